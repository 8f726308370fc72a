// A stand-in for CUDA's float16.
#ifndef TFO_CUDA_EMULATION_CUDA_FP16_H_
#define TFO_CUDA_EMULATION_CUDA_FP16_H_

struct __half {
  _Float16 value;
};
inline float __half2float(__half v) { return static_cast<float>(v.value); }
inline __half __float2half_rn(float v) { return {static_cast<_Float16>(v)}; }

#endif  // TFO_CUDA_EMULATION_CUDA_FP16_H_
