// Softmax and SoftmaxGrad on the GPU: the launchers on TensorFlow's stream.
#include "cc/kernels/softmax_ops.h"

#include "cuda/softmax.h"
#include "cuda/tf/cuda_util.h"

namespace tf_fused_ops {
namespace {

struct GpuEngine {
  static absl::Status Forward(OpKernelContext* ctx,
                              const tfo::SoftmaxArgs& args) {
    return ToAbsl(tfo::cuda::SoftmaxForward(args, StreamOf(ctx)));
  }

  static absl::Status Gradient(OpKernelContext* ctx,
                               const tfo::SoftmaxGradientArgs& args) {
    return ToAbsl(tfo::cuda::SoftmaxGradient(args, StreamOf(ctx)));
  }
};

TFO_REGISTER_SOFTMAX(DEVICE_GPU, GpuEngine, Eigen::half);
TFO_REGISTER_SOFTMAX(DEVICE_GPU, GpuEngine, tensorflow::bfloat16);
TFO_REGISTER_SOFTMAX(DEVICE_GPU, GpuEngine, float);

}  // namespace
}  // namespace tf_fused_ops
