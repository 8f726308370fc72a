// Cross entropy with the softmax of logits, and its gradient.
#include "cc/ops/cross_entropy.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// The shape of the rows of logits, from labels and whatever else has a number
// for each row.
absl::Status RowsShape(InferenceContext* c, ShapeHandle* logits,
                       std::initializer_list<std::pair<const char*, int>> of,
                       ShapeHandle* rows) {
  TF_RETURN_IF_ERROR(CheckStatisticsType(c, "largest", "logits"));
  TF_RETURN_IF_ERROR(RequireRank(c, "logits", 1, kAnyRank, logits));
  if (c->RankKnown(*logits) && c->Value(c->Dim(*logits, -1)) == 0)
    return NoClass();
  TF_RETURN_IF_ERROR(c->Subshape(*logits, 0, -1, rows));
  for (const auto& [name, index] : of) {
    TF_RETURN_IF_ERROR(
        MergeNamed(c, name, c->input(index), "the rows of logits", rows));
  }
  return absl::OkStatus();
}

absl::Status CrossEntropyShape(InferenceContext* c) {
  ShapeHandle logits = c->input(0), rows;
  TF_RETURN_IF_ERROR(RowsShape(c, &logits, {{"labels", 1}}, &rows));
  for (int i = 0; i < 3; ++i) c->set_output(i, rows);
  return absl::OkStatus();
}

absl::Status CrossEntropyGradShape(InferenceContext* c) {
  ShapeHandle logits = c->input(1), rows;
  TF_RETURN_IF_ERROR(RowsShape(
      c, &logits,
      {{"dloss", 0}, {"labels", 2}, {"largest", 3}, {"inverse_sum", 4}},
      &rows));
  c->set_output(0, logits);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>SparseSoftmaxCrossEntropy")
    .Input("logits: T")
    .Input("labels: Tlabels")
    .Output("loss: T")
    .Output("largest: U")
    .Output("inverse_sum: U")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tlabels: {int32, int64} = DT_INT64")
    .Attr("U: {float, double} = DT_FLOAT")
    .SetShapeFn(CrossEntropyShape)
    .Doc(R"doc(
Computes log(sum of e^logits) - logits[label] over the last dimension in one pass.

logits: [..., classes].
labels: [...], numbers of classes.
loss: [...].
largest: [...], the largest logit that is a number.
inverse_sum: [...], 1 / the sum of e^(logits - largest).
U: double where T is double, otherwise float.
)doc");

REGISTER_OP("TfFusedOps>SparseSoftmaxCrossEntropyGrad")
    .Input("dloss: T")
    .Input("logits: T")
    .Input("labels: Tlabels")
    .Input("largest: U")
    .Input("inverse_sum: U")
    .Output("logits_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tlabels: {int32, int64} = DT_INT64")
    .Attr("U: {float, double}")
    .SetShapeFn(CrossEntropyGradShape)
    .Doc(R"doc(
Computes the gradient of SparseSoftmaxCrossEntropy in one pass.

dloss: the gradient of loss.
logits: the forward op's logits.
labels: the forward op's labels.
largest: the forward op's largest.
inverse_sum: the forward op's inverse_sum.
logits_grad: the gradient of logits.
)doc");

}  // namespace tf_fused_ops
