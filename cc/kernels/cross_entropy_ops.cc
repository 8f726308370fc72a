// SparseSoftmaxCrossEntropy, SoftmaxCrossEntropy and their gradients on the
// CPU: the core on the op's own threads.
#include "cc/kernels/cross_entropy_ops.h"

#include "cc/core/dispatch.h"

namespace tf_fused_ops {
namespace {

absl::Status CheckLabels(const tfo::CrossEntropyArgs& args) {
  if (args.probabilities.given) return absl::OkStatus();
  const std::int64_t depth = args.shape.depth;
  for (std::int64_t row = 0; row < args.shape.rows; ++row) {
    const std::int64_t label = args.labels[row];
    if (!tfo::Labels::IsClass(label, depth)) {
      return Invalid("labels must be at least 0 and less than ", depth,
                     ", the number of classes, got ", label);
    }
  }
  return absl::OkStatus();
}

struct CpuEngine {
  static absl::Status Forward(OpKernelContext* ctx,
                              const tfo::CrossEntropyArgs& args) {
    TF_RETURN_IF_ERROR(CheckLabels(args));
    tfo::ActiveKernels().cross_entropy_forward(args, ParallelOf(ctx));
    return absl::OkStatus();
  }

  static absl::Status Gradient(OpKernelContext* ctx,
                               const tfo::CrossEntropyGradientArgs& args) {
    TF_RETURN_IF_ERROR(CheckLabels(args.forward));
    tfo::ActiveKernels().cross_entropy_gradient(args, ParallelOf(ctx));
    return absl::OkStatus();
  }
};

#define TFO_REGISTER_ON_CPU(name)                                              \
  TFO_REGISTER_CROSS_ENTROPY(name, DEVICE_CPU, CpuEngine, Eigen::half, float); \
  TFO_REGISTER_CROSS_ENTROPY(name, DEVICE_CPU, CpuEngine,                      \
                             tensorflow::bfloat16, float);                     \
  TFO_REGISTER_CROSS_ENTROPY(name, DEVICE_CPU, CpuEngine, float, float);       \
  TFO_REGISTER_CROSS_ENTROPY(name, DEVICE_CPU, CpuEngine, double, double)

TFO_REGISTER_ON_CPU("SparseSoftmaxCrossEntropy");
TFO_REGISTER_ON_CPU("SoftmaxCrossEntropy");

}  // namespace
}  // namespace tf_fused_ops
