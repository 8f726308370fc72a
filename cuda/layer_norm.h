// Layer and RMS normalization on the GPU, for float16, bfloat16 and float32
// with statistics in float32, with the arguments of the CPU's
// (cc/core/layer_norm.h). The same shape on the same device gives the same
// bits.
#ifndef TFO_CUDA_LAYER_NORM_H_
#define TFO_CUDA_LAYER_NORM_H_

#include "cc/core/layer_norm.h"
#include "cuda/status.h"

namespace tfo::cuda {

Status LayerNormForward(const LayerNormArgs& args, Stream stream);
Status LayerNormGradient(const LayerNormGradientArgs& args,
                         const Scratch& scratch, Stream stream);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_LAYER_NORM_H_
