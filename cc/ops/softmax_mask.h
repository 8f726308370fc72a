// What a mask may be beside what it is for, checked alike by shape functions
// and kernels.
#ifndef TFO_CC_OPS_SOFTMAX_MASK_H_
#define TFO_CC_OPS_SOFTMAX_MASK_H_

#include <cstdint>

#include "cc/core/softmax.h"
#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// `x` is how errors call what the mask is for.
inline absl::Status CheckMaskRank(const char* x, int mask_rank, int x_rank) {
  if (mask_rank < 1 || mask_rank > x_rank) {
    return Invalid("mask must have rank 1 to ", x_rank, ", at most that of ", x,
                   ", got rank ", mask_rank);
  }
  if (x_rank - 1 > tfo::SoftmaxMask::kMaxRank) {
    return Invalid(x, " must have rank at most ",
                   tfo::SoftmaxMask::kMaxRank + 1,
                   " where there is a mask, got rank ", x_rank);
  }
  return absl::OkStatus();
}

// Dimension `i` of x, and whether that is the last one.
inline absl::Status CheckMaskSize(const char* x, int i, bool last,
                                  std::int64_t mask, std::int64_t size) {
  if (mask == size || (mask == 1 && !last)) return absl::OkStatus();
  return Invalid("mask must have size ", size, last ? "" : " or 1", " where ",
                 x, " has its dimension ", i, ", got ", mask);
}

// Checks a mask for x, as far as their shapes are known.
inline absl::Status CheckMaskShape(InferenceContext* c, const char* name,
                                   ShapeHandle mask, ShapeHandle x) {
  if (!c->RankKnown(x) || !c->RankKnown(mask)) return absl::OkStatus();
  TF_RETURN_IF_ERROR(CheckMaskRank(name, c->Rank(mask), c->Rank(x)));
  for (int i = 1; i <= c->Rank(mask); ++i) {
    const DimensionHandle size = c->Dim(x, -i), kept = c->Dim(mask, -i);
    if (!c->ValueKnown(size) || !c->ValueKnown(kept)) continue;
    TF_RETURN_IF_ERROR(CheckMaskSize(name, c->Rank(x) - i, i == 1,
                                     c->Value(kept), c->Value(size)));
  }
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_SOFTMAX_MASK_H_
