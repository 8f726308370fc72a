// What follows a contraction, and what precedes its gradients, as kernels of
// their own: bias, side input and activation forward; dz = dy * act' and the
// bias gradient backward.
#ifndef TFO_CUDA_BIAS_ACT_H_
#define TFO_CUDA_BIAS_ACT_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"
#include "cuda/status.h"

namespace tfo::cuda {

// y = act(x * scale + bias (+ side)) with x of [outer, channels, inner], dense;
// channels last means inner == 1.
struct BiasActArgs {
  DType dtype;
  std::int64_t outer, channels, inner;
  Activation activation;
  double alpha;
  const void* x;
  const void* scale;     // [channels] of dtype; null: none
  const void* bias;      // the same
  const void* side;      // null: none
  void* y;               // may be x or side
  void* pre_activation;  // null: not wanted; may be x
};

Status BiasActForward(const BiasActArgs& args, Stream stream);

// dz = dy * act'(saved), bias_grad = the sum of dz over outer and inner.
// Two stages in a fixed order: the same bits from run to run.
struct BiasActGradientArgs {
  DType dtype;
  std::int64_t outer, channels, inner;
  Activation activation;
  double alpha;
  const void* dy;
  const void* saved;  // y where SlopeFromValue(activation, alpha), else the
                      // pre-activation; null for Activation::kNone
  void* dz;           // null: not wanted; may be dy
  void* bias_grad;    // [channels] of dtype; null: not wanted
};

Status BiasActGradient(const BiasActGradientArgs& args, const Scratch& scratch,
                       Stream stream);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_BIAS_ACT_H_
