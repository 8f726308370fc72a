// Dropout on the CPU: the core on the op's own threads.
#include "cc/kernels/dropout_ops.h"

#include "cc/core/dispatch.h"

namespace tf_fused_ops {
namespace {

struct CpuEngine {
  static absl::Status Run(tensorflow::OpKernelContext* ctx,
                          const tfo::DropoutArgs& args) {
    tfo::ActiveKernels().drop_out(args, ParallelOf(ctx));
    return absl::OkStatus();
  }
};

TFO_REGISTER_DROPOUT(DEVICE_CPU, CpuEngine, Eigen::half);
TFO_REGISTER_DROPOUT(DEVICE_CPU, CpuEngine, tensorflow::bfloat16);
TFO_REGISTER_DROPOUT(DEVICE_CPU, CpuEngine, float);
TFO_REGISTER_DROPOUT(DEVICE_CPU, CpuEngine, double);

}  // namespace
}  // namespace tf_fused_ops
