// From integers of 8 or 4 bits to the numbers that they stand for.
#ifndef TFO_CC_CORE_DEQUANTIZE_H_
#define TFO_CC_CORE_DEQUANTIZE_H_

#include "cc/core/integers.h"
#include "cc/core/weight_only_matmul.h"

namespace tfo::TFO_ISA {
namespace {

// Where the integers of a row lie in its bytes.
enum class Bits : std::uint8_t { kBytes, kLower, kUpper, kPairs };

typedef std::uint8_t ByteVec
    __attribute__((vector_size(TFO_VECTOR_BYTES / sizeof(float))));

// As many bytes as a vector has lanes, or the first n.
TFO_INLINE UintVec LoadBytes(const std::uint8_t* from, std::int64_t n) {
  ByteVec bytes{};
  constexpr std::int64_t kCount = kLanes<float>;
  if (n >= kCount) {
    __builtin_memcpy(&bytes, from, sizeof(bytes));
  } else {
    __builtin_memcpy(&bytes, from, static_cast<std::size_t>(n));
  }
#if defined(__AVX512F__)
  return (UintVec)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)bytes);
#else
  return __builtin_convertvector(bytes, UintVec);
#endif
}

// What a vector of half bytes is made with. The compiler computes a constant
// only where it is told to.
struct HalfBytes {
  static constexpr int kOfWord = 8;
  static constexpr int kLanes = TFO_VECTOR_BYTES / sizeof(float);

  alignas(TFO_VECTOR_BYTES) std::uint32_t word[kLanes]{}, shift[kLanes]{};
  alignas(TFO_VECTOR_BYTES) float number[kLanes]{}, signed_number[kLanes]{};

  constexpr HalfBytes() {
    for (int l = 0; l < kLanes; ++l) {
      word[l] = static_cast<std::uint32_t>(l / kOfWord);
      shift[l] = static_cast<std::uint32_t>(l % kOfWord * 4);
      number[l] = static_cast<float>(l);
      signed_number[l] = static_cast<float>(l < 8 ? l : l - 16);
    }
  }
};
constexpr HalfBytes kHalfBytes;

// As many half bytes as a vector has lanes, or the first n; what lies above
// them is not cleared.
TFO_INLINE UintVec LoadHalfBytes(const std::uint8_t* from, std::int64_t n) {
  typedef std::uint64_t Words __attribute__((vector_size(TFO_VECTOR_BYTES)));
  constexpr std::int64_t kBytes = kLanes<float> / 2;
  std::uint64_t bytes = 0;
  if (n >= kLanes<float>) {
    __builtin_memcpy(&bytes, from, kBytes);
  } else {
    __builtin_memcpy(&bytes, from, static_cast<std::size_t>(CeilDiv(n, 2)));
  }
  UintVec word, shift;
  __builtin_memcpy(&word, kHalfBytes.word, sizeof(word));
  __builtin_memcpy(&shift, kHalfBytes.shift, sizeof(shift));
  return __builtin_shuffle(BitCast<UintVec>(Words{} + bytes), word) >> shift;
}

// The integers of a vector's lanes as numbers.
template <Bits kBits, bool kSigned>
TFO_INLINE Vec<float> LoadIntegers(const std::uint8_t* row, std::int64_t j,
                                   std::int64_t n) {
  constexpr std::uint32_t kSign = kBits == Bits::kBytes ? 0x80 : 8;
  UintVec bits;
  if constexpr (kBits == Bits::kPairs) {
    bits = LoadHalfBytes(row + j / 2, n);
  } else {
    bits = LoadBytes(row + j, n);
    if constexpr (kBits == Bits::kUpper) bits >>= 4;
  }
#if defined(__AVX512F__)
  // A table of all there are, of which the lowest bits choose.
  if constexpr (kBits != Bits::kBytes) {
    const auto* const table =
        kSigned ? kHalfBytes.signed_number : kHalfBytes.number;
    return (Vec<float>)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)bits,
                                                   (__m512)Load(table));
  }
#endif
  if constexpr (kBits != Bits::kBytes) bits &= 15;
  if constexpr (kSigned) bits = (bits ^ kSign) - kSign;
  return __builtin_convertvector(BitCast<IntVec<float>>(bits), Vec<float>);
}

// Rows of bytes to look ahead over pages, and how much of each.
constexpr std::int64_t kWeightsAhead = 64, kFewBytes = 512;

// Neighbours in the depth that belong to one group, a few hundred at most, so
// that sums of them are exact enough.
constexpr std::int64_t kMostOfRun = 256;

struct WeightRun {
  std::int64_t begin, end, group;
};

struct WeightRuns {
  WeightRun* data = nullptr;
  std::int64_t count = 0;

  // False when scratch memory ran out.
  bool Find(const QuantizedWeights& w, const Scratch& scratch) {
    const auto begins = [&](std::int64_t k) {
      return k == 0 || w.group[k] != w.group[k - 1] ||
             (count > 0 && k - data[count - 1].begin == kMostOfRun);
    };
    std::int64_t most = w.depth / kMostOfRun + 1;
    for (std::int64_t k = 1; k < w.depth; ++k)
      most += w.group[k] != w.group[k - 1];
    data = scratch.Allocate<WeightRun>(most);
    if (data == nullptr) return false;
    for (std::int64_t k = 0; k < w.depth; ++k) {
      if (begins(k)) data[count++] = {k, k, w.group[k]};
      data[count - 1].end = k + 1;
    }
    return true;
  }

  // Whether all but the last are whole vectors.
  bool AreWholeVectors() const {
    for (std::int64_t r = 1; r < count; ++r)
      if (data[r].begin % kLanes<float> != 0) return false;
    return true;
  }
};

// Scales and zeros of numbers that lie together: of each its own, or the same.
struct EachScale {
  const float *scale, *zero;  // zero may be null

  TFO_INLINE Vec<float> Apply(Vec<float> q, std::int64_t j,
                              std::int64_t n) const {
    const auto load = [&](const float* p) TFO_INLINE_LAMBDA {
      return n >= kLanes<float> ? Load(p + j)
                                : LoadPartial(p + j, static_cast<int>(n));
    };
    if (zero != nullptr) q -= load(zero);
    return q * load(scale);
  }
};
struct SameScale {
  float scale, zero;

  TFO_INLINE Vec<float> Apply(Vec<float> q, std::int64_t, std::int64_t) const {
    return (q - zero) * scale;
  }
};

// Numbers [begin, end) of a row.
template <class T, Bits kBits, bool kSigned, class Scale>
void DequantizeRow(const std::uint8_t* row, const Scale& scale,
                   std::int64_t begin, std::int64_t end, T* to) {
  constexpr std::int64_t lanes = kLanes<float>;
  std::int64_t j = begin;
  for (; j + lanes <= end; j += lanes) {
    const Vec<float> q = LoadIntegers<kBits, kSigned>(row, j, lanes);
    StoreAs(to + j, scale.Apply(q, j, lanes));
  }
  if (j == end) return;
  const Vec<float> q = LoadIntegers<kBits, kSigned>(row, j, end - j);
  StoreAsPartial(to + j, scale.Apply(q, j, end - j), static_cast<int>(end - j));
}

// Some columns of quantized weights, as numbers.
template <class T>
class ColumnsOfWeights {
 public:
  ColumnsOfWeights(const QuantizedWeights& w, const WeightRuns& runs,
                   std::int64_t first, std::int64_t count)
      : w_(w),
        runs_(runs),
        whole_(runs.AreWholeVectors()),
        first_(first),
        count_(count) {}

  // Rows of memory.
  std::int64_t rows() const { return w_.transposed ? count_ : w_.depth; }
  // Numbers of scratch memory for Row.
  std::int64_t own_size() const {
    return w_.transposed && !whole_ ? 2 * w_.depth : 0;
  }

  // Writes row i of [depth, count], or of [count, depth].
  void Row(std::int64_t i, float* own, T* to) const {
    const std::int64_t row = w_.transposed ? first_ + i : i;
    const std::int64_t column = w_.transposed ? 0 : first_;
    const bool along = w_.packing == Packing::kAlongRows;
    const std::int64_t size = w_.transposed ? w_.depth : w_.columns;
    const std::int64_t pitch = along ? CeilDiv(size, 2) : size;
    const std::int64_t at = w_.packing == Packing::kAcrossRows ? row / 2 : row;
    const std::uint8_t* const from =
        w_.numbers + at * pitch + (along ? column / 2 : column);
    // Rows of few columns lie pages apart.
    const std::int64_t bytes = along ? count_ / 2 : count_;
    for (std::int64_t j = 0; !w_.transposed && j < Min(bytes, kFewBytes);
         j += 64)
      __builtin_prefetch(from + kWeightsAhead * pitch + j);
    const auto numbers = [&](auto bits) TFO_INLINE_LAMBDA {
      constexpr Bits kBits = decltype(bits)::value;
      w_.is_signed ? RowOf<kBits, true>(from, i, own, to)
                   : RowOf<kBits, false>(from, i, own, to);
    };
    if (along) return numbers(std::integral_constant<Bits, Bits::kPairs>{});
    if (w_.packing == Packing::kNone)
      return numbers(std::integral_constant<Bits, Bits::kBytes>{});
    if (row % 2 == 0)
      return numbers(std::integral_constant<Bits, Bits::kLower>{});
    numbers(std::integral_constant<Bits, Bits::kUpper>{});
  }

 private:
  template <Bits kBits, bool kSigned>
  void RowOf(const std::uint8_t* from, std::int64_t i, float* own,
             T* to) const {
    if (!w_.transposed) {
      const std::int64_t at = w_.group[i] * w_.columns + first_;
      const EachScale scale{w_.scale + at,
                            w_.zero == nullptr ? nullptr : w_.zero + at};
      return DequantizeRow<T, kBits, kSigned>(from, scale, 0, count_, to);
    }
    const std::int64_t at = (first_ + i) * w_.groups;
    const auto of_group = [&](std::int64_t group) {
      return SameScale{w_.scale[at + group],
                       w_.zero == nullptr ? 0 : w_.zero[at + group]};
    };
    if (whole_) {
      for (std::int64_t r = 0; r < runs_.count; ++r) {
        const WeightRun& run = runs_.data[r];
        DequantizeRow<T, kBits, kSigned>(from, of_group(run.group), run.begin,
                                         run.end, to);
      }
      return;
    }
    for (std::int64_t k = 0; k < w_.depth; ++k) {
      const SameScale scale = of_group(w_.group[k]);
      own[k] = scale.scale;
      own[w_.depth + k] = scale.zero;
    }
    DequantizeRow<T, kBits, kSigned>(from, EachScale{own, own + w_.depth}, 0,
                                     w_.depth, to);
  }

  const QuantizedWeights& w_;
  const WeightRuns& runs_;
  const bool whole_;
  const std::int64_t first_, count_;
};

// Writes `count` columns from `first` on, [depth, count] or [count, depth].
// False when scratch memory ran out.
template <class T>
bool DequantizeColumns(const QuantizedWeights& w, const WeightRuns& runs,
                       std::int64_t first, std::int64_t count, T* to,
                       const Parallel& parallel, const Scratch& scratch) {
  constexpr std::int64_t kRowsTogether = 16;
  const ColumnsOfWeights<T> columns(w, runs, first, count);
  float* const own =
      scratch.Allocate<float>(columns.own_size() * parallel.num_workers);
  if (own == nullptr) return false;
  const std::int64_t n = w.transposed ? w.depth : count;
  auto dequantize = [&](std::int64_t task, int worker) {
    const std::int64_t end = Min((task + 1) * kRowsTogether, columns.rows());
    for (std::int64_t i = task * kRowsTogether; i < end; ++i)
      columns.Row(i, own + worker * columns.own_size(), to + i * n);
  };
  ParallelFor(parallel, CeilDiv(columns.rows(), kRowsTogether),
              kRowsTogether * n / 4, dequantize);
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_DEQUANTIZE_H_
