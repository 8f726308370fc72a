// Act and ActGrad on the CPU: the core on the op's own threads.
#include "cc/kernels/act_ops.h"

#include "cc/core/dispatch.h"

namespace tf_fused_ops {
namespace {

struct CpuEngine {
  static absl::Status Forward(tensorflow::OpKernelContext* ctx,
                              const tfo::ActArgs& args) {
    tfo::ActiveKernels().act_forward(args, ParallelOf(ctx));
    return absl::OkStatus();
  }

  static absl::Status Gradient(tensorflow::OpKernelContext* ctx,
                               const tfo::ActGradientArgs& args) {
    tfo::ActiveKernels().act_gradient(args, ParallelOf(ctx));
    return absl::OkStatus();
  }
};

TFO_REGISTER_ACT(DEVICE_CPU, CpuEngine, Eigen::half);
TFO_REGISTER_ACT(DEVICE_CPU, CpuEngine, tensorflow::bfloat16);
TFO_REGISTER_ACT(DEVICE_CPU, CpuEngine, float);
TFO_REGISTER_ACT(DEVICE_CPU, CpuEngine, double);

}  // namespace
}  // namespace tf_fused_ops
