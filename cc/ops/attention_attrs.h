// The attributes of AttentionGrad that shape function and kernel check alike.
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

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_ATTENTION_ATTRS_H_
