// Matrix products with bias, side input and activation, and their gradients:
// the convolutions whose windows are single pixels, each used once.
#ifndef TFO_CUDA_MATMUL_H_
#define TFO_CUDA_MATMUL_H_

#include "cc/core/conv.h"
#include "cuda/call.h"
#include "cuda/status.h"

namespace tfo::cuda {

bool IsProduct(const ConvShape& shape);

// Of shapes for which IsProduct holds, without empty tensors.
Status MatMulForward(const ConvForwardArgs& args, const Call& call);

// The input's gradient from that of the pre-activation, which is dense.
Status MatMulInputGradient(const ConvGradientArgs& args, const void* dz,
                           const Call& call);

// The filters' gradient; that of the bias too where bias_gradient is not null.
Status MatMulFiltersGradient(const ConvGradientArgs& args, const void* dz,
                             void* bias_gradient, const Call& call);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_MATMUL_H_
