// The kernel of QuantizedMatMulBiasAct on the CPU.
#include "cc/core/dispatch.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/quantized_matmul_attrs.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <class T>
class QuantizedMatMulOp : public tensorflow::OpKernel {
 public:
  explicit QuantizedMatMulOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadQuantizedMatMulAttrs(ctx, &attrs_));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  absl::Status Run(OpKernelContext* ctx) const {
    const Tensor &a = ctx->input(0), &b = ctx->input(1);
    const Tensor& b_scale = ctx->input(2);
    const Tensor* bias;
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "bias", &bias));
    if (a.dims() < 2) {
      return Invalid("a must have rank 2 or more, got shape ",
                     a.shape().DebugString());
    }
    if (b.dims() != 2) {
      return Invalid("b must have rank 2, got shape ", b.shape().DebugString());
    }
    const int last = a.dims() - 1;
    const std::int64_t depth = a.dim_size(last);
    const std::int64_t columns = b.dim_size(attrs_.transpose_b ? 0 : 1);
    if (b.dim_size(attrs_.transpose_b ? 1 : 0) != depth) {
      return Invalid("b must have the inner dimension of a, ", depth,
                     ", got shape ", b.shape().DebugString());
    }
    if (depth > tfo::kMostQuantizedDepth) {
      return Invalid("a must have an inner dimension of at most ",
                     tfo::kMostQuantizedDepth, ", got shape ",
                     a.shape().DebugString());
    }
    const TensorShape vector({columns});
    TF_RETURN_IF_ERROR(
        CheckShape("b_scale", b_scale, "the output's last dimension", vector));
    if (bias != nullptr) {
      TF_RETURN_IF_ERROR(
          CheckShape("bias", *bias, "the output's last dimension", vector));
    }
    TensorShape shape = a.shape();
    TF_RETURN_IF_ERROR(shape.SetDimWithStatus(last, columns));
    std::int64_t rows = 1;
    for (int i = 0; i < last; ++i) rows *= a.dim_size(i);
    tfo::QuantizedMatMulArgs args{kDType<T>,
                                  rows,
                                  depth,
                                  columns,
                                  attrs_.transpose_b,
                                  attrs_.activation.activation,
                                  attrs_.activation.alpha,
                                  attrs_.epsilon,
                                  a.data(),
                                  static_cast<const std::int8_t*>(b.data()),
                                  static_cast<const float*>(b_scale.data()),
                                  DataOrNull(bias),
                                  nullptr};
    TF_RETURN_IF_ERROR(Output(ctx, {}, 0, shape, &args.y));
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().quantized_matmul(args, ParallelOf(ctx),
                                                 scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  QuantizedMatMulAttrs attrs_;
};

#define TFO_REGISTER_QUANTIZED_MATMUL(T)                            \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>QuantizedMatMulBiasAct") \
                              .Device(tensorflow::DEVICE_CPU)       \
                              .TypeConstraint<T>("T"),              \
                          QuantizedMatMulOp<T>)

TFO_REGISTER_QUANTIZED_MATMUL(Eigen::half);
TFO_REGISTER_QUANTIZED_MATMUL(tensorflow::bfloat16);
TFO_REGISTER_QUANTIZED_MATMUL(float);

}  // namespace
}  // namespace tf_fused_ops
