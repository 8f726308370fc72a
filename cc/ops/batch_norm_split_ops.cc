// Batch normalization (+ side input) + activation in the two phases between
// which replicas exchange their statistics, forward and backward.
#include "cc/ops/batch_norm_shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

absl::Status MomentsShape(InferenceContext* c) {
  ShapeHandle x;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(InputAndChannels(c, &x, &channels));
  c->set_output(0, c->Matrix(3, channels));
  return absl::OkStatus();
}

absl::Status ApplyShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckStatisticsType(c));
  ShapeHandle y;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(InputAndChannels(c, &y, &channels));
  TF_RETURN_IF_ERROR(MergeChannelVectors(
      c, {"scale", "offset", "mean", "variance"}, &channels));
  ShapeHandle moments;
  TF_RETURN_IF_ERROR(SingleInput(c, "moments", &moments));
  TF_RETURN_IF_ERROR(MergeThreeRows(c, "moments", 3, moments, &channels));
  return SetForwardOutputs(c, y, channels);
}

absl::Status GradSumsShape(InferenceContext* c) {
  ShapeHandle x;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(MergeGradientInputs(c, &x, &channels));
  c->set_output(0, c->Matrix(3, channels));
  c->set_output(1, c->Vector(channels));
  c->set_output(2, c->Vector(channels));
  return absl::OkStatus();
}

absl::Status GradApplyShape(InferenceContext* c) {
  ShapeHandle x;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(MergeGradientInputs(c, &x, &channels));
  ShapeHandle sums;
  TF_RETURN_IF_ERROR(SingleInput(c, "sums", &sums));
  TF_RETURN_IF_ERROR(MergeThreeRows(c, "sums", 2, sums, &channels));
  TF_RETURN_IF_ERROR(WithChannels(c, channels, &x));
  c->set_output(0, x);
  return SetSwitchedOutput(c, 1, "side_input_gradient", x);
}

}  // namespace

REGISTER_OP("TfFusedOps>BatchNormMoments")
    .Input("x: T")
    .Output("moments: double")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .SetShapeFn(MomentsShape)
    .Doc(R"doc(
Computes count, mean and sum of squared deviations of every channel.

x: rank 2 to 5; channels are the last dimension for NHWC, dimension 1 for NCHW.
moments: [3, channels]: the number of elements a channel, their mean, the sum of their squared deviations from it.
)doc");

REGISTER_OP("TfFusedOps>BatchNormApply")
    .Input("x: T")
    .Input("scale: U")
    .Input("offset: U")
    .Input("mean: U")
    .Input("variance: U")
    .Input("moments: double")
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
    .Attr("unbiased: bool = true")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("save_mask: bool = false")
    .SetShapeFn(ApplyShape)
    .Doc(R"doc(
Computes y = activation((x - mu) * r * scale + offset + side_input) with the statistics of several replicas.

mu and r = 1 / sqrt(variance + epsilon) are those of all elements of all replicas, by Chan's combination of their
moments in the order given. Arguments and outputs are those of BatchNormAct in training, but

moments: [num_replicas, 3, channels], BatchNormMoments of every replica.
)doc");

REGISTER_OP("TfFusedOps>BatchNormGradSums")
    .Input("dy: T")
    .Input("x: T")
    .Input("scale: U")
    .Input("offset: U")
    .Input("saved_mean: U")
    .Input("saved_inv_std: U")
    .Input("side_input: num_side_inputs * T")
    .Input("mask: num_masks * uint8")
    .Output("sums: double")
    .Output("scale_grad: U")
    .Output("offset_grad: U")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("num_side_inputs: int >= 0 = 0")
    .Attr("num_masks: int >= 0 = 0")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .SetShapeFn(GradSumsShape)
    .Doc(R"doc(
Computes what replicas add up for the gradient of BatchNormApply.

The inputs are those of BatchNormActGrad. With dz the gradient of the pre-activation:

sums: [3, channels]: the number of elements a channel, the sum of dz, the sum of dz * (x - saved_mean).
scale_grad: the gradient of scale through this replica's y.
offset_grad: the gradient of offset through this replica's y.
)doc");

REGISTER_OP("TfFusedOps>BatchNormGradApply")
    .Input("dy: T")
    .Input("x: T")
    .Input("scale: U")
    .Input("offset: U")
    .Input("saved_mean: U")
    .Input("saved_inv_std: U")
    .Input("sums: double")
    .Input("side_input: num_side_inputs * T")
    .Input("mask: num_masks * uint8")
    .Output("x_grad: T")
    .Output("side_input_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("num_side_inputs: int >= 0 = 0")
    .Attr("num_masks: int >= 0 = 0")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("side_input_gradient: bool = false")
    .SetShapeFn(GradApplyShape)
    .Doc(R"doc(
Computes the gradient of x through the y of all replicas.

The inputs are those of BatchNormActGrad, and

sums: [3, channels], BatchNormGradSums added up over all replicas.
x_grad: the gradient of x.
side_input_grad: the gradient of the pre-activation; empty where side_input_gradient is not set.
)doc");

}  // namespace tf_fused_ops
