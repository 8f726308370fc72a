// Conv2DTransposeBiasAct and Conv2DTransposeBiasActGrad on the CPU.
#include "cc/core/conv_transpose.h"
#include "cc/kernels/contraction_cpu.h"
#include "cc/kernels/conv_geometry.h"

namespace tf_fused_ops {
namespace {

struct ConvTransposeGeometry {
  static constexpr const char* kGradientAttrs[] = {"input_gradient",
                                                   "filters_gradient"};
  static constexpr const char* kConstantAttr = nullptr;
  static constexpr bool kTransposed = true, kHasDepth = false;
  static constexpr bool kHasScale = false, kHasMoments = false;
  static constexpr bool winograd = false;
  ConvAttrs attrs;

  absl::Status Read(tensorflow::OpKernelConstruction* ctx) {
    return ReadConvAttrs(ctx, &attrs);
  }

  // The convolution is that which makes the input's shape of y's.
  absl::Status Bind(const tensorflow::TensorShape& input,
                    const tensorflow::TensorShape& filters,
                    BoundShapes* shapes) const {
    if (input.dims() != 4) {
      return Invalid("input must have rank 4, got shape ", input.DebugString());
    }
    if (filters.dims() != 4) {
      return Invalid("filters must have rank 4, got shape ",
                     filters.DebugString());
    }
    const char* const name = shapes->told_by;
    const tensorflow::TensorShape& y = shapes->y;
    if (y.dims() != 4) {
      return Invalid(name, " must have rank 4, got shape ", y.DebugString());
    }
    const int channel = attrs.channel_dim();
    if (y.dim_size(channel) != filters.dim_size(2)) {
      return Invalid(name, " has ", y.dim_size(channel),
                     " channels where filters have ", filters.dim_size(2),
                     " in dimension 2");
    }
    if (input.dim_size(channel) != filters.dim_size(3)) {
      return Invalid("filters must have in dimension 3 the channels of input, ",
                     input.dim_size(channel), ", got ", filters.dim_size(3));
    }
    BoundShapes conv;
    TF_RETURN_IF_ERROR(ConvGeometry{attrs, false}.Bind(y, filters, &conv));
    if (conv.y != input) {
      return Invalid(name, " of shape ", y.DebugString(), " is convolved to ",
                     conv.y.DebugString(), ", not to the shape of input, ",
                     input.DebugString());
    }
    shapes->conv = conv.conv;
    return absl::OkStatus();
  }
};

class CpuTransposeEngine {
 public:
  absl::Status Forward(tensorflow::OpKernelContext* ctx,
                       const tfo::ConvForwardArgs& args,
                       const tensorflow::Tensor*) {
    ScratchOwner scratch(ctx);
    const bool done =
        tfo::ComputeConvTranspose(args, ParallelOf(ctx), scratch.scratch());
    return done ? absl::OkStatus() : OutOfScratch();
  }

  static absl::Status Gradient(tensorflow::OpKernelContext* ctx,
                               const tfo::ConvGradientArgs& args) {
    ScratchOwner scratch(ctx);
    const bool done = tfo::ComputeConvTransposeGradient(args, ParallelOf(ctx),
                                                        scratch.scratch());
    return done ? absl::OkStatus() : OutOfScratch();
  }
};

TFO_REGISTER_CPU_CONTRACTION("TfFusedOps>Conv2DTransposeBiasAct",
                             ConvTransposeGeometry, CpuTransposeEngine);

}  // namespace
}  // namespace tf_fused_ops
