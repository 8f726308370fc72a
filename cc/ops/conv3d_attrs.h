// The attributes of a 3-D convolution, read and checked once for shape
// functions and kernels.
#ifndef TFO_CC_OPS_CONV3D_ATTRS_H_
#define TFO_CC_OPS_CONV3D_ATTRS_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cc/ops/conv_attrs.h"

namespace tf_fused_ops {

// Channels are last.
struct Conv3DAttrs {
  ConvAttrs depth;   // its height is the volume's depth
  ConvAttrs images;  // height and width

  // Of dimension 1 + i of the input, which is dimension i of the filters.
  absl::Status OutputSize(int i, std::int64_t input, std::int64_t filter,
                          std::int64_t* output,
                          std::int64_t* pad_before) const {
    return i == 0 ? ConvOutputSize(depth, 0, input, filter, output, pad_before)
                  : ConvOutputSize(images, i - 1, input, filter, output,
                                   pad_before);
  }
};

// A list of five positive values that is 1 for batch and channels; `out` gets
// depth, height and width.
inline absl::Status SpatialTriple(const char* name,
                                  const std::vector<std::int64_t>& values,
                                  std::int64_t* out) {
  if (values.size() != 5)
    return Invalid(name, " must have 5 elements, got ", values.size());
  for (std::int64_t value : values) {
    if (value < 1 || value > std::numeric_limits<std::int32_t>::max()) {
      return Invalid(name, " must be positive 32-bit values, got ", value);
    }
  }
  if (values[0] != 1 || values[4] != 1) {
    return Invalid(name, " must be 1 for batch and channels, got ", values[0],
                   " and ", values[4]);
  }
  for (int i = 0; i < 3; ++i) out[i] = values[1 + i];
  return absl::OkStatus();
}

// `Context` is an InferenceContext or an OpKernelConstruction.
template <class Context>
absl::Status ReadConv3DAttrs(Context* c, Conv3DAttrs* out) {
  std::string padding;
  std::vector<std::int64_t> strides, dilations;
  TF_RETURN_IF_ERROR(c->GetAttr("padding", &padding));
  TF_RETURN_IF_ERROR(c->GetAttr("strides", &strides));
  TF_RETURN_IF_ERROR(c->GetAttr("dilations", &dilations));
  std::int64_t stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1};
  TF_RETURN_IF_ERROR(SpatialTriple("strides", strides, stride));
  TF_RETURN_IF_ERROR(SpatialTriple("dilations", dilations, dilation));
  out->depth.padding = out->images.padding =
      padding == "SAME" ? ConvPadding::kSame : ConvPadding::kValid;
  out->depth.stride[0] = stride[0];
  out->depth.dilation[0] = dilation[0];
  for (int i = 0; i < 2; ++i) {
    out->images.stride[i] = stride[1 + i];
    out->images.dilation[i] = dilation[1 + i];
  }
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_CONV3D_ATTRS_H_
