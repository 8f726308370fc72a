// LayerNorm and LayerNormGrad on the GPU: the launchers on TensorFlow's stream.
#include "cc/kernels/layer_norm_ops.h"

#include "cuda/layer_norm.h"
#include "cuda/tf/cuda_util.h"

namespace tf_fused_ops {
namespace {

struct GpuEngine {
  static absl::Status Forward(OpKernelContext* ctx,
                              const tfo::LayerNormArgs& args) {
    return ToAbsl(tfo::cuda::LayerNormForward(args, StreamOf(ctx)));
  }

  static absl::Status Gradient(OpKernelContext* ctx,
                               const tfo::LayerNormGradientArgs& args) {
    ScratchOwner scratch(ctx);
    return ToAbsl(
        tfo::cuda::LayerNormGradient(args, scratch.scratch(), StreamOf(ctx)));
  }
};

TFO_REGISTER_LAYER_NORM(DEVICE_GPU, GpuEngine, Eigen::half, float);
TFO_REGISTER_LAYER_NORM(DEVICE_GPU, GpuEngine, tensorflow::bfloat16, float);
TFO_REGISTER_LAYER_NORM(DEVICE_GPU, GpuEngine, float, float);

}  // namespace
}  // namespace tf_fused_ops
