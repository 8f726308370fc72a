// Integers of 8 bits as register tiles multiply them: four in 32 bits where one
// instruction adds their products, otherwise two, of 16 bits. Sums are exact.
#ifndef TFO_CC_CORE_INTEGER_OPERAND_H_
#define TFO_CC_CORE_INTEGER_OPERAND_H_

#include "cc/core/pack.h"

namespace tfo::TFO_ISA {
namespace {

// Integers that follow each other along the depth of a product, the first in
// the lowest bits.
struct IntegerGroup {
  std::uint32_t bits;
};

template <>
struct VectorOf<IntegerGroup> : VectorOf<std::int32_t> {};

}  // namespace
}  // namespace tfo::TFO_ISA

namespace tfo {

template <>
struct AccumulatorOf<TFO_ISA::IntegerGroup> : AccumulatorOf<std::int32_t> {};

}  // namespace tfo

namespace tfo::TFO_ISA {
namespace {

#if defined(__AVX512VNNI__)
using GroupElement = std::int8_t;
// The instruction multiplies signed by unsigned numbers: those of the right
// factor are this much larger than they stand for.
constexpr std::uint32_t kGroupOffset = 128;
#else
using GroupElement = std::int16_t;
constexpr std::uint32_t kGroupOffset = 0;
#endif
constexpr int kGroupSize = 4 / sizeof(GroupElement);
constexpr int kGroupBits = 32 / kGroupSize;
constexpr std::uint32_t kGroupMask = 0xffffffffu >> (32 - kGroupBits);
// The offset in every element of a group.
constexpr std::uint32_t kGroupOffsets = kGroupOffset * 0x01010101u;

TFO_INLINE Vec<std::int32_t> Accumulate(Vec<std::int32_t> sum, IntegerGroup a,
                                        Vec<std::int32_t> b) {
  const auto group = static_cast<std::int32_t>(a.bits);
#if defined(__AVX512VNNI__)
  return (Vec<std::int32_t>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b,
                                                _mm512_set1_epi32(group));
#elif defined(__AVX512BW__)
  return sum + (Vec<std::int32_t>)_mm512_madd_epi16((__m512i)b,
                                                    _mm512_set1_epi32(group));
#elif defined(__AVX2__)
  return sum + (Vec<std::int32_t>)_mm256_madd_epi16((__m256i)b,
                                                    _mm256_set1_epi32(group));
#elif defined(__x86_64__)
  return sum +
         (Vec<std::int32_t>)_mm_madd_epi16((__m128i)b, _mm_set1_epi32(group));
#else
  return sum + (b >> 16) * (group >> 16) +
         (b << 16 >> 16) * (group << 16 >> 16);
#endif
}

// Stores numbers of no more than 8 bits as elements of groups.
TFO_INLINE void StoreElements(GroupElement* to, Vec<std::int32_t> v) {
  typedef GroupElement Elements
      __attribute__((vector_size(kLanes<float> * sizeof(GroupElement))));
  const Elements elements = __builtin_convertvector(v, Elements);
  __builtin_memcpy(to, &elements, sizeof(elements));
}

// As many numbers of 8 bits as a vector has lanes.
TFO_INLINE Vec<std::int32_t> LoadIntegers(const std::int8_t* from) {
#if defined(__AVX512F__)
  __m128i v;
  __builtin_memcpy(&v, from, sizeof(v));
  return (Vec<std::int32_t>)_mm512_maskz_cvtepi8_epi32(0xffff, v);
#elif defined(__AVX2__)
  __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Vec<std::int32_t>)_mm256_cvtepi8_epi32(v);
#else
  Vec<std::int32_t> v;
  for (int l = 0; l < kLanes<float>; ++l) v[l] = from[l];
  return v;
#endif
}
// The first n of them; the others are zero.
TFO_INLINE Vec<std::int32_t> LoadSomeIntegers(const std::int8_t* from,
                                              std::int64_t n) {
  if (n >= kLanes<float>) return LoadIntegers(from);
  std::int8_t some[kLanes<float>] = {};
  for (std::int64_t l = 0; l < n; ++l) some[l] = from[l];
  return LoadIntegers(some);
}

// Groups of neighbouring columns: an element of each of the next rows. There
// are `rows` of these and `columns`, or, where kWhole, all that are wanted.
template <bool kWhole>
TFO_INLINE Vec<std::int32_t> LoadGroups(const std::int8_t* from,
                                        std::int64_t pitch, std::int64_t rows,
                                        std::int64_t columns) {
  UintVec groups = UintVec{} + kGroupOffsets;
#pragma GCC unroll 4
  for (int i = 0; i < kGroupSize; ++i) {
    if (!kWhole && i >= rows) break;
    const std::int8_t* const at = from + i * pitch;
    const auto row =
        (UintVec)(kWhole ? LoadIntegers(at) : LoadSomeIntegers(at, columns));
    groups ^= (row & kGroupMask) << (i * kGroupBits);
  }
  return (Vec<std::int32_t>)groups;
}

// As many groups as a vector holds, of rows that lie together, of which there
// are `rows`.
TFO_INLINE Vec<std::int32_t> LoadColumnOfGroups(const std::int8_t* from,
                                                std::int64_t rows) {
  constexpr int lanes = kLanes<float>, count = kGroupSize * lanes;
  UintVec groups;
  if (sizeof(GroupElement) == 1 && rows >= count) {
    __builtin_memcpy(&groups, from, sizeof(groups));
  } else {
    GroupElement elements[count];
    for (int i = 0; i < count; i += lanes)
      StoreElements(elements + i, LoadSomeIntegers(from + i, rows - i));
    __builtin_memcpy(&groups, elements, sizeof(groups));
  }
  return (Vec<std::int32_t>)(groups ^ kGroupOffsets);
}

// `rows` rows of neighbouring panels of the right factor, which lie
// `panel_stride` apart; `columns` are those that there are. In `from`, rows or
// columns lie together, and the others `pitch` apart.
TFO_INLINE void PackIntegers(const std::int8_t* from, std::int64_t pitch,
                             bool transposed, std::int64_t rows,
                             std::int64_t columns, std::int64_t panel_stride,
                             IntegerGroup* to) {
  constexpr int lanes = kLanes<float>;
  constexpr int width = kTileColumns<std::int32_t>;
  const std::int64_t end = CeilDiv(columns, width) * width;
  const auto store = [=](std::int64_t row, std::int64_t column,
                         Vec<std::int32_t> v) TFO_INLINE_LAMBDA {
    __builtin_memcpy(to + column / width * panel_stride +
                         row / kGroupSize * width + column % width,
                     &v, sizeof(v));
  };
  if (!transposed) {
    for (std::int64_t k = 0; k < rows; k += kGroupSize) {
      const std::int8_t* const row = from + k * pitch;
      const std::int64_t whole = k + kGroupSize <= rows ? columns - lanes : -1;
      std::int64_t j = 0;
      for (; j <= whole; j += lanes)
        store(k, j, LoadGroups<true>(row + j, pitch, kGroupSize, lanes));
      for (; j < end; j += lanes)
        store(k, j, LoadGroups<false>(row + j, pitch, rows - k, columns - j));
    }
    return;
  }
  for (std::int64_t j = 0; j < end; j += lanes) {
    for (std::int64_t k = 0; k < rows; k += kGroupSize * lanes) {
      Vec<float> block[lanes];
      for (int i = 0; i < lanes; ++i) {
        block[i] = j + i < columns ? (Vec<float>)LoadColumnOfGroups(
                                         from + k + (j + i) * pitch, rows - k)
                                   : Vec<float>{};
      }
      Transpose<float>(block);
      for (int i = 0; i < lanes && k + i * kGroupSize < rows; ++i)
        store(k + i * kGroupSize, j, (Vec<std::int32_t>)block[i]);
    }
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_INTEGER_OPERAND_H_
