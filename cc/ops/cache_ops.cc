// The update of a cache of keys and values, as decoders keep one.
#include "cc/ops/cache_slots.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

absl::Status UpdateCacheShape(InferenceContext* c) {
  std::int64_t slot;
  TF_RETURN_IF_ERROR(c->GetAttr("slot", &slot));
  ShapeHandle cache = c->input(0), key = c->input(1), index = c->input(3);
  TF_RETURN_IF_ERROR(RequireRank(c, "cache", 3, kAnyRank, &cache));
  TF_RETURN_IF_ERROR(RequireRank(c, "key", 2, kAnyRank, &key));
  TF_RETURN_IF_ERROR(RequireRank(c, "index", 0, 0, &index));
  TF_RETURN_IF_ERROR(MergeNamed(c, "value", c->input(2), "key", &key));
  c->set_output(0, cache);
  c->set_output(1, c->UnknownShape());
  c->set_output(2, c->UnknownShape());
  if (!c->RankKnown(cache) || !c->RankKnown(key)) return absl::OkStatus();
  const int rank = c->Rank(key), length = c->Rank(cache) - rank + 1;
  if (length < 2) {
    return Invalid("cache must have more dimensions than key, ",
                   c->DebugString(key), ", got ", c->DebugString(cache));
  }
  TF_RETURN_IF_ERROR(CheckSlots("cache", slot, 2, SlotsOf(c, cache, rank - 1)));
  std::vector<DimensionHandle> sizes{c->Dim(cache, 0)};
  for (int i = length; i < c->Rank(cache); ++i)
    sizes.push_back(c->Dim(cache, i));
  for (int i = 0; i < rank; ++i) {
    if (i == 1) continue;
    TF_RETURN_IF_ERROR(
        MergeNamed(c, "key", c->Dim(key, i), "cache", &sizes[i]));
  }
  const std::int64_t rows = c->Value(c->Dim(key, 1)), held = c->Value(sizes[1]);
  if (held >= 0 && rows > held) {
    return Invalid("key has ", rows, " rows where cache has room for ", held);
  }
  const ShapeHandle updated = c->MakeShape(sizes);
  c->set_output(1, updated);
  c->set_output(2, updated);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>UpdateCache")
    .Input("cache: T")
    .Input("key: T")
    .Input("value: T")
    .Input("index: Tindex")
    .Output("updated: T")
    .Output("keys: T")
    .Output("values: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tindex: {int32, int64} = DT_INT32")
    .Attr("slot: int >= 0 = 0")
    .SetShapeFn(UpdateCacheShape)
    .Doc(R"doc(
Writes keys and values of some positions into a cache of those of all, in place where nothing else
needs the old one.

cache: [batch, slots.., length, ...]; the dimensions of slots are those that it has more than key.
key: [batch, positions, ...], at most `length` positions.
value: of key's shape.
index: of the first position; moved into the range in which all have room.
updated: the cache with key in slot `slot` and value in the one behind it.
keys: [batch, length, ...], updated's slot `slot`; where batch is 1 it shares its memory.
values: [batch, length, ...], updated's slot behind that.
slot: counted through all dimensions of slots, the last one first.
)doc");

}  // namespace tf_fused_ops
