// One bit an element, bit i % 8 of byte i / 8: whether the relu lets it
// through.
#ifndef TFO_CUDA_BATCH_NORM_MASK_H_
#define TFO_CUDA_BATCH_NORM_MASK_H_

#include <cstdint>

#include "cuda/vector.h"

namespace tfo::cuda {

// The bits of the vector at `at`, the first in bit 0.
template <class T>
__device__ unsigned LoadMask(const VectorArray& array, const std::uint8_t* mask,
                             std::int64_t at) {
  if (at >= array.size) return 0;
  return unsigned{mask[at / 8]} >> (at % 8);
}

// Writes mask = (z > 0) for the vector at `at`. With vectors of half a byte,
// threads that are neighbours in x make a byte together: both must call. The
// bits that fill up the last byte are zero.
template <class T>
__device__ void StoreMask(const VectorArray& array,
                          const float (&z)[kVector<T>], std::uint8_t* mask,
                          std::int64_t at) {
  static_assert(kVector<T> == 8 || kVector<T> == 4);
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    bits |= static_cast<unsigned>(z[i] > 0 && at + i < array.size) << i;
  }
  if constexpr (kVector<T> == 4) {
    // blockDim.x is even, so the two are neighbours in a warp.
    const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
    const unsigned pair = 3u << (thread % 32 & ~1u);
    bits |= __shfl_xor_sync(pair, bits, 1) << 4;
    if (at % 8 != 0) return;
  }
  if (at < array.size) mask[at / 8] = static_cast<std::uint8_t>(bits);
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_BATCH_NORM_MASK_H_
