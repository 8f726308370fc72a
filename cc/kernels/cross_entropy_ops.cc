// The kernels of SparseSoftmaxCrossEntropy and its gradient on the CPU.
#include "cc/core/cross_entropy.h"
#include "cc/core/dispatch.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/cross_entropy.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Logits as rows, the labels beside them, and the shape of what each row has
// one of.
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
  for (std::int64_t row = 0; row < args->shape.rows; ++row) {
    const std::int64_t label = args->labels[row];
    if (!tfo::Labels::IsClass(label, depth)) {
      return Invalid("labels must be at least 0 and less than ", depth,
                     ", the number of classes, got ", label);
    }
  }
  return absl::OkStatus();
}

template <class T>
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
    tfo::ActiveKernels().cross_entropy_forward(args, ParallelOf(ctx));
  }
};

template <class T>
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
    tfo::ActiveKernels().cross_entropy_gradient(args, ParallelOf(ctx));
  }
};

#define TFO_REGISTER_CROSS_ENTROPY(T, U)                                   \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>SparseSoftmaxCrossEntropy")     \
                              .Device(tensorflow::DEVICE_CPU)              \
                              .TypeConstraint<T>("T")                      \
                              .TypeConstraint<U>("U"),                     \
                          CrossEntropyOp<T>);                              \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>SparseSoftmaxCrossEntropyGrad") \
                              .Device(tensorflow::DEVICE_CPU)              \
                              .TypeConstraint<T>("T")                      \
                              .TypeConstraint<U>("U"),                     \
                          CrossEntropyGradOp<T>)

TFO_REGISTER_CROSS_ENTROPY(Eigen::half, float);
TFO_REGISTER_CROSS_ENTROPY(tensorflow::bfloat16, float);
TFO_REGISTER_CROSS_ENTROPY(float, float);
TFO_REGISTER_CROSS_ENTROPY(double, double);

}  // namespace
}  // namespace tf_fused_ops
