// Random words by Philox4x32-10, the generator of TensorFlow's random ops.
#ifndef TFO_CC_CORE_PHILOX_H_
#define TFO_CC_CORE_PHILOX_H_

#include <cstdint>

#include "cc/core/dropout.h"
#include "cc/core/integers.h"
#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

typedef std::uint64_t Uint64Vec __attribute__((vector_size(TFO_VECTOR_BYTES)));

// One lane each, of as many vectors as hide how long a product takes (measured:
// 0.7 of one vector's time, two 0.85, six 0.95).
constexpr int kPhiloxVectors = 4;
constexpr int kBlocksOfVector = TFO_VECTOR_BYTES / 8;
constexpr int64_t kPhiloxBlocks = kPhiloxVectors * kBlocksOfVector;
constexpr int64_t kPhiloxWords = 4 * kPhiloxBlocks;

// The products of the lanes' lower halves. One instruction, which the compilers
// do not find.
TFO_INLINE Uint64Vec MultiplyLowerHalves(Uint64Vec a, Uint64Vec b) {
#if defined(__AVX512F__)
  return (Uint64Vec)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Uint64Vec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (Uint64Vec)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Stores the words of kPhiloxBlocks blocks from block `first` on.
TFO_INLINE void StorePhilox(const Philox& random, std::uint64_t first,
                            std::uint32_t* words) {
  // Blocks are in the order in which instructions interleave halves of 128
  // bits. The upper halves of lanes are never read.
  Uint64Vec c[kPhiloxVectors][4];
  for (int v = 0; v < kPhiloxVectors; ++v) {
    Uint64Vec index;
    for (int l = 0; l < kBlocksOfVector; ++l) {
      index[l] = first + v * kBlocksOfVector + l / 2 +
                 (l % 2 != 0 ? kBlocksOfVector / 2 : 0);
    }
    const Uint64Vec low = index + random.counter[0];
    // A comparison that holds is -1.
    const Uint64Vec high = random.counter[1] - (Uint64Vec)(low < index);
    c[v][0] = low;
    c[v][1] = low >> 32;
    c[v][2] = high;
    c[v][3] = high >> 32;
  }
  std::uint32_t key[] = {static_cast<std::uint32_t>(*random.key),
                         static_cast<std::uint32_t>(*random.key >> 32)};
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 4
    for (int v = 0; v < kPhiloxVectors; ++v) {
      const Uint64Vec even =
          MultiplyLowerHalves(c[v][0], Uint64Vec{} + kPhiloxFactors[0]);
      const Uint64Vec odd =
          MultiplyLowerHalves(c[v][2], Uint64Vec{} + kPhiloxFactors[1]);
      c[v][0] = (odd >> 32) ^ c[v][1] ^ key[0];
      c[v][1] = odd;
      c[v][2] = (even >> 32) ^ c[v][3] ^ key[1];
      c[v][3] = even;
    }
    for (int i = 0; i < 2; ++i) key[i] += kPhiloxWeyl[i];
  }
  Uint64Vec even, odd;
  for (int l = 0; l < kBlocksOfVector; ++l) {
    even[l] = l % 2 == 0 ? l : l - 1 + kBlocksOfVector;
    odd[l] = l % 2 == 0 ? l + 1 : l + kBlocksOfVector;
  }
  for (int v = 0; v < kPhiloxVectors; ++v) {
    const Uint64Vec begin = (c[v][0] & 0xffffffffu) | c[v][1] << 32;
    const Uint64Vec end = (c[v][2] & 0xffffffffu) | c[v][3] << 32;
    const Uint64Vec blocks[] = {__builtin_shuffle(begin, end, even),
                                __builtin_shuffle(begin, end, odd)};
    __builtin_memcpy(words + v * 4 * kBlocksOfVector, blocks, sizeof(blocks));
  }
}

// Room for `count` words that begin anywhere in a block.
constexpr int64_t PhiloxRoom(int64_t count) {
  return CeilDiv(count + 3, kPhiloxWords) * kPhiloxWords;
}

// Returns where in `room` the words from number `first` on are, `count` of
// them.
TFO_INLINE const std::uint32_t* PhiloxWords(const Philox& random,
                                            std::uint64_t first, int64_t count,
                                            std::uint32_t* room) {
  const int64_t skipped = static_cast<int64_t>(first % 4);
  for (int64_t i = 0; i < skipped + count; i += kPhiloxWords)
    StorePhilox(random, (first + static_cast<std::uint64_t>(i)) / 4, room + i);
  return room + skipped;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_PHILOX_H_
