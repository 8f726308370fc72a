// The input gradient of a dense layer, from what is gathered of dz for its
// filter gradient: dz is read once for both.
#ifndef TFO_CC_CORE_DENSE_GRADIENT_H_
#define TFO_CC_CORE_DENSE_GRADIENT_H_

#include "cc/core/epilogue.h"
#include "cc/core/pack.h"
#include "cc/core/pixel_operands.h"
#include "cc/core/tile.h"

namespace tfo::TFO_ISA {
namespace {

// One tap that stops at every pixel, in one line of them.
TFO_INLINE bool IsDense(const ConvShape& s) {
  return s.kernel_h * s.kernel_w == 1 && s.in_h == 1 && s.out_h == 1 &&
         s.stride_w == 1 && s.pad_top == 0 && s.pad_left == 0 &&
         s.in_w == s.out_w;
}

// dx[pixel, c] = sum over k of dz[pixel, k] * filters[c, k]. dz comes in panels
// of neighbouring k, each [pixels, columns of a panel].
template <class T>
class DenseInputGradient {
 public:
  using A = Accumulator<T>;
  using E = Operand<T>;
  static constexpr std::int64_t kColumns = kTileColumns<A>;
  static constexpr std::int64_t kRow = kColumns / kElements<E>;  // operands
  static constexpr std::int64_t kTileSize = (kTileRows<E> + 1) * kColumns;

  // `map` is that of the filters with c along its columns. A panel of dz has at
  // most `pixels`. False when scratch memory ran out.
  bool Prepare(const ConvShape& s, const T* filters, const FilterMap& map,
               T* dx, const AddressMap& dx_map, std::int64_t pixels,
               const Parallel& parallel, const Scratch& scratch) {
    channels_ = s.in_c;
    depth_ = NumOperands<E>(s.out_c);
    num_panels_ = CeilDiv(depth_, kRow);
    panel_size_ = pixels * kRow;
    epilogue_ = {dx, nullptr, nullptr, nullptr, Activation::kNone, 0, dx_map};
    epilogue_.stream = epilogue_.ShouldStream(s.batch * s.in_w * s.in_c);
    Tap tap{0, 0, 0};
    TapList taps{&tap};
    taps.Add(tap);
    E* packed = scratch.Allocate<E>(PackedSize<T>(depth_, channels_));
    segments_ = scratch.Allocate<Segment>(num_panels_);
    if (packed == nullptr || segments_ == nullptr) return false;
    FilterPacking<T>(filters, map, taps, s.out_c, channels_, packed)
        .Run(parallel);
    packed_ = packed;
    for (std::int64_t p = 0; p < num_panels_; ++p)
      segments_[p] = {p * panel_size_, Min(kRow, depth_ - p * kRow)};
    return true;
  }

  std::int64_t panel_size() const { return panel_size_; }
  std::int64_t size() const {
    return num_panels_ * panel_size_;
  }  // of dz, a plane

  // Writes dx of `pixels` pixels of image n, from j on. `tile` is a worker's
  // memory of kTileSize.
  void Compute(const E* dz, std::int64_t n, std::int64_t j, std::int64_t pixels,
               A* tile) const {
    std::int64_t row_offset[kTileRows<E>];
    for (int i = 0; i < kTileRows<E>; ++i) row_offset[i] = i * kRow;
    PrefetchList prefetch;
    const EvenParts parts(pixels, kTileRows<E>);
    for (std::int64_t part = 0; part < parts.count(); ++part) {
      const int rows = static_cast<int>(parts.Size(part));
      const std::int64_t begin = parts.Begin(part);
      const std::int64_t at = epilogue_.map.Offset(n, 0, j + begin);
      for (std::int64_t c = 0; c < channels_;) {
        const std::int64_t rest = channels_ - c;
        const int columns = static_cast<int>(Min(rest, kColumns));
        TileOperands<E> operands{dz + begin * kRow,
                                 row_offset,
                                 1,
                                 segments_,
                                 num_panels_,
                                 packed_ + c * depth_,
                                 kColumns,
                                 nullptr,
                                 kColumns,
                                 tile,
                                 kColumns,
                                 &prefetch};
        operands.a_plane = size();
        operands.b_plane = PackedPlane<T>(depth_, channels_);
        operands.b_goes_on = true;
        const bool in_tile = epilogue_.LeaveToTile(at, c, columns, &operands);
        if (in_tile) operands.JoinPanels(rest, depth_ * kColumns);
        const std::int64_t width = operands.num_panels * kColumns;
        prefetch.Clear();
        epilogue_.Prefetch(at, c, rows, Min(rest, width), &prefetch);
        RunTile<E, true>(rows, columns, operands);
        if (!in_tile) WriteTile(epilogue_, at, c, tile, rows, columns);
        c += width;
      }
    }
    if (epilogue_.stream) FlushStores();
  }

 private:
  Epilogue<T> epilogue_;
  std::int64_t channels_, depth_, num_panels_, panel_size_;
  const E* packed_;
  Segment* segments_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_DENSE_GRADIENT_H_
