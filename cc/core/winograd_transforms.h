// The transforms of Winograd's minimal filtering F(4x4, 3x3): of an input tile
// d and a filter g,
//
//   y = A^T [(G g G^T) * (B^T d B)] A
//
// with 36 products for 16 outputs instead of 144 (Lavin and Gray, "Fast
// Algorithms for Convolutional Neural Networks", 2016). Along one axis both are
// polynomials, multiplied by their values at six points.
#ifndef TFO_CC_CORE_WINOGRAD_TRANSFORMS_H_
#define TFO_CC_CORE_WINOGRAD_TRANSFORMS_H_

#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int kWinogradTaps = 3, kWinogradOutputs = 4;
constexpr int kWinogradInputs = kWinogradOutputs + kWinogradTaps - 1;
constexpr int kWinogradPoints = kWinogradInputs * kWinogradInputs;

// The points are 0, a, -a, b, -b and infinity. Of those whose squares are exact
// in few bits, these lose least: a third of the rounding errors of 1 and 2.
struct WinogradPointsAt {
  static constexpr double a = 0.625, b = 1.5;
  static constexpr double a2 = a * a, b2 = b * b;
  // One over the product of the distances from the other points.
  static constexpr double at_zero = 1 / (a2 * b2);
  static constexpr double at_a = 1 / (2 * a2 * (a2 - b2));
  static constexpr double at_b = 1 / (2 * b2 * (b2 - a2));
};

// The transforms along one axis.
template <class A>
struct WinogradAxis {
  using At = WinogradPointsAt;
  static constexpr A a = At::a, a2 = At::a2, a3 = At::a * At::a2;
  static constexpr A b = At::b, b2 = At::b2, b3 = At::b * At::b2;
  static constexpr A sum = At::a2 + At::b2, product = At::a2 * At::b2;
  static constexpr A zero_0 = At::at_zero;
  static constexpr A a_0 = At::at_a, a_1 = At::at_a * At::a,
                     a_2 = At::at_a * At::a2;
  static constexpr A b_0 = At::at_b, b_1 = At::at_b * At::b,
                     b_2 = At::at_b * At::b2;

  // B^T: the rows are the coefficients of x (x^2 - a^2) (x^2 - b^2), without
  // the factor that is zero at the point.
  static TFO_INLINE void Input(const Vec<A> (&d)[kWinogradInputs],
                               Vec<A> (&v)[kWinogradInputs]) {
    v[0] = product * d[0] - sum * d[2] + d[4];
    Mirror(d[4] - b2 * d[2], a * (d[3] - b2 * d[1]), v + 1);
    Mirror(d[4] - a2 * d[2], b * (d[3] - a2 * d[1]), v + 3);
    v[5] = product * d[1] - sum * d[3] + d[5];
  }

  // G: the filter's value at each point, over the product of the distances.
  static TFO_INLINE void Filter(const Vec<A> (&g)[kWinogradTaps],
                                Vec<A> (&u)[kWinogradInputs]) {
    u[0] = zero_0 * g[0];
    Mirror(a_0 * g[0] + a_2 * g[2], a_1 * g[1], u + 1);
    Mirror(b_0 * g[0] + b_2 * g[2], b_1 * g[1], u + 3);
    u[5] = g[2];
  }

  // A^T: output i sums the i-th powers of the points.
  static TFO_INLINE void Output(const Vec<A> (&m)[kWinogradInputs],
                                Vec<A> (&y)[kWinogradOutputs]) {
    const Vec<A> even_a = m[1] + m[2], odd_a = m[1] - m[2];
    const Vec<A> even_b = m[3] + m[4], odd_b = m[3] - m[4];
    y[0] = m[0] + even_a + even_b;
    y[1] = a * odd_a + b * odd_b;
    y[2] = a2 * even_a + b2 * even_b;
    y[3] = a3 * odd_a + b3 * odd_b + m[5];
  }

  // The gradient of the filter is made of the same transforms, transposed:
  //
  //   dg = G^T [(B^T d B) * (A dy A^T)] G
  //
  // A, of the gradient of the outputs.
  static TFO_INLINE void OutputGradient(const Vec<A> (&dy)[kWinogradOutputs],
                                        Vec<A> (&m)[kWinogradInputs]) {
    m[0] = dy[0];
    Mirror(dy[0] + a2 * dy[2], a * dy[1] + a3 * dy[3], m + 1);
    Mirror(dy[0] + b2 * dy[2], b * dy[1] + b3 * dy[3], m + 3);
    m[5] = dy[3];
  }

  // G^T.
  static TFO_INLINE void FilterGradient(const Vec<A> (&u)[kWinogradInputs],
                                        Vec<A> (&dg)[kWinogradTaps]) {
    const Vec<A> even_a = u[1] + u[2], odd_a = u[1] - u[2];
    const Vec<A> even_b = u[3] + u[4], odd_b = u[3] - u[4];
    dg[0] = zero_0 * u[0] + a_0 * even_a + b_0 * even_b;
    dg[1] = a_1 * odd_a + b_1 * odd_b;
    dg[2] = a_2 * even_a + b_2 * even_b + u[5];
  }

 private:
  // The values at a point and at minus the point, of the even and odd powers.
  static TFO_INLINE void Mirror(Vec<A> even, Vec<A> odd, Vec<A>* to) {
    to[0] = even + odd;
    to[1] = even - odd;
  }
};

// Applies the transform of an axis to both axes of a square of vectors, whose
// rows and columns lie so far apart.
template <class A, int kIn, int kOut>
TFO_INLINE void TransformSquare(void (*along_axis)(const Vec<A> (&)[kIn],
                                                   Vec<A> (&)[kOut]),
                                const A* from, std::int64_t row,
                                std::int64_t column, A* to, std::int64_t to_row,
                                std::int64_t to_column) {
  Vec<A> half[kOut][kIn], in[kIn], out[kOut];
#pragma GCC unroll 6
  for (int j = 0; j < kIn; ++j) {
#pragma GCC unroll 6
    for (int i = 0; i < kIn; ++i) in[i] = Load(from + i * row + j * column);
    along_axis(in, out);
#pragma GCC unroll 6
    for (int i = 0; i < kOut; ++i) half[i][j] = out[i];
  }
#pragma GCC unroll 6
  for (int i = 0; i < kOut; ++i) {
    along_axis(half[i], out);
#pragma GCC unroll 6
    for (int j = 0; j < kOut; ++j)
      Store(to + i * to_row + j * to_column, out[j]);
  }
}

// 6 x 6 inputs into as many points, which lie `point` apart.
template <class A>
TFO_INLINE void TransformInput(const A* from, std::int64_t row,
                               std::int64_t column, A* to, std::int64_t point) {
  TransformSquare<A>(&WinogradAxis<A>::Input, from, row, column, to,
                     kWinogradInputs * point, point);
}

// Nine taps, which lie `tap` apart, into points.
template <class A>
TFO_INLINE void TransformFilter(const A* from, std::int64_t tap, A* to,
                                std::int64_t point) {
  TransformSquare<A>(&WinogradAxis<A>::Filter, from, kWinogradTaps * tap, tap,
                     to, kWinogradInputs * point, point);
}

// Points into 4 x 4 outputs.
template <class A>
TFO_INLINE void TransformOutput(const A* from, std::int64_t point, A* to,
                                std::int64_t row, std::int64_t column) {
  TransformSquare<A>(&WinogradAxis<A>::Output, from, kWinogradInputs * point,
                     point, to, row, column);
}

// The gradient of 4 x 4 outputs into points.
template <class A>
TFO_INLINE void TransformOutputGradient(const A* from, std::int64_t row,
                                        std::int64_t column, A* to,
                                        std::int64_t point) {
  TransformSquare<A>(&WinogradAxis<A>::OutputGradient, from, row, column, to,
                     kWinogradInputs * point, point);
}

// Points into the gradient of nine taps.
template <class A>
TFO_INLINE void TransformFilterGradient(const A* from, std::int64_t point,
                                        A* to, std::int64_t tap) {
  TransformSquare<A>(&WinogradAxis<A>::FilterGradient, from,
                     kWinogradInputs * point, point, to, kWinogradTaps * tap,
                     tap);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_WINOGRAD_TRANSFORMS_H_
