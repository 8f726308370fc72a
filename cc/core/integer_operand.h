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

// The sum of a group's products in every lane, added to `sum`.
TFO_INLINE Vec<std::int32_t> Accumulate(Vec<std::int32_t> sum,
                                        Vec<std::int32_t> a,
                                        Vec<std::int32_t> b) {
#if defined(__AVX512VNNI__)
  return (Vec<std::int32_t>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b,
                                                (__m512i)a);
#elif defined(__AVX512BW__)
  return sum + (Vec<std::int32_t>)_mm512_madd_epi16((__m512i)b, (__m512i)a);
#elif defined(__AVX2__)
  return sum + (Vec<std::int32_t>)_mm256_madd_epi16((__m256i)b, (__m256i)a);
#elif defined(__x86_64__)
  return sum + (Vec<std::int32_t>)_mm_madd_epi16((__m128i)b, (__m128i)a);
#else
  return sum + (b >> 16) * (a >> 16) + (b << 16 >> 16) * (a << 16 >> 16);
#endif
}

TFO_INLINE Vec<std::int32_t> Splat(IntegerGroup group) {
  const auto bits = static_cast<std::int32_t>(group.bits);
#if defined(__AVX512F__)
  return (Vec<std::int32_t>)_mm512_set1_epi32(bits);
#elif defined(__AVX2__)
  return (Vec<std::int32_t>)_mm256_set1_epi32(bits);
#else
  return Vec<std::int32_t>{} + bits;
#endif
}

TFO_INLINE Vec<std::int32_t> Accumulate(Vec<std::int32_t> sum, IntegerGroup a,
                                        Vec<std::int32_t> b) {
  return Accumulate(sum, Splat(a), b);
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

typedef GroupElement ElementVec __attribute__((vector_size(TFO_VECTOR_BYTES)));

// As many numbers of 8 bits as a vector has elements of groups.
TFO_INLINE ElementVec LoadElements(const std::int8_t* from) {
#if defined(__AVX512VNNI__)
  return (ElementVec)_mm512_loadu_si512(from);
#elif defined(__AVX512BW__)
  return (ElementVec)_mm512_cvtepi8_epi16(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (ElementVec)_mm256_cvtepi8_epi16(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  typedef std::int8_t Bytes __attribute__((vector_size(TFO_VECTOR_BYTES / 2)));
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, ElementVec);
#endif
}
// The first n of them; the others are zero.
TFO_INLINE ElementVec LoadSomeElements(const std::int8_t* from,
                                       std::int64_t n) {
  constexpr int kCount = TFO_VECTOR_BYTES / sizeof(GroupElement);
  if (n >= kCount) return LoadElements(from);
  std::int8_t some[kCount] = {};
  for (std::int64_t i = 0; i < n; ++i) some[i] = from[i];
  return LoadElements(some);
}

// Groups of one element of each row: of every 128 bits, those of the first few
// elements in the first vector.
TFO_INLINE void InterleaveElements(const ElementVec (&rows)[kGroupSize],
                                   Vec<std::int32_t> (&groups)[kGroupSize]) {
#if defined(__AVX512VNNI__)
  const auto low = [](auto a, auto b) TFO_INLINE_LAMBDA {
    return _mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
  };
  const auto high = [](auto a, auto b) TFO_INLINE_LAMBDA {
    return _mm512_unpackhi_epi8((__m512i)a, (__m512i)b);
  };
  const __m512i first[2] = {low(rows[0], rows[1]), high(rows[0], rows[1])};
  const __m512i last[2] = {low(rows[2], rows[3]), high(rows[2], rows[3])};
  for (int i = 0; i < 2; ++i) {
    groups[2 * i] = (Vec<std::int32_t>)_mm512_unpacklo_epi16(first[i], last[i]);
    groups[2 * i + 1] =
        (Vec<std::int32_t>)_mm512_unpackhi_epi16(first[i], last[i]);
  }
#elif defined(__AVX512BW__)
  const auto a = (__m512i)rows[0], b = (__m512i)rows[1];
  groups[0] = (Vec<std::int32_t>)_mm512_unpacklo_epi16(a, b);
  groups[1] = (Vec<std::int32_t>)_mm512_unpackhi_epi16(a, b);
#elif defined(__AVX2__)
  const auto a = (__m256i)rows[0], b = (__m256i)rows[1];
  groups[0] = (Vec<std::int32_t>)_mm256_unpacklo_epi16(a, b);
  groups[1] = (Vec<std::int32_t>)_mm256_unpackhi_epi16(a, b);
#else
  const ElementVec low = {0, 8, 1, 9, 2, 10, 3, 11};
  groups[0] = (Vec<std::int32_t>)__builtin_shuffle(rows[0], rows[1], low);
  groups[1] = (Vec<std::int32_t>)__builtin_shuffle(rows[0], rows[1], low + 4);
#endif
}

// As many groups as a vector holds, of rows that lie together, of which there
// are `rows`.
TFO_INLINE Vec<std::int32_t> LoadColumnOfGroups(const std::int8_t* from,
                                                std::int64_t rows) {
  return (Vec<std::int32_t>)LoadSomeElements(from, rows) ^
         static_cast<std::int32_t>(kGroupOffsets);
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
