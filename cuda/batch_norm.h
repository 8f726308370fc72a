// Batch normalisation on the GPU, for float16, bfloat16 and float32 with
// statistics in float32: the phases and the whole, with the arguments of the
// CPU's (cc/core/batch_norm.h). Everything is queued on `stream`; the same
// shape on the same device gives the same bits.
#ifndef TFO_CUDA_BATCH_NORM_H_
#define TFO_CUDA_BATCH_NORM_H_

#include "cc/core/batch_norm.h"
#include "cuda/status.h"

namespace tfo::cuda {

// Per channel: the mean of x, and the sum of squared deviations from it. Zero
// for an empty batch.
Status BatchNormMoments(const BatchNormShape& shape, const void* x, float* mean,
                        float* sum_of_squares, const Scratch& scratch,
                        Stream stream);

Status BatchNormApply(const BatchNormApplyArgs& args, Stream stream);

// With dz = dy * act'(z): per channel, the sum of dz and of dz * (x - mean).
// Writes scale_grad and offset_grad, too, where they are not null.
Status BatchNormGradientSums(const BatchNormGradientArgs& args, float* sum_dz,
                             float* sum_dz_x, const Scratch& scratch,
                             Stream stream);

// x_grad and side_grad, from the sums over all `count` elements of a channel.
Status BatchNormGradientApply(const BatchNormGradientArgs& args, double count,
                              const float* sum_dz, const float* sum_dz_x,
                              Stream stream);

// Both phases: in one kernel that reads x once where the tensor fits into the
// chip's shared memory.
Status BatchNormForward(const BatchNormForwardArgs& args,
                        const Scratch& scratch, Stream stream);
Status BatchNormGradient(const BatchNormGradientArgs& args,
                         const Scratch& scratch, Stream stream);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_BATCH_NORM_H_
