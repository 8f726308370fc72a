// What shape functions and kernels of cross entropy say alike.
#ifndef TFO_CC_OPS_CROSS_ENTROPY_H_
#define TFO_CC_OPS_CROSS_ENTROPY_H_

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

inline absl::Status NoClass() {
  return Invalid("logits must have at least one class, got 0");
}

// `logits` and `labels` are shapes in words.
inline absl::Status LabelsMisfit(const std::string& logits,
                                 const std::string& labels) {
  return Invalid("labels must have the shape of logits, ", logits,
                 ", or, of matrices, either must be a single row; got ",
                 labels);
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_CROSS_ENTROPY_H_
