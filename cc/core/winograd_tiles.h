// The tiles into which Winograd's algorithm cuts images.
#ifndef TFO_CC_CORE_WINOGRAD_TILES_H_
#define TFO_CC_CORE_WINOGRAD_TILES_H_

#include <type_traits>

#include "cc/core/windows.h"
#include "cc/core/winograd_transforms.h"

namespace tfo::TFO_ISA {
namespace {

// The tiles of a band as points: the more there are, the less often filters are
// read, or transformed. Of many channels, that matters more than to stay in a
// cache.
constexpr std::int64_t kWinogradTiles = 112;
constexpr std::int64_t kWinogradBytes = 1 << 20, kWinogradMostBytes = 8 << 20;
// Panels of a task, which transforms its tiles anew.
constexpr std::int64_t kWinogradPanels = 4;

// Pairs of bfloat16 stay with their own instruction.
template <class T>
constexpr bool kHasWinograd = std::is_same_v<Operand<T>, Accumulator<T>>;

// Whether it computes what a correlation or its filter gradient does, in less
// time. The costs are those of a vector of outputs, in multiply-adds: what is
// not a product was measured with AVX-512 and AVX2, 3 to 512 channels and 1 to
// 392 tiles.
template <class T>
bool WinogradPays(const Windows<T>& x, std::int64_t out_channels) {
  using A = Accumulator<T>;
  constexpr std::int64_t kTaps = kWinogradTaps * kWinogradTaps;
  constexpr std::int64_t kInputCost = 400, kOutputCost = 640, kFilterCost = 720;
  const TapList& taps = x.taps;
  if (!kHasWinograd<T> || x.stride_h != 1 || x.stride_w != 1 ||
      taps.count != kTaps || taps.max_h - taps.min_h != kWinogradTaps - 1 ||
      taps.max_w - taps.min_w != kWinogradTaps - 1) {
    return false;
  }
  const auto whole_vectors = [](std::int64_t n) {
    return static_cast<double>(CeilDiv(n, kLanes<A>) * kLanes<A>);
  };
  const double images = static_cast<double>(x.batch);
  const double pixels = images * static_cast<double>(x.grid_h * x.grid_w);
  const double tiles =
      images * static_cast<double>(CeilDiv(x.grid_h, kWinogradOutputs) *
                                   CeilDiv(x.grid_w, kWinogradOutputs));
  const double columns = whole_vectors(out_channels);
  const double product = static_cast<double>(x.channels) * columns;
  return tiles * (kWinogradPoints * product +
                  kInputCost * whole_vectors(x.channels) +
                  kOutputCost * columns) +
             kFilterCost * product <
         pixels * kTaps * product;
}

// All tiles of a batch of images, in their order.
struct WinogradGrid {
  struct Place {
    std::int64_t n, i, j;  // the image, the first pixel
  };

  std::int64_t down, across;  // of an image
  std::int64_t count;

  static TFO_INLINE WinogradGrid Of(std::int64_t batch, std::int64_t height,
                                    std::int64_t width) {
    const std::int64_t down = CeilDiv(height, kWinogradOutputs),
                       across = CeilDiv(width, kWinogradOutputs);
    return {down, across, batch * down * across};
  }

  TFO_INLINE Place At(std::int64_t tile) const {
    const std::int64_t in_image = tile % (down * across);
    return {tile / (down * across), in_image / across * kWinogradOutputs,
            in_image % across * kWinogradOutputs};
  }

  // The tiles of a band where each takes so many bytes as points.
  TFO_INLINE std::int64_t Band(std::int64_t tile_bytes,
                               std::int64_t wanted_bands) const {
    const std::int64_t least =
        Max(Min(kWinogradTiles, kWinogradMostBytes / tile_bytes), kTileRows);
    const std::int64_t most = Max(kWinogradBytes / tile_bytes, least);
    return EvenPart(count, Max(Min(most, CeilDiv(count, wanted_bands)), least));
  }
};

// The distance between neighbouring points, of at least `size` numbers: an odd
// number of cache lines, so that all points of a vector fall into different
// sets of the first-level cache.
template <class A>
constexpr std::int64_t PointPitch(std::int64_t size) {
  constexpr std::int64_t kLine = 64 / sizeof(A);
  return ((size + kLine - 1) / kLine | 1) * kLine;
}

// A box of pixels in whole vectors.
template <class A>
struct Patch {
  const A* data;
  std::int64_t row, column;  // from one to the next
};

// A box of image n where it lies if that has its numbers, and gathered
// otherwise, `pitch` from column to column.
template <class T>
TFO_INLINE Patch<Accumulator<T>> PatchAt(const Source<T>& source,
                                         const AddressMap& map, std::int64_t n,
                                         std::int64_t height,
                                         std::int64_t width, const Box& box,
                                         Accumulator<T>* memory,
                                         std::int64_t pitch) {
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<T, A>) {
    if (map.c == 1 && source.saved == nullptr &&
        box.channels % kLanes<A> == 0 && box.h >= 0 && box.w >= 0 &&
        box.h + box.rows <= height && box.w + box.columns <= width) {
      return {source.data + map.Offset(n, box.h, box.w) + box.c, map.h, map.w};
    }
  }
  const std::int64_t row = box.columns * pitch;
  Gather(source, map, n, height, width, box, memory, pitch, row);
  return {memory, row, pitch};
}

// Transforms the input tiles of a band, each point `points_pitch` from the one
// before. `memory` has room for one tile.
template <class T>
void TransformTiles(const Windows<T>& x, const WinogradGrid& grid,
                    const Range& band, std::int64_t tile_pitch,
                    std::int64_t points_pitch, Accumulator<T>* memory,
                    Accumulator<T>* to) {
  using A = Accumulator<T>;
  for (std::int64_t t = band.begin; t < band.end; ++t, to += tile_pitch) {
    const WinogradGrid::Place at = grid.At(t);
    const Patch<A> patch =
        PatchAt(x.source, x.map, at.n, x.height, x.width,
                {at.i + x.taps.min_h, at.j + x.taps.min_w, 0, kWinogradInputs,
                 kWinogradInputs, x.channels},
                memory, tile_pitch);
    for (std::int64_t k = 0; k < x.channels; k += kLanes<A>)
      TransformInput(patch.data + k, patch.row, patch.column, to + k,
                     points_pitch);
  }
}

// From a tile to the next: whole vectors of channels.
template <class A>
TFO_INLINE std::int64_t TilePitch(std::int64_t channels) {
  return PixelPitch<A>(CeilDiv(channels, kLanes<A>) * kLanes<A>);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_WINOGRAD_TILES_H_
