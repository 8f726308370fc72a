// Convolutions by cuDNN.
#ifndef TFO_CUDA_CUDNN_H_
#define TFO_CUDA_CUDNN_H_

#include "cc/core/conv.h"
#include "cuda/call.h"
#include "cuda/status.h"

namespace tfo::cuda {

// Whether the library was found.
Status CudnnStatus();

// All tensors are dense and none is empty. Input and output have the same
// layout; filters are [out_c, in_c, kernel_h, kernel_w] where the channels come
// first, else [out_c, kernel_h, kernel_w, in_c]. Padding is the same on both
// sides. Unsupported where the library refuses.

Status Convolve(DType dtype, const ConvShape& shape, const void* input,
                const void* filters, void* output, const Call& call);

// With bias, side input and activation in the same kernel. The activation is
// kNone or kRelu, which makes 0 of NaN, as in stock TensorFlow's fused kernel;
// no pre-activation is stored.
Status ConvolveBiasAct(const ConvForwardArgs& args, const Call& call);

Status ConvolveInputGradient(DType dtype, const ConvShape& shape,
                             const void* filters, const void* dz,
                             void* input_gradient, const Call& call);

Status ConvolveFiltersGradient(DType dtype, const ConvShape& shape,
                               const void* input, const void* dz,
                               void* filters_gradient, const Call& call);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_CUDNN_H_
