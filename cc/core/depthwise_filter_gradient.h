// Filter gradient, bias gradient and side input gradient of convolutions whose
// channels are groups of their own, from one pass over dz:
//
//   dw[r, s, c] = sum over pixels of x[pixel under tap (r, s), c] * dz[pixel,
//   c]
//
// Bands are cut into slices with partial sums of their own, which are added in
// a fixed order at the end.
#ifndef TFO_CC_CORE_DEPTHWISE_FILTER_GRADIENT_H_
#define TFO_CC_CORE_DEPTHWISE_FILTER_GRADIENT_H_

#include "cc/core/depthwise.h"
#include "cc/core/filter_gradient.h"

namespace tfo::TFO_ISA {
namespace {

// Taps whose sums are kept in registers together: neighbours in a row, and so
// many rows of them that sums do not wait for each other.
constexpr int kTapsTogether = 7;
constexpr int RowsTogether(int taps) { return taps <= 3 ? 3 : 2; }
// Pixels that are summed up by themselves: rounding errors grow with them.
constexpr std::int64_t kPixelsTogether = 1024;

// Vectors that lie in lines: of planes, or of sums.
template <class A, class Distance>
struct Lines {
  A* data;
  std::int64_t pitch;
  Distance distance;  // within a line

  TFO_INLINE A* At(std::int64_t i, std::int64_t j) const {
    return data + i * pitch + j * distance;
  }
};

// Adds to the sums of kRows x kTaps taps the products of `rows` x `columns`
// pixels of dz; `tap_row` is from a row of taps to the next in x.
template <int kRows, int kTaps, class A, class Windows, class Taps>
TFO_INLINE void AddTapProducts(const Lines<const A, Windows>& x,
                               std::int64_t tap_row, Taps tap, const A* dz,
                               std::int64_t dz_pitch, std::int64_t rows,
                               std::int64_t columns, A* sums,
                               std::int64_t sums_pitch) {
  constexpr int lanes = kLanes<A>;
  Vec<A> sum[kRows][kTaps] = {};
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const Vec<A> factor = Load(dz + i * dz_pitch + j * lanes);
      const A* const at = x.At(i, j);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int k = 0; k < kTaps; ++k)
          sum[r][k] += Load(at + r * tap_row + k * tap) * factor;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kTaps; ++k) {
      A* const to = sums + r * sums_pitch + k * lanes;
      Store(to, Load(to) + sum[r][k]);
    }
  }
}

template <class T>
class DepthwiseFilterGradientWork {
 public:
  explicit DepthwiseFilterGradientWork(const FilterGradient<T>& g)
      : g_(g),
        x_(g.x),
        channels_(g.shape.groups),
        num_taps_(g.filters_gradient == nullptr ? 0 : g.x.taps.count),
        p_(PlanPlanes(g.x, channels_)),
        slices_(Min(Min(p_.num_bands, kMaxSlices),
                    CeilDiv(p_.wanted, p_.vectors))) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    dz_size_ = p_.bands.rows * p_.bands.columns * kLanesA;
    sums_ = scratch.Allocate<A>(slices_ * p_.vectors * SumsSize());
    planes_ = scratch.Allocate<A>(PlanesSize() * parallel.num_workers);
    return sums_ != nullptr && planes_ != nullptr;
  }

  void AddBands(const Parallel& parallel) {
    auto task = [&](std::int64_t index, int worker) {
      const std::int64_t slice = index / p_.vectors;
      A* const sums = sums_ + index * SumsSize();
      Zero(sums, SumsSize());
      const std::int64_t last = p_.num_bands * (slice + 1) / slices_;
      for (std::int64_t band = p_.num_bands * slice / slices_; band < last;
           ++band)
        AddBand({x_, p_.bands, band}, index % p_.vectors, sums,
                planes_ + worker * PlanesSize());
    };
    ParallelFor(parallel, slices_ * p_.vectors,
                x_.batch * x_.grid_h * x_.grid_w / slices_ * (num_taps_ + 2),
                task);
  }

  void Reduce() const {
    const std::int64_t matrix = FilterMapOf(g_.shape).matrix;
    for (std::int64_t t = 0; t < num_taps_; ++t)
      ReduceRow(t, g_.filters_gradient + x_.taps.taps[t].filter * matrix);
    if (g_.bias_gradient != nullptr) ReduceRow(num_taps_, g_.bias_gradient);
  }

 private:
  using A = Accumulator<T>;
  static constexpr int kLanesA = kLanes<A>;

  // Of a vector: those of the taps, then that of dz.
  std::int64_t SumsSize() const { return (num_taps_ + 1) * kLanesA; }
  std::int64_t PlanesSize() const { return p_.Size<A>() + dz_size_; }
  int ChannelsOf(std::int64_t vector) const {
    return static_cast<int>(Min(channels_ - vector * kLanesA, kLanesA));
  }

  void AddBand(const PlaneBand& band, std::int64_t vector, A* sums,
               A* planes) const {
    A* const dz = planes + p_.Size<A>();
    const std::int64_t channel = vector * kLanesA;
    const std::int64_t line = band.columns * kLanesA;
    if (ChannelsOf(vector) < kLanesA) Zero(dz, dz_size_);
    Gather(
        g_.dz, g_.dz_map, band.n, g_.shape.out_h, g_.shape.out_w,
        {band.i, band.j, channel, band.rows, band.columns, ChannelsOf(vector)},
        dz, kLanesA, line);
    if (g_.bias_gradient != nullptr) {
      A* const total = sums + num_taps_ * kLanesA;
      for (std::int64_t i = 0; i < band.rows; ++i) {
        Vec<A> sum{};
        for (std::int64_t j = 0; j < line; j += kLanesA)
          sum += Load(dz + i * line + j);
        Store(total, Load(total) + sum);
      }
    }
    if (g_.side_input_gradient != nullptr) WriteBack(band, vector, dz);
    if (num_taps_ == 0) return;
    GatherPlane(x_, band, channel, ChannelsOf(vector), p_, planes);
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
                    AddTaps<decltype(together)::value, kTaps>(
                        band, down.Begin(rows), across.Begin(part), planes, dz,
                        sums);
                  });
            }
          });
    }
  }

  // Adds the products of the taps from the `row`-th row's `column`-th on.
  template <int kRows, int kTaps>
  void AddTaps(const PlaneBand& band, std::int64_t row, std::int64_t column,
               const A* plane, const A* dz, A* sums) const {
    const TapList& taps = x_.taps;
    const std::int64_t first = row * taps.PerRow() + column;
    const Tap& tap = taps.taps[first];
    const std::int64_t pitch = p_.RowPitch<A>(), line = band.columns * kLanesA;
    // The rows of the grid of which one of these taps meets the image.
    const std::int64_t h = band.i * x_.stride_h + tap.h;
    const std::int64_t end = Inside(h, x_.stride_h, band.rows, x_.height).end;
    const std::int64_t begin =
        Min(Inside(h + (kRows - 1) * taps.RowStep(), x_.stride_h, band.rows,
                   x_.height + kRows * taps.RowStep())
                .begin,
            end);
    const EvenParts parts(end - begin, Max(kPixelsTogether / band.columns, 1));
    const std::int64_t step =
        taps.PerRow() > 1 ? taps.taps[1].w - taps.taps[0].w : 1;
    WithDistance<A>(x_.stride_w, [&](auto window) TFO_INLINE_LAMBDA {
      WithDistance<A>(step, [&](auto next) TFO_INLINE_LAMBDA {
        for (std::int64_t part = 0; part < parts.count(); ++part) {
          const std::int64_t i = begin + parts.Begin(part);
          const Lines<const A, decltype(window)> x{
              plane + PlaneOffset<A>(taps, tap, pitch) +
                  i * x_.stride_h * pitch,
              x_.stride_h * pitch, window};
          AddTapProducts<kRows, kTaps>(x, taps.RowStep() * pitch, next,
                                       dz + i * line, line, parts.Size(part),
                                       band.columns, sums + first * kLanesA,
                                       taps.PerRow() * kLanesA);
        }
      });
    });
  }

  // Writes gathered dz as the side input's gradient.
  void WriteBack(const PlaneBand& band, std::int64_t vector,
                 const A* dz) const {
    const Epilogue<T> identity{
        g_.side_input_gradient, nullptr, nullptr,  nullptr,
        Activation::kNone,      A(0),    g_.dz_map};
    A tile[kDepthwisePixels * kTileColumns<A>];
    const EvenParts parts(band.columns, kDepthwisePixels);
    for (std::int64_t i = 0; i < band.rows; ++i) {
      for (std::int64_t part = 0; part < parts.count(); ++part) {
        const std::int64_t j = parts.Begin(part);
        const A* const from = dz + (i * band.columns + j) * kLanesA;
        for (std::int64_t k = 0; k < parts.Size(part); ++k)
          Store(tile + k * kTileColumns<A>, Load(from + k * kLanesA));
        WriteTile(identity, g_.dz_map.Offset(band.n, band.i + i, band.j + j),
                  vector * kLanesA, tile, static_cast<int>(parts.Size(part)),
                  ChannelsOf(vector));
      }
    }
  }

  void ReduceRow(std::int64_t row, T* to) const {
    const std::int64_t slice_size = p_.vectors * SumsSize();
    for (std::int64_t v = 0; v < p_.vectors; ++v) {
      const A* const from = sums_ + v * SumsSize() + row * kLanesA;
      Vec<A> sum = Load(from);
      for (std::int64_t s = 1; s < slices_; ++s)
        sum += Load(from + s * slice_size);
      StoreAsPartial(to + v * kLanesA, sum, ChannelsOf(v));
    }
  }

  const FilterGradient<T>& g_;
  const Windows<T>& x_;
  const std::int64_t channels_, num_taps_;
  const PlanePlan p_;
  const std::int64_t slices_;
  std::int64_t dz_size_;
  A *sums_, *planes_;
};

template <class T>
bool DepthwiseFilterGradient(const FilterGradient<T>& g,
                             const Parallel& parallel, const Scratch& scratch) {
  const ConvShape& s = g.shape;
  const bool empty = s.batch * s.out_h * s.out_w == 0;
  if (g.filters_gradient != nullptr &&
      (empty || g.x.taps.count < s.kernel_h * s.kernel_w)) {
    Zero(g.filters_gradient, s.kernel_h * s.kernel_w * s.groups);
  }
  if (empty) {
    if (g.bias_gradient != nullptr) Zero(g.bias_gradient, s.groups);
    return true;
  }
  DepthwiseFilterGradientWork<T> work(g);
  if (!work.Prepare(parallel, scratch)) return false;
  work.AddBands(parallel);
  work.Reduce();
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_DEPTHWISE_FILTER_GRADIENT_H_
