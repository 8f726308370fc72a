// Conv3DBiasAct and Conv3DBiasActGrad on the CPU.
#include "cc/kernels/contraction_cpu.h"
#include "cc/ops/conv3d_attrs.h"

namespace tf_fused_ops {
namespace {

struct Conv3DGeometry {
  static constexpr const char* kGradientAttrs[] = {"input_gradient",
                                                   "filters_gradient"};
  static constexpr const char* kConstantAttr = nullptr;
  static constexpr bool kTransposed = false, kHasDepth = true;
  static constexpr bool kHasScale = false, kHasMoments = false;
  static constexpr bool winograd = false;
  Conv3DAttrs attrs;

  absl::Status Read(tensorflow::OpKernelConstruction* ctx) {
    return ReadConv3DAttrs(ctx, &attrs);
  }

  absl::Status Bind(const tensorflow::TensorShape& input,
                    const tensorflow::TensorShape& filters,
                    BoundShapes* out) const {
    if (input.dims() != 5) {
      return Invalid("input must have rank 5, got shape ", input.DebugString());
    }
    if (filters.dims() != 5) {
      return Invalid("filters must have rank 5, got shape ",
                     filters.DebugString());
    }
    if (filters.dim_size(3) != input.dim_size(4)) {
      return Invalid("filters must have in dimension 3 the channels of input, ",
                     input.dim_size(4), ", got ", filters.dim_size(3));
    }
    std::int64_t size[3], pad[3];
    out->y = input;
    for (int i = 0; i < 3; ++i) {
      TF_RETURN_IF_ERROR(attrs.OutputSize(
          i, input.dim_size(1 + i), filters.dim_size(i), &size[i], &pad[i]));
      TF_RETURN_IF_ERROR(out->y.SetDimWithStatus(1 + i, size[i]));
    }
    out->conv = {input.dim_size(0),
                 input.dim_size(2),
                 input.dim_size(3),
                 input.dim_size(4),
                 size[1],
                 size[2],
                 filters.dim_size(4),
                 filters.dim_size(1),
                 filters.dim_size(2),
                 attrs.images.stride[0],
                 attrs.images.stride[1],
                 attrs.images.dilation[0],
                 attrs.images.dilation[1],
                 pad[1],
                 pad[2],
                 false,
                 false,
                 false};
    out->depth = {input.dim_size(1),       size[0],
                  filters.dim_size(0),     attrs.depth.stride[0],
                  attrs.depth.dilation[0], pad[0]};
    return out->y.SetDimWithStatus(4, filters.dim_size(4));
  }
};

class CpuVolumeEngine {
 public:
  static absl::Status Forward(tensorflow::OpKernelContext* ctx,
                              const tfo::ConvForwardArgs& args,
                              const tfo::ConvDepth& depth) {
    ScratchOwner scratch(ctx);
    const bool done =
        tfo::ComputeConv3D(args, depth, ParallelOf(ctx), scratch.scratch());
    return done ? absl::OkStatus() : OutOfScratch();
  }

  static absl::Status Gradient(tensorflow::OpKernelContext* ctx,
                               const tfo::ConvGradientArgs& args,
                               const tfo::ConvDepth& depth) {
    ScratchOwner scratch(ctx);
    const bool done = tfo::ComputeConv3DGradient(args, depth, ParallelOf(ctx),
                                                 scratch.scratch());
    return done ? absl::OkStatus() : OutOfScratch();
  }
};

TFO_REGISTER_CPU_CONTRACTION("TfFusedOps>Conv3DBiasAct", Conv3DGeometry,
                             CpuVolumeEngine);

}  // namespace
}  // namespace tf_fused_ops
