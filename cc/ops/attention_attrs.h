// What shape functions and kernels of attention check alike.
#ifndef TFO_CC_OPS_ATTENTION_ATTRS_H_
#define TFO_CC_OPS_ATTENTION_ATTRS_H_

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// Whether the gradient of a bias is asked for, which has to be there. `Context`
// is an InferenceContext or an OpKernelConstruction.
template <class Context>
absl::Status ReadBiasGradient(Context* c, bool* bias_gradient) {
  int num_bias;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_bias", &num_bias));
  TF_RETURN_IF_ERROR(c->GetAttr("bias_gradient", bias_gradient));
  if (*bias_gradient && num_bias == 0)
    return Invalid("bias_gradient asks for that of a bias, got none");
  return absl::OkStatus();
}

// That heads of the queries can share those of the keys; -1 for an unknown
// number.
inline absl::Status CheckKeyHeads(std::int64_t heads, std::int64_t key_heads) {
  if (heads < 0 || key_heads < 0 || heads == key_heads) return absl::OkStatus();
  if (key_heads > 0 && heads % key_heads == 0) return absl::OkStatus();
  return Invalid("key must have a number of heads that divides query's, ",
                 heads, ", got ", key_heads);
}

inline absl::Status CheckCache(std::int64_t slot, bool heads_first) {
  if (slot < 0 || !heads_first) return absl::OkStatus();
  return Invalid("slot is not for keys with heads_first, got ", slot);
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_ATTENTION_ATTRS_H_
