// The kernels of Act and ActGrad. An Engine runs them on a device.
#ifndef TFO_CC_KERNELS_ACT_OPS_H_
#define TFO_CC_KERNELS_ACT_OPS_H_

#include "cc/core/act.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

template <class T, class Engine>
class ActOp : public tensorflow::OpKernel {
 public:
  explicit ActOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadActivationAttrs(ctx, &activation_));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& x = ctx->input(0);
    void* y;
    OP_REQUIRES_OK(ctx, Output(ctx, {0}, 0, x.shape(), &y));
    if (x.NumElements() == 0) return;
    OP_REQUIRES_OK(ctx, Engine::Forward(ctx, {kDType<T>, x.NumElements(),
                                              activation_.activation,
                                              activation_.alpha, x.data(), y}));
  }

 private:
  ActivationAttrs activation_;
};

template <class T, class Engine>
class ActGradOp : public tensorflow::OpKernel {
 public:
  explicit ActGradOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadActivationAttrs(ctx, &activation_));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& dy = ctx->input(0);
    const tensorflow::Tensor& saved = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckShape("dy", dy, "saved", saved.shape()));
    void* x_grad;
    OP_REQUIRES_OK(ctx, Output(ctx, {0, 1}, 0, dy.shape(), &x_grad));
    if (dy.NumElements() == 0) return;
    OP_REQUIRES_OK(
        ctx, Engine::Gradient(
                 ctx, {kDType<T>, dy.NumElements(), activation_.activation,
                       activation_.alpha, dy.data(), saved.data(), x_grad}));
  }

 private:
  ActivationAttrs activation_;
};

#define TFO_REGISTER_ACT(DEVICE, ENGINE, T)               \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>Act")          \
                              .Device(tensorflow::DEVICE) \
                              .TypeConstraint<T>("T"),    \
                          ActOp<T, ENGINE>);              \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>ActGrad")      \
                              .Device(tensorflow::DEVICE) \
                              .TypeConstraint<T>("T"),    \
                          ActGradOp<T, ENGINE>)

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_ACT_OPS_H_
