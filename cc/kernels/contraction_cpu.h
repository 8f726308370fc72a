// The contraction ops on the CPU: the core's engine on the op's own threads and
// memory.
#ifndef TFO_CC_KERNELS_CONTRACTION_CPU_H_
#define TFO_CC_KERNELS_CONTRACTION_CPU_H_

#include "cc/core/dispatch.h"
#include "cc/kernels/contraction_ops.h"
#include "cc/kernels/kept_filters.h"

namespace tf_fused_ops {

class CpuEngine {
 public:
  // `constant`: the filters, if they are the same in every call.
  absl::Status Forward(tensorflow::OpKernelContext* ctx,
                       tfo::ConvForwardArgs args,
                       const tensorflow::Tensor* constant) {
    ScratchOwner scratch(ctx);
    const tfo::Kernels& kernels = tfo::ForwardKernels(args.dtype, args.shape);
    std::shared_ptr<const KeptFilters::Packed> kept;
    if (constant != nullptr) {
      TF_RETURN_IF_ERROR(filters_.Get(ctx, kernels, args, *constant, &kept));
      if (kept != nullptr) args.packed_filters = kept->packed.data();
    }
    const bool done =
        kernels.conv_forward(args, ParallelOf(ctx), scratch.scratch());
    return done ? absl::OkStatus() : OutOfScratch();
  }

  static absl::Status Gradient(tensorflow::OpKernelContext* ctx,
                               const tfo::ConvGradientArgs& args) {
    ScratchOwner scratch(ctx);
    const bool done =
        tfo::ComputeConvGradient(args, ParallelOf(ctx), scratch.scratch());
    return done ? absl::OkStatus() : OutOfScratch();
  }

 private:
  KeptFilters filters_;
};

}  // namespace tf_fused_ops

#define TFO_REGISTER_CPU_CONTRACTION(NAME, GEOMETRY, ENGINE)                 \
  TFO_REGISTER_CONTRACTION(NAME, DEVICE_CPU, GEOMETRY, ENGINE, Eigen::half); \
  TFO_REGISTER_CONTRACTION(NAME, DEVICE_CPU, GEOMETRY, ENGINE,               \
                           tensorflow::bfloat16);                            \
  TFO_REGISTER_CONTRACTION(NAME, DEVICE_CPU, GEOMETRY, ENGINE, float);       \
  TFO_REGISTER_CONTRACTION(NAME, DEVICE_CPU, GEOMETRY, ENGINE, double)

#endif  // TFO_CC_KERNELS_CONTRACTION_CPU_H_
