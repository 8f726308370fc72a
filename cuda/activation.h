// The core's activations on the device.
#ifndef TFO_CUDA_ACTIVATION_H_
#define TFO_CUDA_ACTIVATION_H_

#include <cuda_runtime.h>

#include <cmath>

#include "cc/core/activation.h"
#include "cuda/element.h"

namespace tfo::cuda {

// For elements of type T.
template <class T>
struct DeviceMath {
  using Scalar = float;

  static TFO_DEVICE float Exp(float x) { return ExpFor<T>(x > 88 ? 88 : x); }
  static TFO_DEVICE float Expm1(float x) { return expm1f(x); }
  static TFO_DEVICE float Log1p(float x) { return log1pf(x); }
  static TFO_DEVICE float Tanh(float x) { return tanhf(x); }
  static TFO_DEVICE float Reciprocal(float x) {
    return sizeof(T) == 4 ? 1.0f / x : __fdividef(1.0f, x);
  }
  static TFO_DEVICE float Larger(float a, float b) { return a > b ? a : b; }
  static TFO_DEVICE float Smaller(float a, float b) { return a < b ? a : b; }
  static TFO_DEVICE float Magnitude(float x) {
    const float magnitude = fabsf(x);
    return magnitude > 13.2f ? 13.2f : magnitude;
  }
  static TFO_DEVICE NormalTail<float> Tail(float x) {
    const float exp = Exp(-0.5f * x * x);
    return {0.5f * exp * erfcxf(x * 0.70710678f), exp};
  }
};

template <class T>
using DeviceActivation = ActivationFunctions<DeviceMath<T>, float>;

// The activation is the same for a whole grid: a branch on it for a vector at a
// time costs little, and one kernel serves them all.
template <class T, int N>
__device__ void ActivationValues(Activation activation, float alpha,
                                 float (&z)[N]) {
  WithActivation(activation, [&](auto a) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      z[i] =
          DeviceActivation<T>::template Value<decltype(a)::value>(z[i], alpha);
    }
  });
}

// The same for relu and none, whose few registers leave room for more loads.
template <int N>
__device__ void ReluOrNone(Activation activation, float (&z)[N]) {
  if (activation != Activation::kRelu) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    z[i] = DeviceActivation<float>::Value<Activation::kRelu>(z[i], 0);
  }
}

// From what the forward op saved (the values where SlopeFromValue, else the
// pre-activations) to the slopes.
template <class T, int N>
__device__ void ActivationSlopes(Activation activation, float alpha,
                                 float (&saved)[N]) {
  WithActivation(activation, [&](auto a) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      saved[i] = DeviceActivation<T>::template Slope<decltype(a)::value>(
          saved[i], alpha);
    }
  });
}

// From pre-activations to slopes.
template <class T, int N>
__device__ void SlopesOfArguments(Activation activation, float alpha,
                                  float (&z)[N]) {
  WithActivation(activation, [&](auto a) {
    constexpr Activation kActivation = decltype(a)::value;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      using Functions = DeviceActivation<T>;
      const float saved =
          SlopeFromValue(kActivation, alpha)
              ? Functions::template Value<kActivation>(z[i], alpha)
              : z[i];
      z[i] = Functions::template Slope<kActivation>(saved, alpha);
    }
  });
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_ACTIVATION_H_
