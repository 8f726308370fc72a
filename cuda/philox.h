// Random words by Philox4x32-10, a block at a time.
#ifndef TFO_CUDA_PHILOX_H_
#define TFO_CUDA_PHILOX_H_

#include <cstdint>

#include "cc/core/dropout.h"

namespace tfo::cuda {

// Words of a block.
constexpr int kPhiloxBlock = 4;

class PhiloxBlocks {
 public:
  // The keys of all rounds are computed once.
  __device__ explicit PhiloxBlocks(const Philox& random)
      : low_(random.counter[0]), high_(random.counter[1]) {
    constexpr std::uint32_t kFirst = kPhiloxWeyl[0], kSecond = kPhiloxWeyl[1];
    const std::uint64_t key = *random.key;
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      keys_[round][0] = static_cast<std::uint32_t>(key) + round * kFirst;
      keys_[round][1] = static_cast<std::uint32_t>(key >> 32) + round * kSecond;
    }
  }

  // The words of block `index`.
  __device__ void Words(std::uint64_t index,
                        std::uint32_t (&words)[kPhiloxBlock]) const {
    constexpr std::uint64_t kFirst = kPhiloxFactors[0],
                            kSecond = kPhiloxFactors[1];
    const std::uint64_t low = low_ + index, high = high_ + (low < index);
    words[0] = static_cast<std::uint32_t>(low);
    words[1] = static_cast<std::uint32_t>(low >> 32);
    words[2] = static_cast<std::uint32_t>(high);
    words[3] = static_cast<std::uint32_t>(high >> 32);
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const std::uint64_t even = kFirst * words[0], odd = kSecond * words[2];
      words[0] =
          static_cast<std::uint32_t>(odd >> 32) ^ words[1] ^ keys_[round][0];
      words[1] = static_cast<std::uint32_t>(odd);
      words[2] =
          static_cast<std::uint32_t>(even >> 32) ^ words[3] ^ keys_[round][1];
      words[3] = static_cast<std::uint32_t>(even);
    }
  }

 private:
  std::uint64_t low_, high_;  // the counter
  std::uint32_t keys_[kPhiloxRounds][2];
};

}  // namespace tfo::cuda

#endif  // TFO_CUDA_PHILOX_H_
