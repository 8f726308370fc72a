// Matrix product with weights of 8 bits + bias + activation.
#include "cc/ops/quantized_matmul_attrs.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

absl::Status QuantizedMatMulShape(InferenceContext* c) {
  QuantizedMatMulAttrs attrs;
  TF_RETURN_IF_ERROR(ReadQuantizedMatMulAttrs(c, &attrs));
  ShapeHandle a, b;
  TF_RETURN_IF_ERROR(SingleInput(c, "a", &a));
  TF_RETURN_IF_ERROR(SingleInput(c, "b", 2, &b));
  TF_RETURN_IF_ERROR(RequireRank(c, "a", 2, kAnyRank, &a));
  DimensionHandle columns = c->Dim(b, attrs.transpose_b ? 0 : 1);
  DimensionHandle inner = c->Dim(b, attrs.transpose_b ? 1 : 0);
  TF_RETURN_IF_ERROR(
      MergeVectors(c, "b_scale", "the output's last dimension", &columns));
  TF_RETURN_IF_ERROR(
      MergeVectors(c, "bias", "the output's last dimension", &columns));
  if (!c->RankKnown(a)) {
    c->set_output(0, c->UnknownShape());
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(
      MergeNamed(c, "a", c->Dim(a, -1), "the inner dimension of b", &inner));
  TF_RETURN_IF_ERROR(c->ReplaceDim(a, -1, columns, &a));
  c->set_output(0, a);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>QuantizedMatMulBiasAct")
    .Input("a: T")
    .Input("b: int8")
    .Input("b_scale: float")
    .Input("bias: num_bias * T")
    .Output("y: T")
    .Attr("T: {half, bfloat16, float}")
    .Attr("num_bias: int >= 0 = 0")
    .Attr("transpose_b: bool = false")
    .Attr("epsilon: float = 1e-7")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .Attr("straight_through: bool = true")
    .SetShapeFn(QuantizedMatMulShape)
    .Doc(R"doc(
Computes y = activation(a_q b / (a_scale b_scale) + bias) in one pass.

Every row of a is quantized: with a_scale = 127 / (its largest magnitude +
epsilon), a_q = round(a a_scale), the even number of two that are as near.
Products are summed up as 32-bit integers, without rounding.

a: [..., m, k].
b: [k, n], or [n, k] where transpose_b is set: a column of numbers times its
  scale, rounded.
b_scale: [n].
bias: none, or one vector of length n.
epsilon: at least 0; more where rows of zeros may come.
alpha: leaky_relu's slope below zero; the other activations ignore it.
straight_through: whether the gradient of a is that of the product with
  b / b_scale; otherwise that of rounding is zero.
y: [..., m, n].
)doc");

}  // namespace tf_fused_ops
