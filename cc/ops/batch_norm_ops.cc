// Batch normalization (+ side input) + activation, and its gradient.
#include "cc/ops/batch_norm_shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

absl::Status BatchNormShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckStatisticsType(c));
  ShapeHandle y;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(InputAndChannels(c, &y, &channels));
  TF_RETURN_IF_ERROR(MergeChannelVectors(
      c, {"scale", "offset", "mean", "variance"}, &channels));
  TF_RETURN_IF_ERROR(CheckMomentsCount(c));
  std::vector<ShapeHandle> moments;
  TF_RETURN_IF_ERROR(c->input("moments", &moments));
  for (ShapeHandle rows : moments)
    TF_RETURN_IF_ERROR(MergeThreeRows(c, "moments", 2, rows, &channels));
  return SetForwardOutputs(c, y, channels);
}

absl::Status BatchNormGradShape(InferenceContext* c) {
  ShapeHandle x;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(MergeGradientInputs(c, &x, &channels));
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
    .Input("moments: num_moments * double")
    .Output("y: T")
    .Output("new_mean: U")
    .Output("new_variance: U")
    .Output("saved_mean: U")
    .Output("saved_inv_std: U")
    .Output("mask: uint8")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("num_side_inputs: int >= 0 = 0")
    .Attr("num_moments: int >= 0 = 0")
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
moments: none, or BatchNormMoments of x where they are known already; in training alone. The gradient of x takes them
  for a function of x.
U: double where T is double, otherwise float.
epsilon: as written in decimals: 0.001 is that also where T is double; so is momentum.
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
