// The kernels of Attention and AttentionGrad on the CPU.
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_join.h"
#include "cc/core/attention.h"
#include "cc/core/dispatch.h"
#include "cc/kernels/broadcast_input.h"
#include "cc/kernels/dropout.h"
#include "cc/ops/attention_attrs.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

using Sizes = absl::InlinedVector<std::int64_t, 4>;

absl::Status CheckSizes(const char* name, const Tensor& tensor,
                        const char* what, const Sizes& expected) {
  if (tensor.shape().dim_sizes() == expected) return absl::OkStatus();
  return Invalid(name, " must have the shape of ", what, ", [",
                 absl::StrJoin(expected, ","), "], got ",
                 tensor.shape().DebugString());
}

template <class T>
class AttentionBase : public tensorflow::OpKernel {
 public:
  explicit AttentionBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int num_masks, num_bias;
    float scale, masked, rate, kept_scale;
    OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_masks", &num_masks));
    OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_bias", &num_bias));
    OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_rng", &num_rng_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dropout_rate", &rate));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dropout_scale", &kept_scale));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("scale", &scale));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("masked", &masked));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("zero_masked", &zero_masked_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("heads_first", &heads_first_));
    scale_ = AsWritten(scale);
    masked_ = AsWritten(masked);
    dropout_ = {RoundedAttr<T>(rate), RoundedAttr<T>(kept_scale), {}};
  }

  void Compute(OpKernelContext* ctx) final { OP_REQUIRES_OK(ctx, Run(ctx)); }

 protected:
  virtual absl::Status Run(OpKernelContext* ctx) const = 0;

  struct Shapes {
    TensorShape y, rows;  // of what is kept of the rows of scores
    Sizes scores;
  };

  // What the op's inputs say, in `args` and what that points to, and the shapes
  // that follow. Heads may share a head of the keys if these are `grouped`.
  absl::Status ReadInputs(OpKernelContext* ctx, const Tensor& q,
                          const Tensor& k, const Tensor& v, bool grouped,
                          tfo::AttentionArgs* args, tfo::Dropout* dropout,
                          Shapes* shapes) const {
    const int rank = q.dims(), sequence = heads_first_ ? rank - 2 : 1;
    if (heads_first_ ? rank < 2 : rank != 4) {
      return Invalid("query must have rank ", heads_first_ ? "at least 2" : "4",
                     ", got shape ", q.shape().DebugString());
    }
    // Not as shapes, which cannot have as many elements.
    Sizes sizes = q.shape().dim_sizes();
    const std::int64_t queries = sizes[sequence];
    if (k.dims() == rank) sizes[sequence] = k.dim_size(sequence);
    if (grouped && !heads_first_ && k.dims() == rank) {
      sizes[2] = k.dim_size(2);
      TF_RETURN_IF_ERROR(CheckKeyHeads(q.dim_size(2), sizes[2]));
    }
    TF_RETURN_IF_ERROR(
        CheckSizes("key", k, "query with a number of keys", sizes));
    if (v.dims() == rank) sizes[rank - 1] = v.dim_size(rank - 1);
    TF_RETURN_IF_ERROR(
        CheckSizes("value", v, "key with a depth of its own", sizes));
    sizes[sequence] = queries;
    if (!heads_first_) sizes[2] = q.dim_size(2);
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(sizes, &shapes->y));
    if (!heads_first_) std::swap(sizes[1], sizes[2]);
    Sizes& scores = shapes->scores = sizes;
    scores[rank - 1] = k.dim_size(sequence);
    sizes.pop_back();
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(sizes, &shapes->rows));
    *args = {};
    tfo::AttentionShape& s = args->shape;
    s.dtype = kDType<T>;
    s.heads = heads_first_ ? 1 : q.dim_size(2);
    s.key_heads = heads_first_ ? 1 : k.dim_size(2);
    s.batch = 1;
    for (int i = 0; i < (heads_first_ ? rank - 2 : 1); ++i)
      s.batch *= q.dim_size(i);
    s.queries = q.dim_size(sequence);
    s.keys = k.dim_size(sequence);
    s.depth = q.dim_size(rank - 1);
    s.value_depth = v.dim_size(rank - 1);
    args->scale = scale_;
    args->masked = masked_;
    args->zero_masked = zero_masked_;
    args->q = q.data();
    args->k = k.data();
    args->v = v.data();
    if (num_rng_ > 0) {
      const int first = ctx->num_inputs() - 2;
      *dropout = dropout_;
      TF_RETURN_IF_ERROR(ReadRandom(ctx->input(first), ctx->input(first + 1),
                                    &dropout->random));
      args->dropout = dropout;
    }
    TF_RETURN_IF_ERROR(BroadcastInput(ctx, "bias", "the scores", scores,
                                      &args->bias, &args->bias.data));
    return MaskOf(ctx, "the scores", scores, &args->mask);
  }

 private:
  double scale_, masked_;
  tfo::Dropout dropout_;
  int num_rng_;
  bool zero_masked_, heads_first_;
};

template <class T>
class AttentionOp : public AttentionBase<T> {
 public:
  using AttentionBase<T>::AttentionBase;

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    tfo::AttentionArgs args;
    tfo::Dropout dropout;
    typename AttentionBase<T>::Shapes shapes;
    TF_RETURN_IF_ERROR(this->ReadInputs(ctx, ctx->input(0), ctx->input(1),
                                        ctx->input(2), true, &args, &dropout,
                                        &shapes));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 0, shapes.y, &args.y));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 1, shapes.rows, &args.largest));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 2, shapes.rows, &args.inverse_sum));
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().attention_forward(args, ParallelOf(ctx),
                                                  scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }
};

template <class T>
class AttentionGradOp : public AttentionBase<T> {
 public:
  explicit AttentionGradOp(OpKernelConstruction* ctx) : AttentionBase<T>(ctx) {
    OP_REQUIRES_OK(ctx, ReadBiasGradient(ctx, &bias_gradient_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    const Tensor& dy = ctx->input(0);
    const Tensor& y = ctx->input(4);
    const Tensor& largest = ctx->input(5);
    const Tensor& inverse_sum = ctx->input(6);
    tfo::AttentionGradientArgs args{};
    tfo::AttentionArgs& forward = args.forward;
    tfo::Dropout dropout;
    typename AttentionBase<T>::Shapes shapes;
    TF_RETURN_IF_ERROR(this->ReadInputs(ctx, ctx->input(1), ctx->input(2),
                                        ctx->input(3), false, &forward,
                                        &dropout, &shapes));
    TF_RETURN_IF_ERROR(CheckShape("dy", dy, "the output", shapes.y));
    TF_RETURN_IF_ERROR(CheckShape("y", y, "the output", shapes.y));
    const char* const what = "the rows of scores";
    TF_RETURN_IF_ERROR(CheckShape("largest", largest, what, shapes.rows));
    TF_RETURN_IF_ERROR(
        CheckShape("inverse_sum", inverse_sum, what, shapes.rows));
    forward.y = y.data();
    forward.largest = largest.data();
    forward.inverse_sum = inverse_sum.data();
    args.dy = dy.data();
    void** const grads[] = {&args.q_grad, &args.k_grad, &args.v_grad};
    for (int i = 0; i < 3; ++i) {
      TF_RETURN_IF_ERROR(
          Output(ctx, {}, i, ctx->input(i + 1).shape(), grads[i]));
    }
    TensorShape scores({0});
    if (bias_gradient_) {
      TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(shapes.scores, &scores));
    }
    void* bias_grad;
    TF_RETURN_IF_ERROR(Output(ctx, {}, 3, scores, &bias_grad));
    if (bias_gradient_) args.bias_grad = bias_grad;
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().attention_gradient(args, ParallelOf(ctx),
                                                   scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  bool bias_gradient_;
};

#define TFO_REGISTER_ATTENTION(T, U)                          \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>Attention")        \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T")         \
                              .TypeConstraint<U>("U"),        \
                          AttentionOp<T>);                    \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>AttentionGrad")    \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T")         \
                              .TypeConstraint<U>("U"),        \
                          AttentionGradOp<T>)

TFO_REGISTER_ATTENTION(Eigen::half, float);
TFO_REGISTER_ATTENTION(tensorflow::bfloat16, float);
TFO_REGISTER_ATTENTION(float, float);
TFO_REGISTER_ATTENTION(double, double);

}  // namespace
}  // namespace tf_fused_ops
