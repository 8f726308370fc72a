// BatchNormAct and BatchNormActGrad on the CPU.
#include "cc/kernels/batch_norm_ops.h"

namespace tf_fused_ops {
namespace {

template <class T>
class BatchNormActOp : public BatchNormForwardBase<T> {
 public:
  using BatchNormForwardBase<T>::BatchNormForwardBase;

 private:
  absl::Status Forward(OpKernelContext* ctx,
                       const tfo::BatchNormForwardArgs& args) override {
    ScratchOwner scratch(ctx);
    return Done(
        tfo::BatchNormForward(args, ParallelOf(ctx), scratch.scratch()));
  }
};

template <class T>
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
    ScratchOwner scratch(ctx);
    return Done(
        tfo::BatchNormGradient(args, ParallelOf(ctx), scratch.scratch()));
  }

  bool side_input_gradient_;
};

TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormAct", BatchNormActOp);
TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormActGrad", BatchNormActGradOp);

}  // namespace
}  // namespace tf_fused_ops
