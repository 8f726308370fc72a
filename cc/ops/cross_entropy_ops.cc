// Cross entropy with the softmax of logits, and its gradient.
#include <initializer_list>
#include <utility>

#include "cc/ops/cross_entropy.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

using NamedInputs = std::initializer_list<std::pair<const char*, int>>;

absl::Status MergeRows(InferenceContext* c, NamedInputs of, ShapeHandle* rows) {
  for (const auto& [name, index] : of) {
    TF_RETURN_IF_ERROR(
        MergeNamed(c, name, c->input(index), "the rows of logits", rows));
  }
  return absl::OkStatus();
}

// The shape of the rows of logits, from labels and whatever else has a number
// for each row.
absl::Status RowsShape(InferenceContext* c, ShapeHandle* logits, NamedInputs of,
                       ShapeHandle* rows) {
  TF_RETURN_IF_ERROR(CheckStatisticsType(c, "largest", "logits"));
  TF_RETURN_IF_ERROR(RequireRank(c, "logits", 1, kAnyRank, logits));
  if (c->RankKnown(*logits) && c->Value(c->Dim(*logits, -1)) == 0)
    return NoClass();
  TF_RETURN_IF_ERROR(c->Subshape(*logits, 0, -1, rows));
  return MergeRows(c, of, rows);
}

absl::Status SparseShape(InferenceContext* c) {
  ShapeHandle logits = c->input(0), rows;
  TF_RETURN_IF_ERROR(RowsShape(c, &logits, {{"labels", 1}}, &rows));
  for (int i = 0; i < 3; ++i) c->set_output(i, rows);
  return absl::OkStatus();
}

absl::Status SparseGradShape(InferenceContext* c) {
  ShapeHandle logits = c->input(1), rows;
  TF_RETURN_IF_ERROR(RowsShape(
      c, &logits,
      {{"dloss", 0}, {"labels", 2}, {"largest", 3}, {"inverse_sum", 4}},
      &rows));
  c->set_output(0, logits);
  return absl::OkStatus();
}

// The number of rows of two matrices, of which one may have a single row.
bool BroadcastRows(InferenceContext* c, DimensionHandle a, DimensionHandle b,
                   DimensionHandle* rows) {
  if (c->Value(b) == 1) std::swap(a, b);
  if (c->Value(a) == 1) {
    *rows = b;
    return true;
  }
  if (c->ValueKnown(a) == c->ValueKnown(b)) {
    if (c->ValueKnown(a)) return c->Merge(a, b, rows).ok();
    // Either may be one, unless they are the same.
    *rows = a.SameHandle(b) ? a : c->UnknownDim();
    return true;
  }
  *rows = c->ValueKnown(a) ? a : b;
  return true;
}

// The shape that logits and labels, a number for each class, have together.
bool BroadcastShape(InferenceContext* c, ShapeHandle logits, ShapeHandle labels,
                    ShapeHandle* shape) {
  if (c->RankKnown(labels) && !c->RankKnown(logits)) std::swap(logits, labels);
  if (c->RankKnown(logits) &&
      !c->WithRank(labels, c->Rank(logits), &labels).ok())
    return false;
  if (!c->RankKnown(logits) || c->Rank(logits) != 2)
    return c->Merge(logits, labels, shape).ok();
  DimensionHandle rows, classes;
  if (!c->Merge(c->Dim(logits, 1), c->Dim(labels, 1), &classes).ok() ||
      !BroadcastRows(c, c->Dim(logits, 0), c->Dim(labels, 0), &rows))
    return false;
  *shape = c->Matrix(rows, classes);
  return true;
}

// That shape, and that of its rows, from whatever else has a number for each.
absl::Status DenseShapes(InferenceContext* c, int logits_index,
                         int labels_index, NamedInputs of, ShapeHandle* shape,
                         ShapeHandle* rows) {
  TF_RETURN_IF_ERROR(CheckStatisticsType(c, "largest", "logits"));
  ShapeHandle logits = c->input(logits_index);
  const ShapeHandle labels = c->input(labels_index);
  TF_RETURN_IF_ERROR(RequireRank(c, "logits", 1, kAnyRank, &logits));
  if (!BroadcastShape(c, logits, labels, shape))
    return LabelsMisfit(c->DebugString(logits), c->DebugString(labels));
  TF_RETURN_IF_ERROR(RequireRank(c, "labels", 1, kAnyRank, shape));
  TF_RETURN_IF_ERROR(c->Subshape(*shape, 0, -1, rows));
  return MergeRows(c, of, rows);
}

absl::Status DenseShape(InferenceContext* c) {
  ShapeHandle shape, rows;
  TF_RETURN_IF_ERROR(DenseShapes(c, 0, 1, {}, &shape, &rows));
  for (int i = 0; i < 3; ++i) c->set_output(i, rows);
  return absl::OkStatus();
}

absl::Status DenseGradShape(InferenceContext* c) {
  ShapeHandle shape, rows;
  TF_RETURN_IF_ERROR(
      DenseShapes(c, 1, 2, {{"dloss", 0}, {"largest", 3}, {"inverse_sum", 4}},
                  &shape, &rows));
  c->set_output(0, shape);
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
    .SetShapeFn(SparseShape)
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
    .SetShapeFn(SparseGradShape)
    .Doc(R"doc(
Computes the gradient of SparseSoftmaxCrossEntropy in one pass.

dloss: the gradient of loss.
logits: the forward op's logits.
labels: the forward op's labels.
largest: the forward op's largest.
inverse_sum: the forward op's inverse_sum.
logits_grad: the gradient of logits.
)doc");

REGISTER_OP("TfFusedOps>SoftmaxCrossEntropy")
    .Input("logits: T")
    .Input("labels: T")
    .Output("loss: T")
    .Output("largest: U")
    .Output("inverse_sum: U")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double} = DT_FLOAT")
    .SetShapeFn(DenseShape)
    .Doc(R"doc(
Computes the sum of labels * (log(sum of e^logits) - logits) over the last dimension in one pass.

logits: [..., classes].
labels: [..., classes], of logits' shape. Of matrices, either may have one row, which stands for all.
loss: [...].
largest: [...], the largest logit that is a number.
inverse_sum: [...], 1 / the sum of e^(logits - largest).
U: double where T is double, otherwise float.
)doc");

REGISTER_OP("TfFusedOps>SoftmaxCrossEntropyGrad")
    .Input("dloss: T")
    .Input("logits: T")
    .Input("labels: T")
    .Input("largest: U")
    .Input("inverse_sum: U")
    .Output("logits_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .SetShapeFn(DenseGradShape)
    .Doc(R"doc(
Computes the gradient of SoftmaxCrossEntropy, of labels that add up to one, in one pass.

dloss: the gradient of loss.
logits: the forward op's logits.
labels: the forward op's labels.
largest: the forward op's largest.
inverse_sum: the forward op's inverse_sum.
logits_grad: (softmax(logits) - labels) * dloss, of as many rows as loss has numbers.
)doc");

}  // namespace tf_fused_ops
