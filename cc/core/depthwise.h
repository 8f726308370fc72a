// Convolutions whose channels are groups of their own. Neighbouring channels
// fill the vectors; a vector's plane of the image is gathered, zero beyond the
// edge, and every tap is a multiply-add of it.
#ifndef TFO_CC_CORE_DEPTHWISE_H_
#define TFO_CC_CORE_DEPTHWISE_H_

#include "cc/core/correlate.h"
#include "cc/core/counts.h"

namespace tfo::TFO_ISA {
namespace {

// What is gathered of a vector's channels at a time.
constexpr std::int64_t kPlaneBytes = 256 << 10;
// Sums of neighbouring pixels, as many as leave registers for a vector of
// filters and one of the image.
#if defined(__AVX512F__)
constexpr int kDepthwisePixels = 14;
#else
constexpr int kDepthwisePixels = 12;
#endif

// How an image is cut: into vectors of channels, each in bands.
struct PlanePlan {
  std::int64_t vectors;
  Bands bands;
  std::int64_t num_bands;  // of all images
  std::int64_t wanted;     // tasks that are worth it

  template <class A>
  std::int64_t RowPitch() const {
    return bands.source_columns * kLanes<A>;
  }
  template <class A>
  std::int64_t Size() const {
    return bands.source_rows * RowPitch<A>();
  }
};

// A function of the shape alone.
template <class T>
PlanePlan PlanPlanes(const Windows<T>& x, std::int64_t channels) {
  using A = Accumulator<T>;
  PlanePlan p;
  p.vectors = CeilDiv(channels, kLanes<A>);
  const std::int64_t image = x.grid_h * x.grid_w;
  p.wanted = Max(
      Min(x.batch * image * x.taps.count * channels / kTaskWork, kWantedTasks),
      1);
  const std::int64_t per_image = CeilDiv(p.wanted, x.batch * p.vectors);
  // Neighbouring bands gather the rows that both read anew.
  const std::int64_t shared = x.taps.max_h - x.taps.min_h;
  p.bands = CutIntoBands(x, kLanes<A>,
                         Max(CeilDiv(image, per_image), 2 * shared * x.grid_w),
                         kPlaneBytes / sizeof(A) * sizeof(Operand<T>));
  p.num_bands = x.batch * p.bands.down * p.bands.across;
  return p;
}

// A band of an image: grid rows [i, i + rows) and columns [j, j + columns).
struct PlaneBand {
  std::int64_t n, i, j, rows, columns;

  template <class T>
  PlaneBand(const Windows<T>& x, const Bands& bands, std::int64_t index)
      : n(index / bands.across / bands.down),
        i(index / bands.across % bands.down * bands.rows),
        j(index % bands.across * bands.columns),
        rows(Min(bands.rows, x.grid_h - i)),
        columns(Min(bands.columns, x.grid_w - j)) {}
};

// Brings `channels` <= lanes channels from `channel` on of what the windows of
// a band see into `to`.
template <class T>
void GatherPlane(const Windows<T>& x, const PlaneBand& band,
                 std::int64_t channel, std::int64_t channels,
                 const PlanePlan& plan, Accumulator<T>* to) {
  using A = Accumulator<T>;
  const Box box{band.i * x.stride_h + x.taps.min_h,
                band.j * x.stride_w + x.taps.min_w,
                channel,
                plan.bands.source_rows,
                plan.bands.source_columns,
                channels};
  // What fills the vectors up should be no subnormal numbers.
  if (channels < kLanes<A>) Zero(to, plan.Size<A>());
  Gather(x.source, x.map, band.n, x.height, x.width, box, to, kLanes<A>,
         plan.RowPitch<A>());
}

// Where the taps of a plane lie, from that of pixel (min_h, min_w) on.
template <class A>
TFO_INLINE std::int64_t PlaneOffset(const TapList& taps, const Tap& tap,
                                    std::int64_t row_pitch) {
  return (tap.h - taps.min_h) * row_pitch + (tap.w - taps.min_w) * kLanes<A>;
}

// Calls body(distance) with the elements between neighbouring windows, or taps,
// which the compiler should know where they are those of a pixel.
template <class A, class Body>
TFO_INLINE void WithDistance(std::int64_t pixels, const Body& body) {
  if (pixels == 1) {
    body(std::integral_constant<std::int64_t, kLanes<A>>{});
  } else {
    body(pixels * kLanes<A>);
  }
}

// Sums of kPixels neighbouring windows over `count` taps, into rows of a tile.
template <int kPixels, class A, class Distance>
TFO_INLINE void SumTaps(const A* from, Distance distance,
                        const std::int64_t* offsets, const A* filters,
                        std::int64_t count, A* tile) {
  Vec<A> sums[kPixels] = {};
  for (std::int64_t t = 0; t < count; ++t) {
    const Vec<A> filter = Load(filters + t * kLanes<A>);
    const A* const at = from + offsets[t];
#pragma GCC unroll 16
    for (int i = 0; i < kPixels; ++i)
      sums[i] += Load(at + i * distance) * filter;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kPixels; ++i) Store(tile + i * kTileColumns<A>, sums[i]);
}

// Both as `Correlate` does, but for the channels: `out_channels` are those of
// the source, too.
template <class T>
bool CorrelateDepthwise(const Correlation<T>& c, const Parallel& parallel,
                        const Scratch& scratch) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  const Windows<T>& x = c.x;
  if (x.batch * x.grid_h * x.grid_w * c.out_channels == 0) return true;
  const PlanePlan p = PlanPlanes(x, c.out_channels);
  const TapList& taps = x.taps;
  A* const filters = scratch.Allocate<A>(p.vectors * taps.count * lanes);
  auto* const offsets = scratch.Allocate<std::int64_t>(taps.count);
  A* const own = scratch.Allocate<A>(p.Size<A>() * parallel.num_workers);
  if (filters == nullptr || offsets == nullptr || own == nullptr) return false;
  const auto channels_of = [&](std::int64_t vector) {
    return static_cast<int>(Min(c.out_channels - vector * lanes, lanes));
  };
  for (std::int64_t t = 0; t < taps.count; ++t) {
    offsets[t] = PlaneOffset<A>(taps, taps.taps[t], p.RowPitch<A>());
    const T* from = c.filters + taps.taps[t].filter * c.filter_map.matrix;
    for (std::int64_t v = 0; v < p.vectors; ++v)
      Store(filters + (v * taps.count + t) * lanes,
            LoadAsPartial(from + v * lanes, channels_of(v)));
  }

  auto task = [&](std::int64_t index, int worker) {
    const std::int64_t vector = index % p.vectors, channel = vector * lanes;
    const PlaneBand band(x, p.bands, index / p.vectors);
    const A* const filter = filters + vector * taps.count * lanes;
    A* const plane = own + worker * p.Size<A>();
    GatherPlane(x, band, channel, channels_of(vector), p, plane);
    A tile[kDepthwisePixels * kTileColumns<A>];
    const EvenParts parts(band.columns, kDepthwisePixels);
    for (std::int64_t i = 0; i < band.rows; ++i) {
      const Range inside = Inside((band.i + i) * x.stride_h + taps.min_h,
                                  taps.RowStep(), taps.rows, x.height);
      const std::int64_t first = inside.begin * taps.PerRow();
      const std::int64_t count = (inside.end - inside.begin) * taps.PerRow();
      const A* const row = plane + i * x.stride_h * p.RowPitch<A>();
      for (std::int64_t part = 0; part < parts.count(); ++part) {
        const std::int64_t j = parts.Begin(part);
        WithCount<kDepthwisePixels>(
            parts.Size(part), [&](auto pixels) TFO_INLINE_LAMBDA {
              WithDistance<A>(x.stride_w, [&](auto distance) TFO_INLINE_LAMBDA {
                SumTaps<decltype(pixels)::value>(
                    row + j * distance, distance, offsets + first,
                    filter + first * lanes, count, tile);
              });
            });
        WriteTile(c.epilogue,
                  c.epilogue.map.Offset(band.n, band.i + i, band.j + j),
                  channel, tile, static_cast<int>(parts.Size(part)),
                  channels_of(vector));
      }
    }
  };
  ParallelFor(parallel, p.num_bands * p.vectors,
              p.bands.rows * p.bands.columns * (taps.count + 2), task);
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_DEPTHWISE_H_
