// The kernels of Softmax and SoftmaxGrad. An Engine runs them on a device.
#ifndef TFO_CC_KERNELS_SOFTMAX_OPS_H_
#define TFO_CC_KERNELS_SOFTMAX_OPS_H_

#include "cc/core/softmax.h"
#include "cc/kernels/broadcast_input.h"
#include "cc/kernels/decimals.h"
#include "cc/kernels/kernel_util.h"

namespace tf_fused_ops {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <class T>
class SoftmaxBase : public tensorflow::OpKernel {
 public:
  explicit SoftmaxBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int num_masks;
    float scale;
    OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_masks", &num_masks));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("scale", &scale));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("zero_masked", &zero_masked_));
    scale_ = AsWritten(scale);
  }

  void Compute(OpKernelContext* ctx) final { OP_REQUIRES_OK(ctx, Run(ctx)); }

 protected:
  virtual absl::Status Run(OpKernelContext* ctx) const = 0;

  // x, which errors call `name`, as rows of its last dimension, and the mask
  // beside them.
  absl::Status RowsOf(OpKernelContext* ctx, const char* name, const Tensor& x,
                      tfo::SoftmaxShape* shape, tfo::SoftmaxMask* mask) const {
    if (x.dims() == 0)
      return Invalid(name, " must have rank at least 1, got shape []");
    const std::int64_t depth = x.dim_size(x.dims() - 1);
    *shape = {kDType<T>, depth == 0 ? 0 : x.NumElements() / depth, depth};
    return MaskOf(ctx, name, x.shape().dim_sizes(), mask);
  }

  double scale() const { return scale_; }
  bool zero_masked() const { return zero_masked_; }

 private:
  double scale_;
  bool zero_masked_;
};

template <class T, class Engine>
class SoftmaxOp : public SoftmaxBase<T> {
 public:
  explicit SoftmaxOp(OpKernelConstruction* ctx) : SoftmaxBase<T>(ctx) {
    float masked;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("masked", &masked));
    masked_ = AsWritten(masked);
  }

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    const Tensor& x = ctx->input(0);
    tfo::SoftmaxArgs args{};
    TF_RETURN_IF_ERROR(this->RowsOf(ctx, "x", x, &args.shape, &args.mask));
    args.scale = this->scale();
    args.masked = masked_;
    args.zero_masked = this->zero_masked();
    args.x = x.data();
    TF_RETURN_IF_ERROR(Output(ctx, {0}, 0, x.shape(), &args.y));
    return Engine::Forward(ctx, args);
  }

  double masked_;
};

template <class T, class Engine>
class SoftmaxGradOp : public SoftmaxBase<T> {
 public:
  using SoftmaxBase<T>::SoftmaxBase;

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    const Tensor& dy = ctx->input(0);
    const Tensor& y = ctx->input(1);
    tfo::SoftmaxGradientArgs args{};
    TF_RETURN_IF_ERROR(CheckShape("dy", dy, "y", y.shape()));
    TF_RETURN_IF_ERROR(this->RowsOf(ctx, "y", y, &args.shape, &args.mask));
    args.scale = this->scale();
    args.zero_masked = this->zero_masked();
    args.dy = dy.data();
    args.y = y.data();
    TF_RETURN_IF_ERROR(Output(ctx, {0, 1}, 0, y.shape(), &args.x_grad));
    return Engine::Gradient(ctx, args);
  }
};

#define TFO_REGISTER_SOFTMAX(device, Engine, T)           \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>Softmax")      \
                              .Device(tensorflow::device) \
                              .TypeConstraint<T>("T"),    \
                          SoftmaxOp<T, Engine>);          \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>SoftmaxGrad")  \
                              .Device(tensorflow::device) \
                              .TypeConstraint<T>("T"),    \
                          SoftmaxGradOp<T, Engine>)

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_SOFTMAX_OPS_H_
