// Transposed convolution + bias (+ side input) + activation, and its gradient.
#include "cc/ops/conv_attrs.h"
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// Merges what input, filters and `*y`, the output's shape or that of argument
// `name`, which stands for it, tell about each other.
absl::Status ConvTransposeShapes(InferenceContext* c, const char* name,
                                 const ConvAttrs& attrs, ShapeHandle* input,
                                 ShapeHandle* filters, ShapeHandle* y) {
  TF_RETURN_IF_ERROR(SingleInput(c, "input", 4, input));
  TF_RETURN_IF_ERROR(SingleInput(c, "filters", 4, filters));
  TF_RETURN_IF_ERROR(RequireRank(c, name, 4, 4, y));
  const int channel = attrs.channel_dim();
  DimensionHandle in_channels = c->Dim(*input, channel),
                  batch = c->Dim(*input, 0), channels = c->Dim(*filters, 2);
  TF_RETURN_IF_ERROR(MergeNamed(c, "filters", c->Dim(*filters, 3),
                                "the channels of input", &in_channels));
  TF_RETURN_IF_ERROR(
      MergeNamed(c, name, c->Dim(*y, 0), "the batch of input", &batch));
  TF_RETURN_IF_ERROR(MergeNamed(c, name, c->Dim(*y, channel),
                                "dimension 2 of filters", &channels));
  std::vector<DimensionHandle> in(4), out(4);
  in[0] = out[0] = batch;
  in[channel] = in_channels;
  out[channel] = channels;
  for (int i = 0; i < 2; ++i) {
    const int dim = attrs.spatial_dim(i);
    DimensionHandle of_input = c->Dim(*input, dim), of_y = c->Dim(*y, dim);
    const DimensionHandle filter = c->Dim(*filters, i);
    const bool known = c->ValueKnown(of_y) && c->ValueKnown(filter);
    if (known || (c->ValueKnown(filter) && c->Value(filter) < 1)) {
      std::int64_t size = 0, pad = 0;
      TF_RETURN_IF_ERROR(ConvOutputSize(attrs, i, known ? c->Value(of_y) : 0,
                                        c->Value(filter), &size, &pad));
      DimensionHandle convolved = c->MakeDim(size);
      TF_RETURN_IF_ERROR(MergeNamed(
          c, "input", of_input,
          absl::StrCat("the convolution of ", name).c_str(), &convolved));
      of_input = convolved;
    }
    in[dim] = of_input;
    out[dim] = of_y;
  }
  *input = c->MakeShape(in);
  *y = c->MakeShape(out);
  TF_RETURN_IF_ERROR(c->ReplaceDim(*filters, 2, channels, filters));
  return c->ReplaceDim(*filters, 3, in_channels, filters);
}

absl::Status ConvTransposeShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  int num_bias, num_side_inputs;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_bias", &num_bias));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_side_inputs", &num_side_inputs));
  ShapeHandle sizes, input, filters, y;
  TF_RETURN_IF_ERROR(SingleInput(c, "output_shape", 1, &sizes));
  DimensionHandle four = c->MakeDim(4);
  TF_RETURN_IF_ERROR(MergeNamed(c, "output_shape", c->Dim(sizes, 0),
                                "an image's shape", &four));
  TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(c->num_inputs() - 1, &y));
  ConvAttrs attrs;
  TF_RETURN_IF_ERROR(ReadConvAttrs(c, &attrs));
  TF_RETURN_IF_ERROR(
      ConvTransposeShapes(c, "output_shape", attrs, &input, &filters, &y));
  DimensionHandle channels = c->Dim(filters, 2);
  TF_RETURN_IF_ERROR(
      MergeVectors(c, "bias", "dimension 2 of filters", &channels));
  TF_RETURN_IF_ERROR(c->ReplaceDim(y, attrs.channel_dim(), channels, &y));
  TF_RETURN_IF_ERROR(MergeShapes(c, "side_input", "the output", &y));
  c->set_output(0, y);
  return SetPreActivationOutput(c, 1, y);
}

absl::Status ConvTransposeGradShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  TF_RETURN_IF_ERROR(CheckSavedCount(c, activation));
  ShapeHandle dy, input, filters;
  TF_RETURN_IF_ERROR(SingleInput(c, "dy", &dy));
  ConvAttrs attrs;
  TF_RETURN_IF_ERROR(ReadConvAttrs(c, &attrs));
  TF_RETURN_IF_ERROR(
      ConvTransposeShapes(c, "dy", attrs, &input, &filters, &dy));
  TF_RETURN_IF_ERROR(MergeShapes(c, "saved", "dy", &dy));
  TF_RETURN_IF_ERROR(SetSwitchedOutput(c, 0, "input_gradient", input));
  TF_RETURN_IF_ERROR(SetSwitchedOutput(c, 1, "filters_gradient", filters));
  TF_RETURN_IF_ERROR(
      SetSwitchedOutput(c, 2, "bias_gradient", c->Vector(c->Dim(filters, 2))));
  return SetSwitchedOutput(c, 3, "side_input_gradient", dy);
}

}  // namespace

REGISTER_OP("TfFusedOps>Conv2DTransposeBiasAct")
    .Input("input: T")
    .Input("filters: T")
    .Input("bias: num_bias * T")
    .Input("side_input: num_side_inputs * T")
    .Input("output_shape: int32")
    .Output("y: T")
    .Output("pre_activation: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_bias: int >= 0 = 0")
    .Attr("num_side_inputs: int >= 0 = 0")
    .Attr("strides: list(int)")
    .Attr("padding: {'SAME', 'VALID', 'EXPLICIT'}")
    .Attr("explicit_paddings: list(int) = []")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr("dilations: list(int) = [1, 1, 1, 1]")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("save_pre_activation: bool = false")
    .SetShapeFn(ConvTransposeShape)
    .Doc(R"doc(
Computes y = activation(conv2d_transpose(input, filters) + bias + side_input) in one pass, on the CPU.

input: 4-D, laid out as data_format says.
filters: [filter_height, filter_width, out_channels, in_channels].
bias: none, or one vector of length out_channels.
side_input: none, or one tensor of y's shape.
output_shape: y's shape; the convolution with the other attributes makes input's of it.
alpha: leaky_relu's slope below zero; the other activations ignore it.
y: 4-D, laid out as data_format says.
pre_activation: the activation's argument, of y's shape, where save_pre_activation is set; otherwise empty.
)doc");

REGISTER_OP("TfFusedOps>Conv2DTransposeBiasActGrad")
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
    .SetShapeFn(ConvTransposeGradShape)
    .Doc(R"doc(
Computes the gradients of Conv2DTransposeBiasAct, on the CPU.

dy: the gradient of y.
input: the forward op's input.
filters: the forward op's filters.
saved: none for the activation none; y for relu, relu6, elu, selu, leaky_relu with alpha >= 0,
  sigmoid and tanh; the pre-activation for all others.
input_grad: the gradient of input; empty where input_gradient is not set.
filters_grad: the gradient of filters; empty where filters_gradient is not set.
bias_grad: the gradient of bias; empty where bias_gradient is not set.
side_input_grad: the gradient of the pre-activation; empty where side_input_gradient is not set.
)doc");

}  // namespace tf_fused_ops
