// What the attributes of QuantizedMatMulBiasAct stand for.
#ifndef TFO_CC_OPS_QUANTIZED_MATMUL_ATTRS_H_
#define TFO_CC_OPS_QUANTIZED_MATMUL_ATTRS_H_

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

struct QuantizedMatMulAttrs {
  ActivationAttrs activation;
  bool transpose_b = false;
  float epsilon = 0;
};

// `Context` is an InferenceContext or an OpKernelConstruction.
template <class Context>
absl::Status ReadQuantizedMatMulAttrs(Context* c, QuantizedMatMulAttrs* out) {
  int num_bias;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_bias", &num_bias));
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &out->activation));
  TF_RETURN_IF_ERROR(c->GetAttr("transpose_b", &out->transpose_b));
  TF_RETURN_IF_ERROR(c->GetAttr("epsilon", &out->epsilon));
  // With less, quantized numbers would have more than 8 bits.
  if (out->epsilon >= 0) return absl::OkStatus();
  return Invalid("epsilon must be at least 0, got ", out->epsilon);
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_QUANTIZED_MATMUL_ATTRS_H_
