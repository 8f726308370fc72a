// One bit an element: whether the relu lets it through. Bit i % 8 of byte i
// / 8.
#ifndef TFO_CC_CORE_BATCH_NORM_MASK_H_
#define TFO_CC_CORE_BATCH_NORM_MASK_H_

#include <cstdint>

#include "cc/core/batch_norm_rows.h"

namespace tfo::TFO_ISA {
namespace {

template <class V>
TFO_INLINE std::uint64_t PositiveBits(V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(v[0]) == 4) {
    return _mm512_cmp_ps_mask((__m512)v, __m512{}, _CMP_GT_OQ);
  } else {
    return _mm512_cmp_pd_mask((__m512d)v, __m512d{}, _CMP_GT_OQ);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(v[0]) == 4) {
    return static_cast<unsigned>(_mm256_movemask_ps((__m256)(v > V{})));
  } else {
    return static_cast<unsigned>(_mm256_movemask_pd((__m256d)(v > V{})));
  }
#else
  std::uint64_t bits = 0;
  for (unsigned i = 0; i < sizeof(v) / sizeof(v[0]); ++i)
    bits |= std::uint64_t{v[i] > 0} << i;
  return bits;
#endif
}

// mask = (y > 0), beginning with a whole byte; the bits that fill up the last
// byte are zero.
template <class T>
void PackMask(const T* y, int64_t n, std::uint8_t* mask) {
  using A = Accumulator<T>;
  std::uint64_t word = 0;
  int filled = 0;
  ForColumns<A>(n, [&](int64_t j, auto partial, int count) {
    word |= PositiveBits(LoadColumns<decltype(partial)::value>(y + j, count))
            << filled;
    filled += count;
    if (filled == 64) {
      __builtin_memcpy(mask, &word, 8);
      mask += 8;
      word = 0;
      filled = 0;
    }
  });
  for (; filled > 0; filled -= 8, word >>= 8)
    *mask++ = static_cast<std::uint8_t>(word);
}

// to[i] = bit first + i of the mask, as 0 or 1.
template <class A>
void UnpackMask(const std::uint8_t* mask, int64_t first, int64_t n, A* to) {
  IntVec<A> lane{};
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = i;
  ForColumns<A>(n, [&](int64_t j, auto partial, int count) {
    const int64_t bit = first + j;
    const std::uint8_t* from = mask + bit / 8;
    const int skip = static_cast<int>(bit % 8), bytes = (skip + count + 7) / 8;
    unsigned word = from[0];
    if (bytes > 1) word |= static_cast<unsigned>(from[1]) << 8;
    if (bytes > 2) word |= static_cast<unsigned>(from[2]) << 16;
    const IntVec<A> bits =
        ((IntVec<A>{} +
          static_cast<typename IntegerOf<A>::type>(word >> skip)) >>
         lane) &
        1;
    StoreColumns<decltype(partial)::value>(
        to + j, __builtin_convertvector(bits, Vec<A>), count);
  });
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_BATCH_NORM_MASK_H_
