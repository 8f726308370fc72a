// Quantized weights: as numbers, and a product with them + bias + activation.
#include "cc/ops/weight_only_matmul_attrs.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// That b's dimension `axis` holds as many numbers as `*size`, which is `what`.
absl::Status MergeNumbers(InferenceContext* c, ShapeHandle b, int axis,
                          int packed_axis, const char* what,
                          DimensionHandle* size) {
  const DimensionHandle bytes = c->Dim(b, axis);
  if (axis != packed_axis) return MergeNamed(c, "b", bytes, what, size);
  if (!c->ValueKnown(bytes) || !c->ValueKnown(*size)) return absl::OkStatus();
  const std::int64_t expected = (c->Value(*size) + 1) / 2;
  if (c->Value(bytes) == expected) return absl::OkStatus();
  return Invalid("b has ", c->Value(bytes), " bytes where ", what, " has ",
                 c->Value(*size), ", which takes ", expected);
}

// That there are scales for a depth that is not zero.
absl::Status RequireGroups(InferenceContext* c, ShapeHandle scale, int axis,
                           DimensionHandle depth) {
  const DimensionHandle groups = c->Dim(scale, axis);
  if (!c->ValueKnown(depth) || !c->ValueKnown(groups) || c->Value(groups) > 0 ||
      c->Value(depth) == 0) {
    return absl::OkStatus();
  }
  return Invalid("scale must have a group, got shape ", c->DebugString(scale));
}

absl::Status WeightOnlyMatMulShape(InferenceContext* c) {
  WeightOnlyMatMulAttrs attrs;
  TF_RETURN_IF_ERROR(ReadWeightOnlyMatMulAttrs(c, &attrs));
  ShapeHandle a, b, scale;
  TF_RETURN_IF_ERROR(SingleInput(c, "a", &a));
  TF_RETURN_IF_ERROR(SingleInput(c, "b", 2, &b));
  TF_RETURN_IF_ERROR(SingleInput(c, "scale", 2, &scale));
  TF_RETURN_IF_ERROR(RequireRank(c, "a", 2, kAnyRank, &a));
  TF_RETURN_IF_ERROR(MergeShapes(c, "zero", "scale", &scale));
  const int depth_axis = attrs.layout.transpose_b ? 1 : 0;
  DimensionHandle columns = c->Dim(scale, 1 - depth_axis);
  DimensionHandle depth = c->RankKnown(a) ? c->Dim(a, -1) : c->UnknownDim();
  TF_RETURN_IF_ERROR(
      MergeVectors(c, "group", "the inner dimension of a", &depth));
  TF_RETURN_IF_ERROR(
      MergeVectors(c, "bias", "the output's last dimension", &columns));
  TF_RETURN_IF_ERROR(MergeNumbers(c, b, depth_axis, attrs.layout.PackedAxis(),
                                  "the inner dimension of a", &depth));
  TF_RETURN_IF_ERROR(MergeNumbers(c, b, 1 - depth_axis,
                                  attrs.layout.PackedAxis(),
                                  "the output's last dimension", &columns));
  TF_RETURN_IF_ERROR(RequireGroups(c, scale, depth_axis, depth));
  if (!c->RankKnown(a)) {
    c->set_output(0, c->UnknownShape());
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(c->ReplaceDim(a, -1, columns, &a));
  c->set_output(0, a);
  return absl::OkStatus();
}

absl::Status DequantizedWeightsShape(InferenceContext* c) {
  WeightLayout layout;
  TF_RETURN_IF_ERROR(ReadWeightLayout(c, &layout));
  ShapeHandle b, scale, group;
  TF_RETURN_IF_ERROR(SingleInput(c, "b", 2, &b));
  TF_RETURN_IF_ERROR(SingleInput(c, "scale", 2, &scale));
  TF_RETURN_IF_ERROR(MergeShapes(c, "zero", "scale", &scale));
  const int depth_axis = layout.transpose_b ? 1 : 0;
  TF_RETURN_IF_ERROR(SingleInput(c, "group", 1, &group));
  DimensionHandle depth = c->Dim(group, 0);
  DimensionHandle columns = c->Dim(scale, 1 - depth_axis);
  TF_RETURN_IF_ERROR(
      MergeNumbers(c, b, depth_axis, layout.PackedAxis(), "group", &depth));
  TF_RETURN_IF_ERROR(MergeNumbers(c, b, 1 - depth_axis, layout.PackedAxis(),
                                  "scale", &columns));
  TF_RETURN_IF_ERROR(RequireGroups(c, scale, depth_axis, depth));
  c->set_output(0, layout.transpose_b ? c->Matrix(columns, depth)
                                      : c->Matrix(depth, columns));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>DequantizedWeights")
    .Input("b: Tb")
    .Input("scale: float")
    .Input("zero: num_zero * Tz")
    .Input("group: Tg")
    .Output("w: T")
    .Attr("T: {half, bfloat16, float}")
    .Attr("Tb: {int8, uint8}")
    .Attr("Tz: {int8, uint8, float} = DT_FLOAT")
    .Attr("Tg: {int32, float} = DT_INT32")
    .Attr("num_zero: int >= 0 = 0")
    .Attr("transpose_b: bool = false")
    .Attr("bits: int = 8")
    .Attr("packed_axis: int = 1")
    .SetShapeFn(DequantizedWeightsShape)
    .Doc(R"doc(
The numbers (q - zero) scale that quantized weights stand for, see
WeightOnlyMatMulBiasAct.

b: the integers q: [k, n], or [n, k] where transpose_b is set.
scale: [groups, n], or [n, groups] where transpose_b is set.
zero: none, or one matrix of scale's shape: zeros.
group: [k], from -groups to groups - 1.
bits: 4 or 8.
packed_axis: 0 or 1, of b; with 8 bits it is ignored.
w: [k, n], or [n, k] where transpose_b is set.
)doc");

REGISTER_OP("TfFusedOps>WeightOnlyMatMulBiasAct")
    .Input("a: T")
    .Input("b: Tb")
    .Input("scale: float")
    .Input("zero: num_zero * Tz")
    .Input("group: num_group * Tg")
    .Input("bias: num_bias * T")
    .Output("y: T")
    .Attr("T: {half, bfloat16, float}")
    .Attr("Tb: {int8, uint8}")
    .Attr("Tz: {int8, uint8, float} = DT_FLOAT")
    .Attr("Tg: {int32, float} = DT_INT32")
    .Attr("num_zero: int >= 0 = 0")
    .Attr("num_group: int >= 0 = 0")
    .Attr("num_bias: int >= 0 = 0")
    .Attr("transpose_b: bool = false")
    .Attr("bits: int = 8")
    .Attr("packed_axis: int = 1")
    .Attr(ActivationAttr())
    .Attr("alpha: float = 0.2")
    .SetShapeFn(WeightOnlyMatMulShape)
    .Doc(R"doc(
Computes y = activation(a w + bias) in one pass, with w[i, j] = (q[i, j] -
zero[g, j]) scale[g, j], g = group[i].

a: [..., m, k].
b: the integers q: [k, n], or [n, k] where transpose_b is set. With bits = 4 a
  byte has two that follow each other along packed_axis, the first in its lower
  bits, with a sign where b has one; the last byte may be half empty.
scale: [groups, n], or [n, groups] where transpose_b is set.
zero: none, or one matrix of scale's shape: zeros.
group: none, or one vector of length k, from -groups to groups - 1, negative
  ones from the last group backwards, floats cut off: parts of k, one after the
  other, of ceil(k / groups) each.
bias: none, or one vector of length n.
bits: 4 or 8.
packed_axis: 0 or 1, of b; with 8 bits it is ignored.
alpha: leaky_relu's slope below zero; the other activations ignore it.
y: [..., m, n].
)doc");

}  // namespace tf_fused_ops
