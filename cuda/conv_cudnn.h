// Convolutions with bias, side input and activation, and their gradients, by
// cuDNN: what matmul.h is for products.
#ifndef TFO_CUDA_CONV_CUDNN_H_
#define TFO_CUDA_CONV_CUDNN_H_

#include "cc/core/conv.h"
#include "cuda/call.h"
#include "cuda/status.h"

namespace tfo::cuda {

// Of shapes with one layout for input and output, filters not transposed,
// without empty tensors.
Status CudnnForward(const ConvForwardArgs& args, const Call& call);

// The gradients of input and filters from that of the pre-activation.
Status CudnnInputGradient(const ConvGradientArgs& args, const void* dz,
                          const Call& call);
Status CudnnFiltersGradient(const ConvGradientArgs& args, const void* dz,
                            const Call& call);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_CONV_CUDNN_H_
