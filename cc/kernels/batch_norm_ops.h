// What the kernels of batch normalization share: arguments, their checks,
// outputs.
#ifndef TFO_CC_KERNELS_BATCH_NORM_OPS_H_
#define TFO_CC_KERNELS_BATCH_NORM_OPS_H_

#include "cc/core/batch_norm.h"
#include "cc/kernels/decimals.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

inline double* Doubles(Tensor* tensor) { return tensor->flat<double>().data(); }

inline const double* Doubles(const Tensor& tensor) {
  return tensor.flat<double>().data();
}

// One bit an element, in whole bytes.
inline TensorShape MaskShape(const Tensor& y) {
  return {y.NumElements() / 8 + (y.NumElements() % 8 != 0)};
}

// The tensor x: its layout.
template <class T>
class BatchNormBase : public tensorflow::OpKernel {
 public:
  explicit BatchNormBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string data_format;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("data_format", &data_format));
    channels_last_ = data_format == "NHWC";
  }

  void Compute(OpKernelContext* ctx) final { OP_REQUIRES_OK(ctx, Run(ctx)); }

 protected:
  virtual absl::Status Run(OpKernelContext* ctx) = 0;

  bool channels_last() const { return channels_last_; }

  absl::Status ShapeOf(const Tensor& x, tfo::BatchNormShape* out) const {
    const int rank = x.dims();
    if (rank < 2 || rank > 5) {
      return Invalid("x must have rank 2 to 5, got shape ",
                     x.shape().DebugString());
    }
    const int channel_dim = channels_last_ ? rank - 1 : 1;
    *out = {kDType<T>, 1, x.dim_size(channel_dim), 1};
    for (int i = 0; i < channel_dim; ++i) out->outer *= x.dim_size(i);
    for (int i = channel_dim + 1; i < rank; ++i) out->inner *= x.dim_size(i);
    return absl::OkStatus();
  }

 private:
  bool channels_last_;
};

// Vectors, side input and activation.
template <class T>
class BatchNormActBase : public BatchNormBase<T> {
 public:
  explicit BatchNormActBase(OpKernelConstruction* ctx) : BatchNormBase<T>(ctx) {
    OP_REQUIRES_OK(ctx, ReadActivationAttrs(ctx, &activation_));
    if (ctx->HasAttr("training")) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("training", &training_));
    }
    OP_REQUIRES_OK(
        ctx, ReadOptionalCount(ctx, "num_side_inputs", &num_side_inputs_));
  }

 protected:
  // The vectors, one value a channel, from input `first` on.
  static absl::Status ChannelVectors(OpKernelContext* ctx, int first,
                                     std::initializer_list<const char*> names,
                                     std::int64_t channels, const void** data) {
    for (const char* name : names) {
      const Tensor& vector = ctx->input(first++);
      TF_RETURN_IF_ERROR(
          CheckShape(name, vector, "the channels of x", {channels}));
      *data++ = vector.data();
    }
    return absl::OkStatus();
  }

  static absl::Status SideInput(OpKernelContext* ctx, const Tensor& x,
                                const Tensor** side) {
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "side_input", side));
    if (*side == nullptr) return absl::OkStatus();
    return CheckShape("side_input", **side, "x", x.shape());
  }

  ActivationAttrs activation_;
  // Ops without the attribute split a training step.
  bool training_ = true;
  int num_side_inputs_;
};

// Inputs x, scale, offset, mean, variance, ..., side_input; outputs y, four
// vectors, mask.
template <class T>
class BatchNormForwardBase : public BatchNormActBase<T> {
 public:
  explicit BatchNormForwardBase(OpKernelConstruction* ctx)
      : BatchNormActBase<T>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &epsilon_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("momentum", &momentum_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("unbiased", &unbiased_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("save_mask", &save_mask_));
  }

 private:
  // Runs the core, by whose statistics the two forward ops differ.
  virtual absl::Status Forward(OpKernelContext* ctx,
                               const tfo::BatchNormForwardArgs& args) = 0;

  absl::Status Run(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    tfo::BatchNormForwardArgs args{};
    TF_RETURN_IF_ERROR(this->ShapeOf(x, &args.apply.shape));
    const std::int64_t channels = args.apply.shape.channels;
    const void* vectors[4];
    TF_RETURN_IF_ERROR(this->ChannelVectors(
        ctx, 1, {"scale", "offset", "mean", "variance"}, channels, vectors));
    const Tensor* side;
    TF_RETURN_IF_ERROR(this->SideInput(ctx, x, &side));

    // y is written elementwise after x has been reduced, so it may take the
    // place of an input.
    std::vector<int> candidates{0};
    if (side != nullptr) {
      int begin, end;
      TF_RETURN_IF_ERROR(this->InputRange("side_input", &begin, &end));
      candidates.insert(candidates.begin(), begin);
    }
    void* y;
    TF_RETURN_IF_ERROR(Output(ctx, candidates, 0, x.shape(), &y));
    void* statistics[4];
    for (int i = 0; i < 4; ++i) {
      TF_RETURN_IF_ERROR(
          OptionalOutput(ctx, 1 + i, true, {channels}, &statistics[i]));
    }
    const bool mask_wanted =
        save_mask_ && side != nullptr &&
        this->activation_.activation == tfo::Activation::kRelu;
    void* mask;
    TF_RETURN_IF_ERROR(
        OptionalOutput(ctx, 5, mask_wanted, MaskShape(x), &mask));

    args.apply.parameters = {nullptr, nullptr, vectors[0], vectors[1]};
    args.apply.activation = this->activation_.activation;
    args.apply.alpha = this->activation_.alpha;
    args.apply.x = x.data();
    args.apply.side = DataOrNull(side);
    args.apply.y = y;
    args.apply.mask = static_cast<std::uint8_t*>(mask);
    args.moving_mean = vectors[2];
    args.moving_variance = vectors[3];
    args.epsilon = AsWritten(epsilon_);
    args.momentum = AsWritten(momentum_);
    args.training = this->training_;
    args.unbiased = unbiased_;
    args.new_mean = statistics[0];
    args.new_variance = statistics[1];
    args.saved_mean = statistics[2];
    args.saved_inv_std = statistics[3];
    return Forward(ctx, args);
  }

  float epsilon_, momentum_;
  bool unbiased_, save_mask_;
};

// Inputs dy, x, scale, offset, saved_mean, saved_inv_std, ..., side_input,
// mask.
template <class T>
class BatchNormGradientBase : public BatchNormActBase<T> {
 public:
  explicit BatchNormGradientBase(OpKernelConstruction* ctx)
      : BatchNormActBase<T>(ctx) {
    int num_masks;
    OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_masks", &num_masks));
    OP_REQUIRES(ctx,
                num_masks == 0 ||
                    this->activation_.activation == tfo::Activation::kRelu,
                Invalid("mask is for the activation relu alone"));
    OP_REQUIRES(
        ctx, num_masks == 0 || this->num_side_inputs_ == 0,
        Invalid("mask takes the place of side_input: give one of the two"));
  }

 protected:
  absl::Status ReadInputs(OpKernelContext* ctx,
                          tfo::BatchNormGradientArgs* args) const {
    const Tensor& dy = ctx->input(0);
    const Tensor& x = ctx->input(1);
    TF_RETURN_IF_ERROR(this->ShapeOf(x, &args->shape));
    TF_RETURN_IF_ERROR(CheckShape("dy", dy, "x", x.shape()));
    const void* vectors[4];
    TF_RETURN_IF_ERROR(this->ChannelVectors(
        ctx, 2, {"scale", "offset", "saved_mean", "saved_inv_std"},
        args->shape.channels, vectors));
    const Tensor *side, *mask;
    TF_RETURN_IF_ERROR(this->SideInput(ctx, x, &side));
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "mask", &mask));
    if (mask != nullptr) {
      TF_RETURN_IF_ERROR(
          CheckShape("mask", *mask, "one bit an element of x", MaskShape(x)));
    }
    args->parameters = {vectors[2], vectors[3], vectors[0], vectors[1]};
    args->activation = this->activation_.activation;
    args->alpha = this->activation_.alpha;
    args->training = this->training_;
    args->dy = dy.data();
    args->x = x.data();
    args->side = DataOrNull(side);
    args->mask = static_cast<const std::uint8_t*>(DataOrNull(mask));
    return absl::OkStatus();
  }

  // scale_grad and offset_grad, outputs 1 and 2.
  static absl::Status VectorOutputs(OpKernelContext* ctx,
                                    tfo::BatchNormGradientArgs* args) {
    const TensorShape shape({args->shape.channels});
    TF_RETURN_IF_ERROR(OptionalOutput(ctx, 1, true, shape, &args->scale_grad));
    return OptionalOutput(ctx, 2, true, shape, &args->offset_grad);
  }

  // x_grad, output 0, and side_input_grad, output `side_index`.
  absl::Status TensorOutputs(OpKernelContext* ctx, int side_index,
                             bool side_wanted,
                             tfo::BatchNormGradientArgs* args) const {
    // Without an activation the side input's gradient is dy itself. Otherwise
    // x_grad may take the place of dy or x: it is written elementwise after
    // both have been reduced.
    const Tensor& dy = ctx->input(0);
    const bool pass_dy =
        side_wanted && this->activation_.activation == tfo::Activation::kNone;
    if (pass_dy) {
      ctx->set_output(side_index, dy);
      return Output(ctx, {}, 0, dy.shape(), &args->x_grad);
    }
    TF_RETURN_IF_ERROR(OptionalOutput(ctx, side_index, side_wanted, dy.shape(),
                                      &args->side_grad));
    return Output(ctx, {0, 1}, 0, dy.shape(), &args->x_grad);
  }
};

// Registers Kernel<T, Engine> for op `name`; U is the type of its vectors.
#define TFO_REGISTER_BATCH_NORM(name, device, Kernel, Engine, T, U) \
  REGISTER_KERNEL_BUILDER(Name(name)                                \
                              .Device(tensorflow::device)           \
                              .TypeConstraint<T>("T")               \
                              .TypeConstraint<U>("U"),              \
                          Kernel<T, Engine>)
#define TFO_REGISTER_BATCH_NORM_OPS(device, Engine, T, U)                    \
  TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormAct", device, BatchNormActOp, \
                          Engine, T, U);                                     \
  TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormActGrad", device,             \
                          BatchNormActGradOp, Engine, T, U);                 \
  TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormApply", device,               \
                          BatchNormApplyOp, Engine, T, U);                   \
  TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormGradSums", device,            \
                          BatchNormGradSumsOp, Engine, T, U);                \
  TFO_REGISTER_BATCH_NORM("TfFusedOps>BatchNormGradApply", device,           \
                          BatchNormGradApplyOp, Engine, T, U);               \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>BatchNormMoments")                \
                              .Device(tensorflow::device)                    \
                              .TypeConstraint<T>("T"),                       \
                          BatchNormMomentsOp<T, Engine>)

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_BATCH_NORM_OPS_H_
