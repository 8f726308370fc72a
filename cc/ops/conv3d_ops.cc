// 3-D convolution + bias (+ side input) + activation, and its gradient.
#include "cc/ops/conv3d_attrs.h"
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// The output's shape, all that is known of it.
absl::Status Conv3DOutputShape(InferenceContext* c, ShapeHandle* input,
                               ShapeHandle* filters, ShapeHandle* y) {
  Conv3DAttrs attrs;
  TF_RETURN_IF_ERROR(ReadConv3DAttrs(c, &attrs));
  TF_RETURN_IF_ERROR(SingleInput(c, "input", 5, input));
  TF_RETURN_IF_ERROR(SingleInput(c, "filters", 5, filters));
  DimensionHandle channels = c->Dim(*input, 4);
  TF_RETURN_IF_ERROR(MergeNamed(c, "filters", c->Dim(*filters, 3),
                                "the channels of input", &channels));
  std::vector<DimensionHandle> dims(5);
  dims[0] = c->Dim(*input, 0);
  dims[4] = c->Dim(*filters, 4);
  for (int i = 0; i < 3; ++i) {
    const DimensionHandle in = c->Dim(*input, 1 + i);
    const DimensionHandle filter = c->Dim(*filters, i);
    // With SAME padding the filter's size does not matter.
    const bool known =
        c->ValueKnown(in) &&
        (c->ValueKnown(filter) || attrs.images.padding == ConvPadding::kSame);
    dims[1 + i] = c->UnknownDim();
    if (known || (c->ValueKnown(filter) && c->Value(filter) < 1)) {
      std::int64_t size = 0, pad = 0;
      TF_RETURN_IF_ERROR(attrs.OutputSize(
          i, c->ValueKnown(in) ? c->Value(in) : 0,
          c->ValueKnown(filter) ? c->Value(filter) : 1, &size, &pad));
      dims[1 + i] = c->MakeDim(size);
    }
  }
  *y = c->MakeShape(dims);
  return absl::OkStatus();
}

absl::Status Conv3DShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  int num_bias, num_side_inputs;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_bias", &num_bias));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_side_inputs", &num_side_inputs));
  ShapeHandle input, filters, y;
  TF_RETURN_IF_ERROR(Conv3DOutputShape(c, &input, &filters, &y));
  DimensionHandle channels = c->Dim(y, 4);
  TF_RETURN_IF_ERROR(
      MergeVectors(c, "bias", "the last dimension of filters", &channels));
  TF_RETURN_IF_ERROR(c->ReplaceDim(y, 4, channels, &y));
  TF_RETURN_IF_ERROR(MergeShapes(c, "side_input", "the output", &y));
  c->set_output(0, y);
  return SetPreActivationOutput(c, 1, y);
}

absl::Status Conv3DGradShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  TF_RETURN_IF_ERROR(CheckSavedCount(c, activation));
  ShapeHandle dy, input, filters, y;
  TF_RETURN_IF_ERROR(Conv3DOutputShape(c, &input, &filters, &y));
  TF_RETURN_IF_ERROR(SingleInput(c, "dy", 5, &dy));
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", dy, "the convolution's output", &y));
  TF_RETURN_IF_ERROR(MergeShapes(c, "saved", "dy", &y));
  TF_RETURN_IF_ERROR(SetSwitchedOutput(c, 0, "input_gradient", input));
  TF_RETURN_IF_ERROR(SetSwitchedOutput(c, 1, "filters_gradient", filters));
  TF_RETURN_IF_ERROR(
      SetSwitchedOutput(c, 2, "bias_gradient", c->Vector(c->Dim(y, 4))));
  return SetSwitchedOutput(c, 3, "side_input_gradient", y);
}

}  // namespace

REGISTER_OP("TfFusedOps>Conv3DBiasAct")
    .Input("input: T")
    .Input("filters: T")
    .Input("bias: num_bias * T")
    .Input("side_input: num_side_inputs * T")
    .Output("y: T")
    .Output("pre_activation: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_bias: int >= 0 = 0")
    .Attr("num_side_inputs: int >= 0 = 0")
    .Attr("strides: list(int)")
    .Attr("padding: {'SAME', 'VALID'}")
    .Attr("dilations: list(int) = [1, 1, 1, 1, 1]")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("save_pre_activation: bool = false")
    .SetShapeFn(Conv3DShape)
    .Doc(R"doc(
Computes y = activation(conv3d(input, filters) + bias + side_input) in one pass. On the CPU alone.

input: [batch, depth, height, width, in_channels].
filters: [filter_depth, filter_height, filter_width, in_channels, out_channels].
bias: none, or one vector of length out_channels.
side_input: none, or one tensor of y's shape.
strides: five integers, in the order of input; 1 for batch and channels. So are dilations.
alpha: leaky_relu's slope below zero; the other activations ignore it.
y: [batch, out_depth, out_height, out_width, out_channels].
pre_activation: the activation's argument, of y's shape, where save_pre_activation is set; otherwise empty.
)doc");

REGISTER_OP("TfFusedOps>Conv3DBiasActGrad")
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
    .Attr("padding: {'SAME', 'VALID'}")
    .Attr("dilations: list(int) = [1, 1, 1, 1, 1]")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("input_gradient: bool = true")
    .Attr("filters_gradient: bool = true")
    .Attr("bias_gradient: bool = true")
    .Attr("side_input_gradient: bool = true")
    .SetShapeFn(Conv3DGradShape)
    .Doc(R"doc(
Computes the gradients of Conv3DBiasAct in one op. On the CPU alone.

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
