// The kernels of SparseSoftmaxCrossEntropy, SoftmaxCrossEntropy and their
// gradients. An Engine runs them on a device.
#ifndef TFO_CC_KERNELS_CROSS_ENTROPY_OPS_H_
#define TFO_CC_KERNELS_CROSS_ENTROPY_OPS_H_

#include "cc/core/cross_entropy.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/cross_entropy.h"

namespace tf_fused_ops {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

inline bool IsSparse(const Tensor& labels) {
  return labels.dtype() == tensorflow::DT_INT32 ||
         labels.dtype() == tensorflow::DT_INT64;
}

// The shape that logits and labels, a number for each class, have together.
inline absl::Status BroadcastShape(const TensorShape& logits,
                                   const TensorShape& labels,
                                   TensorShape* shape) {
  const bool broadcast = logits.dims() == 2 && labels.dims() == 2 &&
                         logits.dim_size(1) == labels.dim_size(1);
  if (labels == logits || (broadcast && labels.dim_size(0) == 1)) {
    *shape = logits;
  } else if (broadcast && logits.dim_size(0) == 1) {
    *shape = labels;
  } else {
    return LabelsMisfit(logits.DebugString(), labels.DebugString());
  }
  return absl::OkStatus();
}

// Logits as rows, the labels beside them, the shape of both together, and that
// of what each row has one of. What classes the labels are is the Engine's to
// look at.
template <class T>
absl::Status ReadInputs(const Tensor& logits, const Tensor& labels,
                        tfo::CrossEntropyArgs* args, TensorShape* shape,
                        TensorShape* rows) {
  if (logits.dims() == 0)
    return Invalid("logits must have rank at least 1, got shape []");
  *args = {};
  *shape = logits.shape();
  if (!IsSparse(labels)) {
    TF_RETURN_IF_ERROR(BroadcastShape(logits.shape(), labels.shape(), shape));
    args->probabilities = {true, labels.data(), labels.shape() != *shape};
    args->one_x = logits.shape() != *shape;
  }
  // Without classes there may be more rows than a shape has room for.
  const int last = shape->dims() - 1;
  for (int i = 0; i < last; ++i)
    TF_RETURN_IF_ERROR(rows->AddDimWithStatus(shape->dim_size(i)));
  const std::int64_t depth = shape->dim_size(last);
  if (IsSparse(labels)) {
    TF_RETURN_IF_ERROR(
        CheckShape("labels", labels, "the rows of logits", *rows));
    if (depth == 0) return NoClass();
    args->labels = {labels.data(), labels.dtype() == tensorflow::DT_INT64};
  }
  args->shape = {kDType<T>, rows->num_elements(), depth};
  args->x = logits.data();
  return absl::OkStatus();
}

template <class T, class Engine>
class CrossEntropyOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tfo::CrossEntropyArgs args;
    TensorShape shape, rows;
    OP_REQUIRES_OK(
        ctx, ReadInputs<T>(ctx->input(0), ctx->input(1), &args, &shape, &rows));
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
    TensorShape shape, rows;
    OP_REQUIRES_OK(ctx, ReadInputs<T>(ctx->input(1), ctx->input(2),
                                      &args.forward, &shape, &rows));
    const char* const what = "the rows of logits";
    OP_REQUIRES_OK(ctx, CheckShape("dloss", dloss, what, rows));
    OP_REQUIRES_OK(ctx, CheckShape("largest", largest, what, rows));
    OP_REQUIRES_OK(ctx, CheckShape("inverse_sum", inverse_sum, what, rows));
    args.forward.largest = largest.data();
    args.forward.inverse_sum = inverse_sum.data();
    args.dloss = dloss.data();
    // Integers have another type, and their memory is not taken.
    OP_REQUIRES_OK(ctx, Output(ctx, {1, 2}, 0, shape, &args.x_grad));
    OP_REQUIRES_OK(ctx, Engine::Gradient(ctx, args));
  }
};

// `name` is that of the forward op.
#define TFO_REGISTER_CROSS_ENTROPY(name, device, Engine, T, U) \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>" name)             \
                              .Device(tensorflow::device)      \
                              .TypeConstraint<T>("T")          \
                              .TypeConstraint<U>("U"),         \
                          CrossEntropyOp<T, Engine>);          \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>" name "Grad")      \
                              .Device(tensorflow::device)      \
                              .TypeConstraint<T>("T")          \
                              .TypeConstraint<U>("U"),         \
                          CrossEntropyGradOp<T, Engine>)

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_CROSS_ENTROPY_OPS_H_
