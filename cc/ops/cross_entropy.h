// What shape functions and kernels of cross entropy say alike.
#ifndef TFO_CC_OPS_CROSS_ENTROPY_H_
#define TFO_CC_OPS_CROSS_ENTROPY_H_

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

inline absl::Status NoClass() {
  return Invalid("logits must have at least one class, got 0");
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_CROSS_ENTROPY_H_
