// Matrix product + bias (+ side input) + activation, and its gradient.
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// The output's shape, all that is known of it.
absl::Status MatMulOutputShape(InferenceContext* c, ShapeHandle* a,
                               ShapeHandle* b, ShapeHandle* y) {
  bool transpose_a, transpose_b;
  TF_RETURN_IF_ERROR(c->GetAttr("transpose_a", &transpose_a));
  TF_RETURN_IF_ERROR(c->GetAttr("transpose_b", &transpose_b));
  TF_RETURN_IF_ERROR(SingleInput(c, "a", a));
  TF_RETURN_IF_ERROR(SingleInput(c, "b", 2, b));
  TF_RETURN_IF_ERROR(RequireRank(c, "a", 2, kAnyRank, a));
  const DimensionHandle columns = c->Dim(*b, transpose_b ? 0 : 1);
  DimensionHandle inner = c->Dim(*b, transpose_b ? 1 : 0);
  if (!c->RankKnown(*a)) {
    *y = c->UnknownShape();
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(MergeNamed(c, "a", c->Dim(*a, transpose_a ? -2 : -1),
                                "the inner dimension of b", &inner));
  ShapeHandle batch;
  TF_RETURN_IF_ERROR(c->Subshape(*a, 0, -2, &batch));
  return c->Concatenate(
      batch, c->Matrix(c->Dim(*a, transpose_a ? -1 : -2), columns), y);
}

// The last dimension of b as the product takes it: the length of bias.
absl::Status Columns(InferenceContext* c, ShapeHandle b,
                     DimensionHandle* columns) {
  bool transpose_b;
  TF_RETURN_IF_ERROR(c->GetAttr("transpose_b", &transpose_b));
  *columns = c->Dim(b, transpose_b ? 0 : 1);
  return absl::OkStatus();
}

absl::Status MatMulShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  int num_bias, num_side_inputs;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_bias", &num_bias));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_side_inputs", &num_side_inputs));
  ShapeHandle a, b, y;
  TF_RETURN_IF_ERROR(MatMulOutputShape(c, &a, &b, &y));
  DimensionHandle columns;
  TF_RETURN_IF_ERROR(Columns(c, b, &columns));
  TF_RETURN_IF_ERROR(
      MergeVectors(c, "bias", "the output's last dimension", &columns));
  if (c->RankKnown(y)) TF_RETURN_IF_ERROR(c->ReplaceDim(y, -1, columns, &y));
  TF_RETURN_IF_ERROR(MergeShapes(c, "side_input", "the output", &y));
  c->set_output(0, y);
  return SetPreActivationOutput(c, 1, y);
}

absl::Status MatMulGradShape(InferenceContext* c) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  TF_RETURN_IF_ERROR(CheckSavedCount(c, activation));
  ShapeHandle dy, a, b, y;
  TF_RETURN_IF_ERROR(MatMulOutputShape(c, &a, &b, &y));
  TF_RETURN_IF_ERROR(SingleInput(c, "dy", &dy));
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", dy, "the product", &y));
  TF_RETURN_IF_ERROR(MergeShapes(c, "saved", "dy", &y));
  DimensionHandle columns;
  TF_RETURN_IF_ERROR(Columns(c, b, &columns));
  TF_RETURN_IF_ERROR(SetSwitchedOutput(c, 0, "a_gradient", a));
  TF_RETURN_IF_ERROR(SetSwitchedOutput(c, 1, "b_gradient", b));
  TF_RETURN_IF_ERROR(
      SetSwitchedOutput(c, 2, "bias_gradient", c->Vector(columns)));
  return SetSwitchedOutput(c, 3, "side_input_gradient", y);
}

}  // namespace

REGISTER_OP("TfFusedOps>MatMulBiasAct")
    .Input("a: T")
    .Input("b: T")
    .Input("bias: num_bias * T")
    .Input("side_input: num_side_inputs * T")
    .Output("y: T")
    .Output("pre_activation: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_bias: int >= 0 = 0")
    .Attr("num_side_inputs: int >= 0 = 0")
    .Attr("transpose_a: bool = false")
    .Attr("transpose_b: bool = false")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("save_pre_activation: bool = false")
    .Attr("constant_b: bool = false")
    .SetShapeFn(MatMulShape)
    .Doc(R"doc(
Computes y = activation(a b + bias + side_input) in one pass.

a: [..., m, k], or [..., k, m] where transpose_a is set.
b: [k, n], or [n, k] where transpose_b is set.
bias: none, or one vector of length n.
side_input: none, or one tensor of y's shape.
alpha: leaky_relu's slope below zero; the other activations ignore it.
constant_b: b is the same tensor in every call, so that it pays to keep what is made of it.
y: [..., m, n].
pre_activation: the activation's argument, of y's shape, where save_pre_activation is set; otherwise empty.
)doc");

REGISTER_OP("TfFusedOps>MatMulBiasActGrad")
    .Input("dy: T")
    .Input("a: T")
    .Input("b: T")
    .Input("saved: num_saved * T")
    .Output("a_grad: T")
    .Output("b_grad: T")
    .Output("bias_grad: T")
    .Output("side_input_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_saved: int >= 0 = 0")
    .Attr("transpose_a: bool = false")
    .Attr("transpose_b: bool = false")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("a_gradient: bool = true")
    .Attr("b_gradient: bool = true")
    .Attr("bias_gradient: bool = true")
    .Attr("side_input_gradient: bool = true")
    .SetShapeFn(MatMulGradShape)
    .Doc(R"doc(
Computes the gradients of MatMulBiasAct in one op.

dy: the gradient of y.
a: the forward op's a.
b: the forward op's b.
saved: none for the activation none; y for relu, relu6, elu, selu, leaky_relu with alpha >= 0,
  sigmoid and tanh; the pre-activation for all others.
a_grad: the gradient of a; empty where a_gradient is not set.
b_grad: the gradient of b; empty where b_gradient is not set.
bias_grad: the gradient of bias; empty where bias_gradient is not set.
side_input_grad: the gradient of the pre-activation; empty where side_input_gradient is not set.
)doc");

}  // namespace tf_fused_ops
