// A leaky relu with a learned slope, and its gradients.
#include "cc/ops/prelu.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

absl::Status CheckAlpha(InferenceContext* c, ShapeHandle alpha, ShapeHandle x) {
  if (!c->RankKnown(x) || !c->RankKnown(alpha)) return absl::OkStatus();
  TF_RETURN_IF_ERROR(CheckPreluRank(c->Rank(alpha), c->Rank(x)));
  PreluDimensions dimensions;
  for (int i = 1; i <= c->Rank(alpha); ++i) {
    // Unknown sizes are -1.
    TF_RETURN_IF_ERROR(dimensions.Add(
        c->Rank(x) - i, c->Value(c->Dim(alpha, -i)), c->Value(c->Dim(x, -i))));
  }
  return absl::OkStatus();
}

absl::Status PreluShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckAlpha(c, c->input(1), c->input(0)));
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

absl::Status PreluGradShape(InferenceContext* c) {
  ShapeHandle x = c->input(1);
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", c->input(0), "x", &x));
  TF_RETURN_IF_ERROR(CheckAlpha(c, c->input(2), x));
  c->set_output(0, x);
  c->set_output(1, c->input(2));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>Prelu")
    .Input("x: T")
    .Input("alpha: T")
    .Output("y: T")
    .Attr("T: {half, bfloat16, float, double}")
    .SetShapeFn(PreluShape)
    .Doc(R"doc(
Computes y = x where x > 0, otherwise alpha * x, in one pass.

x: of any shape.
alpha: of x's last dimensions, with ones in front of them or nothing.
y: of x's shape.
)doc");

REGISTER_OP("TfFusedOps>PreluGrad")
    .Input("dy: T")
    .Input("x: T")
    .Input("alpha: T")
    .Output("x_grad: T")
    .Output("alpha_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .SetShapeFn(PreluGradShape)
    .Doc(R"doc(
Computes the gradients of Prelu in one pass.

dy: the gradient of y.
x: the forward op's x.
alpha: the forward op's alpha.
x_grad: the gradient of x; zero where x is zero.
alpha_grad: the gradient of alpha.
)doc");

}  // namespace tf_fused_ops
