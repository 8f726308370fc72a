// Convolution (* scale) + bias (+ side input) + activation, and its gradient.
#include "cc/ops/conv_attrs.h"
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// The output's shape, all that is known of it, and its channels.
absl::Status ConvOutputShape(InferenceContext* c, ShapeHandle* input,
                             ShapeHandle* filters, ShapeHandle* y) {
  ConvAttrs attrs;
  TF_RETURN_IF_ERROR(ReadConvAttrs(c, &attrs));
  TF_RETURN_IF_ERROR(SingleInput(c, "input", 4, input));
  TF_RETURN_IF_ERROR(SingleInput(c, "filters", 4, filters));
  const DimensionHandle channels = c->Dim(*input, attrs.channel_dim());
  const DimensionHandle of_filters = c->Dim(*filters, 2),
                        out_channels = c->Dim(*filters, 3);
  if (c->ValueKnown(channels) && c->ValueKnown(of_filters)) {
    std::int64_t groups;
    // Any number of groups fits no output channels.
    TF_RETURN_IF_ERROR(ConvGroups(
        c->Value(channels), c->Value(of_filters),
        c->ValueKnown(out_channels) ? c->Value(out_channels) : 0, &groups));
  }
  std::vector<DimensionHandle> dims(4);
  dims[0] = c->Dim(*input, 0);
  dims[attrs.channel_dim()] = out_channels;
  for (int i = 0; i < 2; ++i) {
    const DimensionHandle in = c->Dim(*input, attrs.spatial_dim(i));
    const DimensionHandle filter = c->Dim(*filters, i);
    // With SAME padding the filter's size does not matter.
    const bool known =
        c->ValueKnown(in) &&
        (c->ValueKnown(filter) || attrs.padding == ConvPadding::kSame);
    DimensionHandle out = c->UnknownDim();
    if (known || (c->ValueKnown(filter) && c->Value(filter) < 1)) {
      std::int64_t size = 0, pad = 0;
      TF_RETURN_IF_ERROR(ConvOutputSize(
          attrs, i, c->ValueKnown(in) ? c->Value(in) : 0,
          c->ValueKnown(filter) ? c->Value(filter) : 1, &size, &pad));
      out = c->MakeDim(size);
    }
    dims[attrs.spatial_dim(i)] = out;
  }
  *y = c->MakeShape(dims);
  return absl::OkStatus();
}

absl::Status ChannelDim(InferenceContext* c, int* channel_dim) {
  ConvAttrs attrs;
  TF_RETURN_IF_ERROR(ReadConvAttrs(c, &attrs));
  *channel_dim = attrs.channel_dim();
  return absl::OkStatus();
}

absl::Status ConvShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  int num_bias, num_side_inputs, num_scale, num_moments, channel_dim;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_bias", &num_bias));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_side_inputs", &num_side_inputs));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_scale", &num_scale));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_moments", &num_moments));
  TF_RETURN_IF_ERROR(ChannelDim(c, &channel_dim));
  ShapeHandle input, filters, y;
  TF_RETURN_IF_ERROR(ConvOutputShape(c, &input, &filters, &y));
  DimensionHandle channels = c->Dim(y, channel_dim);
  for (const char* name : {"scale", "bias"}) {
    TF_RETURN_IF_ERROR(
        MergeVectors(c, name, "the last dimension of filters", &channels));
  }
  TF_RETURN_IF_ERROR(c->ReplaceDim(y, channel_dim, channels, &y));
  TF_RETURN_IF_ERROR(MergeShapes(c, "side_input", "the output", &y));
  c->set_output(0, y);
  if (num_moments > 0) c->set_output(2, c->Matrix(3, channels));
  return SetPreActivationOutput(c, 1, y);
}

absl::Status ConvGradShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  TF_RETURN_IF_ERROR(CheckSavedCount(c, activation));
  int channel_dim;
  TF_RETURN_IF_ERROR(ChannelDim(c, &channel_dim));
  ShapeHandle dy, input, filters, y;
  TF_RETURN_IF_ERROR(ConvOutputShape(c, &input, &filters, &y));
  TF_RETURN_IF_ERROR(SingleInput(c, "dy", 4, &dy));
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", dy, "the convolution's output", &y));
  TF_RETURN_IF_ERROR(MergeShapes(c, "saved", "dy", &y));
  TF_RETURN_IF_ERROR(SetSwitchedOutput(c, 0, "input_gradient", input));
  TF_RETURN_IF_ERROR(SetSwitchedOutput(c, 1, "filters_gradient", filters));
  TF_RETURN_IF_ERROR(SetSwitchedOutput(c, 2, "bias_gradient",
                                       c->Vector(c->Dim(y, channel_dim))));
  return SetSwitchedOutput(c, 3, "side_input_gradient", y);
}

}  // namespace

REGISTER_OP("TfFusedOps>Conv2DBiasAct")
    .Input("input: T")
    .Input("filters: T")
    .Input("bias: num_bias * T")
    .Input("side_input: num_side_inputs * T")
    .Input("scale: num_scale * T")
    .Output("y: T")
    .Output("pre_activation: T")
    .Output("moments: num_moments * double")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_bias: int >= 0 = 0")
    .Attr("num_side_inputs: int >= 0 = 0")
    .Attr("num_scale: int >= 0 = 0")
    .Attr("num_moments: int >= 0 = 0")
    .Attr("strides: list(int)")
    .Attr("padding: {'SAME', 'VALID', 'EXPLICIT'}")
    .Attr("explicit_paddings: list(int) = []")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr("dilations: list(int) = [1, 1, 1, 1]")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("save_pre_activation: bool = false")
    .Attr("constant_filters: bool = false")
    .Attr("winograd: bool = false")
    .SetShapeFn(ConvShape)
    .Doc(R"doc(
Computes y = activation(conv2d(input, filters) * scale + bias + side_input) in one pass.

input: 4-D, laid out as data_format says.
filters: [filter_height, filter_width, in_channels / groups, out_channels], where groups follows from the shapes; more
  than one on the CPU alone.
bias: none, or one vector of length out_channels.
side_input: none, or one tensor of y's shape.
scale: none, or one vector of length out_channels.
alpha: leaky_relu's slope below zero; the other activations ignore it.
constant_filters: the filters are the same tensor in every call, so that it pays to keep what is made of them.
winograd: 3x3 filters of stride 1 may be computed by Winograd's algorithm, in less time and with larger rounding
  errors; on the CPU alone.
y: 4-D, laid out as data_format says.
pre_activation: the activation's argument, of y's shape, where save_pre_activation is set; otherwise empty.
moments: none, or BatchNormMoments of y, taken on the way to memory; on the CPU alone.
)doc");

REGISTER_OP("TfFusedOps>Conv2DBiasActGrad")
    .Input("dy: T")
    .Input("input: T")
    .Input("filters: T")
    .Input("saved: num_saved * T")
    .Output("input_grad: T")
    .Output("filters_grad: T")
    .Output("bias_grad: T")
    .Output("side_input_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_saved: int >= 0 = 0")
    .Attr("strides: list(int)")
    .Attr("padding: {'SAME', 'VALID', 'EXPLICIT'}")
    .Attr("explicit_paddings: list(int) = []")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr("dilations: list(int) = [1, 1, 1, 1]")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("input_gradient: bool = true")
    .Attr("filters_gradient: bool = true")
    .Attr("bias_gradient: bool = true")
    .Attr("side_input_gradient: bool = true")
    .Attr("winograd: bool = false")
    .SetShapeFn(ConvGradShape)
    .Doc(R"doc(
Computes the gradients of Conv2DBiasAct without scale in one op.

dy: the gradient of y.
input: the forward op's input.
filters: the forward op's filters.
saved: none for the activation none; y for relu, relu6, elu, selu, leaky_relu with alpha >= 0,
  sigmoid and tanh; the pre-activation for all others.
winograd: as in the forward op.
input_grad: the gradient of input; empty where input_gradient is not set.
filters_grad: the gradient of filters; empty where filters_gradient is not set.
bias_grad: the gradient of bias; empty where bias_gradient is not set.
side_input_grad: the gradient of the pre-activation; empty where side_input_gradient is not set.
)doc");

}  // namespace tf_fused_ops
