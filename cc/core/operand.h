// What register tiles multiply: numbers of the accumulator's type, or pairs of
// bfloat16 where one instruction adds the products of both. Numbers of more
// digits are sums of two or three bfloat16.
#ifndef TFO_CC_CORE_OPERAND_H_
#define TFO_CC_CORE_OPERAND_H_

#include <type_traits>

#include "cc/core/integers.h"
#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

#if defined(__AMX_BF16__)
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif

// Two elements that follow each other along the depth of a product; the first
// in the low half.
struct BFloat16Pair {
  typedef std::uint32_t Bits __attribute__((may_alias, aligned(2)));
  Bits bits;
};

// One of the pairs of bfloat16 whose sum is a pair of T: of their first digits,
// of the next ones, of the last ones. They lie in as many planes.
template <class T>
struct SplitPair : BFloat16Pair {};

// Operands of 32 bits travel as floats, which no move changes.
template <>
struct VectorOf<BFloat16Pair> : VectorOf<float> {};
template <class T>
struct VectorOf<SplitPair<T>> : VectorOf<float> {};

template <class T>
struct OperandOf {
  using type = Accumulator<T>;
};
#if defined(__AVX512BF16__)
template <>
struct OperandOf<BFloat16> {
  using type = BFloat16Pair;
};
#endif
#if defined(__AMX_BF16__)
// AMX multiplies bfloat16 at 15 times the rate of multiply-adds.
template <>
struct OperandOf<float> {
  using type = SplitPair<float>;
};
template <>
struct OperandOf<Half> {
  using type = SplitPair<Half>;
};
#endif
template <class T>
using Operand = typename OperandOf<T>::type;

// What operands are made of: the elements of one, the planes that they lie in,
// and the type of what is gathered as them.
template <class E>
struct OperandTraits {
  static constexpr int kElements = 1, kPlanes = 1;
  using Element = E;
};
template <>
struct OperandTraits<BFloat16Pair> {
  static constexpr int kElements = 2, kPlanes = 1;
  using Element = BFloat16;
};
template <>
struct OperandTraits<SplitPair<float>> {
  static constexpr int kElements = 2, kPlanes = 3;
  using Element = float;
};
template <>
struct OperandTraits<SplitPair<Half>> {
  static constexpr int kElements = 2, kPlanes = 2;
  using Element = Half;
};
template <class E>
constexpr int kElements = OperandTraits<E>::kElements;
template <class E>
constexpr int kPlanes = OperandTraits<E>::kPlanes;
template <class E>
using ElementOf = typename OperandTraits<E>::Element;
template <class E>
constexpr std::int64_t kOperandBytes = kPlanes<E> * sizeof(E);

// Whether tiles of T's operands can be written as T.
template <class T>
constexpr bool kTilesHold = std::is_same_v<ElementOf<Operand<T>>, T>;
// Whether tensors of T hold operands as they are.
template <class T>
constexpr bool kHoldsOperands = kTilesHold<T> && kPlanes<Operand<T>> == 1;

// The operands that `depth` elements make; the last may be half empty.
template <class E>
TFO_INLINE std::int64_t NumOperands(std::int64_t depth) {
  return CeilDiv(depth, kElements<E>);
}

// The sum and the products of `a` with each operand of `b`.
template <class A>
TFO_INLINE Vec<A> Accumulate(Vec<A> sum, A a, Vec<A> b) {
  return sum + a * b;
}
#if defined(__AVX512BF16__)
TFO_INLINE Vec<float> Accumulate(Vec<float> sum, BFloat16Pair a, Vec<float> b) {
  const __m512i both = _mm512_set1_epi32(static_cast<int>(a.bits));
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)both, (__m512bh)b);
}
#endif

// The same of the lower halves of vectors; the upper one becomes zero.
#if defined(__AVX512F__)
TFO_INLINE __m256 LowerHalf(Vec<float> v) {
  return (__m256)_mm512_maskz_extractf64x4_pd(0xf, (__m512d)v, 0);
}
TFO_INLINE Vec<float> Widened(__m256 half) {
  return (Vec<float>)_mm512_maskz_insertf64x4(0xff, __m512d{}, (__m256d)half,
                                              0);
}
TFO_INLINE Vec<float> AccumulateLow(Vec<float> sum, float a, Vec<float> b) {
  return Widened(
      _mm256_fmadd_ps(_mm256_set1_ps(a), LowerHalf(b), LowerHalf(sum)));
}
#endif
#if defined(__AVX512BF16__)
TFO_INLINE Vec<float> AccumulateLow(Vec<float> sum, BFloat16Pair a,
                                    Vec<float> b) {
  // That of whole vectors is at hand.
  const Vec<float> both =
      (Vec<float>)_mm512_set1_epi32(static_cast<int>(a.bits));
  return Widened(_mm256_dpbf16_ps(LowerHalf(sum), (__m256bh)LowerHalf(both),
                                  (__m256bh)LowerHalf(b)));
}
#endif

// ---- Planes
// -------------------------------------------------------------------------------------------------------

// Memory in kCount planes.
template <class P, int kCount>
struct InPlanes {
  P* first;
  std::int64_t plane;  // from one to the next

  TFO_INLINE InPlanes operator+(std::int64_t i) const {
    return {first + i, plane};
  }
  TFO_INLINE P* operator[](int i) const { return first + i * plane; }
};
template <class E>
using OperandsIn = InPlanes<E, kPlanes<E>>;

// A vector of operands in all their planes.
template <class E>
struct OperandVec {
  Vec<Accumulator<E>> plane[kPlanes<E>];
};

template <class E>
TFO_INLINE void StoreAs(OperandsIn<E> to, const OperandVec<E>& v) {
#pragma GCC unroll 4
  for (int i = 0; i < kPlanes<E>; ++i) Store(to[i], v.plane[i]);
}
template <class E>
TFO_INLINE void StoreAsPartial(OperandsIn<E> to, const OperandVec<E>& v,
                               int n) {
#pragma GCC unroll 4
  for (int i = 0; i < kPlanes<E>; ++i)
    __builtin_memcpy(to[i], &v.plane[i], static_cast<unsigned>(n) * sizeof(E));
}

// As many rows as a vector has lanes.
template <class A, class E>
TFO_INLINE void Transpose(OperandVec<E>* rows) {
#pragma GCC unroll 4
  for (int p = 0; p < kPlanes<E>; ++p) {
    Vec<A> plane[kLanes<A>];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<A>; ++i) plane[i] = rows[i].plane[p];
    Transpose<A>(plane);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<A>; ++i) rows[i].plane[p] = plane[i];
  }
}

// Where the elements of operands in one plane are written, or the parts of
// those in several.
template <class E, bool kSplit = (kPlanes<E> > 1)>
struct ElementsOf {
  using type = ElementOf<E>*;
};
template <class E>
struct ElementsOf<E, true> {
  using type = InPlanes<BFloat16, kPlanes<E>>;
};
template <class E>
TFO_INLINE typename ElementsOf<E>::type Elements(OperandsIn<E> operands) {
  if constexpr (kPlanes<E> == 1) {
    return reinterpret_cast<ElementOf<E>*>(operands.first);
  } else {
    return {reinterpret_cast<BFloat16*>(operands.first),
            operands.plane * kElements<E>};
  }
}

// ---- Pairs of bfloat16
// --------------------------------------------------------------------------------------------

// Of numbers that are bfloat16.
TFO_INLINE Vec<float> Pair(Vec<float> first, Vec<float> second) {
  return BitCast<Vec<float>>((BitCast<UintVec>(first) >> 16) |
                             (BitCast<UintVec>(second) & 0xffff0000u));
}

// Numbers whose sum is v: kCount - 1 bfloat16, and what they leave, which is
// one too where v has no more than 8 * kCount digits. The first is cut off, so
// that it is finite where v is; the second is rounded, so that what products of
// the last ones would add, which is left out, has no bias.
//
// They are none where v is infinite.
template <int kCount>
struct Parts {
  Vec<float> part[kCount];

  TFO_INLINE explicit Parts(Vec<float> v) {
#pragma GCC unroll 4
    for (int i = 0; i + 1 < kCount; ++i) {
      const UintVec half = UintVec{} + (i > 0 ? 0x8000u : 0u);
      part[i] = BitCast<Vec<float>>((BitCast<UintVec>(v) + half) & 0xffff0000u);
      v -= part[i];
    }
    part[kCount - 1] = v;
  }
};

template <int kCount>
TFO_INLINE void StoreAs(InPlanes<BFloat16, kCount> to, Vec<float> v) {
  const Parts<kCount> parts(v);
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) StoreAs(to[i], parts.part[i]);
}
template <int kCount>
TFO_INLINE void StoreAsPartial(InPlanes<BFloat16, kCount> to, Vec<float> v,
                               int n) {
  const Parts<kCount> parts(v);
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) StoreAsPartial(to[i], parts.part[i], n);
}

// The upper halves of two vectors' numbers, one behind the other: an
// instruction, where narrowing either takes two. The compiler computes a
// constant only where it is told to.
struct OddHalves {
  alignas(TFO_VECTOR_BYTES) std::uint16_t at[TFO_VECTOR_BYTES / 2]{};

  constexpr OddHalves() {
    for (int i = 0; i < TFO_VECTOR_BYTES / 2; ++i)
      at[i] = static_cast<std::uint16_t>(2 * i + 1);
  }
};
constexpr OddHalves kOddHalves;

TFO_INLINE Vec<float> UpperHalves(Vec<float> first, Vec<float> second) {
  typedef std::uint16_t Halves __attribute__((vector_size(TFO_VECTOR_BYTES)));
  Halves odd;
  __builtin_memcpy(&odd, kOddHalves.at, sizeof(odd));
  return BitCast<Vec<float>>(
      __builtin_shuffle(BitCast<Halves>(first), BitCast<Halves>(second), odd));
}

// Two vectors that follow each other.
TFO_INLINE void StoreAs(BFloat16* to, Vec<float> first, Vec<float> second) {
#if defined(__AVX512BF16__)
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  __builtin_memcpy(to, &both, sizeof(both));
#else
  StoreAs(to, first);
  StoreAs(to + kLanes<float>, second);
#endif
}
// What the last part has too much is cut off.
template <int kCount>
TFO_INLINE void StoreAs(InPlanes<BFloat16, kCount> to, Vec<float> first,
                        Vec<float> second) {
  const Parts<kCount> low(first), high(second);
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    const Vec<float> halves = UpperHalves(low.part[i], high.part[i]);
    __builtin_memcpy(to[i], &halves, sizeof(halves));
  }
}

// Operands of numbers of the type that they are made of.
template <class E>
TFO_INLINE OperandVec<E> MakePairs(Vec<float> first, Vec<float> second) {
  OperandVec<E> pairs;
  if constexpr (kPlanes<E> == 1) {
    pairs.plane[0] = Pair(first, second);
  } else {
    const Parts<kPlanes<E>> low(first), high(second);
#pragma GCC unroll 4
    for (int i = 0; i < kPlanes<E>; ++i)
      pairs.plane[i] = Pair(low.part[i], high.part[i]);
  }
  return pairs;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_OPERAND_H_
