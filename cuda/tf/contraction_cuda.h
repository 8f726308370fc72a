// The contraction ops on the GPU: TensorFlow's stream, memory and choice of
// TF32 for the launchers.
#ifndef TFO_CUDA_TF_CONTRACTION_CUDA_H_
#define TFO_CUDA_TF_CONTRACTION_CUDA_H_

#include "cc/kernels/contraction_ops.h"
#include "cuda/conv.h"
#include "cuda/tf/cuda_util.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/tensor_float_32_utils.h"

namespace tf_fused_ops {

struct CudaEngine {
  // Nothing is kept for constant filters: the libraries take them as they are.
  static absl::Status Forward(tensorflow::OpKernelContext* ctx,
                              const tfo::ConvForwardArgs& args,
                              const tensorflow::Tensor* /*constant*/) {
    if (args.moments != nullptr) {
      return absl::UnimplementedError(
          "num_moments must be 0 on a GPU, where BatchNormMoments is as fast");
    }
    ScratchOwner scratch(ctx);
    return ToAbsl(tfo::cuda::ConvForward(args, CallOf(ctx, &scratch)));
  }

  static absl::Status Gradient(tensorflow::OpKernelContext* ctx,
                               const tfo::ConvGradientArgs& args) {
    ScratchOwner scratch(ctx);
    return ToAbsl(tfo::cuda::ConvGradient(args, CallOf(ctx, &scratch)));
  }

 private:
  static tfo::cuda::Call CallOf(tensorflow::OpKernelContext* ctx,
                                ScratchOwner* scratch) {
    return {StreamOf(ctx), scratch->scratch(),
            tsl::tensor_float_32_execution_enabled(),
            [](const char* message) { VLOG(3) << message; }};
  }
};

}  // namespace tf_fused_ops

#define TFO_REGISTER_CUDA_CONTRACTION(NAME, GEOMETRY)              \
  TFO_REGISTER_CONTRACTION(NAME, DEVICE_GPU, GEOMETRY, CudaEngine, \
                           Eigen::half);                           \
  TFO_REGISTER_CONTRACTION(NAME, DEVICE_GPU, GEOMETRY, CudaEngine, \
                           tensorflow::bfloat16);                  \
  TFO_REGISTER_CONTRACTION(NAME, DEVICE_GPU, GEOMETRY, CudaEngine, float)

#endif  // TFO_CUDA_TF_CONTRACTION_CUDA_H_
