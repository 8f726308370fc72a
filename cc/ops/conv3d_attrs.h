// The attributes of a 3-D convolution, read and checked once for shape
// functions and kernels.
#ifndef TFO_CC_OPS_CONV3D_ATTRS_H_
#define TFO_CC_OPS_CONV3D_ATTRS_H_

#include <cstdint>
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

// `Context` is an InferenceContext or an OpKernelConstruction.
template <class Context>
absl::Status ReadConv3DAttrs(Context* c, Conv3DAttrs* out) {
  std::string padding;
  std::vector<std::int64_t> strides, dilations;
  TF_RETURN_IF_ERROR(c->GetAttr("padding", &padding));
  TF_RETURN_IF_ERROR(c->GetAttr("strides", &strides));
  TF_RETURN_IF_ERROR(c->GetAttr("dilations", &dilations));
  TF_RETURN_IF_ERROR(CheckSpatialValues("strides", strides, 5, 4));
  TF_RETURN_IF_ERROR(CheckSpatialValues("dilations", dilations, 5, 4));
  out->depth.padding = out->images.padding =
      padding == "SAME" ? ConvPadding::kSame : ConvPadding::kValid;
  out->depth.stride[0] = strides[1];
  out->depth.dilation[0] = dilations[1];
  for (int i = 0; i < 2; ++i) {
    out->images.stride[i] = strides[2 + i];
    out->images.dilation[i] = dilations[2 + i];
  }
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_CONV3D_ATTRS_H_
