// exp, expm1, log1p, tanh and the normal distribution on vectors. Polynomials:
// Chebyshev interpolation of the stated function, for atanh its minimax
// approximation, computed in 40 to 60 digits; the stated errors are those of
// the polynomial, relative.
#ifndef TFO_CC_CORE_VECTOR_MATH_H_
#define TFO_CC_CORE_VECTOR_MATH_H_

#include <type_traits>

#include "cc/core/activation.h"
#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

// Of what numbers are stored as: 16 bits need no more than 14 or 15 digits.
template <class T>
struct MathConstants;

template <>
struct MathConstants<float> {
  // Arguments of exp are cut off where 2^n would leave the normal numbers.
  static constexpr float kExpMin = -87.3f, kExpMax = 88.3f;
  static constexpr float kLn2High = 0.693359375f,
                         kLn2Low = -2.12194440054690583e-4f;
  static constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr int kMantissaBits = 23, kExponentBias = 127;
  static constexpr float kTanhOne = 10.0f, kTailEnd = 13.2f;
  // (e^r - 1 - r) / r^2 on |r| <= 0.35; 1.4e-7, which is 1.7e-8 of e^r.
  static constexpr float kExpPolynomial[] = {
      0.5f, 0.1666657338f, 0.04166655011f, 0.008363773874f, 0.001392692661f};
  // (1 + 2y) e^(y^2) erfc(y) / 2 in t = (y - 3) / (y + 3) on y = x / sqrt(2) in
  // [0, 10.1]; 2.9e-9.
  static constexpr float kTailPolynomial[] = {
      0.626504029f,     -0.0678105717f,    -0.02378114027f,  0.0648232878f,
      -0.05963632635f,  0.03414675488f,    -0.01189511709f,  0.001289717343f,
      0.0009972372955f, -0.0003991695707f, -0.0001386634611f};
  // atanh(s) / s in s^2 on [0, 1 / 9]; 4.0e-9.
  static constexpr float kAtanhPolynomial[] = {
      1.0f, 0.3333315734f, 0.2001245516f, 0.139803012f, 0.1408916807f};
};

template <>
struct MathConstants<double> {
  static constexpr double kExpMin = -708.0, kExpMax = 709.0;
  static constexpr double kLn2High = 0.693147180369123816490,
                          kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissaBits = 52, kExponentBias = 1023;
  static constexpr double kTanhOne = 22.0, kTailEnd = 37.6;
  // As above; 3.3e-18.
  static constexpr double kExpPolynomial[] = {0.5,
                                              0.16666666666666671438,
                                              0.041666666666666670074,
                                              0.0083333333333255446996,
                                              0.0013888888888883326674,
                                              0.00019841269876864354929,
                                              0.000024801587327007186731,
                                              2.7557252833516909748e-6,
                                              2.7557271810219799569e-7,
                                              2.5106274733573294687e-8,
                                              2.0915442297780115216e-9};
  // As above on y in [0, 27.3]; 3.0e-17.
  static constexpr double kTailPolynomial[] = {
      0.62650402913486480383,     -0.067810553062290335191,
      -0.023781147176723423098,   0.064822579351352022092,
      -0.059636831707752392673,   0.034154013672927870104,
      -0.011885257457344661908,   0.0012646958937196160332,
      0.00094434515819936102644,  -0.00038991601521422768976,
      -5.2579757154010115612e-05, 6.2549055232952638405e-05,
      2.474112621594156021e-06,   -1.0048244475903403273e-05,
      -3.6386658465946023886e-07, 1.7318450543592142236e-06,
      1.7456626716103188734e-07,  -3.0229903356683464669e-07,
      -6.5571493851539334896e-08, 4.5781221157174923256e-08,
      1.6426216990879937363e-08,  -4.2028609026074420138e-09,
      -2.0854839068974142304e-09};
  // As above; 4.6e-17.
  static constexpr double kAtanhPolynomial[] = {
      0.99999999999999995424,  0.33333333333341515232,  0.19999999997588788747,
      0.14285714560931614438,  0.11111095193727044256,  0.090914360770022777172,
      0.076817435788161380024, 0.067964959132111309619, 0.049363405430812440348,
      0.088985018393831331445};
};

struct MathConstants16 : MathConstants<float> {
  // As above; 1.3e-5 of e^r.
  static constexpr float kExpPolynomial[] = {0.49999738f, 0.16743416f,
                                             0.04183716f};
  // 2^f on |f| <= 0.5; 2.6e-6.
  static constexpr float kExp2Polynomial[] = {
      0.999999261f, 0.693121815f, 0.240247448f, 0.0559178603f, 0.00957010143f};
  // e^(y^2) erfc(y) / 2t in t = 1 / (1 + kTailScale x) on y = x / sqrt(2) in
  // [0, 10]; 8.4e-6.
  static constexpr float kTailScale = 0.450780573f;
  static constexpr float kTailPolynomial[] = {0.179592195f,  0.184500481f,
                                              0.109016982f,  0.192737394f,
                                              -0.233596501f, 0.0677460905f};
  // As above; 7.2e-6.
  static constexpr float kAtanhPolynomial[] = {1.00000720f, 0.332189823f,
                                               0.226485159f};
};
template <>
struct MathConstants<BFloat16> : MathConstants16 {};
template <>
struct MathConstants<Half> : MathConstants16 {};

template <class T>
struct VectorMath {
  using A = Accumulator<T>;
  using Scalar = A;
  using V = Vec<A>;
  using K = MathConstants<T>;

  template <int N>
  static TFO_INLINE V Polynomial(const A (&coefficients)[N], V x) {
    V sum = Splat(coefficients[N - 1]);
#pragma GCC unroll 32
    for (int i = N - 2; i >= 0; --i) sum = sum * x + coefficients[i];
    return sum;
  }

  // e^x = scale * (1 + fraction), scale a power of two.
  struct Reduced {
    V scale, fraction;
  };
  static TFO_INLINE Reduced Reduce(V x) {
    const V biased = x * A(kLog2E) + K::kRound;
    const V n = biased - K::kRound;
    const V r = (x - n * K::kLn2High) - n * K::kLn2Low;
    const IntVec<A> exponent = BitCast<IntVec<A>>(biased) + K::kExponentBias;
    return {BitCast<V>(exponent << K::kMantissaBits),
            r + r * r * Polynomial(K::kExpPolynomial, r)};
  }

  static TFO_INLINE V Clamp(V x) {
    return Smaller(Splat(K::kExpMax), Larger(Splat(K::kExpMin), x));
  }

  // Of finite x; of 16 bits, of any.
  static TFO_INLINE V Reciprocal(V x) {
#if defined(__AVX512F__)
    // A division takes several times as long as this and a step of Newton's.
    if constexpr (std::is_same_v<A, float>) {
      const V r = (V)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);
      return kIs16Bit<T> ? r : r * (A(2) - x * r);
    }
#endif
    return A(1) / x;
  }

  // 2^x of what kExpMin and kExpMax allow.
  static TFO_INLINE V PowerOfTwo(V x) {
    // 2^n 2^f; the integer that rounding leaves below the bias of kRound is
    // added to the exponent.
    const V biased = x + K::kRound;
    const V f = x - (biased - K::kRound);
    return BitCast<V>(BitCast<IntVec<A>>(Polynomial(K::kExp2Polynomial, f)) +
                      (BitCast<IntVec<A>>(biased) << K::kMantissaBits));
  }

  static TFO_INLINE V Exp(V x) {
    if constexpr (kIs16Bit<T>) return PowerOfTwo(Clamp(x) * A(kLog2E));
    const Reduced e = Reduce(Clamp(x));
    return e.scale + e.scale * e.fraction;
  }

  static TFO_INLINE V Expm1(V x) {
    const Reduced e = Reduce(Clamp(x));
    return e.scale * e.fraction + (e.scale - A(1));
  }

  // log(1 + x) = 2 atanh(x / (2 + x)), for x in [0, 1].
  static TFO_INLINE V Log1p(V x) {
    const V s = x * Reciprocal(x + A(2));
    return A(2) * s * Polynomial(K::kAtanhPolynomial, s * s);
  }

  static TFO_INLINE V Tanh(V x) {
    const V magnitude = x < V{} ? -x : x;
    const V t = Expm1(A(2) * Smaller(Splat(K::kTanhOne), magnitude));
    const V value = t / (t + A(2));
    return x < V{} ? -value : value;
  }

  static TFO_INLINE V Larger(V a, V b) { return TFO_ISA::Larger<A>(a, b); }
  static TFO_INLINE V Smaller(V a, V b) { return TFO_ISA::Smaller<A>(a, b); }

  static TFO_INLINE V Magnitude(V x) {
    using Int = typename IntegerOf<A>::type;
    constexpr auto kBits = static_cast<Int>(~0ull >> (65 - 8 * sizeof(Int)));
    return Smaller(Splat(K::kTailEnd),
                   BitCast<V>(BitCast<IntVec<A>>(x) & kBits));
  }

  static TFO_INLINE NormalTail<V> Tail(V x) {
    if constexpr (kIs16Bit<T>) {
      const V exp = PowerOfTwo(x * x * A(-0.5 * kLog2E));
      const V t = Reciprocal(A(1) + K::kTailScale * x);
      return {Polynomial(K::kTailPolynomial, t) * t * exp, exp};
    } else {
      const Reduced e = Reduce(A(-0.5) * x * x);
      const V exp = e.scale + e.scale * e.fraction;
      const V a = x + A(3 * kSqrt2), b = A(1) + A(kSqrt2) * x;
      const V r = Reciprocal(a * b);
      return {Polynomial(K::kTailPolynomial, (x - A(3 * kSqrt2)) * b * r) *
                  (a * r) * exp,
              exp};
    }
  }

 private:
  static constexpr double kLog2E = 1.44269504088896340735992468100;
  static constexpr double kSqrt2 = 1.41421356237309504880168872421;
};

// Of numbers that are stored as T.
template <class T>
using VectorActivation =
    ActivationFunctions<VectorMath<T>, Vec<Accumulator<T>>>;

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_VECTOR_MATH_H_
