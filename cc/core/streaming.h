// Stores that bypass the caches, for outputs larger than those.
#ifndef TFO_CC_CORE_STREAMING_H_
#define TFO_CC_CORE_STREAMING_H_

#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

// Stores past the caches, where the instruction set can; `to` is aligned to the
// bytes stored. FlushStores must follow before another thread reads.
template <class T>
TFO_INLINE void StoreStreaming(T* to, Vec<Accumulator<T>> v) {
#if defined(__x86_64__)
  using A = Accumulator<T>;
  constexpr int kBytes = kLanes<A> * static_cast<int>(sizeof(T));
  alignas(kBytes) T block[kLanes<A>];
  StoreAs(block, v);
#if defined(__AVX512F__)
  if constexpr (kBytes == 64) {
    __m512i bits;
    __builtin_memcpy(&bits, block, kBytes);
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits);
  }
#endif
#if defined(__AVX2__)
  if constexpr (kBytes == 32) {
    __m256i bits;
    __builtin_memcpy(&bits, block, kBytes);
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits);
  }
#endif
  if constexpr (kBytes == 16) {
    __m128i bits;
    __builtin_memcpy(&bits, block, kBytes);
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits);
  }
#endif
  StoreAs(to, v);
}

TFO_INLINE void FlushStores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_STREAMING_H_
