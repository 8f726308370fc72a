// Batch normalisation in one kernel that reads its tensors once, where they fit
// into the shared memory of the whole chip.
#ifndef TFO_CUDA_BATCH_NORM_FUSED_H_
#define TFO_CUDA_BATCH_NORM_FUSED_H_

#include "cuda/batch_norm_kernels.h"

namespace tfo::cuda {

// `*done` tells whether the tensors fitted; otherwise nothing was queued.
Status FusedForward(const BatchNormForwardArgs& forward,
                    const StatisticsFinish& statistics, const Scratch& scratch,
                    Stream stream, bool* done);
Status FusedGradient(const BatchNormGradientArgs& args,
                     const GradientFinish& finish, const Scratch& scratch,
                     Stream stream, bool* done);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_BATCH_NORM_FUSED_H_
