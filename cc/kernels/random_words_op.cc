// RandomWords on the CPU.
#include "cc/kernels/random_words_op.h"

namespace tf_fused_ops {
namespace {

struct CpuEngine {
  static absl::Status Store(tensorflow::OpKernelContext* /*ctx*/,
                            const tfo::PhiloxStart& start, std::uint64_t* key,
                            std::uint64_t* counter) {
    start.Store(key, counter);
    return absl::OkStatus();
  }
};

TFO_REGISTER_RANDOM_WORDS(DEVICE_CPU, CpuEngine);

}  // namespace
}  // namespace tf_fused_ops
