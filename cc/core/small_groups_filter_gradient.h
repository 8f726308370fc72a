// Filter gradient, bias gradient and side input gradient of convolutions whose
// groups fit a vector, from one pass over dz:
//
//   dw[r, s, c, k] = sum over pixels of x[pixel under tap (r, s), channel c of
//   k's group] * dz[pixel, k]
//
// Bands are cut into slices with partial sums of their own, which are added in
// a fixed order at the end.
#ifndef TFO_CC_CORE_SMALL_GROUPS_FILTER_GRADIENT_H_
#define TFO_CC_CORE_SMALL_GROUPS_FILTER_GRADIENT_H_

#include "cc/core/filter_gradient.h"
#include "cc/core/small_groups.h"

namespace tfo::TFO_ISA {
namespace {

// Taps whose sums are kept in registers together: neighbours in a row, and so
// many rows of them that sums do not wait for each other.
constexpr int kTapsTogether = 7;
constexpr int RowsTogether(int taps) { return taps <= 3 ? 3 : 2; }
// Pixels that are summed up by themselves: rounding errors grow with them.
constexpr std::int64_t kPixelsPerSum = 1024;

// `rows` x `columns` vectors of a plane.
template <class A>
struct Lines {
  const A* data;
  std::int64_t pitch, distance;  // from line to line, and within a line
  // From a vector to the one that is asked for meanwhile, since those that lie
  // a pixel apart are not foreseen (measured with AVX-512: 0.83 to 0.96 of the
  // time of images of 5 to 25 MB); zero: none is.
  std::int64_t ahead = 0;
};

// Where the taps of a part lie in x, from a row of them to the next and within
// a row, and their sums.
template <class A>
struct TapSums {
  std::int64_t row, tap;
  A* sums;
  std::int64_t sums_row, sums_tap;
};

// Adds to the sums of kRows x kTaps taps the products of `rows` x `columns`
// pixels of x and dz.
template <int kRows, int kTaps, bool kSpread, class A>
TFO_INLINE void AddTapProducts(const Lines<A>& x, const Lines<A>& dz,
                               std::int64_t rows, std::int64_t columns,
                               IntVec<A> spread, const TapSums<A>& taps) {
  Vec<A> sum[kRows][kTaps] = {};
  for (std::int64_t i = 0; i < rows; ++i) {
    const A* from = x.data + i * x.pitch;
    const A* factors = dz.data + i * dz.pitch;
    for (std::int64_t j = 0; j < columns; ++j) {
      const Vec<A> factor = Load(factors);
      if (dz.ahead != 0) __builtin_prefetch(factors + dz.ahead);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int k = 0; k < kTaps; ++k)
          sum[r][k] +=
              LoadSpread<kSpread>(from + r * taps.row + k * taps.tap, spread) *
              factor;
      }
      from += x.distance;
      factors += dz.distance;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kTaps; ++k) {
      A* const to = taps.sums + r * taps.sums_row + k * taps.sums_tap;
      Store(to, Load(to) + sum[r][k]);
    }
  }
}

// Of the accumulator's type, as dz that is read in place is; null where T is
// another.
template <class T>
TFO_INLINE const Accumulator<T>* InPlace(const T* data) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) return data;
  return nullptr;
}

template <class T>
class SmallGroupsFilterGradientWork {
 public:
  explicit SmallGroupsFilterGradientWork(const FilterGradient<T>& g)
      : g_(g),
        x_(g.x),
        groups_{g.shape.groups, g.shape.in_c, g.shape.out_c},
        per_vector_(groups_.PerVector<A>()),
        num_taps_(g.filters_gradient == nullptr ? 0 : g.x.taps.count),
        p_(PlanPlanes(g.x, groups_)),
        dz_in_place_(std::is_same_v<T, A> &&
                     ReadInPlace(g.dz, g.dz_map, groups_, p_)),
        slices_(Min(Min(p_.num_bands, kMaxSlices),
                    CeilDiv(p_.wanted, p_.portions))) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    dz_pitch_ = (CeilDiv(p_.portion, kLanesA) | 1) * kLanesA;
    const std::int64_t dz_size =
        dz_in_place_ ? 0
                     : p_.bands.rows * p_.bands.columns * dz_pitch_ + kLanesA;
    sums_ = scratch.Allocate<A>(slices_ * SliceSize());
    for (std::int64_t k = 0; k < groups_.in; ++k)
      indices_[k] = SpreadIndices<A>(groups_, k);
    return sums_ != nullptr &&
           planes_.Allocate(p_.Size<A>() + dz_size, groups_.FillVectors<A>(),
                            parallel.num_workers, scratch);
  }

  void AddBands(const Parallel& parallel) {
    auto task = [&](std::int64_t index, int worker) {
      const std::int64_t slice = index / p_.portions;
      const Range outputs = p_.PortionAt(index, groups_.Outputs());
      A* const sums = sums_ + slice * SliceSize();
      for (std::int64_t k = outputs.begin; k < outputs.end; k += per_vector_)
        Zero(SumsOf(sums, k), SumsSize());
      const std::int64_t last = p_.num_bands * (slice + 1) / slices_;
      for (std::int64_t band = p_.num_bands * slice / slices_; band < last;
           ++band)
        AddBand({x_, p_.bands, band}, outputs, sums, planes_.Of(worker));
    };
    ParallelFor(parallel, slices_ * p_.portions,
                x_.batch * x_.grid_h * x_.grid_w / slices_ *
                    CeilDiv(p_.portion, per_vector_) *
                    (num_taps_ * groups_.in + 2),
                task);
  }

  void Reduce() const {
    const FilterMap map = FilterMapOf(g_.shape);
    for (std::int64_t t = 0; t < num_taps_; ++t) {
      for (std::int64_t k = 0; k < groups_.in; ++k)
        ReduceRow(t * groups_.in + k, g_.filters_gradient +
                                          x_.taps.taps[t].filter * map.matrix +
                                          k * map.row);
    }
    if (g_.bias_gradient != nullptr)
      ReduceRow(num_taps_ * groups_.in, g_.bias_gradient);
  }

 private:
  using A = Accumulator<T>;
  static constexpr int kLanesA = kLanes<A>;

  // Of a vector of outputs: those of the taps' channels, then that of dz.
  std::int64_t SumsSize() const {
    return (num_taps_ * groups_.in + 1) * kLanesA;
  }
  std::int64_t SliceSize() const { return groups_.Vectors<A>() * SumsSize(); }
  A* SumsOf(A* slice, std::int64_t output) const {
    return slice + output / per_vector_ * SumsSize();
  }
  // Where the vector of these outputs begins.
  std::int64_t VectorAt(std::int64_t output) const {
    return dz_in_place_ ? groups_.VectorInside<A>(output) : output;
  }

  void AddBand(const Band& band, const Range& outputs, A* sums,
               A* plane) const {
    Lines<A> all;
    if (dz_in_place_) {
      all = {InPlace(g_.dz.data + g_.dz_map.Offset(band.n, band.i, band.j) +
                     outputs.begin),
             g_.dz_map.h, g_.dz_map.w};
    } else {
      A* const gathered = plane + p_.Size<A>();
      all = {gathered, band.columns * dz_pitch_, dz_pitch_};
      Gather(g_.dz, g_.dz_map, band.n, g_.shape.out_h, g_.shape.out_w,
             {band.i, band.j, outputs.begin, band.rows, band.columns,
              outputs.end - outputs.begin},
             gathered, all.distance, all.pitch);
    }
    if (num_taps_ > 0) GatherPlane(x_, band, groups_, outputs, p_, plane);
    for (std::int64_t k = outputs.begin; k < outputs.end; k += per_vector_) {
      const std::int64_t first = VectorAt(k);
      const bool fetches = dz_in_place_ && k + per_vector_ < outputs.end;
      const Lines<A> dz{all.data + first - outputs.begin, all.pitch,
                        all.distance,
                        fetches ? VectorAt(k + per_vector_) - first : 0};
      if (g_.bias_gradient != nullptr)
        AddSum(band, dz, SumsOf(sums, k) + SumsSize() - kLanesA);
      if (num_taps_ > 0)
        AddProducts(band, plane + groups_.Source(first - outputs.begin), dz,
                    SumsOf(sums, k));
      if (g_.side_input_gradient != nullptr)
        WriteBack(band, dz, first, Min(outputs.end - first, per_vector_));
    }
  }

  static void AddSum(const Band& band, const Lines<A>& dz, A* total) {
    for (std::int64_t i = 0; i < band.rows; ++i) {
      Vec<A> sum{};
      for (std::int64_t j = 0; j < band.columns; ++j)
        sum += Load(dz.data + i * dz.pitch + j * dz.distance);
      Store(total, Load(total) + sum);
    }
  }

  void AddProducts(const Band& band, const A* plane, const Lines<A>& dz,
                   A* sums) const {
    const TapList& taps = x_.taps;
    const EvenParts across(taps.PerRow(), kTapsTogether);
    for (std::int64_t part = 0; part < across.count(); ++part) {
      WithCount<kTapsTogether>(
          across.Size(part), [&](auto count) TFO_INLINE_LAMBDA {
            constexpr int kTaps = decltype(count)::value;
            const EvenParts down(taps.rows, RowsTogether(kTaps));
            for (std::int64_t rows = 0; rows < down.count(); ++rows) {
              WithCount<RowsTogether(kTaps)>(
                  down.Size(rows), [&](auto together) TFO_INLINE_LAMBDA {
                    constexpr int kRows = decltype(together)::value;
                    const std::int64_t first =
                        down.Begin(rows) * taps.PerRow() + across.Begin(part);
                    groups_.AreDepthwise() ? AddTaps<kRows, kTaps, false>(
                                                 band, first, plane, dz, sums)
                                           : AddTaps<kRows, kTaps, true>(
                                                 band, first, plane, dz, sums);
                  });
            }
          });
    }
  }

  // Adds the products of kRows x kTaps taps, of which `first` is the first.
  template <int kRows, int kTaps, bool kSpread>
  void AddTaps(const Band& band, std::int64_t first, const A* plane,
               const Lines<A>& dz, A* sums) const {
    const TapList& taps = x_.taps;
    const Tap& tap = taps.taps[first];
    // The rows of the grid of which one of these taps meets the image.
    const std::int64_t h = band.i * x_.stride_h + tap.h;
    const std::int64_t last = h + (kRows - 1) * taps.RowStep();
    const std::int64_t end = Inside(h, x_.stride_h, band.rows, x_.height).end;
    const std::int64_t begin =
        Min(last < 0 ? CeilDiv(-last, x_.stride_h) : 0, end);
    const EvenParts parts(end - begin, Max(kPixelsPerSum / band.columns, 1));
    const std::int64_t step =
        taps.PerRow() > 1 ? taps.taps[1].w - taps.taps[0].w : 1;
    const std::int64_t pitch = x_.stride_h * p_.row_pitch;
    const std::int64_t sums_tap = groups_.in * kLanesA;
    for (std::int64_t k = 0; k < groups_.in; ++k) {
      const TapSums<A> to{taps.RowStep() * p_.row_pitch, step * p_.pitch,
                          sums + first * sums_tap + k * kLanesA,
                          taps.PerRow() * sums_tap, sums_tap};
      for (std::int64_t part = 0; part < parts.count(); ++part) {
        const std::int64_t i = begin + parts.Begin(part);
        AddTapProducts<kRows, kTaps, kSpread>(
            {plane + PlaneOffset(taps, tap, p_) + i * pitch, pitch,
             x_.stride_w * p_.pitch},
            {dz.data + i * dz.pitch, dz.pitch, dz.distance,
             first == 0 ? dz.ahead : 0},
            parts.Size(part), band.columns, indices_[k], to);
      }
    }
  }

  // Writes gathered dz as the side input's gradient.
  void WriteBack(const Band& band, const Lines<A>& dz, std::int64_t channel,
                 std::int64_t channels) const {
    const Epilogue<T> identity{
        g_.side_input_gradient, nullptr, nullptr,  nullptr,
        Activation::kNone,      A(0),    g_.dz_map};
    A tile[kPixelsTogether * kTileColumns<A>];
    const EvenParts parts(band.columns, kPixelsTogether);
    for (std::int64_t i = 0; i < band.rows; ++i) {
      for (std::int64_t part = 0; part < parts.count(); ++part) {
        const std::int64_t j = parts.Begin(part);
        for (std::int64_t k = 0; k < parts.Size(part); ++k)
          Store(tile + k * kTileColumns<A>,
                Load(dz.data + i * dz.pitch + (j + k) * dz.distance));
        WriteTile(identity, g_.dz_map.Offset(band.n, band.i + i, band.j + j),
                  channel, tile, static_cast<int>(parts.Size(part)),
                  static_cast<int>(channels));
      }
    }
  }

  void ReduceRow(std::int64_t row, T* to) const {
    for (std::int64_t k = 0; k < groups_.Outputs(); k += per_vector_) {
      const A* const from = SumsOf(sums_, k) + row * kLanesA;
      Vec<A> sum = Load(from);
      for (std::int64_t s = 1; s < slices_; ++s)
        sum += Load(from + s * SliceSize());
      const std::int64_t first = VectorAt(k);
      StoreAsPartial(
          to + first, sum,
          static_cast<int>(Min(groups_.Outputs() - first, per_vector_)));
    }
  }

  const FilterGradient<T>& g_;
  const Windows<T>& x_;
  const Groups groups_;
  const std::int64_t per_vector_, num_taps_;
  const PlanePlan p_;
  const bool dz_in_place_;
  const std::int64_t slices_;
  std::int64_t dz_pitch_;
  A* sums_;
  WorkerPlanes<A> planes_;
  IntVec<A> indices_[kLanesA];
};

template <class T>
bool SmallGroupsFilterGradient(const FilterGradient<T>& g,
                               const Parallel& parallel,
                               const Scratch& scratch) {
  const ConvShape& s = g.shape;
  const bool empty = s.batch * s.out_h * s.out_w == 0;
  if (g.filters_gradient != nullptr &&
      (empty || g.x.taps.count < s.kernel_h * s.kernel_w)) {
    Zero(g.filters_gradient,
         s.kernel_h * s.kernel_w * s.in_c * s.OutputChannels());
  }
  if (empty) {
    if (g.bias_gradient != nullptr) Zero(g.bias_gradient, s.OutputChannels());
    return true;
  }
  SmallGroupsFilterGradientWork<T> work(g);
  if (!work.Prepare(parallel, scratch)) return false;
  work.AddBands(parallel);
  work.Reduce();
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SMALL_GROUPS_FILTER_GRADIENT_H_
