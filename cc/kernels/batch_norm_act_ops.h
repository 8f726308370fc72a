// BatchNormAct and BatchNormActGrad; an Engine runs them on a device.
#ifndef TFO_CC_KERNELS_BATCH_NORM_ACT_OPS_H_
#define TFO_CC_KERNELS_BATCH_NORM_ACT_OPS_H_

#include "cc/kernels/batch_norm_ops.h"

namespace tf_fused_ops {

template <class T, class Engine>
class BatchNormActOp : public BatchNormForwardBase<T> {
 public:
  explicit BatchNormActOp(OpKernelConstruction* ctx)
      : BatchNormForwardBase<T>(ctx) {
    OP_REQUIRES_OK(ctx, CheckMomentsCount(ctx));
  }

 private:
  absl::Status Forward(OpKernelContext* ctx,
                       const tfo::BatchNormForwardArgs& args) override {
    const Tensor* moments;
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "moments", &moments));
    if (moments == nullptr) return Engine::Forward(ctx, args);
    TF_RETURN_IF_ERROR(CheckShape("moments", *moments, "three rows of channels",
                                  {3, args.apply.shape.channels}));
    return Engine::ForwardFromMoments(ctx, args, 1, Doubles(*moments));
  }
};

template <class T, class Engine>
class BatchNormActGradOp : public BatchNormGradientBase<T> {
 public:
  explicit BatchNormActGradOp(OpKernelConstruction* ctx)
      : BatchNormGradientBase<T>(ctx) {
    OP_REQUIRES_OK(ctx,
                   ctx->GetAttr("side_input_gradient", &side_input_gradient_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx) override {
    tfo::BatchNormGradientArgs args{};
    TF_RETURN_IF_ERROR(this->ReadInputs(ctx, &args));
    TF_RETURN_IF_ERROR(
        this->TensorOutputs(ctx, 3, side_input_gradient_, &args));
    TF_RETURN_IF_ERROR(this->VectorOutputs(ctx, &args));
    return Engine::Gradient(ctx, args);
  }

  bool side_input_gradient_;
};

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_BATCH_NORM_ACT_OPS_H_
