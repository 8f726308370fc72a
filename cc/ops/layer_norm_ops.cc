// Layer normalization and its gradient.
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// Merges the vectors, one element for each of x's last dimension, into x, which
// is set from `input`, and sets the shape of the statistics.
absl::Status MergeRows(InferenceContext* c, ShapeHandle input,
                       std::initializer_list<const char*> vectors,
                       ShapeHandle* x, ShapeHandle* statistics) {
  *x = input;
  TF_RETURN_IF_ERROR(CheckStatisticsType(c));
  TF_RETURN_IF_ERROR(RequireRank(c, "x", 1, kAnyRank, x));
  DimensionHandle depth = c->Dim(*x, -1);
  for (const char* vector : vectors)
    TF_RETURN_IF_ERROR(
        MergeVectors(c, vector, "the last dimension of x", &depth));
  *statistics = c->UnknownShape();
  if (!c->RankKnown(*x)) return absl::OkStatus();
  TF_RETURN_IF_ERROR(c->ReplaceDim(*x, -1, depth, x));
  return c->Subshape(*x, 0, -1, statistics);
}

absl::Status LayerNormShape(InferenceContext* c) {
  ShapeHandle x, statistics;
  TF_RETURN_IF_ERROR(
      MergeRows(c, c->input(0), {"scale", "offset"}, &x, &statistics));
  c->set_output(0, x);
  c->set_output(1, statistics);
  c->set_output(2, statistics);
  return absl::OkStatus();
}

absl::Status LayerNormGradShape(InferenceContext* c) {
  ShapeHandle dy = c->input(0), x, statistics;
  TF_RETURN_IF_ERROR(MergeRows(c, c->input(1), {"scale"}, &x, &statistics));
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", dy, "x", &x));
  for (const auto& [name, index] : {std::pair("mean", 3), {"inv_std", 4}})
    TF_RETURN_IF_ERROR(MergeNamed(c, name, c->input(index),
                                  "x without its last dimension", &statistics));
  const DimensionHandle depth =
      c->RankKnown(x) ? c->Dim(x, -1) : c->UnknownDim();
  c->set_output(0, x);
  c->set_output(1, c->Vector(depth));
  c->set_output(2, c->Vector(depth));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>LayerNorm")
    .Input("x: T")
    .Input("scale: U")
    .Input("offset: U")
    .Output("y: T")
    .Output("mean: U")
    .Output("inv_std: U")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("epsilon: float = 0.001")
    .Attr("subtract_mean: bool = true")
    .SetShapeFn(LayerNormShape)
    .Doc(R"doc(
Computes y = (x - mu) * r * scale + offset in one op.

mu and r = 1 / sqrt(variance + epsilon) are those of x's last dimension; where
subtract_mean is not set, mu is zero, and the variance is the mean of squares
(RMS normalization).

x: of rank 1 or more.
scale: a vector, one value for each of x's last dimension.
offset: a vector, one value for each of x's last dimension.
U: double where T is double, otherwise float.
epsilon: as written in decimals: 0.001 is that also where T is double.
y: has x's shape.
mean: mu, of x's shape without its last dimension.
inv_std: r, of x's shape without its last dimension.
)doc");

REGISTER_OP("TfFusedOps>LayerNormGrad")
    .Input("dy: T")
    .Input("x: T")
    .Input("scale: U")
    .Input("mean: U")
    .Input("inv_std: U")
    .Output("x_grad: T")
    .Output("scale_grad: U")
    .Output("offset_grad: U")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("subtract_mean: bool = true")
    .SetShapeFn(LayerNormGradShape)
    .Doc(R"doc(
Computes the gradients of LayerNorm in one op.

dy: the gradient of y.
x: the forward op's x.
scale: the forward op's scale.
mean: the forward op's mean.
inv_std: the forward op's inv_std.
subtract_mean: as the forward op's.
x_grad: the gradient of x.
scale_grad: the gradient of scale.
offset_grad: the gradient of offset.
)doc");

}  // namespace tf_fused_ops
