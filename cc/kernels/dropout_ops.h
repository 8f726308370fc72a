// The kernel of Dropout. An Engine runs it on a device.
#ifndef TFO_CC_KERNELS_DROPOUT_OPS_H_
#define TFO_CC_KERNELS_DROPOUT_OPS_H_

#include "cc/kernels/dropout.h"

namespace tf_fused_ops {

template <class T, class Engine>
class DropoutOp : public tensorflow::OpKernel {
 public:
  explicit DropoutOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    float rate, scale;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rate", &rate));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("scale", &scale));
    dropout_ = {RoundedAttr<T>(rate), RoundedAttr<T>(scale), {}};
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& x = ctx->input(0);
    tfo::DropoutArgs args{kDType<T>, x.NumElements(), dropout_, x.data(),
                          nullptr};
    OP_REQUIRES_OK(
        ctx, ReadRandom(ctx->input(1), ctx->input(2), &args.dropout.random));
    OP_REQUIRES_OK(ctx, Output(ctx, {0}, 0, x.shape(), &args.y));
    OP_REQUIRES_OK(ctx, Engine::Run(ctx, args));
  }

 private:
  tfo::Dropout dropout_;
};

#define TFO_REGISTER_DROPOUT(device, Engine, T)           \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>Dropout")      \
                              .Device(tensorflow::device) \
                              .TypeConstraint<T>("T"),    \
                          DropoutOp<T, Engine>)

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_DROPOUT_OPS_H_
