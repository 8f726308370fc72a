// The batch-norm ops on the GPU: the launchers on TensorFlow's stream, with the
// op's memory.
#include "cc/kernels/batch_norm_ops.h"

#include "cc/kernels/batch_norm_act_ops.h"
#include "cc/kernels/batch_norm_split_ops.h"
#include "cuda/batch_norm.h"
#include "cuda/tf/cuda_util.h"

namespace tf_fused_ops {
namespace {

// Calls a launcher. Its memory may be handed on as soon as it returns: whoever
// gets it uses it behind this op on the same stream.
template <class Launcher>
absl::Status Call(OpKernelContext* ctx, const Launcher& launcher) {
  ScratchOwner scratch(ctx);
  return ToAbsl(launcher(scratch.scratch(), StreamOf(ctx)));
}

struct GpuEngine {
  static absl::Status Forward(OpKernelContext* ctx,
                              const tfo::BatchNormForwardArgs& args) {
    return Call(ctx, [&](const auto& scratch, auto stream) {
      return tfo::cuda::BatchNormForward(args, scratch, stream);
    });
  }

  static absl::Status Gradient(OpKernelContext* ctx,
                               const tfo::BatchNormGradientArgs& args) {
    return Call(ctx, [&](const auto& scratch, auto stream) {
      return tfo::cuda::BatchNormGradient(args, scratch, stream);
    });
  }

  static absl::Status LocalMoments(OpKernelContext* ctx,
                                   const tfo::BatchNormShape& shape,
                                   const void* x, double* moments) {
    return Call(ctx, [&](const auto& scratch, auto stream) {
      return tfo::cuda::BatchNormLocalMoments(shape, x, scratch, stream,
                                              moments);
    });
  }

  static absl::Status ForwardFromMoments(OpKernelContext* ctx,
                                         const tfo::BatchNormForwardArgs& args,
                                         std::int64_t num_replicas,
                                         const double* moments) {
    return Call(ctx, [&](const auto&, auto stream) {
      return tfo::cuda::BatchNormForwardFromMoments(args, num_replicas, moments,
                                                    stream);
    });
  }

  static absl::Status LocalSums(OpKernelContext* ctx,
                                const tfo::BatchNormGradientArgs& args,
                                double* sums) {
    return Call(ctx, [&](const auto& scratch, auto stream) {
      return tfo::cuda::BatchNormLocalSums(args, scratch, stream, sums);
    });
  }

  static absl::Status GradientFromSums(OpKernelContext* ctx,
                                       const tfo::BatchNormGradientArgs& args,
                                       const double* sums) {
    return Call(ctx, [&](const auto& scratch, auto stream) {
      return tfo::cuda::BatchNormGradientFromSums(args, sums, scratch, stream);
    });
  }
};

TFO_REGISTER_BATCH_NORM_OPS(DEVICE_GPU, GpuEngine, Eigen::half, float);
TFO_REGISTER_BATCH_NORM_OPS(DEVICE_GPU, GpuEngine, tensorflow::bfloat16, float);
TFO_REGISTER_BATCH_NORM_OPS(DEVICE_GPU, GpuEngine, float, float);

}  // namespace
}  // namespace tf_fused_ops
