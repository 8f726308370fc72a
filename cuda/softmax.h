// Softmax with scale and mask on the GPU, for float16, bfloat16 and float32,
// with the arguments of the CPU's (cc/core/softmax.h). The same shape gives the
// same bits.
#ifndef TFO_CUDA_SOFTMAX_H_
#define TFO_CUDA_SOFTMAX_H_

#include "cc/core/softmax.h"
#include "cuda/status.h"

namespace tfo::cuda {

Status SoftmaxForward(const SoftmaxArgs& args, Stream stream);
Status SoftmaxGradient(const SoftmaxGradientArgs& args, Stream stream);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_SOFTMAX_H_
