// The kernels of Attention and AttentionGrad on the CPU.
#include <algorithm>

#include "cc/core/attention.h"
#include "cc/core/dispatch.h"
#include "cc/kernels/broadcast_input.h"
#include "cc/kernels/dropout.h"
#include "cc/ops/attention_attrs.h"
#include "cc/ops/cache_slots.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Keys or values of all sequences, each of which is dense.
struct Sequences {
  Sizes sizes;
  const char* data;
  std::int64_t stride;  // from one to the next, in elements
};

// Those of a tensor that has sequences in its first dimension, or in all but
// the last two.
Sequences AllOf(const Tensor& x, bool heads_first) {
  const Sizes sizes = x.shape().dim_sizes();
  std::int64_t stride = 0;
  if (x.NumElements() > 0) {
    stride = x.NumElements();
    const int leading = heads_first ? x.dims() - 2 : 1;
    for (int i = 0; i < std::min(leading, x.dims()); ++i) stride /= sizes[i];
  }
  return {sizes, static_cast<const char*>(x.data()), stride};
}

// Those in the `behind`-th slot behind a slot of a cache, `name`.
absl::Status InSlot(const char* name, const Tensor& cache, std::int64_t slot,
                    int behind, Sequences* out) {
  const int inner = cache.dims() - 3;
  if (inner < 2) {
    return Invalid(name, " must have rank at least 5, as slot says, got shape ",
                   cache.shape().DebugString());
  }
  const Sizes sizes = cache.shape().dim_sizes();
  const std::int64_t slots =
      ProductOf({sizes.begin() + 1, sizes.begin() + inner});
  TF_RETURN_IF_ERROR(CheckSlots(name, slot, behind + 1, slots));
  *out = {{sizes[0], sizes[inner], sizes[inner + 1], sizes[inner + 2]},
          static_cast<const char*>(cache.data()),
          0};
  if (cache.NumElements() == 0) return absl::OkStatus();
  out->stride = cache.NumElements() / sizes[0];
  out->data += (slot + behind) * (out->stride / slots) *
               tensorflow::DataTypeSize(cache.dtype());
  return absl::OkStatus();
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
                          const Sequences& k, const Sequences& v, bool grouped,
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
    const bool same_rank = k.sizes.size() == sizes.size();
    if (same_rank) sizes[sequence] = k.sizes[sequence];
    if (grouped && !heads_first_ && same_rank) {
      sizes[2] = k.sizes[2];
      TF_RETURN_IF_ERROR(CheckKeyHeads(q.dim_size(2), sizes[2]));
    }
    TF_RETURN_IF_ERROR(
        CheckSizes("key", k.sizes, "query with a number of keys", sizes));
    if (v.sizes.size() == sizes.size()) sizes[rank - 1] = v.sizes[rank - 1];
    TF_RETURN_IF_ERROR(
        CheckSizes("value", v.sizes, "key with a depth of its own", sizes));
    sizes[sequence] = queries;
    if (!heads_first_) sizes[2] = q.dim_size(2);
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(sizes, &shapes->y));
    if (!heads_first_) std::swap(sizes[1], sizes[2]);
    Sizes& scores = shapes->scores = sizes;
    scores[rank - 1] = k.sizes[sequence];
    sizes.pop_back();
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(sizes, &shapes->rows));
    *args = {};
    tfo::AttentionShape& s = args->shape;
    s.dtype = kDType<T>;
    s.heads = heads_first_ ? 1 : q.dim_size(2);
    s.key_heads = heads_first_ ? 1 : k.sizes[2];
    s.batch = 1;
    for (int i = 0; i < (heads_first_ ? rank - 2 : 1); ++i)
      s.batch *= q.dim_size(i);
    s.queries = q.dim_size(sequence);
    s.keys = k.sizes[sequence];
    s.depth = q.dim_size(rank - 1);
    s.value_depth = v.sizes[rank - 1];
    s.key_stride = k.stride;
    s.value_stride = v.stride;
    args->scale = scale_;
    args->masked = masked_;
    args->zero_masked = zero_masked_;
    args->q = q.data();
    args->k = k.data;
    args->v = v.data;
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

  // Keys or values that are not in a cache.
  Sequences Plain(const Tensor& x) const { return AllOf(x, heads_first_); }

  bool heads_first_;

 private:
  double scale_, masked_;
  tfo::Dropout dropout_;
  int num_rng_;
  bool zero_masked_;
};

template <class T>
class AttentionOp : public AttentionBase<T> {
 public:
  explicit AttentionOp(OpKernelConstruction* ctx) : AttentionBase<T>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot", &slot_));
    OP_REQUIRES_OK(ctx, CheckCache(slot_, this->heads_first_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    tfo::AttentionArgs args;
    tfo::Dropout dropout;
    typename AttentionBase<T>::Shapes shapes;
    const Tensor& key = ctx->input(1);
    const Tensor& value = ctx->input(2);
    Sequences k, v;
    if (slot_ < 0) {
      k = this->Plain(key);
      v = this->Plain(value);
    } else {
      TF_RETURN_IF_ERROR(InSlot("key", key, slot_, 0, &k));
      TF_RETURN_IF_ERROR(InSlot("value", value, slot_, 1, &v));
    }
    TF_RETURN_IF_ERROR(this->ReadInputs(ctx, ctx->input(0), k, v, true, &args,
                                        &dropout, &shapes));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 0, shapes.y, &args.y));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 1, shapes.rows, &args.largest));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 2, shapes.rows, &args.inverse_sum));
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().attention_forward(args, ParallelOf(ctx),
                                                  scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  std::int64_t slot_;
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
    TF_RETURN_IF_ERROR(this->ReadInputs(
        ctx, ctx->input(1), this->Plain(ctx->input(2)),
        this->Plain(ctx->input(3)), false, &forward, &dropout, &shapes));
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
