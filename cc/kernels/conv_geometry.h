// What the shapes and attributes of Conv2DBiasAct stand for.
#ifndef TFO_CC_KERNELS_CONV_GEOMETRY_H_
#define TFO_CC_KERNELS_CONV_GEOMETRY_H_

#include "cc/kernels/contraction_ops.h"
#include "cc/ops/conv_attrs.h"

namespace tf_fused_ops {

struct ConvGeometry {
  static constexpr const char* kGradientAttrs[] = {"input_gradient",
                                                   "filters_gradient"};
  static constexpr const char* kConstantAttr = "constant_filters";
  static constexpr bool kTransposed = false, kHasDepth = false;
  static constexpr bool kHasScale = true, kHasMoments = true;
  ConvAttrs attrs;
  bool winograd;

  absl::Status Read(tensorflow::OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("winograd", &winograd));
    return ReadConvAttrs(ctx, &attrs);
  }

  absl::Status Bind(const tensorflow::TensorShape& input,
                    const tensorflow::TensorShape& filters,
                    BoundShapes* out) const {
    if (input.dims() != 4) {
      return Invalid("input must have rank 4, got shape ", input.DebugString());
    }
    if (filters.dims() != 4) {
      return Invalid("filters must have rank 4, got shape ",
                     filters.DebugString());
    }
    std::int64_t groups;
    TF_RETURN_IF_ERROR(ConvGroups(input.dim_size(attrs.channel_dim()),
                                  filters.dim_size(2), filters.dim_size(3),
                                  &groups));
    std::int64_t in[2], size[2], pad[2];
    for (int i = 0; i < 2; ++i) {
      in[i] = input.dim_size(attrs.spatial_dim(i));
      TF_RETURN_IF_ERROR(ConvOutputSize(attrs, i, in[i], filters.dim_size(i),
                                        &size[i], &pad[i]));
    }
    out->conv = {input.dim_size(0),
                 in[0],
                 in[1],
                 filters.dim_size(2),
                 size[0],
                 size[1],
                 filters.dim_size(3) / groups,
                 filters.dim_size(0),
                 filters.dim_size(1),
                 attrs.stride[0],
                 attrs.stride[1],
                 attrs.dilation[0],
                 attrs.dilation[1],
                 pad[0],
                 pad[1],
                 !attrs.channels_last,
                 !attrs.channels_last,
                 false,
                 groups};
    out->y = input;
    for (int i = 0; i < 2; ++i) {
      TF_RETURN_IF_ERROR(
          out->y.SetDimWithStatus(attrs.spatial_dim(i), size[i]));
    }
    return out->y.SetDimWithStatus(attrs.channel_dim(), filters.dim_size(3));
  }
};

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_CONV_GEOMETRY_H_
