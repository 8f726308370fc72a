// Batch normalisation on the GPU, for float16, bfloat16 and float32 with
// statistics in float32: the phases and the whole, with the arguments of the
// CPU's (cc/core/batch_norm.h). Everything is queued on `stream`; the same
// shape and alignment on the same device give the same bits.
#ifndef TFO_CUDA_BATCH_NORM_H_
#define TFO_CUDA_BATCH_NORM_H_

#include "cc/core/batch_norm.h"
#include "cuda/status.h"

namespace tfo::cuda {

// ---- What replicas exchange: float64 [3, channels] on the device ------------

// Count, mean and sum of squared deviations of x.
Status BatchNormLocalMoments(const BatchNormShape& shape, const void* x,
                             const Scratch& scratch, Stream stream,
                             double* moments);

// The forward op with the statistics of all replicas, moments being
// [num_replicas, 3, channels].
Status BatchNormForwardFromMoments(const BatchNormForwardArgs& args,
                                   std::int64_t num_replicas,
                                   const double* moments, Stream stream);

// With dz = dy * act'(z): count, the sum of dz and of dz * (x - mean);
// scale_grad and offset_grad, which are of this replica's elements alone. Reads
// neither x_grad nor side_grad.
Status BatchNormLocalSums(const BatchNormGradientArgs& args,
                          const Scratch& scratch, Stream stream, double* sums);

// x_grad and side_grad, from the sums added up over all replicas.
Status BatchNormGradientFromSums(const BatchNormGradientArgs& args,
                                 const double* sums, const Scratch& scratch,
                                 Stream stream);

// ---- The whole op -----------------------------------------------------------

// Both phases: in one kernel that reads x once where the tensor fits into the
// chip's shared memory.
Status BatchNormForward(const BatchNormForwardArgs& args,
                        const Scratch& scratch, Stream stream);
Status BatchNormGradient(const BatchNormGradientArgs& args,
                         const Scratch& scratch, Stream stream);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_BATCH_NORM_H_
