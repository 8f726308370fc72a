// exp, expm1, tanh and erfcx on vectors. Polynomials: Chebyshev interpolation
// of the stated function, computed in 60 digits; the stated errors are those of
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
  static constexpr float kTanhOne = 10.0f, kErfcxEnd = 10.0f;
  // (e^r - 1 - r) / r^2 on |r| <= 0.35; 1.4e-7, which is 1.7e-8 of e^r.
  static constexpr float kExpPolynomial[] = {
      0.5f, 0.1666657338f, 0.04166655011f, 0.008363773874f, 0.001392692661f};
  // (1 + 2y) e^(y^2) erfc(y) in t = (y - 3) / (y + 3) on y in
  // [0, 10.1]; 2.9e-9.
  static constexpr float kErfcxPolynomial[] = {
      1.253008058f,    -0.1356211434f,    -0.04756228054f,  0.1296465756f,
      -0.1192726527f,  0.06829350976f,    -0.02379023418f,  0.002579434685f,
      0.001994474591f, -0.0007983391415f, -0.0002773269222f};
};

template <>
struct MathConstants<double> {
  static constexpr double kExpMin = -708.0, kExpMax = 709.0;
  static constexpr double kLn2High = 0.693147180369123816490,
                          kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissaBits = 52, kExponentBias = 1023;
  static constexpr double kTanhOne = 22.0, kErfcxEnd = 27.0;
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
  static constexpr double kErfcxPolynomial[] = {
      1.253008058269729639,       -0.13562110612458067157,
      -0.047562294353446849415,   0.12964515870270403326,
      -0.11927366341550477991,    0.068308027345855741933,
      -0.023770514914689325413,   0.0025293917874392320132,
      0.0018886903163987220201,   -0.00077983203042845542408,
      -0.00010515951430802023436, 0.00012509811046590528435,
      4.9482252431883122113e-6,   -0.000020096488951806805298,
      -7.2773316931892043458e-7,  3.4636901087184282701e-6,
      3.4913253432206376634e-7,   -6.0459806713366932816e-7,
      -1.3114298770307866375e-7,  9.1562442314349849847e-8,
      3.2852433981759873408e-8,   -8.4057218052148833455e-9,
      -4.170967813794828552e-9};
};

struct MathConstants16 : MathConstants<float> {
  // As above; 1.3e-5 of e^r.
  static constexpr float kExpPolynomial[] = {0.49999738f, 0.16743416f,
                                             0.04183716f};
  // 2^f on |f| <= 0.5; 2.6e-6.
  static constexpr float kExp2Polynomial[] = {
      0.999999261f, 0.693121815f, 0.240247448f, 0.0559178603f, 0.00957010143f};
  // e^(y^2) erfc(y) / t in t = 1 / (1 + kErfcxScale y) on y in [0, 10]; 8.4e-6.
  static constexpr float kErfcxScale = 0.6375f;
  static constexpr float kErfcxPolynomial[] = {0.359184391f,  0.369000962f,
                                               0.218033964f,  0.385474789f,
                                               -0.467193002f, 0.135492181f};
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
    x = Clamp(x);
    const V biased = x * A(kLog2E) + K::kRound;
    const V n = biased - K::kRound;
    const V r = (x - n * K::kLn2High) - n * K::kLn2Low;
    const IntVec<A> exponent = BitCast<IntVec<A>>(biased) + K::kExponentBias;
    return {BitCast<V>(exponent << K::kMantissaBits),
            r + r * r * Polynomial(K::kExpPolynomial, r)};
  }

  static TFO_INLINE V Clamp(V x) {
    return Smaller<A>(Splat(K::kExpMax), Larger<A>(Splat(K::kExpMin), x));
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

  static TFO_INLINE V Exp(V x) {
    if constexpr (kIs16Bit<T>) {
      // 2^n 2^f; the integer that rounding leaves below the bias of kRound is
      // added to the exponent.
      const V power = Clamp(x) * A(kLog2E);
      const V biased = power + K::kRound;
      const V f = power - (biased - K::kRound);
      return BitCast<V>(BitCast<IntVec<A>>(Polynomial(K::kExp2Polynomial, f)) +
                        (BitCast<IntVec<A>>(biased) << K::kMantissaBits));
    } else {
      const Reduced e = Reduce(x);
      return e.scale + e.scale * e.fraction;
    }
  }

  static TFO_INLINE V Expm1(V x) {
    const Reduced e = Reduce(x);
    return e.scale * e.fraction + (e.scale - A(1));
  }

  static TFO_INLINE V Tanh(V x) {
    const V magnitude = x < V{} ? -x : x;
    const V t = Expm1(A(2) * Smaller<A>(Splat(K::kTanhOne), magnitude));
    const V value = t / (t + A(2));
    return x < V{} ? -value : value;
  }

  // e^(x^2) erfc(x) of x >= 0.
  static TFO_INLINE V Erfcx(V x) {
    if constexpr (kIs16Bit<T>) {
      const V t = Reciprocal(A(1) + K::kErfcxScale * x);
      return Polynomial(K::kErfcxPolynomial, t) * t;
    } else {
      x = Smaller<A>(Splat(K::kErfcxEnd), x);
      const V a = x + A(3), b = A(1) + A(2) * x;
      const V r = Reciprocal(a * b);
      return Polynomial(K::kErfcxPolynomial, (x - A(3)) * b * r) * (a * r);
    }
  }

 private:
  static constexpr double kLog2E = 1.44269504088896340735992468100;
};

// Of numbers that are stored as T.
template <class T>
using VectorActivation =
    ActivationFunctions<VectorMath<T>, Vec<Accumulator<T>>>;

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_VECTOR_MATH_H_
