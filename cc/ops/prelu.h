// What alpha may be beside x, checked alike by shape functions and kernels.
#ifndef TFO_CC_OPS_PRELU_H_
#define TFO_CC_OPS_PRELU_H_

#include <cstdint>

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// Walks along the dimensions of alpha and x together, the last ones first.
class PreluDimensions {
 public:
  // Of x's dimension `i`; negative sizes are not known.
  absl::Status Add(int i, std::int64_t own, std::int64_t size) {
    if (own < 0) return absl::OkStatus();
    if (own == 1) {
      broadcast_ = broadcast_ || size > 1;
      return absl::OkStatus();
    }
    if (size >= 0 && own != size) {
      return Invalid("alpha must have size ", size,
                     " or 1 where x has its dimension ", i, ", got ", own);
    }
    if (broadcast_) {
      return Invalid(
          "alpha must have size 1 in front of the dimensions that "
          "it is broadcast along, got ",
          own, " where x has its dimension ", i);
    }
    return absl::OkStatus();
  }

 private:
  bool broadcast_ = false;  // along a dimension so far
};

inline absl::Status CheckPreluRank(int rank, int x_rank) {
  if (rank <= x_rank) return absl::OkStatus();
  return Invalid("alpha must have at most the rank of x, ", x_rank, ", got ",
                 rank);
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_PRELU_H_
