// Softmax and SoftmaxGrad on the CPU: the core on the op's own threads and
// memory.
#include "cc/kernels/softmax_ops.h"

#include "cc/core/dispatch.h"

namespace tf_fused_ops {
namespace {

struct CpuEngine {
  static absl::Status Forward(OpKernelContext* ctx,
                              const tfo::SoftmaxArgs& args) {
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().softmax_forward(args, ParallelOf(ctx),
                                                scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  static absl::Status Gradient(OpKernelContext* ctx,
                               const tfo::SoftmaxGradientArgs& args) {
    tfo::ActiveKernels().softmax_gradient(args, ParallelOf(ctx));
    return absl::OkStatus();
  }
};

TFO_REGISTER_SOFTMAX(DEVICE_CPU, CpuEngine, Eigen::half);
TFO_REGISTER_SOFTMAX(DEVICE_CPU, CpuEngine, tensorflow::bfloat16);
TFO_REGISTER_SOFTMAX(DEVICE_CPU, CpuEngine, float);
TFO_REGISTER_SOFTMAX(DEVICE_CPU, CpuEngine, double);

}  // namespace
}  // namespace tf_fused_ops
