// The slots of a cache of keys and values, [batch, slots.., length, ...].
#ifndef TFO_CC_OPS_CACHE_SLOTS_H_
#define TFO_CC_OPS_CACHE_SLOTS_H_

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// How many slots sizes say that there are; -1 if one is not known, or if there
// are more than a number can hold, as an empty cache may have.
inline std::int64_t ProductOf(const std::vector<std::int64_t>& sizes) {
  std::int64_t product = 1;
  for (std::int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) return -1;
  }
  return product;
}

// How many slots a cache has, the last `inner` dimensions being a slot's.
inline std::int64_t SlotsOf(InferenceContext* c, ShapeHandle cache, int inner) {
  std::vector<std::int64_t> sizes;
  for (int i = 1; i + inner < c->Rank(cache); ++i) {
    sizes.push_back(c->Value(c->Dim(cache, i)));
  }
  return ProductOf(sizes);
}

// That argument `name` has `count` slots from `slot` on; -1 for an unknown
// number of `slots`.
inline absl::Status CheckSlots(const char* name, std::int64_t slot, int count,
                               std::int64_t slots) {
  if (slots < 0 || slot <= slots - count) return absl::OkStatus();
  return Invalid("slot must be at most ", slots - count, ", as ", name, " has ",
                 slots, ", got ", slot);
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_CACHE_SLOTS_H_
