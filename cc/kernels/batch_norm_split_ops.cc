// Batch normalization in the two phases between which replicas exchange their
// statistics, forward and backward, on the CPU.
#include "cc/kernels/batch_norm_ops.h"

namespace tf_fused_ops {
namespace {

double* Doubles(Tensor* tensor) { return tensor->flat<double>().data(); }

const double* Doubles(const Tensor& tensor) {
  return tensor.flat<double>().data();
}

template <class T>
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
    ScratchOwner scratch(ctx);
    return Done(tfo::BatchNormLocalMoments(
        shape, x.data(), ParallelOf(ctx), scratch.scratch(), Doubles(moments)));
  }
};

template <class T>
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
    ScratchOwner scratch(ctx);
    return Done(tfo::BatchNormForwardFromMoments(
        args, moments.dim_size(0), Doubles(moments), ParallelOf(ctx),
        scratch.scratch()));
  }
};

template <class T>
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
    ScratchOwner scratch(ctx);
    return Done(tfo::BatchNormLocalSums(args, ParallelOf(ctx),
                                        scratch.scratch(), Doubles(sums)));
  }
};

template <class T>
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
    ScratchOwner scratch(ctx);
    return Done(tfo::BatchNormGradientFromSums(
        args, Doubles(sums), ParallelOf(ctx), scratch.scratch()));
  }

  bool side_input_gradient_;
};

TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormApply", BatchNormApplyOp);
TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormGradSums", BatchNormGradSumsOp);
TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormGradApply", BatchNormGradApplyOp);

#define TFO_REGISTER_MOMENTS(T)                               \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>BatchNormMoments") \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          BatchNormMomentsOp<T>)
TFO_REGISTER_MOMENTS(Eigen::half);
TFO_REGISTER_MOMENTS(tensorflow::bfloat16);
TFO_REGISTER_MOMENTS(float);
TFO_REGISTER_MOMENTS(double);
#undef TFO_REGISTER_MOMENTS

}  // namespace
}  // namespace tf_fused_ops
