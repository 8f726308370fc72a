// The batch-norm ops on the CPU: the core on the op's own threads and memory.
#include "cc/kernels/batch_norm_ops.h"

#include "cc/kernels/batch_norm_act_ops.h"
#include "cc/kernels/batch_norm_split_ops.h"

namespace tf_fused_ops {
namespace {

// Calls a function of the core.
template <class Function>
absl::Status Call(OpKernelContext* ctx, const Function& function) {
  ScratchOwner scratch(ctx);
  return function(ParallelOf(ctx), scratch.scratch()) ? absl::OkStatus()
                                                      : OutOfScratch();
}

struct CpuEngine {
  static absl::Status Forward(OpKernelContext* ctx,
                              const tfo::BatchNormForwardArgs& args) {
    return Call(ctx, [&](const auto& parallel, const auto& scratch) {
      return tfo::BatchNormForward(args, parallel, scratch);
    });
  }

  static absl::Status Gradient(OpKernelContext* ctx,
                               const tfo::BatchNormGradientArgs& args) {
    return Call(ctx, [&](const auto& parallel, const auto& scratch) {
      return tfo::BatchNormGradient(args, parallel, scratch);
    });
  }

  static absl::Status LocalMoments(OpKernelContext* ctx,
                                   const tfo::BatchNormShape& shape,
                                   const void* x, double* moments) {
    return Call(ctx, [&](const auto& parallel, const auto& scratch) {
      return tfo::BatchNormLocalMoments(shape, x, parallel, scratch, moments);
    });
  }

  static absl::Status ForwardFromMoments(OpKernelContext* ctx,
                                         const tfo::BatchNormForwardArgs& args,
                                         std::int64_t num_replicas,
                                         const double* moments) {
    return Call(ctx, [&](const auto& parallel, const auto& scratch) {
      return tfo::BatchNormForwardFromMoments(args, num_replicas, moments,
                                              parallel, scratch);
    });
  }

  static absl::Status LocalSums(OpKernelContext* ctx,
                                const tfo::BatchNormGradientArgs& args,
                                double* sums) {
    return Call(ctx, [&](const auto& parallel, const auto& scratch) {
      return tfo::BatchNormLocalSums(args, parallel, scratch, sums);
    });
  }

  static absl::Status GradientFromSums(OpKernelContext* ctx,
                                       const tfo::BatchNormGradientArgs& args,
                                       const double* sums) {
    return Call(ctx, [&](const auto& parallel, const auto& scratch) {
      return tfo::BatchNormGradientFromSums(args, sums, parallel, scratch);
    });
  }
};

TFO_REGISTER_BATCH_NORM_OPS(DEVICE_CPU, CpuEngine, Eigen::half, float);
TFO_REGISTER_BATCH_NORM_OPS(DEVICE_CPU, CpuEngine, tensorflow::bfloat16, float);
TFO_REGISTER_BATCH_NORM_OPS(DEVICE_CPU, CpuEngine, float, float);
TFO_REGISTER_BATCH_NORM_OPS(DEVICE_CPU, CpuEngine, double, double);

}  // namespace
}  // namespace tf_fused_ops
