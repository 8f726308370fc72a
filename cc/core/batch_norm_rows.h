// The innermost loops of batch normalisation: rows of tensors against
// per-column parameters.
//
// Rows are `stride` elements apart; per-column arrays may be read one vector
// past their width (PaddedLanes).
#ifndef TFO_CC_CORE_BATCH_NORM_ROWS_H_
#define TFO_CC_CORE_BATCH_NORM_ROWS_H_

#include <cstdint>
#include <type_traits>

#include "cc/core/batch_norm_mask.h"
#include "cc/core/elementwise.h"

namespace tfo::TFO_ISA {
namespace {

using std::int64_t;

// Per-column parameters. z = (x - mean) * scale + offset, and with dz = dy *
// act'(z) the input's gradient is dz * scale - pull - (x - mean) * pull_x.
template <class A>
struct Columns {
  A* mean;
  A* scale;
  A* offset;
  A* pull;
  A* pull_x;

  Columns At(int64_t column) const {
    return {mean + column, scale + column, offset + column, pull + column,
            pull_x + column};
  }
};

// Where the activation's slope comes from.
enum class SlopeKind { kOne, kRelu, kMask, kBuffer };

// Rows are taken one after the other: the streams that an order by columns
// makes of several rows are too short for the hardware's prefetchers (measured:
// 0.65 of the bandwidth).

// sum += x - shift, square += (x - shift)^2.
template <class T, class A = Accumulator<T>>
void MomentsRows(const T* x, int64_t rows, int64_t stride, int64_t width,
                 const A* shift, A* sum, A* square) {
  const auto add = [&](auto count) {
    ForColumns<A>(width, [&](int64_t j, auto partial, int n) {
      constexpr bool kPartial = decltype(partial)::value;
      const Vec<A> center = Load(shift + j);
      Vec<A> total = Load(sum + j), squares = Load(square + j);
      for (int r = 0; r < decltype(count)::value; ++r) {
        FetchAhead(x + r * stride + j);
        const Vec<A> d = LoadColumns<kPartial>(x + r * stride + j, n) - center;
        total += d;
        squares += d * d;
      }
      StoreColumns<kPartial>(sum + j, total, n);
      StoreColumns<kPartial>(square + j, squares, n);
    });
    x += decltype(count)::value * stride;
    rows -= decltype(count)::value;
  };
  // Several of 16-bit rows: for them the sums' own loads and stores take longer
  // than memory.
  using Several = std::integral_constant<int, kIs16Bit<T> ? 4 : 1>;
  while (rows >= Several::value) add(Several{});
  while (rows > 0) add(std::integral_constant<int, 1>{});
}

// y = z, or max(z, 0), with z = (x - mean) * scale + offset (+ side), and the
// signs of z where kMask. y is dense.
template <bool kRelu, bool kSide, bool kMask, class T, class Out,
          class A = Accumulator<T>>
void ApplyRows(const T* x, const T* side, int64_t rows, int64_t stride,
               int64_t width, const Columns<A>& columns, Output<Out> y,
               MaskWriter* mask) {
  for (int64_t row = 0; row < rows; ++row) {
    ForColumns<A>(width, [&](int64_t j, auto partial, int n) {
      constexpr bool kPartial = decltype(partial)::value;
      const int64_t at = row * stride + j;
      FetchAhead(x + at);
      Vec<A> z = LoadColumns<kPartial>(x + at, n) - Load(columns.mean + j);
      z = z * Load(columns.scale + j) + Load(columns.offset + j);
      if constexpr (kSide) {
        FetchAhead(side + at);
        z += LoadColumns<kPartial>(side + at, n);
      }
      if constexpr (kMask) mask->Put(PositiveBits(z), n);
      if constexpr (kRelu) z = z <= Vec<A>{} ? Vec<A>{} : z;
      y.template Store<kPartial>(row * width + j, z, n);
    });
  }
}

// Slopes that are not all one: bits of a mask from bit `first` on, or values.
template <class A>
struct SlopeSource {
  const std::uint8_t* mask;
  int64_t first;
  const A* values;
};

template <SlopeKind kSlope, bool kPartial, class A, class T>
TFO_INLINE Vec<A> LoadDz(const T* dy, const SlopeSource<A>& slopes, int64_t bit,
                         int64_t value, Vec<A> centered, Vec<A> scale,
                         Vec<A> offset, int n) {
  FetchAhead(dy);
  const Vec<A> gradient = LoadColumns<kPartial>(dy, n);
  if constexpr (kSlope == SlopeKind::kRelu) {
    return centered * scale + offset > Vec<A>{} ? gradient : Vec<A>{};
  } else if constexpr (kSlope == SlopeKind::kMask) {
    return LoadMask<A>(slopes.mask, slopes.first + bit, n) ? gradient
                                                           : Vec<A>{};
  } else if constexpr (kSlope == SlopeKind::kBuffer) {
    return gradient * LoadColumns<kPartial>(slopes.values + value, n);
  } else {
    return gradient;
  }
}

// sum += dz, sum_x += dz * (x - mean), and dz to `kept` unless that is null;
// the slopes' values are dense.
template <SlopeKind kSlope, class T, class A = Accumulator<T>>
void GradientSumRows(const T* dy, const T* x, const SlopeSource<A>& slopes,
                     int64_t rows, int64_t stride, int64_t width,
                     const Columns<A>& columns, A* sum, A* sum_x, T* kept) {
  for (int64_t row = 0; row < rows; ++row) {
    ForColumns<A>(width, [&](int64_t j, auto partial, int n) {
      constexpr bool kPartial = decltype(partial)::value;
      const int64_t at = row * stride + j;
      FetchAhead(x + at);
      const Vec<A> centered =
          LoadColumns<kPartial>(x + at, n) - Load(columns.mean + j);
      const Vec<A> dz = LoadDz<kSlope, kPartial>(
          dy + at, slopes, at, row * width + j, centered,
          Load(columns.scale + j), Load(columns.offset + j), n);
      StoreColumns<kPartial>(sum + j, Load(sum + j) + dz, n);
      StoreColumns<kPartial>(sum_x + j, Load(sum_x + j) + dz * centered, n);
      if constexpr (kSlope == SlopeKind::kBuffer) {
        if (kept != nullptr) StoreColumns<kPartial>(kept + at, dz, n);
      }
    });
  }
}

// The gradients of x and, where kSide, of the side input, which is dz.
// kCentered: through the batch's statistics too. All tensors are dense.
template <SlopeKind kSlope, bool kCentered, bool kSide, class T,
          class A = Accumulator<T>>
void GradientRows(const T* dy, const T* x, const SlopeSource<A>& slopes,
                  int64_t rows, int64_t width, const Columns<A>& columns,
                  Output<T> x_grad, Output<T> side_grad) {
  for (int64_t row = 0; row < rows; ++row) {
    ForColumns<A>(width, [&](int64_t j, auto partial, int n) {
      constexpr bool kPartial = decltype(partial)::value;
      const int64_t at = row * width + j;
      const Vec<A> scale = Load(columns.scale + j);
      Vec<A> centered{};
      if constexpr (kCentered || kSlope == SlopeKind::kRelu) {
        FetchAhead(x + at);
        centered = LoadColumns<kPartial>(x + at, n) - Load(columns.mean + j);
      }
      const Vec<A> dz =
          LoadDz<kSlope, kPartial>(dy + at, slopes, at, at, centered, scale,
                                   Load(columns.offset + j), n);
      Vec<A> gradient = dz * scale;
      if constexpr (kCentered) {
        gradient = (gradient - Load(columns.pull + j)) -
                   centered * Load(columns.pull_x + j);
      }
      x_grad.template Store<kPartial>(at, gradient, n);
      if constexpr (kSide) side_grad.template Store<kPartial>(at, dz, n);
    });
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_BATCH_NORM_ROWS_H_
