// SparseSoftmaxCrossEntropy and its gradient on the GPU: the launchers on
// TensorFlow's stream.
#include "cc/kernels/cross_entropy_ops.h"

#include "cuda/cross_entropy.h"
#include "cuda/tf/cuda_util.h"

namespace tf_fused_ops {
namespace {

struct GpuEngine {
  static absl::Status Forward(OpKernelContext* ctx,
                              const tfo::CrossEntropyArgs& args) {
    return ToAbsl(tfo::cuda::CrossEntropyForward(args, StreamOf(ctx)));
  }

  static absl::Status Gradient(OpKernelContext* ctx,
                               const tfo::CrossEntropyGradientArgs& args) {
    return ToAbsl(tfo::cuda::CrossEntropyGradient(args, StreamOf(ctx)));
  }
};

#define TFO_REGISTER_ON_GPU(T)                                        \
  TFO_REGISTER_CROSS_ENTROPY("SparseSoftmaxCrossEntropy", DEVICE_GPU, \
                             GpuEngine, T, float)

TFO_REGISTER_ON_GPU(Eigen::half);
TFO_REGISTER_ON_GPU(tensorflow::bfloat16);
TFO_REGISTER_ON_GPU(float);

}  // namespace
}  // namespace tf_fused_ops
