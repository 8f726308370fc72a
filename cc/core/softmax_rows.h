// What computes softmax row by row: tasks, sums over lanes, elements that a
// mask keeps.
#ifndef TFO_CC_CORE_SOFTMAX_ROWS_H_
#define TFO_CC_CORE_SOFTMAX_ROWS_H_

#include <type_traits>

#include "cc/core/elementwise.h"
#include "cc/core/softmax.h"
#include "cc/core/vector_math.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kSumBlock = 256;

template <class A>
TFO_INLINE Vec<A> MinusInfinity() {
  return Splat(-static_cast<A>(__builtin_inf()));
}

// combine over all lanes, in every lane.
template <class A, int kHalf = kLanes<A> / 2, class Combine>
TFO_INLINE Vec<A> OverLanes(Vec<A> v, const Combine& combine) {
  IntVec<A> other;
#pragma GCC unroll 16
  for (int l = 0; l < kLanes<A>; ++l) other[l] = l ^ kHalf;
  v = combine(v, __builtin_shuffle(v, other));
  if constexpr (kHalf > 1) {
    return OverLanes<A, kHalf / 2>(v, combine);
  } else {
    return v;
  }
}

template <class A>
TFO_INLINE Vec<A> SumOverLanes(Vec<A> v) {
  return OverLanes<A>(
      v, [](Vec<A> a, Vec<A> b) TFO_INLINE_LAMBDA { return a + b; });
}

// Several sums that are taken together.
template <class A, int kCount>
struct Sums {
  Vec<A> of[kCount];

  TFO_INLINE void operator+=(const Sums& other) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) of[i] += other.of[i];
  }
};

template <class A, int kCount>
TFO_INLINE Sums<A, kCount> SumOverLanes(Sums<A, kCount> v) {
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) v.of[i] = SumOverLanes<A>(v.of[i]);
  return v;
}

template <class A>
TFO_INLINE Vec<A> LargestOverLanes(Vec<A> v) {
  return OverLanes<A>(
      v, [](Vec<A> a, Vec<A> b) TFO_INLINE_LAMBDA { return Larger<A>(a, b); });
}

// The sum of term(column, Partial<P>, n), a vector or Sums, over `width`
// columns, in every lane: block by block, for the digits of long rows.
template <class A, class Term>
TFO_INLINE auto SumOver(int64_t width, const Term& term) {
  using Sum = decltype(term(width, Partial<false>{}, 0));
  Sum total{};
  for (int64_t begin = 0; begin < width; begin += kSumBlock) {
    Sum sum{};
    ForColumns<A>(Min(width - begin, kSumBlock),
                  [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
                    sum += term(begin + j, partial, n);
                  });
    total += sum;
  }
  return SumOverLanes<A>(total);
}

// n bytes, each in a lane of its own; GCC 12 would move them one by one.
template <class A>
TFO_INLINE IntVec<A> LoadBytes(const std::uint8_t* from, int n) {
#if defined(__AVX2__)
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m128i bytes =
      _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << n) - 1), from);
#else
  __m128i bytes{};
  __builtin_memcpy(&bytes, from, static_cast<unsigned>(n));
#endif
  constexpr bool kFloat = std::is_same_v<A, float>;
#if defined(__AVX512F__)
  if constexpr (kFloat)
    return (IntVec<A>)_mm512_maskz_cvtepu8_epi32(0xffff, bytes);
  else
    return (IntVec<A>)_mm512_maskz_cvtepu8_epi64(0xff, bytes);
#else
  if constexpr (kFloat)
    return (IntVec<A>)_mm256_cvtepu8_epi32(bytes);
  else
    return (IntVec<A>)_mm256_cvtepu8_epi64(bytes);
#endif
#else
  IntVec<A> lanes{};
  for (int l = 0; l < n; ++l) lanes[l] = from[l];
  return lanes;
#endif
}

// v where the mask keeps it, `otherwise` elsewhere.
template <class A>
TFO_INLINE Vec<A> Kept(const std::uint8_t* keep, int n, Vec<A> v,
                       Vec<A> otherwise) {
  return LoadBytes<A>(keep, n) != IntVec<A>{} ? v : otherwise;
}

// e^v of v <= 0, zero where that is too small for a normal number.
template <class T>
TFO_INLINE Vec<Accumulator<T>> ExpOfNegative(Vec<Accumulator<T>> v) {
  return v < MathConstants<T>::kExpMin ? Vec<Accumulator<T>>{}
                                       : VectorMath<T>::Exp(v);
}

constexpr int64_t kCyclesPerVector = 24;

// Calls body(row, worker) for all rows.
template <class T, class Body>
void ForRows(const SoftmaxShape& s, bool stream, const Parallel& parallel,
             const Body& body) {
  const int64_t rows = Max(kTaskElements / Max(s.depth, 1), 1);
  auto run = [&](int64_t task, int worker) {
    const int64_t end = Min((task + 1) * rows, s.rows);
    for (int64_t row = task * rows; row < end; ++row) body(row, worker);
    if (stream) FlushStores();
  };
  ParallelFor(
      parallel, CeilDiv(s.rows, rows),
      rows * CeilDiv(s.depth, kLanes<Accumulator<T>>) * kCyclesPerVector, run);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SOFTMAX_ROWS_H_
