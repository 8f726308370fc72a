// What the shapes and attributes of MatMulBiasAct stand for.
#ifndef TFO_CC_KERNELS_MATMUL_GEOMETRY_H_
#define TFO_CC_KERNELS_MATMUL_GEOMETRY_H_

#include "cc/kernels/contraction_ops.h"

namespace tf_fused_ops {

struct MatMulGeometry {
  static constexpr const char* kGradientAttrs[] = {"a_gradient", "b_gradient"};
  static constexpr const char* kConstantAttr = "constant_b";
  static constexpr bool kTransposed = false, kHasDepth = false;
  static constexpr bool kHasScale = false, kHasMoments = false;
  static constexpr bool winograd = false;
  bool transpose_a, transpose_b;

  absl::Status Read(tensorflow::OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("transpose_a", &transpose_a));
    return ctx->GetAttr("transpose_b", &transpose_b);
  }

  absl::Status Bind(const tensorflow::TensorShape& a,
                    const tensorflow::TensorShape& b, BoundShapes* out) const {
    if (a.dims() < 2) {
      return Invalid("a must have rank 2 or more, got shape ", a.DebugString());
    }
    if (b.dims() != 2) {
      return Invalid("b must have rank 2, got shape ", b.DebugString());
    }
    const int rows = a.dims() - (transpose_a ? 1 : 2);
    const std::int64_t m = a.dim_size(rows);
    const std::int64_t k = a.dim_size(a.dims() - (transpose_a ? 2 : 1));
    const std::int64_t n = b.dim_size(transpose_b ? 0 : 1);
    if (b.dim_size(transpose_b ? 1 : 0) != k) {
      return Invalid("b must have the inner dimension of a, ", k,
                     ", got shape ", b.DebugString());
    }
    std::int64_t batch = 1;
    for (int i = 0; i < a.dims() - 2; ++i) batch *= a.dim_size(i);
    out->conv = tfo::MatMulShape(batch, m, k, n, transpose_a, transpose_b);
    out->y = a;
    TF_RETURN_IF_ERROR(out->y.SetDimWithStatus(a.dims() - 2, m));
    return out->y.SetDimWithStatus(a.dims() - 1, n);
  }
};

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_MATMUL_GEOMETRY_H_
