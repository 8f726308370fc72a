// Sums of neighbouring windows of small groups over their taps, in registers.
#ifndef TFO_CC_CORE_SMALL_GROUPS_SUMS_H_
#define TFO_CC_CORE_SMALL_GROUPS_SUMS_H_

#include "cc/core/counts.h"
#include "cc/core/small_groups_planes.h"

namespace tfo::TFO_ISA {
namespace {

// Sums of neighbouring pixels, as many as leave registers for the filters of
// some taps and a vector of the image.
#if defined(__AVX512F__)
constexpr int kPixelsTogether = 14, kTapsInARow = 4;
#else
constexpr int kPixelsTogether = 12, kTapsInARow = 2;
#endif

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

template <bool kSpread, class S, class A = Accumulator<S>>
TFO_INLINE Vec<A> LoadSpread(const S* from, IntVec<A> indices) {
  const Vec<A> v = LoadAs(from);
  return kSpread ? __builtin_shuffle(v, indices) : v;
}

// The filters of small groups, [vector, tap, channel of the group, lane].
template <class T>
struct SpreadFilters {
  using A = Accumulator<T>;

  std::int64_t vector_pitch, tap_pitch;
  A* data;

  // `group_stride`: from the filters of a group to the next; `overlap`: the
  // last vector is full, too. False when scratch memory ran out.
  bool Pack(const Correlation<T>& c, const Groups& g, std::int64_t group_stride,
            bool overlap, const Scratch& scratch) {
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
          const std::int64_t first =
              overlap ? g.VectorInside<A>(v * outputs) : v * outputs;
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
// what is loaded serves several windows; at an edge, only what lies `inside`.
template <int kPixels, int kTaps, bool kSpread, bool kEdge, class S,
          class A = Accumulator<S>>
TFO_INLINE void AddTaps(const S* pixel, std::int64_t distance,
                        const Range& inside, const A* filters,
                        std::int64_t tap_pitch, IntVec<A> spread,
                        Vec<A> (&sums)[kPixels][1]) {
  Vec<A> filter[kTaps];
#pragma GCC unroll 4
  for (int t = 0; t < kTaps; ++t) filter[t] = Load(filters + t * tap_pitch);
  // Not hoisted: there are no registers for so many distances.
#pragma GCC unroll 20
  for (int i = 0; i < kPixels + kTaps - 1; ++i, pixel += distance) {
    if (kEdge && (i < inside.begin || i >= inside.end)) continue;
    const Vec<A> v = LoadSpread<kSpread>(pixel, spread);
#pragma GCC unroll 4
    for (int t = 0; t < kTaps; ++t)
      if (i >= t && i - t < kPixels) sums[i - t][0] += v * filter[t];
  }
}

// The same of any number, as many at a time as there are registers for.
template <int kPixels, int kTaps, bool kSpread, bool kEdge, class S,
          class A = Accumulator<S>>
TFO_INLINE void AddRun(const S* pixel, std::int64_t distance,
                       const Range& inside, const A* filters,
                       std::int64_t tap_pitch, IntVec<A> spread,
                       Vec<A> (&sums)[kPixels][1]) {
  if constexpr (kTaps <= kTapsInARow) {
    AddTaps<kPixels, kTaps, kSpread, kEdge>(pixel, distance, inside, filters,
                                            tap_pitch, spread, sums);
  } else {
    constexpr int kFirst = (kTaps + 1) / 2;
    AddRun<kPixels, kFirst, kSpread, kEdge>(pixel, distance, inside, filters,
                                            tap_pitch, spread, sums);
    AddRun<kPixels, kTaps - kFirst, kSpread, kEdge>(
        pixel + kFirst * distance, distance,
        {inside.begin - kFirst, inside.end - kFirst},
        filters + kFirst * tap_pitch, tap_pitch, spread, sums);
  }
}

// What a vector's sums are made of. S: the accumulator's type, or that of the
// tensor which is read in place.
template <class S>
struct GroupOperands {
  using A = Accumulator<S>;

  const S* from;
  std::int64_t distance;        // between windows
  const std::int64_t* offsets;  // of taps
  std::int64_t count;           // of them
  const A* filters;
  std::int64_t channels;  // of a group
  const IntVec<A>* indices;
  // For each of the `per_row` taps of a row, the windows for which it lies in
  // the image; `first` is the first of these here. Only at an edge.
  const Range* inside;
  std::int64_t per_row, first;
};

// Sums of kPixels neighbouring windows into a tile of a vector. Of each kRun
// taps, one lies a window behind the other.
template <int kPixels, int kRun, bool kSpread, bool kEdge, class T, class S>
void SumTaps(const GroupOperands<S>& g, const TileOperands<Operand<T>>& tile) {
  using A = Accumulator<T>;
  Vec<A> sums[kPixels][1] = {};
  const std::int64_t tap_pitch = g.channels * kLanes<A>;
  const A* filters = g.filters;
  Range inside{};
  std::int64_t tap = 0;
  for (std::int64_t t = 0; t < g.count; t += kRun) {
    if constexpr (kEdge) {
      inside = {g.inside[tap].begin - g.first, g.inside[tap].end - g.first};
      tap = tap + kRun < g.per_row ? tap + kRun : 0;
    }
    for (std::int64_t k = 0; k < (kSpread ? g.channels : 1); ++k) {
      AddRun<kPixels, kRun, kSpread, kEdge>(g.from + g.offsets[t], g.distance,
                                            inside, filters + k * kLanes<A>,
                                            tap_pitch, g.indices[k], sums);
    }
    filters += kRun * tap_pitch;
  }
  Finish<Operand<T>, kPixels, 1>(tile, 0, 0, sums);
}

// The same of runs of `run` taps; of one tap where runs of such a length have
// no function of their own.
template <int kPixels, bool kSpread, bool kEdge, class T, class S>
TFO_INLINE void SumRuns(std::int64_t run, const GroupOperands<S>& g,
                        const TileOperands<Operand<T>>& tile) {
  const auto sum = run == 7   ? &SumTaps<kPixels, 7, kSpread, kEdge, T, S>
                   : run == 5 ? &SumTaps<kPixels, 5, kSpread, kEdge, T, S>
                   : run == 3 ? &SumTaps<kPixels, 3, kSpread, kEdge, T, S>
                              : &SumTaps<kPixels, 1, kSpread, kEdge, T, S>;
  sum(g, tile);
}

// The same of `pixels` windows.
template <class T, class S>
void SumTapsOf(std::int64_t pixels, std::int64_t run, bool depthwise, bool edge,
               const GroupOperands<S>& g,
               const TileOperands<Operand<T>>& tile) {
  WithCount<kPixelsTogether>(pixels, [&](auto count) TFO_INLINE_LAMBDA {
    constexpr int kPixels = decltype(count)::value;
    if constexpr (std::is_same_v<S, Accumulator<T>>) {
      if (!depthwise) return SumRuns<kPixels, true, false, T>(run, g, tile);
    }
    if constexpr (std::is_same_v<S, T>) {
      if (edge) return SumRuns<kPixels, false, true, T>(run, g, tile);
    }
    SumRuns<kPixels, false, false, T>(run, g, tile);
  });
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SMALL_GROUPS_SUMS_H_
