// One bit an element: whether the relu lets it through. Bit i % 8 of byte i
// / 8.
#ifndef TFO_CC_CORE_BATCH_NORM_MASK_H_
#define TFO_CC_CORE_BATCH_NORM_MASK_H_

#include <cstdint>

#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

using std::int64_t;

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

// Writes bits one after the other, from a whole byte on.
class MaskWriter {
 public:
  explicit MaskWriter(std::uint8_t* to) : to_(to) {}

  // The n lowest bits, n <= 16.
  TFO_INLINE void Put(std::uint64_t bits, int n) {
    bits &= (std::uint64_t{1} << n) - 1;
    word_ |= bits << filled_;
    filled_ += n;
    if (filled_ < 64) return;
    __builtin_memcpy(to_, &word_, 8);
    to_ += 8;
    filled_ -= 64;
    word_ = bits >> (n - filled_);
  }

  // The bits that fill up the last byte are zero.
  void Finish() {
    for (; filled_ > 0; filled_ -= 8, word_ >>= 8)
      *to_++ = static_cast<std::uint8_t>(word_);
  }

 private:
  std::uint8_t* to_;
  std::uint64_t word_ = 0;
  int filled_ = 0;
};

// Lanes whose bits, from bit `first` of the mask on, are set: n of them.
template <class A>
TFO_INLINE IntVec<A> LoadMask(const std::uint8_t* mask, int64_t first, int n) {
  using Int = typename IntegerOf<A>::type;
  IntVec<A> lane{};
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = Int{1} << i;
  const std::uint8_t* from = mask + first / 8;
  const int skip = static_cast<int>(first % 8), bits = skip + n;
  unsigned word = from[0];
  if (bits > 8) word |= static_cast<unsigned>(from[1]) << 8;
  if (bits > 16) word |= static_cast<unsigned>(from[2]) << 16;
  return ((IntVec<A>{} + static_cast<Int>(word >> skip)) & lane) != 0;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_BATCH_NORM_MASK_H_
