// Act and ActGrad on the GPU: the contractions' elementwise kernels without a
// contraction.
#include "cc/kernels/act_ops.h"

#include "cuda/bias_act.h"
#include "cuda/tf/cuda_util.h"

namespace tf_fused_ops {
namespace {

struct GpuEngine {
  static absl::Status Forward(tensorflow::OpKernelContext* ctx,
                              const tfo::ActArgs& args) {
    return ToAbsl(tfo::cuda::BiasActForward(
        {args.dtype, args.size, 1, 1, args.activation, args.alpha, args.x,
         nullptr, nullptr, nullptr, args.y, nullptr},
        StreamOf(ctx)));
  }

  static absl::Status Gradient(tensorflow::OpKernelContext* ctx,
                               const tfo::ActGradientArgs& args) {
    ScratchOwner scratch(ctx);
    return ToAbsl(tfo::cuda::BiasActGradient(
        {args.dtype, args.size, 1, 1, args.activation, args.alpha, args.dy,
         args.saved, args.x_grad, nullptr},
        scratch.scratch(), StreamOf(ctx)));
  }
};

TFO_REGISTER_ACT(DEVICE_GPU, GpuEngine, Eigen::half);
TFO_REGISTER_ACT(DEVICE_GPU, GpuEngine, tensorflow::bfloat16);
TFO_REGISTER_ACT(DEVICE_GPU, GpuEngine, float);

}  // namespace
}  // namespace tf_fused_ops
