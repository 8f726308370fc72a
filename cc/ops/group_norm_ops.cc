// Group normalization + activation, and its gradient.
#include "cc/ops/batch_norm_shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// Merges the vectors into the channels of x, and sets the shape of the
// statistics.
absl::Status MergeGroups(InferenceContext* c,
                         std::initializer_list<const char*> vectors,
                         ShapeHandle* x, DimensionHandle* channels,
                         ShapeHandle* statistics) {
  TF_RETURN_IF_ERROR(CheckStatisticsType(c));
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  TF_RETURN_IF_ERROR(InputAndChannels(c, x, channels));
  TF_RETURN_IF_ERROR(MergeChannelVectors(c, vectors, channels));
  TF_RETURN_IF_ERROR(WithChannels(c, *channels, x));
  int groups;
  TF_RETURN_IF_ERROR(c->GetAttr("groups", &groups));
  if (c->ValueKnown(*channels))
    TF_RETURN_IF_ERROR(CheckGroups(groups, c->Value(*channels)));
  *statistics = c->Matrix(c->Dim(*x, 0), groups);
  return absl::OkStatus();
}

absl::Status GroupNormShape(InferenceContext* c) {
  ShapeHandle x, statistics;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(
      MergeGroups(c, {"scale", "offset"}, &x, &channels, &statistics));
  c->set_output(0, x);
  c->set_output(1, statistics);
  c->set_output(2, statistics);
  return absl::OkStatus();
}

absl::Status GroupNormGradShape(InferenceContext* c) {
  ShapeHandle x, statistics;
  DimensionHandle channels;
  TF_RETURN_IF_ERROR(
      MergeGroups(c, {"scale", "offset"}, &x, &channels, &statistics));
  TF_RETURN_IF_ERROR(MergeShapes(c, "dy", "x", &x));
  for (const char* name : {"mean", "inv_std"})
    TF_RETURN_IF_ERROR(MergeShapes(c, name, "images and groups", &statistics));
  c->set_output(0, x);
  c->set_output(1, c->Vector(channels));
  c->set_output(2, c->Vector(channels));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>GroupNormAct")
    .Input("x: T")
    .Input("scale: U")
    .Input("offset: U")
    .Output("y: T")
    .Output("mean: U")
    .Output("inv_std: U")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("groups: int >= 1")
    .Attr("epsilon: float = 0.001")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .SetShapeFn(GroupNormShape)
    .Doc(R"doc(
Computes y = activation((x - mu) * r * scale + offset) in one op.

mu and r = 1 / sqrt(variance + epsilon) are those of an image's group of neighbouring channels.

x: rank 2 to 5; images are dimension 0, channels are the last dimension for NHWC, dimension 1 for NCHW.
scale: a vector, one value a channel.
offset: a vector, one value a channel.
U: double where T is double, otherwise float.
groups: divides the channels; as many as channels for instance normalization.
epsilon: as written in decimals: 0.001 is that also where T is double.
alpha: leaky_relu's slope below zero; the other activations ignore it.
y: has x's shape.
mean: mu, [images, groups].
inv_std: r, [images, groups].
)doc");

REGISTER_OP("TfFusedOps>GroupNormActGrad")
    .Input("dy: T")
    .Input("x: T")
    .Input("scale: U")
    .Input("offset: U")
    .Input("mean: U")
    .Input("inv_std: U")
    .Output("x_grad: T")
    .Output("scale_grad: U")
    .Output("offset_grad: U")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("groups: int >= 1")
    .Attr("data_format: {'NHWC', 'NCHW'} = 'NHWC'")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .SetShapeFn(GroupNormGradShape)
    .Doc(R"doc(
Computes the gradients of GroupNormAct in one op.

dy: the gradient of y.
x: the forward op's x.
scale: the forward op's scale.
offset: the forward op's offset.
mean: the forward op's mean.
inv_std: the forward op's inv_std.
groups: as the forward op's; so are data_format, activation and alpha.
x_grad: the gradient of x.
scale_grad: the gradient of scale.
offset_grad: the gradient of offset.
)doc");

}  // namespace tf_fused_ops
