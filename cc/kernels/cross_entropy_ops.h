// The kernels of SparseSoftmaxCrossEntropy and its gradient. An Engine runs
// them on a device.
#ifndef TFO_CC_KERNELS_CROSS_ENTROPY_OPS_H_
#define TFO_CC_KERNELS_CROSS_ENTROPY_OPS_H_

#include "cc/core/cross_entropy.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/cross_entropy.h"

namespace tf_fused_ops {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Logits as rows, the labels beside them, and the shape of what each row has
// one of. What the labels are is the Engine's to look at.
template <class T>
absl::Status ReadInputs(const Tensor& logits, const Tensor& labels,
                        tfo::CrossEntropyArgs* args, TensorShape* rows) {
  if (logits.dims() == 0)
    return Invalid("logits must have rank at least 1, got shape []");
  *rows = logits.shape();
  rows->RemoveLastDims(1);
  TF_RETURN_IF_ERROR(CheckShape("labels", labels, "the rows of logits", *rows));
  const std::int64_t depth = logits.dim_size(logits.dims() - 1);
  if (depth == 0) return NoClass();
  *args = {};
  args->shape = {kDType<T>, rows->num_elements(), depth};
  args->labels = {labels.data(), labels.dtype() == tensorflow::DT_INT64};
  args->x = logits.data();
  return absl::OkStatus();
}

template <class T, class Engine>
class CrossEntropyOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tfo::CrossEntropyArgs args;
    TensorShape rows;
    OP_REQUIRES_OK(ctx,
                   ReadInputs<T>(ctx->input(0), ctx->input(1), &args, &rows));
    void** const outputs[] = {&args.loss, &args.largest, &args.inverse_sum};
    for (int i = 0; i < 3; ++i)
      OP_REQUIRES_OK(ctx, Output(ctx, {}, i, rows, outputs[i]));
    OP_REQUIRES_OK(ctx, Engine::Forward(ctx, args));
  }
};

template <class T, class Engine>
class CrossEntropyGradOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& dloss = ctx->input(0);
    const Tensor& largest = ctx->input(3);
    const Tensor& inverse_sum = ctx->input(4);
    tfo::CrossEntropyGradientArgs args{};
    TensorShape rows;
    OP_REQUIRES_OK(
        ctx, ReadInputs<T>(ctx->input(1), ctx->input(2), &args.forward, &rows));
    const char* const what = "the rows of logits";
    OP_REQUIRES_OK(ctx, CheckShape("dloss", dloss, what, rows));
    OP_REQUIRES_OK(ctx, CheckShape("largest", largest, what, rows));
    OP_REQUIRES_OK(ctx, CheckShape("inverse_sum", inverse_sum, what, rows));
    args.forward.largest = largest.data();
    args.forward.inverse_sum = inverse_sum.data();
    args.dloss = dloss.data();
    OP_REQUIRES_OK(ctx,
                   Output(ctx, {1}, 0, ctx->input(1).shape(), &args.x_grad));
    OP_REQUIRES_OK(ctx, Engine::Gradient(ctx, args));
  }
};

#define TFO_REGISTER_CROSS_ENTROPY(device, Engine, T, U)                   \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>SparseSoftmaxCrossEntropy")     \
                              .Device(tensorflow::device)                  \
                              .TypeConstraint<T>("T")                      \
                              .TypeConstraint<U>("U"),                     \
                          CrossEntropyOp<T, Engine>);                      \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>SparseSoftmaxCrossEntropyGrad") \
                              .Device(tensorflow::device)                  \
                              .TypeConstraint<T>("T")                      \
                              .TypeConstraint<U>("U"),                     \
                          CrossEntropyGradOp<T, Engine>)

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_CROSS_ENTROPY_OPS_H_
