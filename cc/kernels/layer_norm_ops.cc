// LayerNorm and LayerNormGrad on the CPU: the core on the op's own threads and
// memory.
#include "cc/kernels/layer_norm_ops.h"

#include "cc/core/dispatch.h"

namespace tf_fused_ops {
namespace {

struct CpuEngine {
  static absl::Status Forward(OpKernelContext* ctx,
                              const tfo::LayerNormArgs& args) {
    tfo::ActiveKernels().layer_norm_forward(args, ParallelOf(ctx));
    return absl::OkStatus();
  }

  static absl::Status Gradient(OpKernelContext* ctx,
                               const tfo::LayerNormGradientArgs& args) {
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().layer_norm_gradient(args, ParallelOf(ctx),
                                                    scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }
};

TFO_REGISTER_LAYER_NORM(DEVICE_CPU, CpuEngine, Eigen::half, float);
TFO_REGISTER_LAYER_NORM(DEVICE_CPU, CpuEngine, tensorflow::bfloat16, float);
TFO_REGISTER_LAYER_NORM(DEVICE_CPU, CpuEngine, float, float);
TFO_REGISTER_LAYER_NORM(DEVICE_CPU, CpuEngine, double, double);

}  // namespace
}  // namespace tf_fused_ops
