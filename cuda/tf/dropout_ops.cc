// Dropout and RandomWords on the GPU: the launchers on TensorFlow's stream. Key
// and counter are in the device's memory, as those of StatelessRandomUniformV2.
#include "cc/kernels/dropout_ops.h"

#include "cc/kernels/random_words_op.h"
#include "cuda/dropout.h"
#include "cuda/tf/cuda_util.h"

namespace tf_fused_ops {
namespace {

struct GpuEngine {
  static absl::Status Run(tensorflow::OpKernelContext* ctx,
                          const tfo::DropoutArgs& args) {
    return ToAbsl(tfo::cuda::DropOut(args, StreamOf(ctx)));
  }

  static absl::Status Store(tensorflow::OpKernelContext* ctx,
                            const tfo::PhiloxStart& start, std::uint64_t* key,
                            std::uint64_t* counter) {
    return ToAbsl(
        tfo::cuda::StoreRandomWords(start, key, counter, StreamOf(ctx)));
  }
};

TFO_REGISTER_DROPOUT(DEVICE_GPU, GpuEngine, Eigen::half);
TFO_REGISTER_DROPOUT(DEVICE_GPU, GpuEngine, tensorflow::bfloat16);
TFO_REGISTER_DROPOUT(DEVICE_GPU, GpuEngine, float);
TFO_REGISTER_RANDOM_WORDS(DEVICE_GPU, GpuEngine);

}  // namespace
}  // namespace tf_fused_ops
