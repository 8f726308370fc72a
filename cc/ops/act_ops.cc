// An activation on its own, and its gradient.
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

absl::Status ActShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

absl::Status ActGradShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  ShapeHandle shape = c->input(1);
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", c->input(0), "saved", &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>Act")
    .Input("x: T")
    .Output("y: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .SetShapeFn(ActShape)
    .Doc(R"doc(
Computes y = activation(x) in one pass.

x: of any shape.
alpha: leaky_relu's slope below zero; the other activations ignore it.
y: of x's shape.
)doc");

REGISTER_OP("TfFusedOps>ActGrad")
    .Input("dy: T")
    .Input("saved: T")
    .Output("x_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .SetShapeFn(ActGradShape)
    .Doc(R"doc(
Computes the gradient of Act in one pass.

dy: the gradient of y.
saved: y for relu, relu6, elu, selu, leaky_relu with alpha >= 0, sigmoid and tanh; x for all others.
x_grad: the gradient of x.
)doc");

}  // namespace tf_fused_ops
