#include "cc/core/amx.h"
#include "cc/core/integers.h"
#include "cc/core/peak.h"
#include "cc/core/streaming.h"

namespace tfo::TFO_ISA {
namespace {

// Enough to hide the latency of two instructions a cycle, and with both factors
// no more than sixteen registers.
constexpr int kChains = 12;

// Keeps the compiler from computing the chains ahead, or not at all.
template <class V>
TFO_INLINE void Opaque(V& v) {
  asm volatile("" : "+m"(v));
}

template <class A>
std::int64_t Chains(std::int64_t rounds) {
  Vec<A> factor = Splat(A(0.5)), sums[kChains];
  Opaque(factor);
  for (Vec<A>& sum : sums) sum = factor;
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (Vec<A>& sum : sums) sum = sum * factor + factor;
  }
  for (Vec<A>& sum : sums) Opaque(sum);
  return 2 * rounds * kChains * kLanes<A>;
}

#if defined(__AMX_BF16__)
std::int64_t BFloat16Chains(std::int64_t rounds) {
  // An instruction takes about as long as a round of the others.
  constexpr int kSums = 4;
  SetAmxShapes(kAmxRows, kAmxRows, kAmxDepth);
  for (std::int64_t i = 0; i < rounds; i += kSums) {
    MultiplyAmx<kUpperLeft, kUpperA, kLeftB>();
    MultiplyAmx<kUpperRight, kUpperA, kRightB>();
    MultiplyAmx<kLowerLeft, kLowerA, kLeftB>();
    MultiplyAmx<kLowerRight, kLowerA, kRightB>();
  }
  ReleaseAmx();
  return 4 * CeilDiv(rounds, kSums) * kSums * kAmxRows * kAmxDepth *
         kAmxColumns;
}
#elif defined(__AVX512BF16__)
std::int64_t BFloat16Chains(std::int64_t rounds) {
  __m512 sums[kChains];
  __m512bh factor = (__m512bh)_mm512_set1_epi16(0x3f00);  // 0.5
  Opaque(factor);
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, factor, factor);
  }
  for (__m512& sum : sums) Opaque(sum);
  return 4 * rounds * kChains * kLanes<float>;
}
#endif

}  // namespace

MultiplyAddFunction MultiplyAdd;
CopyFunction Copy;

std::int64_t MultiplyAdd(DType dtype, std::int64_t rounds) {
  if (dtype == DType::kDouble) return Chains<double>(rounds);
#if defined(__AVX512BF16__)
  if (dtype == DType::kBFloat16) return BFloat16Chains(rounds);
#endif
  return Chains<float>(rounds);
}

void Copy(const void* from, void* to, std::int64_t bytes) {
  constexpr int kBlock = 4;
  const float* source = static_cast<const float*>(from);
  float* target = static_cast<float*>(to);
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(float));
  std::int64_t i = 0;
  for (; i + kBlock * kLanes<float> <= count; i += kBlock * kLanes<float>) {
    Vec<float> block[kBlock];
    for (int j = 0; j < kBlock; ++j)
      block[j] = Load(source + i + j * kLanes<float>);
    for (int j = 0; j < kBlock; ++j) {
      StoreStreaming(target + i + j * kLanes<float>, block[j]);
    }
  }
  for (; i < count; i += kLanes<float>) {
    StoreStreaming(target + i, Load(source + i));
  }
  FlushStores();
}

}  // namespace tfo::TFO_ISA
