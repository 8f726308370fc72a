// Several output pixels as one with more channels: an input gradient of few
// channels would leave most lanes of a vector idle.
#ifndef TFO_CC_CORE_PIXEL_BLOCK_H_
#define TFO_CC_CORE_PIXEL_BLOCK_H_

#include "cc/core/epilogue.h"
#include "cc/core/integers.h"
#include "cc/core/pack.h"

namespace tfo::TFO_ISA {
namespace {

// Grid pixel (i, j) stands for the h x w output pixels from (i * h, j * w) on,
// those inside the image. Their channels lie side by side in one panel of
// filters.
struct PixelBlock {
  std::int64_t h, w;
  std::int64_t channels;
  std::int64_t height, width;   // of the output image
  AddressMap map;               // of its pixels
  const std::int64_t* filters;  // [tap, pixel]: a matrix, or -1 for none

  TFO_INLINE std::int64_t Pixels() const { return h * w; }
};

template <class T>
void PackBlockFilters(const T* filters, const FilterMap& map,
                      const TapList& list, std::int64_t channels,
                      const PixelBlock& block, Operand<T>* packed) {
  using A = Accumulator<T>;
  constexpr int depth = kElements<Operand<T>>;
  const std::int64_t rows = NumOperands<T>(channels);
  Zero(packed, list.count * rows * kTileColumns<A>);
  for (std::int64_t i = 0; i < list.count * block.Pixels(); ++i) {
    if (block.filters[i] < 0) continue;
    const T* from = filters + block.filters[i] * map.matrix;
    Operand<T>* to = packed + i / block.Pixels() * rows * kTileColumns<A> +
                     i % block.Pixels() * block.channels;
    for (std::int64_t k = 0; k < channels; k += depth) {
      for (std::int64_t c = 0; c < block.channels; ++c) {
        to[k / depth * kTileColumns<A> + c] = LoadOperand(
            from + k * map.row + c * map.column, map.row, k + 1 < channels);
      }
    }
  }
}

// Writes the blocks of `rows` grid pixels from (i, j) on; `at` is where the
// first begins. The tile is followed by one readable vector.
template <class T>
void WriteBlocks(const Epilogue<T>& epilogue, std::int64_t at,
                 const PixelBlock& block, std::int64_t i, std::int64_t j,
                 const Accumulator<T>* tile, int rows) {
  for (std::int64_t p = 0; p < block.Pixels(); ++p) {
    const std::int64_t h = p / block.w, w = p % block.w;
    if (i * block.h + h >= block.height) break;
    const std::int64_t inside = CeilDiv(block.width - w, block.w) - j;
    if (inside <= 0) continue;
    WriteTile(epilogue, at + h * block.map.h + w * block.map.w, 0,
              tile + p * block.channels, static_cast<int>(Min(rows, inside)),
              static_cast<int>(block.channels));
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_PIXEL_BLOCK_H_
