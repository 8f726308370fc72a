// What register tiles multiply: numbers of the accumulator's type, or pairs of
// bfloat16 where one instruction adds the products of both.
#ifndef TFO_CC_CORE_OPERAND_H_
#define TFO_CC_CORE_OPERAND_H_

#include <type_traits>

#include "cc/core/integers.h"
#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

// Two elements that follow each other along the depth of a product; the first
// in the low half.
struct BFloat16Pair {
  typedef std::uint32_t Bits __attribute__((may_alias, aligned(2)));
  Bits bits;
};

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
template <class T>
using Operand = typename OperandOf<T>::type;

// The elements of an operand, and their type.
template <class E>
constexpr int kElements = 1;
template <>
constexpr int kElements<BFloat16Pair> = 2;
template <class E>
using ElementOf =
    std::conditional_t<std::is_same_v<E, BFloat16Pair>, BFloat16, E>;

// Whether tensors of T hold operands as they are.
template <class T>
constexpr bool kHoldsOperands = std::is_same_v<ElementOf<Operand<T>>, T>;

// The operands that `depth` elements make; the last may be half empty.
template <class T>
TFO_INLINE std::int64_t NumOperands(std::int64_t depth) {
  return CeilDiv(depth, kElements<Operand<T>>);
}

// Operands of 32 bits travel as floats, which no move changes.
TFO_INLINE Vec<float> Load(const BFloat16Pair* from) {
  Vec<float> v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}
TFO_INLINE void Store(BFloat16Pair* to, Vec<float> v) {
  __builtin_memcpy(to, &v, sizeof(v));
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

// Pairs of bfloat16 that were loaded as floats, and so are exact.
TFO_INLINE Vec<float> Pair(Vec<float> first, Vec<float> second) {
  return BitCast<Vec<float>>((BitCast<UintVec>(first) >> 16) |
                             (BitCast<UintVec>(second) & 0xffff0000u));
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_OPERAND_H_
