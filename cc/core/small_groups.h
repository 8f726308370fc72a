// Convolutions whose groups fit a vector, among them those whose channels are
// groups of their own. The output channels of as many groups as fit share a
// vector; what they see of the image is gathered, zero beyond the edge, and
// every tap is a multiply-add of a vector of it for each of a group's channels.
#ifndef TFO_CC_CORE_SMALL_GROUPS_H_
#define TFO_CC_CORE_SMALL_GROUPS_H_

#include "cc/core/correlate.h"
#include "cc/core/counts.h"

namespace tfo::TFO_ISA {
namespace {

// What is gathered at a time.
constexpr std::int64_t kPlaneBytes = 384 << 10;
// Sums of neighbouring pixels, as many as leave registers for the filters of
// some taps and a vector of the image.
#if defined(__AVX512F__)
constexpr int kPixelsTogether = 14, kTapsInARow = 4;
#else
constexpr int kPixelsTogether = 12, kTapsInARow = 2;
#endif

// So many groups of `in` channels of the source and `out` of the output.
struct Groups {
  std::int64_t count, in, out;

  std::int64_t Outputs() const { return count * out; }
  // The source's channels begin here for an output channel that begins a group.
  std::int64_t Source(std::int64_t output) const { return output / out * in; }

  // Whether both sides of a group fit a vector.
  template <class A>
  bool AreSmall() const {
    return count > 1 && Min(in, out) >= 1 && Max(in, out) <= kLanes<A>;
  }
  // The output channels that share a vector, and a tile.
  template <class A>
  std::int64_t PerVector() const {
    return kLanes<A> / Max(in, out) * out;
  }
  template <class A>
  std::int64_t PerTile() const {
    return kTileColumns<A> / kLanes<A> * PerVector<A>();
  }
  template <class A>
  std::int64_t Vectors() const {
    return CeilDiv(Outputs(), PerVector<A>());
  }
  // Whether all vectors are full.
  template <class A>
  bool FillVectors() const {
    return in == out && PerVector<A>() == kLanes<A> &&
           Outputs() % kLanes<A> == 0;
  }
  // Whether a vector of the source meets the filters as it is.
  bool AreDepthwise() const { return in == 1 && out == 1; }
};

// Whether all groups are computed together: the output and the filter gradient,
// and the input gradient.
template <class T>
bool HasSmallGroups(const ConvShape& s) {
  return Groups{s.groups, s.in_c, s.out_c}.AreSmall<Accumulator<T>>();
}
template <class T>
bool HasSmallGroupsBackwards(const ConvShape& s) {
  return Groups{s.groups, s.out_c, s.in_c}.AreSmall<Accumulator<T>>();
}

// Which elements of a vector of the source meet the `channel`-th filters of
// their groups.
template <class A>
TFO_INLINE IntVec<A> SpreadIndices(const Groups& g, std::int64_t channel) {
  IntVec<A> indices{};
  for (int l = 0; l < kLanes<A>; ++l)
    indices[l] =
        static_cast<typename IntegerOf<A>::type>(l / g.out * g.in + channel);
  return indices;
}

template <bool kSpread, class A>
TFO_INLINE Vec<A> LoadSpread(const A* from, IntVec<A> indices) {
  const Vec<A> v = Load(from);
  return kSpread ? __builtin_shuffle(v, indices) : v;
}

// How an image is cut: into portions of output channels, each in bands.
struct PlanePlan {
  std::int64_t portion, portions;  // output channels, whole tiles
  std::int64_t pitch;              // elements between gathered pixels
  Bands bands;
  std::int64_t num_bands;  // of all images
  std::int64_t wanted;     // tasks that are worth it

  std::int64_t RowPitch() const { return bands.source_columns * pitch; }
  // The last vector may reach beyond the last pixel.
  template <class A>
  std::int64_t Size() const {
    return bands.source_rows * RowPitch() + kLanes<A>;
  }
  Range PortionAt(std::int64_t index, std::int64_t outputs) const {
    const std::int64_t begin = index % portions * portion;
    return {begin, Min(begin + portion, outputs)};
  }
};

// A function of the shape alone.
template <class T>
PlanePlan PlanPlanes(const Windows<T>& x, const Groups& g) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  PlanePlan p;
  const std::int64_t image = x.grid_h * x.grid_w;
  const std::int64_t work = x.taps.count * g.in * g.Outputs();
  p.wanted = Max(Min(x.batch * image * work / kTaskWork, kWantedTasks), 1);
  const std::int64_t reach_h = x.taps.max_h - x.taps.min_h,
                     reach_w = x.taps.max_w - x.taps.min_w;
  // Neighbouring bands gather the rows that both read anew, so that there
  // should be as many others.
  const std::int64_t pixels =
      (2 * reach_h + x.stride_h) * ((x.grid_w - 1) * x.stride_w + reach_w + 1);
  const std::int64_t fitting = static_cast<std::int64_t>(
      kPlaneBytes / sizeof(A) / Max(pixels, 1) / lanes * lanes);
  const std::int64_t per_tile = g.PerTile<A>();
  p.portion = EvenPart(CeilDiv(g.Outputs(), per_tile),
                       Max(fitting / g.in * g.out / per_tile, 1)) *
              per_tile;
  p.portions = CeilDiv(g.Outputs(), p.portion);
  // An odd number of vectors, so that pixels do not fall into the same few sets
  // of the first-level cache.
  p.pitch =
      (CeilDiv(Min(g.Source(p.portion), g.count * g.in), lanes) | 1) * lanes;
  const std::int64_t per_image = CeilDiv(p.wanted, x.batch * p.portions);
  p.bands = CutIntoBands(x, p.pitch,
                         Max(CeilDiv(image, per_image), 2 * reach_h * x.grid_w),
                         kPlaneBytes / sizeof(A) * kOperandBytes<Operand<T>>);
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

// Memory for a plane of each worker, in which nothing is a subnormal number
// that only fills vectors up.
template <class A>
class WorkerPlanes {
 public:
  // False when scratch memory ran out. `whole`: nothing fills vectors up.
  bool Allocate(std::int64_t size, bool whole, int workers,
                const Scratch& scratch) {
    size_ = size;
    data_ = scratch.Allocate<A>(size * workers);
    ready_ = scratch.Allocate<bool>(workers);
    if (data_ == nullptr || ready_ == nullptr) return false;
    for (int i = 0; i < workers; ++i) ready_[i] = whole;
    return true;
  }

  A* Of(int worker) const {
    A* const plane = data_ + worker * size_;
    if (!ready_[worker]) Zero(plane, size_);
    ready_[worker] = true;
    return plane;
  }

 private:
  std::int64_t size_;
  A* data_;
  bool* ready_;
};

// Brings what the windows of a band see of the channels of `outputs` into `to`.
template <class T>
void GatherPlane(const Windows<T>& x, const PlaneBand& band, const Groups& g,
                 const Range& outputs, const PlanePlan& plan,
                 Accumulator<T>* to) {
  const std::int64_t first = g.Source(outputs.begin);
  const Box box{band.i * x.stride_h + x.taps.min_h,
                band.j * x.stride_w + x.taps.min_w,
                first,
                plan.bands.source_rows,
                plan.bands.source_columns,
                g.Source(outputs.end) - first};
  Gather(x.source, x.map, band.n, x.height, x.width, box, to, plan.pitch,
         plan.RowPitch());
}

// Where a tap lies, from pixel (min_h, min_w) on.
TFO_INLINE std::int64_t PlaneOffset(const TapList& taps, const Tap& tap,
                                    const PlanePlan& plan) {
  return (tap.h - taps.min_h) * plan.RowPitch() +
         (tap.w - taps.min_w) * plan.pitch;
}

// The filters of small groups, [vector, tap, channel of the group, lane].
template <class T>
struct SpreadFilters {
  using A = Accumulator<T>;

  std::int64_t vector_pitch, tap_pitch;
  A* data;

  // `group_stride`: from the filters of a group to the next. False when scratch
  // memory ran out.
  bool Pack(const Correlation<T>& c, const Groups& g, std::int64_t group_stride,
            const Scratch& scratch) {
    constexpr int lanes = kLanes<A>;
    const TapList& taps = c.x.taps;
    const FilterMap& map = c.filter_map;
    const std::int64_t vectors = g.Vectors<A>(), outputs = g.PerVector<A>();
    const bool together =
        group_stride == g.out && (map.column == 1 || g.out == 1);
    tap_pitch = g.in * lanes;
    vector_pitch = taps.count * tap_pitch;
    data = scratch.Allocate<A>(vectors * vector_pitch);
    if (data == nullptr) return false;
    for (std::int64_t t = 0; t < taps.count; ++t) {
      for (std::int64_t k = 0; k < g.in; ++k) {
        const T* const from =
            c.filters + taps.taps[t].filter * map.matrix + k * map.row;
        for (std::int64_t v = 0; v < vectors; ++v) {
          const std::int64_t first = v * outputs;
          const int n = static_cast<int>(Min(g.Outputs() - first, outputs));
          A* const to = data + v * vector_pitch + t * tap_pitch + k * lanes;
          if (together) {
            Store(to, LoadAsPartial(from + first, n));
            continue;
          }
          Store(to, Vec<A>{});
          for (int l = 0; l < n; ++l)
            to[l] = LoadOne(from + (first + l) / g.out * group_stride +
                            (first + l) % g.out * map.column);
        }
      }
    }
    return true;
  }
};

// Adds the products of kTaps taps, each a window behind the one before, so that
// what is loaded serves several windows.
template <int kPixels, int kTaps, bool kSpread, class A>
TFO_INLINE void AddTaps(const A* pixel, std::int64_t distance, const A* filters,
                        std::int64_t tap_pitch, IntVec<A> spread,
                        Vec<A> (&sums)[kPixels]) {
  Vec<A> filter[kTaps];
#pragma GCC unroll 4
  for (int t = 0; t < kTaps; ++t) filter[t] = Load(filters + t * tap_pitch);
  // Not hoisted: there are no registers for so many distances.
#pragma GCC unroll 20
  for (int i = 0; i < kPixels + kTaps - 1; ++i, pixel += distance) {
    const Vec<A> v = LoadSpread<kSpread>(pixel, spread);
#pragma GCC unroll 4
    for (int t = 0; t < kTaps; ++t)
      if (i >= t && i - t < kPixels) sums[i - t] += v * filter[t];
  }
}

// The same of any number, as many at a time as there are registers for.
template <int kPixels, int kTaps, bool kSpread, class A>
TFO_INLINE void AddRun(const A* pixel, std::int64_t distance, const A* filters,
                       std::int64_t tap_pitch, IntVec<A> spread,
                       Vec<A> (&sums)[kPixels]) {
  if constexpr (kTaps <= kTapsInARow) {
    AddTaps<kPixels, kTaps, kSpread>(pixel, distance, filters, tap_pitch,
                                     spread, sums);
  } else {
    constexpr int kFirst = (kTaps + 1) / 2;
    AddRun<kPixels, kFirst, kSpread>(pixel, distance, filters, tap_pitch,
                                     spread, sums);
    AddRun<kPixels, kTaps - kFirst, kSpread>(
        pixel + kFirst * distance, distance, filters + kFirst * tap_pitch,
        tap_pitch, spread, sums);
  }
}

// Sums of kPixels neighbouring windows, `distance` elements apart, over `count`
// taps, into rows of a tile. Of each kRun taps, one lies a window behind the
// other.
template <int kPixels, int kRun, bool kSpread, class A>
TFO_INLINE void SumTaps(const A* from, std::int64_t distance,
                        const std::int64_t* offsets, std::int64_t count,
                        const A* filters, std::int64_t channels,
                        const IntVec<A>* indices, A* tile) {
  Vec<A> sums[kPixels] = {};
  const std::int64_t tap_pitch = channels * kLanes<A>;
  for (std::int64_t t = 0; t < count; t += kRun, filters += kRun * tap_pitch) {
    for (std::int64_t k = 0; k < (kSpread ? channels : 1); ++k) {
      AddRun<kPixels, kRun, kSpread>(from + offsets[t], distance,
                                     filters + k * kLanes<A>, tap_pitch,
                                     indices[k], sums);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kPixels; ++i) Store(tile + i * kTileColumns<A>, sums[i]);
}

// Calls body(std::integral_constant<int, n>{}) for a run of `taps`; of one tap
// where runs of such a length have no function of their own.
template <class Body>
TFO_INLINE void WithRun(std::int64_t taps, Body&& body) {
  if (taps == 7) return body(std::integral_constant<int, 7>{});
  if (taps == 5) return body(std::integral_constant<int, 5>{});
  if (taps == 3) return body(std::integral_constant<int, 3>{});
  body(std::integral_constant<int, 1>{});
}

// One of the correlations that read the same planes.
template <class T>
struct SmallGroupsPass {
  const Correlation<T>* c;
  std::int64_t* offsets;  // of its taps in a plane
  std::int64_t run;       // of taps that are summed up together
  SpreadFilters<T> filters;
};

// The windows of all correlations: as many as the first has, over the reach of
// all taps.
template <class T>
Windows<T> JoinedWindows(const Correlation<T>* correlations,
                         std::int64_t count) {
  Windows<T> x = correlations[0].x;
  x.taps = {nullptr};
  for (std::int64_t i = 0; i < count; ++i) {
    const TapList& taps = correlations[i].x.taps;
    if (taps.count == 0) continue;
    TapList& all = x.taps;
    const bool first = all.count == 0;
    all.min_h = first ? taps.min_h : Min(all.min_h, taps.min_h);
    all.max_h = first ? taps.max_h : Max(all.max_h, taps.max_h);
    all.min_w = first ? taps.min_w : Min(all.min_w, taps.min_w);
    all.max_w = first ? taps.max_w : Max(all.max_w, taps.max_w);
    all.count += taps.count;
  }
  return x;
}

// As `Correlate` does for one group, for `count` correlations of one source,
// of which none has a larger grid than the first; `s` is the shape of the
// convolution of which this is the forward direction or the input gradient.
template <class T>
bool CorrelateSmallGroups(const Correlation<T>* correlations,
                          std::int64_t count, const ConvShape& s,
                          const Parallel& parallel, const Scratch& scratch) {
  using A = Accumulator<T>;
  const Windows<T> x = JoinedWindows(correlations, count);
  const Groups g{s.groups, x.channels, correlations[0].out_channels};
  const std::int64_t per_vector = g.PerVector<A>(), per_tile = g.PerTile<A>();
  if (x.batch * x.grid_h * x.grid_w == 0) return true;
  const PlanePlan p = PlanPlanes(x, g);
  auto* const passes = scratch.Allocate<SmallGroupsPass<T>>(count);
  auto* offsets = scratch.Allocate<std::int64_t>(x.taps.count);
  WorkerPlanes<A> planes;
  if (passes == nullptr || offsets == nullptr ||
      !planes.Allocate(p.Size<A>(), g.FillVectors<A>(), parallel.num_workers,
                       scratch)) {
    return false;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const TapList& taps = correlations[i].x.taps;
    passes[i].c = &correlations[i];
    passes[i].offsets = offsets;
    if (!passes[i].filters.Pack(correlations[i], g, s.out_c, scratch))
      return false;
    for (std::int64_t t = 0; t < taps.count; ++t)
      *offsets++ = PlaneOffset(x.taps, taps.taps[t], p);
    // What is loaded serves several taps of a row where each lies a window
    // behind the one before (measured with AVX-512: 7x7 taps 0.82 to 0.86 of
    // the time, 3x3 of four channels 0.85 to 0.91; but 3x3 and 5x5 of one
    // channel 1.0 to 1.1).
    const std::int64_t in_row = taps.PerRow();
    const std::int64_t* const of = passes[i].offsets;
    passes[i].run = in_row > (g.AreDepthwise() ? 5 : 1) &&
                            of[1] - of[0] == x.stride_w * p.pitch
                        ? in_row
                        : 1;
  }
  IntVec<A> indices[kLanes<A>];
  for (std::int64_t k = 0; k < g.in; ++k) indices[k] = SpreadIndices<A>(g, k);
  // Other vectors do not begin where a whole number of them does.
  const bool stream = per_vector == kLanes<A> &&
                      correlations[0].epilogue.ShouldStream(
                          count * x.batch * x.grid_h * x.grid_w * g.Outputs());

  // Row i of a band whose plane is gathered.
  auto add_row = [&](const SmallGroupsPass<T>& pass, const PlaneBand& band,
                     std::int64_t i, const Range& outputs, const A* plane) {
    const Correlation<T>& c = *pass.c;
    const TapList& taps = c.x.taps;
    if (band.i + i >= c.x.grid_h || band.j >= c.x.grid_w) return;
    Epilogue<T> epilogue = c.epilogue;
    epilogue.stream = stream;
    A tile[kPixelsTogether * kTileColumns<A>];
    const EvenParts parts(Min(band.columns, c.x.grid_w - band.j),
                          kPixelsTogether);
    const std::int64_t distance = x.stride_w * p.pitch;
    const Range inside = Inside((band.i + i) * x.stride_h + taps.min_h,
                                taps.RowStep(), taps.rows, x.height);
    const std::int64_t first = inside.begin * taps.PerRow();
    const std::int64_t taps_inside =
        (inside.end - inside.begin) * taps.PerRow();
    const A* const row = plane + i * x.stride_h * p.RowPitch();
    for (std::int64_t part = 0; part < parts.count(); ++part) {
      const std::int64_t j = parts.Begin(part);
      for (std::int64_t k = outputs.begin; k < outputs.end; k += per_tile) {
        const std::int64_t columns = Min(outputs.end - k, per_tile);
        // The next vector covers what this one has too much.
        for (std::int64_t l = 0; l < columns; l += per_vector) {
          const A* const from =
              row + j * distance + g.Source(k + l - outputs.begin);
          const A* const filter =
              pass.filters.data +
              (k + l) / per_vector * pass.filters.vector_pitch +
              first * pass.filters.tap_pitch;
          WithCount<kPixelsTogether>(
              parts.Size(part), [&](auto pixels) TFO_INLINE_LAMBDA {
                WithRun(pass.run, [&](auto run) TFO_INLINE_LAMBDA {
                  constexpr int kPixels = decltype(pixels)::value;
                  constexpr int kRun = decltype(run)::value;
                  const auto sum = g.AreDepthwise()
                                       ? &SumTaps<kPixels, kRun, false, A>
                                       : &SumTaps<kPixels, kRun, true, A>;
                  sum(from, distance, pass.offsets + first, taps_inside, filter,
                      g.in, indices, tile + l);
                });
              });
        }
        WriteTile(epilogue, epilogue.map.Offset(band.n, band.i + i, band.j + j),
                  k, tile, static_cast<int>(parts.Size(part)),
                  static_cast<int>(columns));
      }
    }
  };
  auto task = [&](std::int64_t index, int worker) {
    const Range outputs = p.PortionAt(index, g.Outputs());
    const PlaneBand band(x, p.bands, index / p.portions);
    A* const plane = planes.Of(worker);
    GatherPlane(x, band, g, outputs, p, plane);
    for (std::int64_t i = 0; i < band.rows; ++i) {
      for (std::int64_t pass = 0; pass < count; ++pass)
        add_row(passes[pass], band, i, outputs, plane);
    }
    if (stream) FlushStores();
  };
  ParallelFor(parallel, p.num_bands * p.portions,
              p.bands.rows * p.bands.columns * CeilDiv(p.portion, per_vector) *
                  (x.taps.count * g.in + 2 * count),
              task);
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SMALL_GROUPS_H_
