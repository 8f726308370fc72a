// Batch normalization (+ side input) + activation, and its gradient.
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// x of rank 2 to 5 and its channel dimension, which is unset while the rank is
// unknown.
absl::Status InputAndChannels(InferenceContext* c, ShapeHandle* x,
                              DimensionHandle* channels) {
  std::string data_format;
  TF_RETURN_IF_ERROR(c->GetAttr("data_format", &data_format));
  TF_RETURN_IF_ERROR(SingleInput(c, "x", x));
  TF_RETURN_IF_ERROR(RequireRank(c, "x", 2, 5, x));
  *channels = c->Dim(*x, data_format == "NHWC" ? -1 : 1);
  return absl::OkStatus();
}

absl::Status CheckStatisticsType(InferenceContext* c) {
  tensorflow::DataType t, u;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &t));
  TF_RETURN_IF_ERROR(c->GetAttr("U", &u));
  const bool wide = t == tensorflow::DT_DOUBLE;
  if (wide == (u == tensorflow::DT_DOUBLE)) return absl::OkStatus();
  return Invalid("scale must be ", wide ? "double" : "float",
                 " for x of this type");
}

absl::Status MergeChannelVectors(InferenceContext* c,
                                 std::initializer_list<const char*> names,
                                 DimensionHandle* channels) {
  for (const char* name : names) {
    TF_RETURN_IF_ERROR(
        MergeVectors(c, name, "the channel dimension of x", channels));
  }
  return absl::OkStatus();
}

// Puts the merged channels back into the shape.
absl::Status WithChannels(InferenceContext* c, DimensionHandle channels,
                          ShapeHandle* x) {
  if (!c->RankKnown(*x)) return absl::OkStatus();
  std::string data_format;
  TF_RETURN_IF_ERROR(c->GetAttr("data_format", &data_format));
  return c->ReplaceDim(*x, data_format == "NHWC" ? -1 : 1, channels, x);
}

// One bit an element, in whole bytes.
absl::Status MaskShape(InferenceContext* c, ShapeHandle y, ShapeHandle* mask) {
  const DimensionHandle elements = c->NumElements(y);
  *mask = c->Vector(
      c->ValueKnown(elements)
          ? c->MakeDim(c->Value(elements) / 8 + (c->Value(elements) % 8 != 0))
          : c->UnknownDim());
  return absl::OkStatus();
}

absl::Status BatchNormShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckStatisticsType(c));
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  int num_side_inputs;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_side_inputs", &num_side_inputs));
  ShapeHandle y;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(InputAndChannels(c, &y, &channels));
  TF_RETURN_IF_ERROR(MergeChannelVectors(
      c, {"scale", "offset", "mean", "variance"}, &channels));
  TF_RETURN_IF_ERROR(WithChannels(c, channels, &y));
  TF_RETURN_IF_ERROR(MergeShapes(c, "side_input", "x", &y));
  c->set_output(0, y);
  for (int i = 1; i < 5; ++i) c->set_output(i, c->Vector(channels));
  // Switched off the mask's length is left open, as a gradient that is built
  // later may switch it on.
  bool save_mask;
  TF_RETURN_IF_ERROR(c->GetAttr("save_mask", &save_mask));
  ShapeHandle mask = c->Vector(0);
  if (activation.activation == tfo::Activation::kRelu && num_side_inputs == 1) {
    if (save_mask) {
      TF_RETURN_IF_ERROR(MaskShape(c, y, &mask));
    } else {
      mask = c->UnknownShapeOfRank(1);
    }
  }
  c->set_output(5, mask);
  return absl::OkStatus();
}

absl::Status BatchNormGradShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckStatisticsType(c));
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  int num_side_inputs, num_masks;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_side_inputs", &num_side_inputs));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_masks", &num_masks));
  if (num_masks > 0 && activation.activation != tfo::Activation::kRelu) {
    return Invalid("mask is for the activation relu alone");
  }
  if (num_masks > 0 && num_side_inputs > 0) {
    return Invalid("mask takes the place of side_input: give one of the two");
  }
  ShapeHandle x;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(InputAndChannels(c, &x, &channels));
  TF_RETURN_IF_ERROR(MergeChannelVectors(
      c, {"scale", "offset", "saved_mean", "saved_inv_std"}, &channels));
  TF_RETURN_IF_ERROR(WithChannels(c, channels, &x));
  TF_RETURN_IF_ERROR(MergeShapes(c, "dy", "x", &x));
  TF_RETURN_IF_ERROR(MergeShapes(c, "side_input", "x", &x));
  std::vector<ShapeHandle> masks;
  TF_RETURN_IF_ERROR(c->input("mask", &masks));
  for (ShapeHandle mask : masks) {
    ShapeHandle expected;
    TF_RETURN_IF_ERROR(MaskShape(c, x, &expected));
    TF_RETURN_IF_ERROR(RequireRank(c, "mask", 1, 1, &mask));
    TF_RETURN_IF_ERROR(
        MergeNamed(c, "mask", mask, "one bit an element of x", &expected));
  }
  c->set_output(0, x);
  c->set_output(1, c->Vector(channels));
  c->set_output(2, c->Vector(channels));
  return SetSwitchedOutput(c, 3, "side_input_gradient", x);
}

}  // namespace

REGISTER_OP("TfFusedOps>BatchNormAct")
    .Input("x: T")
    .Input("scale: U")
    .Input("offset: U")
    .Input("mean: U")
    .Input("variance: U")
    .Input("side_input: num_side_inputs * T")
    .Output("y: T")
    .Output("new_mean: U")
    .Output("new_variance: U")
    .Output("saved_mean: U")
    .Output("saved_inv_std: U")
    .Output("mask: uint8")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("num_side_inputs: int >= 0 = 0")
    .Attr("epsilon: float = 0.001")
    .Attr("momentum: float = 0.99")
    .Attr("training: bool = true")
    .Attr("unbiased: bool = true")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("save_mask: bool = false")
    .SetShapeFn(BatchNormShape)
    .Doc(R"doc(
Computes y = activation((x - mu) * r * scale + offset + side_input) in one op.

mu and r = 1 / sqrt(variance + epsilon) are those of the batch in training, otherwise of mean and variance.

x: rank 2 to 5; channels are the last dimension for NHWC, dimension 1 for NCHW.
scale: a vector, one value a channel.
offset: a vector, one value a channel.
mean: the moving mean.
variance: the moving variance.
side_input: none, or one tensor of x's shape.
U: double where T is double, otherwise float.
momentum: new = old * momentum + batch * (1 - momentum).
unbiased: the new moving variance takes the batch's with n / (n - 1).
alpha: leaky_relu's slope below zero; the other activations ignore it.
y: has x's shape.
new_mean: the updated moving mean; mean itself unless training.
new_variance: the updated moving variance; variance itself unless training.
saved_mean: mu.
saved_inv_std: r.
mask: one bit an element of y, set where the relu lets it through, where save_mask is set for a relu with a side
  input; otherwise empty.
)doc");

REGISTER_OP("TfFusedOps>BatchNormActGrad")
    .Input("dy: T")
    .Input("x: T")
    .Input("scale: U")
    .Input("offset: U")
    .Input("saved_mean: U")
    .Input("saved_inv_std: U")
    .Input("side_input: num_side_inputs * T")
    .Input("mask: num_masks * uint8")
    .Output("x_grad: T")
    .Output("scale_grad: U")
    .Output("offset_grad: U")
    .Output("side_input_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("num_side_inputs: int >= 0 = 0")
    .Attr("num_masks: int >= 0 = 0")
    .Attr("training: bool = true")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("side_input_gradient: bool = false")
    .SetShapeFn(BatchNormGradShape)
    .Doc(R"doc(
Computes the gradients of BatchNormAct in one op.

dy: the gradient of y.
x: the forward op's x.
scale: the forward op's scale.
offset: the forward op's offset.
saved_mean: the forward op's saved_mean.
saved_inv_std: the forward op's saved_inv_std.
side_input: the forward op's, where it had one and the activation is neither none nor relu.
mask: the forward op's mask, where it had a side input and the activation is relu.
x_grad: the gradient of x.
scale_grad: the gradient of scale.
offset_grad: the gradient of offset.
side_input_grad: the gradient of the pre-activation; empty where side_input_gradient is not set.
)doc");

}  // namespace tf_fused_ops
