// Cross entropy on the GPU, for float16, bfloat16 and float32, with the
// arguments of the CPU's (cc/core/cross_entropy.h). The loss and the gradient
// of a row whose label is no class are NaN. The same shape gives the same bits.
#ifndef TFO_CUDA_CROSS_ENTROPY_H_
#define TFO_CUDA_CROSS_ENTROPY_H_

#include "cc/core/cross_entropy.h"
#include "cuda/status.h"

namespace tfo::cuda {

Status CrossEntropyForward(const CrossEntropyArgs& args, Stream stream);
Status CrossEntropyGradient(const CrossEntropyGradientArgs& args,
                            Stream stream);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_CROSS_ENTROPY_H_
