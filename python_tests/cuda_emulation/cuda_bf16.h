// A stand-in for CUDA's bfloat16: the upper half of a float32, rounded to
// nearest, ties to even.
#ifndef TFO_CUDA_EMULATION_CUDA_BF16_H_
#define TFO_CUDA_EMULATION_CUDA_BF16_H_

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  std::uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 v) {
  const std::uint32_t bits = std::uint32_t{v.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  if (v != v) return {0x7fff};
  bits += 0x7fff + (bits >> 16 & 1);
  return {static_cast<std::uint16_t>(bits >> 16)};
}

#endif  // TFO_CUDA_EMULATION_CUDA_BF16_H_
