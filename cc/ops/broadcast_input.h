// What a mask or a bias may be beside what it is broadcast to, checked alike by
// shape functions and kernels.
#ifndef TFO_CC_OPS_BROADCAST_INPUT_H_
#define TFO_CC_OPS_BROADCAST_INPUT_H_

#include <cstdint>

#include "cc/core/broadcast_rows.h"
#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// `name` is the input, `x` how errors call what it is broadcast to.
inline absl::Status CheckBroadcastRank(const char* name, int rank,
                                       const char* x, int x_rank) {
  if (rank < 1 || rank > x_rank) {
    return Invalid(name, " must have rank 1 to ", x_rank, ", at most that of ",
                   x, ", got rank ", rank);
  }
  if (x_rank - 1 > tfo::BroadcastRows::kMaxRank) {
    return Invalid(x, " must have rank at most ",
                   tfo::BroadcastRows::kMaxRank + 1, " where there is a ", name,
                   ", got rank ", x_rank);
  }
  return absl::OkStatus();
}

// Of dimension `i` of x, and whether that is the last one.
inline absl::Status CheckBroadcastSize(const char* name, std::int64_t own,
                                       const char* x, int i, bool last,
                                       std::int64_t size) {
  if (own == size || (own == 1 && !last)) return absl::OkStatus();
  return Invalid(name, " must have size ", size, last ? "" : " or 1", " where ",
                 x, " has its dimension ", i, ", got ", own);
}

// Checks an input beside x, as far as their shapes are known.
inline absl::Status CheckBroadcastShape(InferenceContext* c, const char* name,
                                        ShapeHandle input, const char* x_name,
                                        ShapeHandle x) {
  if (!c->RankKnown(x) || !c->RankKnown(input)) return absl::OkStatus();
  TF_RETURN_IF_ERROR(
      CheckBroadcastRank(name, c->Rank(input), x_name, c->Rank(x)));
  for (int i = 1; i <= c->Rank(input); ++i) {
    const DimensionHandle size = c->Dim(x, -i), own = c->Dim(input, -i);
    if (!c->ValueKnown(size) || !c->ValueKnown(own)) continue;
    TF_RETURN_IF_ERROR(CheckBroadcastSize(
        name, c->Value(own), x_name, c->Rank(x) - i, i == 1, c->Value(size)));
  }
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_BROADCAST_INPUT_H_
