// The attributes of a 2-D convolution, read and checked once for shape
// functions and kernels.
#ifndef TFO_CC_OPS_CONV_ATTRS_H_
#define TFO_CC_OPS_CONV_ATTRS_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

enum class ConvPadding { kSame, kValid, kExplicit };

struct ConvAttrs {
  bool channels_last = true;
  ConvPadding padding = ConvPadding::kValid;
  // Height, then width.
  std::int64_t stride[2] = {1, 1};
  std::int64_t dilation[2] = {1, 1};
  // Explicit padding; zero otherwise.
  std::int64_t pad_before[2] = {0, 0};
  std::int64_t pad_after[2] = {0, 0};

  int channel_dim() const { return channels_last ? 3 : 1; }
  int spatial_dim(int i) const { return channels_last ? 1 + i : 2 + i; }
};

// A list of positive values, one a dimension, that is 1 for batch and channels.
inline absl::Status CheckSpatialValues(const char* name,
                                       const std::vector<std::int64_t>& values,
                                       std::size_t dims, int channel_dim) {
  if (values.size() != dims)
    return Invalid(name, " must have ", dims, " elements, got ", values.size());
  for (std::int64_t value : values) {
    if (value < 1 || value > std::numeric_limits<std::int32_t>::max()) {
      return Invalid(name, " must be positive 32-bit values, got ", value);
    }
  }
  if (values[0] != 1 || values[channel_dim] != 1) {
    return Invalid(name, " must be 1 for batch and channels, got ", values[0],
                   " and ", values[channel_dim]);
  }
  return absl::OkStatus();
}

// Of four values; `out` gets height and width.
inline absl::Status SpatialPair(const char* name,
                                const std::vector<std::int64_t>& values,
                                const ConvAttrs& attrs, std::int64_t* out) {
  TF_RETURN_IF_ERROR(CheckSpatialValues(name, values, 4, attrs.channel_dim()));
  for (int i = 0; i < 2; ++i) out[i] = values[attrs.spatial_dim(i)];
  return absl::OkStatus();
}

inline absl::Status ReadExplicitPaddings(
    const std::vector<std::int64_t>& values, ConvAttrs* out) {
  if (out->padding != ConvPadding::kExplicit) {
    if (values.empty()) return absl::OkStatus();
    return Invalid(
        "explicit_paddings must be empty unless padding is EXPLICIT");
  }
  if (values.size() != 8) {
    return Invalid("explicit_paddings must have 8 elements, got ",
                   values.size());
  }
  for (std::int64_t value : values) {
    if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) {
      return Invalid(
          "explicit_paddings must be non-negative 32-bit values, got ", value);
    }
  }
  const int c = out->channel_dim();
  if (values[0] != 0 || values[1] != 0 || values[2 * c] != 0 ||
      values[2 * c + 1] != 0) {
    return Invalid("explicit_paddings must be 0 for batch and channels");
  }
  for (int i = 0; i < 2; ++i) {
    out->pad_before[i] = values[2 * out->spatial_dim(i)];
    out->pad_after[i] = values[2 * out->spatial_dim(i) + 1];
  }
  return absl::OkStatus();
}

// `Context` is an InferenceContext or an OpKernelConstruction.
template <class Context>
absl::Status ReadConvAttrs(Context* c, ConvAttrs* out) {
  std::string data_format, padding;
  std::vector<std::int64_t> strides, dilations, explicit_paddings;
  TF_RETURN_IF_ERROR(c->GetAttr("data_format", &data_format));
  TF_RETURN_IF_ERROR(c->GetAttr("padding", &padding));
  TF_RETURN_IF_ERROR(c->GetAttr("strides", &strides));
  TF_RETURN_IF_ERROR(c->GetAttr("dilations", &dilations));
  TF_RETURN_IF_ERROR(c->GetAttr("explicit_paddings", &explicit_paddings));
  out->channels_last = data_format == "NHWC";
  out->padding = padding == "SAME"    ? ConvPadding::kSame
                 : padding == "VALID" ? ConvPadding::kValid
                                      : ConvPadding::kExplicit;
  TF_RETURN_IF_ERROR(SpatialPair("strides", strides, *out, out->stride));
  TF_RETURN_IF_ERROR(SpatialPair("dilations", dilations, *out, out->dilation));
  return ReadExplicitPaddings(explicit_paddings, out);
}

// How many groups a convolution falls into; filters have the channels of one.
inline absl::Status ConvGroups(std::int64_t input_channels,
                               std::int64_t filter_channels,
                               std::int64_t output_channels,
                               std::int64_t* groups) {
  *groups = 1;
  if (filter_channels == input_channels) return absl::OkStatus();
  if (filter_channels < 1 || input_channels < filter_channels ||
      input_channels % filter_channels != 0) {
    return Invalid("filters must have in dimension 2 the channels of input, ",
                   input_channels,
                   ", or those of a group of them, which divide them; got ",
                   filter_channels);
  }
  *groups = input_channels / filter_channels;
  if (output_channels % *groups != 0) {
    return Invalid(
        "filters must have in dimension 3 as many channels for each "
        "of the ",
        *groups, " groups, got ", output_channels);
  }
  return absl::OkStatus();
}

// One spatial dimension of the output and the padding in front of it, as
// TensorFlow's convolution computes them. `i` is 0 for height, 1 for width.
inline absl::Status ConvOutputSize(const ConvAttrs& attrs, int i,
                                   std::int64_t input, std::int64_t filter,
                                   std::int64_t* output,
                                   std::int64_t* pad_before) {
  if (filter < 1)
    return Invalid("filters must have positive height and width, got ", filter);
  std::int64_t extent, padded;
  if (__builtin_mul_overflow(filter - 1, attrs.dilation[i], &extent) ||
      __builtin_add_overflow(extent, 1, &extent) ||
      __builtin_add_overflow(input, attrs.pad_before[i] + attrs.pad_after[i],
                             &padded)) {
    return Invalid(
        "filters, dilations and explicit_paddings make the convolution too "
        "large");
  }
  const std::int64_t stride = attrs.stride[i];
  if (attrs.padding == ConvPadding::kSame) {
    *output = input / stride + (input % stride != 0);
    // The last window starts inside the image, so nothing here exceeds input +
    // extent.
    const std::int64_t needed =
        *output == 0 ? 0 : (*output - 1) * stride - input;
    *pad_before =
        *output == 0 || needed + extent < 0 ? 0 : (needed + extent) / 2;
    return absl::OkStatus();
  }
  if (extent - padded >= 2 * stride) {
    return Invalid("filters of extent ", extent,
                   " do not fit the input: ", padded,
                   " with its padding, stride ", stride);
  }
  *output = padded < extent ? 0 : (padded - extent) / stride + 1;
  *pad_before = attrs.pad_before[i];
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_CONV_ATTRS_H_
