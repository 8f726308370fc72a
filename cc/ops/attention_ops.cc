// Attention and its gradient.
#include "cc/ops/attention_attrs.h"
#include "cc/ops/broadcast_input.h"
#include "cc/ops/cache_slots.h"
#include "cc/ops/dropout.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// The shapes of y, of the scores and of what is kept of their rows, from those
// of q, k, v and, if there are any, the mask and the bias, of which `optional`
// is the first. Heads may share a head of the keys if these are `grouped`.
absl::Status AttentionShapes(InferenceContext* c, ShapeHandle q, ShapeHandle k,
                             ShapeHandle v, int optional, bool grouped,
                             ShapeHandle* y, ShapeHandle* scores,
                             ShapeHandle* rows) {
  bool heads_first;
  int num_masks, num_bias, num_rng;
  TF_RETURN_IF_ERROR(c->GetAttr("heads_first", &heads_first));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_masks", &num_masks));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_bias", &num_bias));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_rng", &num_rng));
  if (num_rng > 0)
    TF_RETURN_IF_ERROR(CheckRandomShapes(c, c->num_inputs() - 2));
  TF_RETURN_IF_ERROR(CheckStatisticsType(c, "largest", "a query"));
  *y = *scores = *rows = c->UnknownShape();
  for (auto [name, x] : {std::pair("query", &q), {"key", &k}, {"value", &v}}) {
    TF_RETURN_IF_ERROR(RequireRank(c, name, heads_first ? 2 : 4,
                                   heads_first ? kAnyRank : 4, x));
    if (!c->RankKnown(*x)) return absl::OkStatus();
  }
  const int rank = c->Rank(q), sequence = heads_first ? rank - 2 : 1;
  TF_RETURN_IF_ERROR(RequireRank(c, "key", rank, rank, &k));
  TF_RETURN_IF_ERROR(RequireRank(c, "value", rank, rank, &v));
  ShapeHandle like_q, like_k;
  TF_RETURN_IF_ERROR(c->ReplaceDim(q, sequence, c->Dim(k, sequence), &like_q));
  if (grouped && !heads_first) {
    TF_RETURN_IF_ERROR(c->ReplaceDim(like_q, 2, c->Dim(k, 2), &like_q));
    TF_RETURN_IF_ERROR(
        CheckKeyHeads(c->Value(c->Dim(q, 2)), c->Value(c->Dim(k, 2))));
  }
  TF_RETURN_IF_ERROR(
      MergeNamed(c, "key", k, "query with a number of keys", &like_q));
  TF_RETURN_IF_ERROR(c->ReplaceDim(like_q, -1, c->Dim(v, -1), &like_k));
  TF_RETURN_IF_ERROR(
      MergeNamed(c, "value", v, "key with a depth of its own", &like_k));
  TF_RETURN_IF_ERROR(c->ReplaceDim(like_k, sequence, c->Dim(q, sequence), y));
  if (!heads_first) TF_RETURN_IF_ERROR(c->ReplaceDim(*y, 2, c->Dim(q, 2), y));
  std::vector<DimensionHandle> sizes;
  for (int i = 0; i + 1 < rank; ++i) sizes.push_back(c->Dim(*y, i));
  if (!heads_first) std::swap(sizes[1], sizes[2]);
  *rows = c->MakeShape(sizes);
  sizes.push_back(c->Dim(like_k, sequence));
  *scores = c->MakeShape(sizes);
  for (auto [name, number] :
       {std::pair("mask", num_masks), {"bias", num_bias}}) {
    if (number == 0) continue;
    TF_RETURN_IF_ERROR(CheckBroadcastShape(c, name, c->input(optional++),
                                           "the scores", *scores));
  }
  return absl::OkStatus();
}

// The shape of a slot of a cache, as UpdateCache has it, which is to have
// `count` of them from `slot` on.
absl::Status SlotShape(InferenceContext* c, const char* name, std::int64_t slot,
                       int count, ShapeHandle cache, ShapeHandle* out) {
  *out = c->UnknownShape();
  TF_RETURN_IF_ERROR(RequireRank(c, name, 5, kAnyRank, &cache));
  if (!c->RankKnown(cache)) return absl::OkStatus();
  TF_RETURN_IF_ERROR(CheckSlots(name, slot, count, SlotsOf(c, cache, 3)));
  ShapeHandle row;
  TF_RETURN_IF_ERROR(c->Subshape(cache, -3, &row));
  return c->Concatenate(c->Vector(c->Dim(cache, 0)), row, out);
}

absl::Status AttentionShape(InferenceContext* c) {
  ShapeHandle key = c->input(1), value = c->input(2);
  std::int64_t slot;
  bool heads_first;
  TF_RETURN_IF_ERROR(c->GetAttr("slot", &slot));
  TF_RETURN_IF_ERROR(c->GetAttr("heads_first", &heads_first));
  TF_RETURN_IF_ERROR(CheckCache(slot, heads_first));
  if (slot >= 0) {
    TF_RETURN_IF_ERROR(SlotShape(c, "key", slot, 1, key, &key));
    TF_RETURN_IF_ERROR(SlotShape(c, "value", slot, 2, value, &value));
  }
  ShapeHandle y, scores, rows;
  TF_RETURN_IF_ERROR(
      AttentionShapes(c, c->input(0), key, value, 3, true, &y, &scores, &rows));
  c->set_output(0, y);
  c->set_output(1, rows);
  c->set_output(2, rows);
  return absl::OkStatus();
}

absl::Status AttentionGradShape(InferenceContext* c) {
  bool bias_gradient;
  TF_RETURN_IF_ERROR(ReadBiasGradient(c, &bias_gradient));
  ShapeHandle y, scores, rows;
  TF_RETURN_IF_ERROR(AttentionShapes(c, c->input(1), c->input(2), c->input(3),
                                     7, false, &y, &scores, &rows));
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", c->input(0), "the output", &y));
  TF_RETURN_IF_ERROR(MergeNamed(c, "y", c->input(4), "the output", &y));
  for (const auto& [name, index] :
       {std::pair("largest", 5), {"inverse_sum", 6}}) {
    TF_RETURN_IF_ERROR(
        MergeNamed(c, name, c->input(index), "the rows of scores", &rows));
  }
  for (int i = 0; i < 3; ++i) c->set_output(i, c->input(i + 1));
  return SetSwitchedOutput(c, 3, "bias_gradient", scores);
}

}  // namespace

REGISTER_OP("TfFusedOps>Attention")
    .Input("query: T")
    .Input("key: T")
    .Input("value: T")
    .Input("mask: num_masks * bool")
    .Input("bias: num_bias * T")
    .Input("rng_key: num_rng * uint64")
    .Input("rng_counter: num_rng * uint64")
    .Output("y: T")
    .Output("largest: U")
    .Output("inverse_sum: U")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double} = DT_FLOAT")
    .Attr("num_masks: int >= 0 = 0")
    .Attr("num_bias: int >= 0 = 0")
    .Attr("num_rng: int >= 0 = 0")
    .Attr("scale: float = 1.0")
    .Attr("masked: float = -3e38")
    .Attr("zero_masked: bool = false")
    .Attr("heads_first: bool = false")
    .Attr("dropout_rate: float = 0.0")
    .Attr("dropout_scale: float = 1.0")
    .Attr("slot: int >= -1 = -1")
    .SetShapeFn(AttentionShape)
    .Doc(R"doc(
Computes dropout(softmax(z)) value in one op, where z is query key^T * scale + bias if the mask is
true, otherwise `masked`, without z in memory.

query: [batch, queries, heads, depth].
key: [batch, keys, key_heads, depth], where key_heads divides heads; as many heads that follow one
  another share one of them.
value: [batch, keys, key_heads, value_depth].
mask: of as many keys, otherwise broadcast to the scores, [batch, heads,
  queries, keys]; empty for one that is true everywhere.
bias: of as many keys, otherwise broadcast to the scores; empty for none.
rng_key: as Dropout takes it, whose x are the softmax's values; empty if there is no dropout.
rng_counter: as Dropout takes it; empty if there is no dropout.
y: [batch, queries, heads, value_depth].
largest: [batch, heads, queries], the largest z of each query.
inverse_sum: [batch, heads, queries], 1 / the sum of e^(z - largest) over the
  keys.
U: double where T is double, otherwise float.
scale: as written in decimals: 0.1 is that also where T is double; so is
  `masked`.
masked: what z is where the mask is false.
zero_masked: whether the softmax is zero where the mask is false, also in rows where it is false everywhere.
heads_first: query is [..., queries, depth], key [..., keys, depth], value
  [..., keys, value_depth], y [..., queries, value_depth], scores [..., queries, keys]; none is shared.
dropout_rate: Dropout's rate.
dropout_scale: Dropout's scale.
slot: if not -1, key and value are caches as UpdateCache has them, [batch, slots.., keys, key_heads,
  depth], of which this slot of key and the one behind it of value are read.
)doc");

REGISTER_OP("TfFusedOps>AttentionGrad")
    .Input("dy: T")
    .Input("query: T")
    .Input("key: T")
    .Input("value: T")
    .Input("y: T")
    .Input("largest: U")
    .Input("inverse_sum: U")
    .Input("mask: num_masks * bool")
    .Input("bias: num_bias * T")
    .Input("rng_key: num_rng * uint64")
    .Input("rng_counter: num_rng * uint64")
    .Output("query_grad: T")
    .Output("key_grad: T")
    .Output("value_grad: T")
    .Output("bias_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("U: {float, double}")
    .Attr("num_masks: int >= 0 = 0")
    .Attr("num_bias: int >= 0 = 0")
    .Attr("num_rng: int >= 0 = 0")
    .Attr("scale: float = 1.0")
    .Attr("masked: float = -3e38")
    .Attr("zero_masked: bool = false")
    .Attr("heads_first: bool = false")
    .Attr("dropout_rate: float = 0.0")
    .Attr("dropout_scale: float = 1.0")
    .Attr("bias_gradient: bool = false")
    .SetShapeFn(AttentionGradShape)
    .Doc(R"doc(
Computes the gradient of Attention in one op; the scores are computed again.

dy: the gradient of y.
query: the forward op's query.
key: the forward op's key, of as many heads as the query.
value: the forward op's value.
y: the forward op's y.
largest: the forward op's largest.
inverse_sum: the forward op's inverse_sum.
mask: the forward op's mask.
bias: the forward op's bias.
bias_grad: [batch, heads, queries, keys], the gradient of a bias of that shape; [0] unless asked for.
bias_gradient: whether the gradient of the bias is asked for.
scale: the forward op's scale.
masked: the forward op's masked.
zero_masked: the forward op's zero_masked.
heads_first: the forward op's heads_first.
rng_key: the forward op's rng_key.
rng_counter: the forward op's rng_counter.
dropout_rate: the forward op's dropout_rate.
dropout_scale: the forward op's dropout_scale.
)doc");

}  // namespace tf_fused_ops
