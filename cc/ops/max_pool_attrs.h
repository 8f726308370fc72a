// The attributes of MaxPoolAct, read and checked once for shape functions and
// kernels.
#ifndef TFO_CC_OPS_MAX_POOL_ATTRS_H_
#define TFO_CC_OPS_MAX_POOL_ATTRS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/max_pool.h"
#include "cc/ops/conv_attrs.h"

namespace tf_fused_ops {

struct MaxPoolAttrs {
  // Channels last, without dilation.
  ConvAttrs windows;
  // Height, then width.
  std::int64_t ksize[2] = {1, 1};
};

// `Context` is an InferenceContext or an OpKernelConstruction.
template <class Context>
absl::Status ReadMaxPoolAttrs(Context* c, MaxPoolAttrs* out) {
  std::string padding;
  std::vector<std::int64_t> ksize, strides;
  TF_RETURN_IF_ERROR(c->GetAttr("padding", &padding));
  TF_RETURN_IF_ERROR(c->GetAttr("ksize", &ksize));
  TF_RETURN_IF_ERROR(c->GetAttr("strides", &strides));
  ConvAttrs& windows = out->windows;
  windows.padding =
      padding == "SAME" ? ConvPadding::kSame : ConvPadding::kValid;
  TF_RETURN_IF_ERROR(SpatialPair("ksize", ksize, windows, out->ksize));
  TF_RETURN_IF_ERROR(SpatialPair("strides", strides, windows, windows.stride));
  if (out->ksize[0] * out->ksize[1] > tfo::kNoMaxPoolIndex) {
    return Invalid("ksize must be of at most ", tfo::kNoMaxPoolIndex,
                   " pixels, got ", out->ksize[0], " x ", out->ksize[1]);
  }
  return absl::OkStatus();
}

// One spatial dimension of the output and the padding in front of it. `i` is 0
// for height, 1 for width.
inline absl::Status MaxPoolOutputSize(const MaxPoolAttrs& attrs, int i,
                                      std::int64_t input, std::int64_t* output,
                                      std::int64_t* pad_before) {
  const ConvAttrs& windows = attrs.windows;
  if (windows.padding == ConvPadding::kValid &&
      attrs.ksize[i] - input >= 2 * windows.stride[i]) {
    return Invalid("ksize ", attrs.ksize[i], " does not fit x: ", input,
                   " with stride ", windows.stride[i]);
  }
  return ConvOutputSize(windows, i, input, attrs.ksize[i], output, pad_before);
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_MAX_POOL_ATTRS_H_
