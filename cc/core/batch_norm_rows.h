// The innermost loops of batch normalisation: rows of tensors against
// per-column parameters.
//
// Rows are `stride` elements apart; per-column arrays may be read one vector
// past their width (PaddedLanes).
#ifndef TFO_CC_CORE_BATCH_NORM_ROWS_H_
#define TFO_CC_CORE_BATCH_NORM_ROWS_H_

#include <cstdint>

#include "cc/core/simd.h"
#include "cc/core/streaming.h"

namespace tfo::TFO_ISA {
namespace {

using std::int64_t;

// Per-column parameters. z = (x - mean) * scale + offset, and with dz = dy *
// act'(z) the input's gradient is scale * (dz - dz_mean - (x - mean) *
// dz_x_mean).
template <class A>
struct Columns {
  A* mean;
  A* scale;
  A* offset;
  A* dz_mean;
  A* dz_x_mean;

  Columns At(int64_t column) const {
    return {mean + column, scale + column, offset + column, dz_mean + column,
            dz_x_mean + column};
  }
};

// Where the activation's slope comes from.
enum class SlopeKind { kOne, kRelu, kBuffer };

template <int R>
struct RowCount {
  static constexpr int value = R;
};

template <bool P>
struct Partial {
  static constexpr bool value = P;
};

// Calls body(first_row, RowCount<R>): four rows as long as there are, then one
// by one.
template <class Body>
TFO_INLINE void ForRows(int64_t rows, const Body& body) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) body(r, RowCount<4>{});
  for (; r < rows; ++r) body(r, RowCount<1>{});
}

// Calls step(column, Partial<P>, n): whole vectors, then the n columns that
// remain.
template <class A, class Step>
TFO_INLINE void ForColumns(int64_t width, const Step& step) {
  int64_t j = 0;
  for (; j + kLanes<A> <= width; j += kLanes<A>)
    step(j, Partial<false>{}, kLanes<A>);
  if (j < width) step(j, Partial<true>{}, static_cast<int>(width - j));
}

template <bool P, class T>
TFO_INLINE Vec<Accumulator<T>> LoadColumns(const T* from, int n) {
  if constexpr (P) {
    return LoadAsPartial(from, n);
  } else {
    return LoadAs(from);
  }
}

template <bool P, class T>
TFO_INLINE void StoreColumns(T* to, Vec<Accumulator<T>> v, int n) {
  if constexpr (P) {
    StoreAsPartial(to, v, n);
  } else {
    StoreAs(to, v);
  }
}

// An output tensor. `stream`: its whole vectors bypass the caches.
template <class T>
struct Output {
  T* data;
  bool stream;

  Output At(int64_t element) const { return {data + element, stream}; }

  template <bool kPartial>
  TFO_INLINE void Store(int64_t element, Vec<Accumulator<T>> v, int n) const {
    if (!kPartial && stream) {
      StoreStreaming(data + element, v);
    } else {
      StoreColumns<kPartial>(data + element, v, n);
    }
  }
};

template <class V>
TFO_INLINE V SumRows(const V (&v)[4]) {
  return (v[0] + v[1]) + (v[2] + v[3]);
}
template <class V>
TFO_INLINE V SumRows(const V (&v)[1]) {
  return v[0];
}

// sum += x - shift, square += (x - shift)^2.
template <class T, class A = Accumulator<T>>
void MomentsRows(const T* x, int64_t rows, int64_t stride, int64_t width,
                 const A* shift, A* sum, A* square) {
  ForRows(rows, [&](int64_t row, auto count) {
    const T* from = x + row * stride;
    ForColumns<A>(width, [&](int64_t j, auto partial, int n) {
      constexpr bool kPartial = decltype(partial)::value;
      constexpr int kRows = decltype(count)::value;
      const Vec<A> center = Load(shift + j);
      Vec<A> d[kRows], dd[kRows];
      for (int r = 0; r < kRows; ++r) {
        d[r] = LoadColumns<kPartial>(from + r * stride + j, n) - center;
        dd[r] = d[r] * d[r];
      }
      StoreColumns<kPartial>(sum + j, Load(sum + j) + SumRows(d), n);
      StoreColumns<kPartial>(square + j, Load(square + j) + SumRows(dd), n);
    });
  });
}

// y = z, or max(z, 0), with z = (x - mean) * scale + offset (+ side). All
// tensors are dense here.
template <bool kRelu, bool kSide, class T, class Out, class A = Accumulator<T>>
void ApplyRows(const T* x, const T* side, int64_t rows, int64_t stride,
               int64_t out_stride, int64_t width, const Columns<A>& columns,
               Output<Out> y) {
  ForRows(rows, [&](int64_t row, auto count) {
    ForColumns<A>(width, [&](int64_t j, auto partial, int n) {
      constexpr bool kPartial = decltype(partial)::value;
      const Vec<A> mean = Load(columns.mean + j);
      const Vec<A> scale = Load(columns.scale + j);
      const Vec<A> offset = Load(columns.offset + j);
      for (int r = 0; r < decltype(count)::value; ++r) {
        const int64_t at = (row + r) * stride + j;
        Vec<A> z = (LoadColumns<kPartial>(x + at, n) - mean) * scale + offset;
        if constexpr (kSide) z += LoadColumns<kPartial>(side + at, n);
        if constexpr (kRelu) z = z <= Vec<A>{} ? Vec<A>{} : z;
        y.template Store<kPartial>((row + r) * out_stride + j, z, n);
      }
    });
  });
}

template <SlopeKind kSlope, bool kPartial, class A, class T>
TFO_INLINE Vec<A> LoadDz(const T* dy, const A* slope, Vec<A> centered,
                         Vec<A> scale, Vec<A> offset, int n) {
  const Vec<A> gradient = LoadColumns<kPartial>(dy, n);
  if constexpr (kSlope == SlopeKind::kRelu) {
    return centered * scale + offset > Vec<A>{} ? gradient : Vec<A>{};
  } else if constexpr (kSlope == SlopeKind::kBuffer) {
    return gradient * LoadColumns<kPartial>(slope, n);
  } else {
    return gradient;
  }
}

// sum += dz, sum_x += dz * (x - mean), with the slopes as in LoadDz, `width` of
// them a row.
template <SlopeKind kSlope, class T, class A = Accumulator<T>>
void GradientSumRows(const T* dy, const T* x, const A* slope, int64_t rows,
                     int64_t stride, int64_t width, const Columns<A>& columns,
                     A* sum, A* sum_x) {
  ForRows(rows, [&](int64_t row, auto count) {
    ForColumns<A>(width, [&](int64_t j, auto partial, int n) {
      constexpr bool kPartial = decltype(partial)::value;
      constexpr int kRows = decltype(count)::value;
      const Vec<A> mean = Load(columns.mean + j);
      const Vec<A> scale = Load(columns.scale + j);
      const Vec<A> offset = Load(columns.offset + j);
      Vec<A> dz[kRows], product[kRows];
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = (row + r) * stride + j;
        const Vec<A> centered = LoadColumns<kPartial>(x + at, n) - mean;
        dz[r] = LoadDz<kSlope, kPartial>(dy + at, slope + (row + r) * width + j,
                                         centered, scale, offset, n);
        product[r] = dz[r] * centered;
      }
      StoreColumns<kPartial>(sum + j, Load(sum + j) + SumRows(dz), n);
      StoreColumns<kPartial>(sum_x + j, Load(sum_x + j) + SumRows(product), n);
    });
  });
}

// The gradients of x and, where kSide, of the side input, which is dz.
// kCentered: through the batch's statistics too.
template <SlopeKind kSlope, bool kCentered, bool kSide, class T,
          class A = Accumulator<T>>
void GradientRows(const T* dy, const T* x, const A* slope, int64_t rows,
                  int64_t width, const Columns<A>& columns, Output<T> x_grad,
                  Output<T> side_grad) {
  ForRows(rows, [&](int64_t row, auto count) {
    ForColumns<A>(width, [&](int64_t j, auto partial, int n) {
      constexpr bool kPartial = decltype(partial)::value;
      const Vec<A> mean = Load(columns.mean + j);
      const Vec<A> scale = Load(columns.scale + j);
      const Vec<A> offset = Load(columns.offset + j);
      const Vec<A> dz_mean = Load(columns.dz_mean + j);
      const Vec<A> dz_x_mean = Load(columns.dz_x_mean + j);
      for (int r = 0; r < decltype(count)::value; ++r) {
        const int64_t at = (row + r) * width + j;
        Vec<A> centered{};
        if constexpr (kCentered || kSlope == SlopeKind::kRelu) {
          centered = LoadColumns<kPartial>(x + at, n) - mean;
        }
        const Vec<A> dz = LoadDz<kSlope, kPartial>(dy + at, slope + at,
                                                   centered, scale, offset, n);
        Vec<A> gradient = dz;
        if constexpr (kCentered)
          gradient = (dz - dz_mean) - centered * dz_x_mean;
        x_grad.template Store<kPartial>(at, scale * gradient, n);
        if constexpr (kSide) side_grad.template Store<kPartial>(at, dz, n);
      }
    });
  });
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_BATCH_NORM_ROWS_H_
