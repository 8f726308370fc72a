// Convolutions and matrix products with bias, side input and activation, and
// their gradients, on the device.
#ifndef TFO_CUDA_CONV_H_
#define TFO_CUDA_CONV_H_

#include "cc/core/conv.h"
#include "cuda/call.h"
#include "cuda/status.h"

namespace tfo::cuda {

// The core's arguments (cc/core/conv.h) with pointers to device memory. What is
// a matrix product (see IsProduct) goes to cuBLASLt, everything else to cuDNN,
// for which input and output must have the same layout.
Status ConvForward(const ConvForwardArgs& args, const Call& call);
Status ConvGradient(const ConvGradientArgs& args, const Call& call);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_CONV_H_
