// Element types on the device: each is read as float32 and rounded when it is
// written.
#ifndef TFO_CUDA_ELEMENT_H_
#define TFO_CUDA_ELEMENT_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cc/core/types.h"
#include "cuda/status.h"

namespace tfo::cuda {

__device__ inline float ToFloat(float v) { return v; }
__device__ inline float ToFloat(__half v) { return __half2float(v); }
__device__ inline float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ inline T FromFloat(float v);
template <>
__device__ inline float FromFloat<float>(float v) {
  return v;
}
template <>
__device__ inline __half FromFloat<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// e^x, of which so many bits are right as T has: what is rounded to 16 takes
// none of 24.
template <class T>
__device__ inline float ExpFor(float x) {
  return sizeof(T) == 4 ? expf(x) : __expf(x);
}

// The lowest bits of a word.
template <class T>
__device__ inline T FromBits(std::uint32_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}
template <class T>
__device__ inline std::uint32_t ToBits(T value) {
  std::uint32_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  return word;
}

template <class T>
struct Element {
  using type = T;
};

// Calls body(Element<T>{}) for the type that stores `dtype`.
template <class Body>
Status WithElement(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kHalf:
      return body(Element<__half>{});
    case DType::kBFloat16:
      return body(Element<__nv_bfloat16>{});
    case DType::kFloat:
      return body(Element<float>{});
    default:
      return Unsupported("dtype", "the GPU kernels compute in float32");
  }
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_ELEMENT_H_
