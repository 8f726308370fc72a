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
struct WinogradAxis {
  static constexpr double a = 0.625, b = 1.5;
  static constexpr double a2 = a * a, b2 = b * b;

  // B^T: the rows are the coefficients of x (x^2 - a^2) (x^2 - b^2), without
  // the factor that is zero at the point.
  template <class A>
  static TFO_INLINE void Input(const Vec<A> (&d)[kWinogradInputs],
                               Vec<A> (&v)[kWinogradInputs]) {
    constexpr A kA = a, kB = b, kA2 = a2, kB2 = b2, kSum = a2 + b2,
                kProduct = a2 * b2;
    const Vec<A> even_a = d[4] - kB2 * d[2], odd_a = kA * (d[3] - kB2 * d[1]);
    const Vec<A> even_b = d[4] - kA2 * d[2], odd_b = kB * (d[3] - kA2 * d[1]);
    v[0] = kProduct * d[0] - kSum * d[2] + d[4];
    v[1] = even_a + odd_a;
    v[2] = even_a - odd_a;
    v[3] = even_b + odd_b;
    v[4] = even_b - odd_b;
    v[5] = kProduct * d[1] - kSum * d[3] + d[5];
  }

  // G: the filter's value at each point, over the product of the point's
  // distances from the others.
  template <class A>
  static TFO_INLINE void Filter(const Vec<A> (&g)[kWinogradTaps],
                                Vec<A> (&u)[kWinogradInputs]) {
    constexpr A kAtZero = 1 / (a2 * b2), kAtA = 1 / (2 * a2 * (a2 - b2)),
                kAtB = 1 / (2 * b2 * (b2 - a2));
    constexpr A kOddA = kAtA * a, kEvenA = kAtA * a2, kOddB = kAtB * b,
                kEvenB = kAtB * b2;
    const Vec<A> even_a = kAtA * g[0] + kEvenA * g[2], odd_a = kOddA * g[1];
    const Vec<A> even_b = kAtB * g[0] + kEvenB * g[2], odd_b = kOddB * g[1];
    u[0] = kAtZero * g[0];
    u[1] = even_a + odd_a;
    u[2] = even_a - odd_a;
    u[3] = even_b + odd_b;
    u[4] = even_b - odd_b;
    u[5] = g[2];
  }

  // A^T: output i sums the i-th powers of the points.
  template <class A>
  static TFO_INLINE void Output(const Vec<A> (&m)[kWinogradInputs],
                                Vec<A> (&y)[kWinogradOutputs]) {
    constexpr A kA = a, kB = b, kA2 = a2, kB2 = b2, kA3 = a * a2, kB3 = b * b2;
    const Vec<A> even_a = m[1] + m[2], odd_a = m[1] - m[2];
    const Vec<A> even_b = m[3] + m[4], odd_b = m[3] - m[4];
    y[0] = m[0] + even_a + even_b;
    y[1] = kA * odd_a + kB * odd_b;
    y[2] = kA2 * even_a + kB2 * even_b;
    y[3] = kA3 * odd_a + kB3 * odd_b + m[5];
  }

  // A, the transpose of Output.
  template <class A>
  static TFO_INLINE void OutputGradient(const Vec<A> (&dy)[kWinogradOutputs],
                                        Vec<A> (&m)[kWinogradInputs]) {
    constexpr A kA = a, kB = b, kA2 = a2, kB2 = b2, kA3 = a * a2, kB3 = b * b2;
    const Vec<A> even_a = dy[0] + kA2 * dy[2], odd_a = kA * dy[1] + kA3 * dy[3];
    const Vec<A> even_b = dy[0] + kB2 * dy[2], odd_b = kB * dy[1] + kB3 * dy[3];
    m[0] = dy[0];
    m[1] = even_a + odd_a;
    m[2] = even_a - odd_a;
    m[3] = even_b + odd_b;
    m[4] = even_b - odd_b;
    m[5] = dy[3];
  }

  // G^T, the transpose of Filter.
  template <class A>
  static TFO_INLINE void FilterGradient(const Vec<A> (&u)[kWinogradInputs],
                                        Vec<A> (&dg)[kWinogradTaps]) {
    constexpr A kAtZero = 1 / (a2 * b2), kAtA = 1 / (2 * a2 * (a2 - b2)),
                kAtB = 1 / (2 * b2 * (b2 - a2));
    constexpr A kOddA = kAtA * a, kEvenA = kAtA * a2, kOddB = kAtB * b,
                kEvenB = kAtB * b2;
    const Vec<A> even_a = u[1] + u[2], odd_a = u[1] - u[2];
    const Vec<A> even_b = u[3] + u[4], odd_b = u[3] - u[4];
    dg[0] = kAtZero * u[0] + kAtA * even_a + kAtB * even_b;
    dg[1] = kOddA * odd_a + kOddB * odd_b;
    dg[2] = kEvenA * even_a + kEvenB * even_b + u[5];
  }
};

// The gradient of the filter is that of the input tile with 4 x 4 taps, but for
// the transforms, which are those above the other way:
//
//   dg = G^T [(B^T d B) * (A dy A^T)] G

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
  TransformSquare<A>(&WinogradAxis::Input<A>, from, row, column, to,
                     kWinogradInputs * point, point);
}

// Nine taps, which lie `tap` apart, into points.
template <class A>
TFO_INLINE void TransformFilter(const A* from, std::int64_t tap, A* to,
                                std::int64_t point) {
  TransformSquare<A>(&WinogradAxis::Filter<A>, from, kWinogradTaps * tap, tap,
                     to, kWinogradInputs * point, point);
}

// Points into 4 x 4 outputs.
template <class A>
TFO_INLINE void TransformOutput(const A* from, std::int64_t point, A* to,
                                std::int64_t row, std::int64_t column) {
  TransformSquare<A>(&WinogradAxis::Output<A>, from, kWinogradInputs * point,
                     point, to, row, column);
}

// The gradient of 4 x 4 outputs into points.
template <class A>
TFO_INLINE void TransformOutputGradient(const A* from, std::int64_t row,
                                        std::int64_t column, A* to,
                                        std::int64_t point) {
  TransformSquare<A>(&WinogradAxis::OutputGradient<A>, from, row, column, to,
                     kWinogradInputs * point, point);
}

// Points into the gradient of nine taps.
template <class A>
TFO_INLINE void TransformFilterGradient(const A* from, std::int64_t point,
                                        A* to, std::int64_t tap) {
  TransformSquare<A>(&WinogradAxis::FilterGradient<A>, from,
                     kWinogradInputs * point, point, to, kWinogradTaps * tap,
                     tap);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_WINOGRAD_TRANSFORMS_H_
