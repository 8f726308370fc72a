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
// Tiles beside each other that are gathered, or written, together.
constexpr std::int64_t kWinogradRun = 8;

// Pairs of bfloat16 stay with their own instruction.
template <class T>
constexpr bool kHasWinograd = !std::is_same_v<Operand<T>, BFloat16Pair>;

// Whether it computes a correlation of x, which is convolution `s` or its input
// gradient, or the filter gradient, in less time. The costs are those of a
// vector of outputs, in multiply-adds: what is not a product was measured with
// AVX-512 and AVX2, 3 to 512 channels and 1 to 392 tiles.
template <class T>
bool WinogradPays(const ConvShape& s, const Windows<T>& x,
                  std::int64_t out_channels) {
  using A = Accumulator<T>;
  constexpr std::int64_t kTaps = kWinogradTaps * kWinogradTaps;
  constexpr std::int64_t kInputCost = 400, kOutputCost = 640, kFilterCost = 720;
  // Nine taps may also be what a larger filter's stride or padding leaves of
  // it.
  if (!kHasWinograd<T> || s.kernel_h != kWinogradTaps ||
      s.kernel_w != kWinogradTaps || s.stride_h != 1 || s.stride_w != 1 ||
      s.dilation_h != 1 || s.dilation_w != 1 || x.taps.count != kTaps) {
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

  // The tiles from one on that lie beside each other, at most kWinogradRun.
  TFO_INLINE std::int64_t Run(std::int64_t tile, std::int64_t end) const {
    return Min(Min(end - tile, across - tile % across), kWinogradRun);
  }

  // The tiles of a band where each takes so many bytes as points.
  TFO_INLINE std::int64_t Band(std::int64_t tile_bytes,
                               std::int64_t wanted_bands) const {
    const std::int64_t least = Max(
        Min(kWinogradTiles, kWinogradMostBytes / tile_bytes), kTileRows<float>);
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

// Pixels in whole vectors.
template <class A>
struct Patch {
  const A* data;
  std::int64_t row, column;  // from one to the next
};

// Reads tiles, with the pixels around them, of some channels of an image.
template <class T>
class TileReader {
 public:
  using A = Accumulator<T>;

  // Tiles of side x side pixels.
  TFO_INLINE TileReader(const Source<T>& source, const AddressMap& map,
                        std::int64_t height, std::int64_t width,
                        std::int64_t first_channel, std::int64_t channels,
                        int side)
      : source_(source),
        map_(map),
        height_(height),
        width_(width),
        first_channel_(first_channel),
        channels_(channels),
        side_(side),
        in_place_(std::is_same_v<T, A> && map.c == 1 &&
                  source.saved == nullptr && channels % kLanes<A> == 0) {}

  // Calls body(t, patch) for the tiles of a band, whose first pixels lie so far
  // from the places of the grid. Those that do not lie in memory as they are
  // wanted are gathered, together with their neighbours in a row of the image,
  // into `memory` for kWinogradRun of them with `pitch` from column to column.
  template <class Body>
  TFO_INLINE void ForEach(const WinogradGrid& grid, const Range& band,
                          std::int64_t reach_h, std::int64_t reach_w, A* memory,
                          std::int64_t pitch, const Body& body) const {
    for (std::int64_t t = band.begin, run; t < band.end; t += run) {
      const WinogradGrid::Place at = grid.At(t);
      const std::int64_t h = at.i + reach_h, w = at.j + reach_w;
      run = 1;
      if constexpr (std::is_same_v<T, A>) {
        if (in_place_ && h >= 0 && w >= 0 && h + side_ <= height_ &&
            w + side_ <= width_) {
          body(t,
               Patch<A>{source_.data + map_.Offset(at.n, h, w) + first_channel_,
                        map_.h, map_.w});
          continue;
        }
      }
      if (!in_place_) run = grid.Run(t, band.end);
      const std::int64_t columns = (run - 1) * kWinogradOutputs + side_;
      Gather(source_, map_, at.n, height_, width_,
             {h, w, first_channel_, side_, columns, channels_}, memory, pitch,
             columns * pitch);
      for (std::int64_t i = 0; i < run; ++i)
        body(t + i, Patch<A>{memory + i * kWinogradOutputs * pitch,
                             columns * pitch, pitch});
    }
  }

 private:
  const Source<T>& source_;
  const AddressMap& map_;
  const std::int64_t height_, width_, first_channel_, channels_;
  const int side_;
  const bool in_place_;
};

// The size of what is gathered for tiles of side x side pixels.
TFO_INLINE std::int64_t RunSize(int side, std::int64_t pitch) {
  return side * ((kWinogradRun - 1) * kWinogradOutputs + side) * pitch;
}

// Transforms the input tiles of a band, each point `points_pitch` from the one
// before. `memory` is of RunSize.
template <class T>
void TransformTiles(const Windows<T>& x, const WinogradGrid& grid,
                    const Range& band, std::int64_t tile_pitch,
                    std::int64_t points_pitch, Accumulator<T>* memory,
                    Accumulator<T>* to) {
  using A = Accumulator<T>;
  const TileReader<T> reader(x.source, x.map, x.height, x.width, 0, x.channels,
                             kWinogradInputs);
  reader.ForEach(grid, band, x.taps.min_h, x.taps.min_w, memory, tile_pitch,
                 [&](std::int64_t t, const Patch<A>& patch) {
                   A* const points = to + (t - band.begin) * tile_pitch;
                   for (std::int64_t k = 0; k < x.channels; k += kLanes<A>)
                     TransformInput(patch.data + k, patch.row, patch.column,
                                    points + k, points_pitch);
                 });
}

// Into how many groups panels are cut, at least `least`, so that parts of the
// tiles times groups are tasks that keep all workers busy. A task transforms
// its tiles anew, so not into more; results do not depend on it.
TFO_INLINE std::int64_t PanelGroups(std::int64_t parts, std::int64_t panels,
                                    std::int64_t least, int num_workers) {
  std::int64_t groups = least;
  while (groups < panels && parts * groups < 3 * num_workers &&
         parts * groups % num_workers != 0) {
    ++groups;
  }
  return groups;
}

// From a tile to the next: whole vectors of channels.
template <class A>
TFO_INLINE std::int64_t TilePitch(std::int64_t channels) {
  return PixelPitch<A>(CeilDiv(channels, kLanes<A>) * kLanes<A>);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_WINOGRAD_TILES_H_
