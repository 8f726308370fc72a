// What the attributes of ops with quantized weights stand for.
#ifndef TFO_CC_OPS_WEIGHT_ONLY_MATMUL_ATTRS_H_
#define TFO_CC_OPS_WEIGHT_ONLY_MATMUL_ATTRS_H_

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// How the integers of weights lie in memory.
struct WeightLayout {
  bool transpose_b = false;
  int bits = 8;
  int packed_axis = 1;

  // The dimension of b along which a byte has two numbers, -1 if none.
  int PackedAxis() const { return bits == 4 ? packed_axis : -1; }
};

// `Context` is an InferenceContext or an OpKernelConstruction.
template <class Context>
absl::Status ReadWeightLayout(Context* c, WeightLayout* out) {
  int count;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_zero", &count));
  TF_RETURN_IF_ERROR(c->GetAttr("transpose_b", &out->transpose_b));
  TF_RETURN_IF_ERROR(c->GetAttr("bits", &out->bits));
  TF_RETURN_IF_ERROR(c->GetAttr("packed_axis", &out->packed_axis));
  if (out->bits != 4 && out->bits != 8)
    return Invalid("bits must be 4 or 8, got ", out->bits);
  if (out->packed_axis != 0 && out->packed_axis != 1)
    return Invalid("packed_axis must be 0 or 1, got ", out->packed_axis);
  return absl::OkStatus();
}

struct WeightOnlyMatMulAttrs {
  ActivationAttrs activation;
  WeightLayout layout;
};

template <class Context>
absl::Status ReadWeightOnlyMatMulAttrs(Context* c, WeightOnlyMatMulAttrs* out) {
  int count;
  for (const char* name : {"num_group", "num_bias"})
    TF_RETURN_IF_ERROR(ReadOptionalCount(c, name, &count));
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &out->activation));
  return ReadWeightLayout(c, &out->layout);
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_WEIGHT_ONLY_MATMUL_ATTRS_H_
