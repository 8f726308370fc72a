// Vectors of one instruction set, on the compilers' vector extension. Included
// by *_isa.cc only; all of it has internal linkage, so that no code of one
// instruction set can be linked into another.
#ifndef TFO_CC_CORE_SIMD_H_
#define TFO_CC_CORE_SIMD_H_

#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cc/core/types.h"

#if defined(__AVX512F__)
#define TFO_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define TFO_VECTOR_BYTES 32
#else
#define TFO_VECTOR_BYTES 16
#endif

#define TFO_INLINE inline __attribute__((always_inline))
#define TFO_INLINE_LAMBDA __attribute__((always_inline))

namespace tfo::TFO_ISA {
namespace {

// A vector of accumulators: float or double.
template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(TFO_VECTOR_BYTES)));
};
template <class A>
using Vec = typename VectorOf<A>::type;

template <class A>
constexpr int kLanes = TFO_VECTOR_BYTES / sizeof(A);

// By multiplication with one, which the compiler turns into a broadcast (adding
// zero it must keep: -0 + 0 is 0).
template <class A>
TFO_INLINE Vec<A> Splat(A value) {
  return value * (Vec<A>{} + A(1));
}

template <class A>
struct IntegerOf {
  using type = std::int32_t;
};
template <>
struct IntegerOf<double> {
  using type = std::int64_t;
};
template <class A>
using IntVec = Vec<typename IntegerOf<A>::type>;

// ---- Loads and stores of the accumulator's own type
// -------------------------------------------------------------

template <class A>
TFO_INLINE Vec<A> Load(const A* from) {
  Vec<A> v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

template <class A>
TFO_INLINE void Store(A* to, Vec<A> v) {
  __builtin_memcpy(to, &v, sizeof(v));
}

// Keeps a vector in a register, where the compiler would load it for every use.
template <class V>
TFO_INLINE void KeepLoaded(V& v) {
#if defined(__x86_64__)
  __asm__("" : "+v"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
}

// a > b ? a : b, and a < b ? a : b: b where one of them is no number. An
// instruction, which the compilers do not take for these expressions.
template <class A>
TFO_INLINE Vec<A> Larger(Vec<A> a, Vec<A> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) {
    return (Vec<A>)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
  } else {
    return (Vec<A>)_mm512_maskz_max_pd(0xff, (__m512d)a, (__m512d)b);
  }
#else
  return a > b ? a : b;
#endif
}
template <class A>
TFO_INLINE Vec<A> Smaller(Vec<A> a, Vec<A> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) {
    return (Vec<A>)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
  } else {
    return (Vec<A>)_mm512_maskz_min_pd(0xff, (__m512d)a, (__m512d)b);
  }
#else
  return a < b ? a : b;
#endif
}

template <class A>
TFO_INLINE Vec<A> SquareRoot(Vec<A> v) {
  constexpr bool kFloat = std::is_same_v<A, float>;
#if defined(__AVX512F__)
  if constexpr (kFloat) {
    return (Vec<A>)_mm512_maskz_sqrt_ps(0xffff, (__m512)v);
  } else {
    return (Vec<A>)_mm512_maskz_sqrt_pd(0xff, (__m512d)v);
  }
#elif defined(__AVX2__)
  if constexpr (kFloat) {
    return (Vec<A>)_mm256_sqrt_ps((__m256)v);
  } else {
    return (Vec<A>)_mm256_sqrt_pd((__m256d)v);
  }
#else
  for (int l = 0; l < kLanes<A>; ++l)
    v[l] = kFloat ? __builtin_sqrtf(v[l]) : __builtin_sqrt(v[l]);
  return v;
#endif
}

#if defined(__AVX512F__)
TFO_INLINE Vec<float> LoadPartial(const float* from, int n) {
  return (Vec<float>)_mm512_maskz_loadu_ps(
      static_cast<__mmask16>((1u << n) - 1), from);
}
TFO_INLINE Vec<double> LoadPartial(const double* from, int n) {
  return (Vec<double>)_mm512_maskz_loadu_pd(
      static_cast<__mmask8>((1u << n) - 1), from);
}
TFO_INLINE void StorePartial(float* to, Vec<float> v, int n) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
}
TFO_INLINE void StorePartial(double* to, Vec<double> v, int n) {
  _mm512_mask_storeu_pd(to, static_cast<__mmask8>((1u << n) - 1), (__m512d)v);
}
#else
// The first n elements; the others are zero, and nothing beyond the n-th is
// touched in memory.
template <class A>
TFO_INLINE Vec<A> LoadPartial(const A* from, int n) {
  Vec<A> v{};
  for (int i = 0; i < n; ++i) v[i] = from[i];
  return v;
}
template <class A>
TFO_INLINE void StorePartial(A* to, Vec<A> v, int n) {
  for (int i = 0; i < n; ++i) to[i] = v[i];
}
#endif

// ---- Transposition
// -------------------------------------------------------------------------------------------------

// Exchanges the off-diagonal quarters of every 2n x 2n block.
template <int n, class A>
TFO_INLINE void ExchangeQuarters(Vec<A>* rows) {
  IntVec<A> low, high;
  for (int l = 0; l < kLanes<A>; ++l) {
    low[l] = l & n ? l - n + kLanes<A> : l;
    high[l] = l & n ? l + kLanes<A> : l + n;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<A>; ++i) {
    if (i & n) continue;
    const Vec<A> a = rows[i], b = rows[i + n];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + n] = __builtin_shuffle(a, b, high);
  }
}

// As many rows as a vector has lanes.
template <class A, int n = kLanes<A> / 2>
TFO_INLINE void Transpose(Vec<A>* rows) {
  if constexpr (n > 0) {
    ExchangeQuarters<n, A>(rows);
    Transpose<A, n / 2>(rows);
  }
}

// ---- 16-bit storage
// ---------------------------------------------------------------------------------------------

typedef std::uint16_t Vec16 __attribute__((vector_size(TFO_VECTOR_BYTES / 2)));
typedef std::uint32_t UintVec __attribute__((vector_size(TFO_VECTOR_BYTES)));

template <class To, class From>
TFO_INLINE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

TFO_INLINE Vec16 Load16(const void* from) {
  Vec16 v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

// The first n elements; the others are zero, and nothing beyond the n-th is
// touched in memory.
TFO_INLINE Vec16 Load16Partial(const void* from, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return (Vec16)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1),
                                         from);
#else
  Vec16 v{};
  __builtin_memcpy(&v, from, static_cast<unsigned>(n) * sizeof(v[0]));
  return v;
#endif
}
TFO_INLINE void Store16Partial(void* to, Vec16 v, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << n) - 1),
                           (__m256i)v);
#else
  __builtin_memcpy(to, &v, static_cast<unsigned>(n) * sizeof(v[0]));
#endif
}

// One instruction, of which GCC 12 makes four (measured with AMX in bfloat16:
// filter gradients 0.93, input gradients 0.95 of the time).
TFO_INLINE UintVec ZeroExtended(Vec16 bits) {
#if defined(__AVX512F__)
  return (UintVec)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)bits);
#elif defined(__AVX2__)
  return (UintVec)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, UintVec);
#endif
}

TFO_INLINE Vec<float> Widen(const BFloat16*, Vec16 bits) {
  return BitCast<Vec<float>>(ZeroExtended(bits) << 16);
}

// Rounds to nearest even; a NaN stays a (quiet) NaN.
#if defined(__AVX512BF16__)
// Subnormal numbers become zero.
TFO_INLINE Vec16 Narrow(const BFloat16*, Vec<float> v) {
  return (Vec16)_mm512_cvtneps_pbh((__m512)v);
}
#else
TFO_INLINE Vec16 Narrow(const BFloat16*, Vec<float> v) {
  const UintVec bits = BitCast<UintVec>(v);
  const UintVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UintVec nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(
      (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded, Vec16);
}
#endif

#if defined(__AVX512F__)
TFO_INLINE Vec<float> Widen(const Half*, Vec16 bits) {
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
}
TFO_INLINE Vec16 Narrow(const Half*, Vec<float> v) {
  return (Vec16)_mm512_maskz_cvtps_ph(
      0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
TFO_INLINE Vec<float> Widen(const Half*, Vec16 bits) {
  return (Vec<float>)_mm256_cvtph_ps((__m128i)bits);
}
TFO_INLINE Vec16 Narrow(const Half*, Vec<float> v) {
  return (Vec16)_mm256_cvtps_ph((__m256)v,
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// By exponent arithmetic; subnormals pass through normal floats only, so
// flush-to-zero modes do not matter.
TFO_INLINE Vec<float> Widen(const Half*, Vec16 half) {
  const UintVec bits = __builtin_convertvector(half, UintVec);
  const UintVec sign = (bits & 0x8000u) << 16;
  const UintVec magnitude = bits & 0x7fffu;
  const UintVec shifted = magnitude << 13;
  const UintVec normal = shifted + (112u << 23);
  const UintVec special = shifted | 0x7f800000u;
  const UintVec subnormal =
      BitCast<UintVec>(BitCast<Vec<float>>(shifted + (113u << 23)) -
                       BitCast<Vec<float>>(UintVec{} + (113u << 23)));
  const UintVec finite = magnitude < 0x400u ? subnormal : normal;
  return BitCast<Vec<float>>((magnitude >= 0x7c00u ? special : finite) | sign);
}
TFO_INLINE Vec16 Narrow(const Half*, Vec<float> v) {
  const UintVec bits = BitCast<UintVec>(v);
  const UintVec sign = (bits >> 16) & 0x8000u;
  const UintVec magnitude = bits & 0x7fffffffu;
  const UintVec normal =
      (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Adding 0.5 leaves the subnormal half's bits, rounded to nearest even, at
  // the bottom of the float.
  const UintVec subnormal =
      BitCast<UintVec>(BitCast<Vec<float>>(magnitude) + 0.5f) - (126u << 23);
  const UintVec overflow =
      magnitude > 0x7f800000u ? UintVec{} + 0x7e00u : UintVec{} + 0x7c00u;
  const UintVec finite = magnitude < (113u << 23) ? subnormal : normal;
  return __builtin_convertvector(
      (magnitude >= 0x477ff000u ? overflow : finite) | sign, Vec16);
}
#endif

template <class T>
constexpr bool kIs16Bit = sizeof(T) == 2;

// ---- Loads and stores of any storage type, as vectors of accumulators
// ---------------------------------------------

template <class T>
TFO_INLINE Vec<Accumulator<T>> LoadAs(const T* from) {
  if constexpr (kIs16Bit<T>) {
    return Widen(from, Load16(from));
  } else {
    return Load(from);
  }
}

template <class T>
TFO_INLINE Vec<Accumulator<T>> LoadAsPartial(const T* from, int n) {
  if constexpr (kIs16Bit<T>) {
    return Widen(from, Load16Partial(from, n));
  } else {
    return LoadPartial(from, n);
  }
}

template <class T>
TFO_INLINE void StoreAs(T* to, Vec<Accumulator<T>> v) {
  if constexpr (kIs16Bit<T>) {
    const Vec16 bits = Narrow(to, v);
    __builtin_memcpy(to, &bits, sizeof(bits));
  } else {
    Store(to, v);
  }
}

template <class T>
TFO_INLINE void StoreAsPartial(T* to, Vec<Accumulator<T>> v, int n) {
  if constexpr (kIs16Bit<T>) {
    Store16Partial(to, Narrow(to, v), n);
  } else {
    StorePartial(to, v, n);
  }
}

// The first half of v.
template <class T>
TFO_INLINE void StoreHalfAs(T* to, Vec<Accumulator<T>> v) {
  if constexpr (kIs16Bit<T>) {
    const Vec16 bits = Narrow(to, v);
    __builtin_memcpy(to, &bits, sizeof(bits) / 2);
  } else {
    __builtin_memcpy(to, &v, sizeof(v) / 2);
  }
}

// As it will be loaded again.
template <class T>
TFO_INLINE Vec<Accumulator<T>> AsStored(Vec<Accumulator<T>> v) {
  if constexpr (kIs16Bit<T>) {
    constexpr const T* kType = nullptr;
    return Widen(kType, Narrow(kType, v));
  } else {
    return v;
  }
}

// One element, through the vector path so that its rounding is the same.
template <class T>
TFO_INLINE Accumulator<T> LoadOne(const T* from) {
  if constexpr (kIs16Bit<T>) {
    return LoadAsPartial(from, 1)[0];
  } else {
    return *from;
  }
}

template <class T>
TFO_INLINE void StoreOne(T* to, Accumulator<T> value) {
  if constexpr (kIs16Bit<T>) {
    StoreAsPartial(to, Splat(value), 1);
  } else {
    *to = value;
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SIMD_H_
