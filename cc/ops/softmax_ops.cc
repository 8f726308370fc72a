// Softmax with scale and mask, and its gradient.
#include "cc/ops/broadcast_input.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// Checks the rank of x, which errors call `name`, and beside it the mask, input
// `index` if there is one.
absl::Status CheckMask(InferenceContext* c, const char* name, int index,
                       ShapeHandle* x) {
  int num_masks;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_masks", &num_masks));
  TF_RETURN_IF_ERROR(RequireRank(c, name, 1, kAnyRank, x));
  if (num_masks == 0) return absl::OkStatus();
  return CheckBroadcastShape(c, "mask", c->input(index), name, *x);
}

absl::Status SoftmaxShape(InferenceContext* c) {
  ShapeHandle x = c->input(0);
  TF_RETURN_IF_ERROR(CheckMask(c, "x", 1, &x));
  c->set_output(0, x);
  return absl::OkStatus();
}

absl::Status SoftmaxGradShape(InferenceContext* c) {
  ShapeHandle y = c->input(1);
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", c->input(0), "y", &y));
  TF_RETURN_IF_ERROR(CheckMask(c, "y", 2, &y));
  c->set_output(0, y);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>Softmax")
    .Input("x: T")
    .Input("mask: num_masks * bool")
    .Output("y: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_masks: int >= 0 = 0")
    .Attr("scale: float = 1.0")
    .Attr("masked: float = -3e38")
    .Attr("zero_masked: bool = false")
    .SetShapeFn(SoftmaxShape)
    .Doc(R"doc(
Computes the softmax of z over the last dimension in one op, where z is x * scale if the mask is
true, otherwise `masked`.

x: of rank 1 or more.
mask: of x's last dimension, otherwise broadcast to x's shape; empty for one that is true
  everywhere.
y: of x's shape.
scale: as written in decimals: 0.1 is that also where T is double; so is `masked`.
masked: what z is where the mask is false.
zero_masked: whether y is zero where the mask is false, also in rows where it is false everywhere.
)doc");

REGISTER_OP("TfFusedOps>SoftmaxGrad")
    .Input("dy: T")
    .Input("y: T")
    .Input("mask: num_masks * bool")
    .Output("x_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_masks: int >= 0 = 0")
    .Attr("scale: float = 1.0")
    .Attr("zero_masked: bool = false")
    .SetShapeFn(SoftmaxGradShape)
    .Doc(R"doc(
Computes the gradient of Softmax in one op.

dy: the gradient of y.
y: the forward op's y.
mask: the forward op's mask.
scale: the forward op's scale.
zero_masked: the forward op's zero_masked; dy does not count where the mask is false.
x_grad: the gradient of x, zero where the mask is false.
)doc");

}  // namespace tf_fused_ops
