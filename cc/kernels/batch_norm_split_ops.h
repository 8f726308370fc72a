// Batch normalization in the two phases between which replicas exchange their
// statistics, forward and backward; an Engine runs them on a device.
#ifndef TFO_CC_KERNELS_BATCH_NORM_SPLIT_OPS_H_
#define TFO_CC_KERNELS_BATCH_NORM_SPLIT_OPS_H_

#include "cc/kernels/batch_norm_ops.h"

namespace tf_fused_ops {

template <class T, class Engine>
class BatchNormMomentsOp : public BatchNormBase<T> {
 public:
  using BatchNormBase<T>::BatchNormBase;

 private:
  absl::Status Run(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    tfo::BatchNormShape shape;
    TF_RETURN_IF_ERROR(this->ShapeOf(x, &shape));
    Tensor* moments = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, {3, shape.channels}, &moments));
    return Engine::LocalMoments(ctx, shape, x.data(), Doubles(moments));
  }
};

template <class T, class Engine>
class BatchNormApplyOp : public BatchNormForwardBase<T> {
 public:
  using BatchNormForwardBase<T>::BatchNormForwardBase;

 private:
  absl::Status Forward(OpKernelContext* ctx,
                       const tfo::BatchNormForwardArgs& args) override {
    const Tensor& moments = ctx->input(5);
    const std::int64_t channels = args.apply.shape.channels;
    if (moments.dims() != 3 || moments.dim_size(1) != 3 ||
        moments.dim_size(2) != channels) {
      return Invalid("moments must have shape [num_replicas, 3, ", channels,
                     "], got ", moments.shape().DebugString());
    }
    return Engine::ForwardFromMoments(ctx, args, moments.dim_size(0),
                                      Doubles(moments));
  }
};

template <class T, class Engine>
class BatchNormGradSumsOp : public BatchNormGradientBase<T> {
 public:
  using BatchNormGradientBase<T>::BatchNormGradientBase;

 private:
  absl::Status Run(OpKernelContext* ctx) override {
    tfo::BatchNormGradientArgs args{};
    TF_RETURN_IF_ERROR(this->ReadInputs(ctx, &args));
    Tensor* sums = nullptr;
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(0, {3, args.shape.channels}, &sums));
    TF_RETURN_IF_ERROR(this->VectorOutputs(ctx, &args));
    return Engine::LocalSums(ctx, args, Doubles(sums));
  }
};

template <class T, class Engine>
class BatchNormGradApplyOp : public BatchNormGradientBase<T> {
 public:
  explicit BatchNormGradApplyOp(OpKernelConstruction* ctx)
      : BatchNormGradientBase<T>(ctx) {
    OP_REQUIRES_OK(ctx,
                   ctx->GetAttr("side_input_gradient", &side_input_gradient_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx) override {
    tfo::BatchNormGradientArgs args{};
    TF_RETURN_IF_ERROR(this->ReadInputs(ctx, &args));
    const Tensor& sums = ctx->input(6);
    TF_RETURN_IF_ERROR(CheckShape("sums", sums, "three rows of channels",
                                  {3, args.shape.channels}));
    TF_RETURN_IF_ERROR(
        this->TensorOutputs(ctx, 1, side_input_gradient_, &args));
    return Engine::GradientFromSums(ctx, args, Doubles(sums));
  }

  bool side_input_gradient_;
};

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_BATCH_NORM_SPLIT_OPS_H_
