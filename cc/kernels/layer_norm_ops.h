// The kernels of LayerNorm and LayerNormGrad. An Engine runs them on a device.
#ifndef TFO_CC_KERNELS_LAYER_NORM_OPS_H_
#define TFO_CC_KERNELS_LAYER_NORM_OPS_H_

#include "cc/core/layer_norm.h"
#include "cc/kernels/decimals.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <class T>
class LayerNormBase : public tensorflow::OpKernel {
 public:
  explicit LayerNormBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("subtract_mean", &subtract_mean_));
  }

  void Compute(OpKernelContext* ctx) final { OP_REQUIRES_OK(ctx, Run(ctx)); }

 protected:
  virtual absl::Status Run(OpKernelContext* ctx) const = 0;

  // x as rows of its last dimension; `*statistics` is the shape of the others.
  absl::Status RowsOf(const Tensor& x, tfo::LayerNormShape* rows,
                      TensorShape* statistics) const {
    if (x.dims() == 0)
      return Invalid("x must have rank at least 1, got shape []");
    *statistics = x.shape();
    statistics->RemoveLastDims(1);
    *rows = {kDType<T>, statistics->num_elements(), x.dim_size(x.dims() - 1),
             subtract_mean_};
    return absl::OkStatus();
  }

 private:
  bool subtract_mean_;
};

template <class T, class Engine>
class LayerNormOp : public LayerNormBase<T> {
 public:
  explicit LayerNormOp(OpKernelConstruction* ctx) : LayerNormBase<T>(ctx) {
    float epsilon;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &epsilon));
    epsilon_ = AsWritten(epsilon);
  }

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    const Tensor& x = ctx->input(0);
    const Tensor& scale = ctx->input(1);
    const Tensor& offset = ctx->input(2);
    tfo::LayerNormShape shape;
    TensorShape statistics;
    TF_RETURN_IF_ERROR(this->RowsOf(x, &shape, &statistics));
    const TensorShape vector({shape.depth});
    TF_RETURN_IF_ERROR(
        CheckShape("scale", scale, "the last dimension of x", vector));
    TF_RETURN_IF_ERROR(
        CheckShape("offset", offset, "the last dimension of x", vector));
    void *y, *mean, *inv_std;
    TF_RETURN_IF_ERROR(Output(ctx, {0}, 0, x.shape(), &y));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 1, statistics, &mean));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 2, statistics, &inv_std));
    return Engine::Forward(ctx, {shape, epsilon_, x.data(), scale.data(),
                                 offset.data(), y, mean, inv_std});
  }

  double epsilon_;
};

template <class T, class Engine>
class LayerNormGradOp : public LayerNormBase<T> {
 public:
  using LayerNormBase<T>::LayerNormBase;

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    const Tensor& dy = ctx->input(0);
    const Tensor& x = ctx->input(1);
    const Tensor& scale = ctx->input(2);
    const Tensor& mean = ctx->input(3);
    const Tensor& inv_std = ctx->input(4);
    tfo::LayerNormShape shape;
    TensorShape statistics;
    TF_RETURN_IF_ERROR(this->RowsOf(x, &shape, &statistics));
    const TensorShape vector({shape.depth});
    const char* const rest = "x without its last dimension";
    TF_RETURN_IF_ERROR(CheckShape("dy", dy, "x", x.shape()));
    TF_RETURN_IF_ERROR(
        CheckShape("scale", scale, "the last dimension of x", vector));
    TF_RETURN_IF_ERROR(CheckShape("mean", mean, rest, statistics));
    TF_RETURN_IF_ERROR(CheckShape("inv_std", inv_std, rest, statistics));
    void *x_grad, *scale_grad, *offset_grad;
    TF_RETURN_IF_ERROR(Output(ctx, {0}, 0, x.shape(), &x_grad));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 1, vector, &scale_grad));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 2, vector, &offset_grad));
    return Engine::Gradient(
        ctx, {shape, dy.data(), x.data(), scale.data(), mean.data(),
              inv_std.data(), x_grad, scale_grad, offset_grad});
  }
};

#define TFO_REGISTER_LAYER_NORM(device, Engine, T, U)      \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>LayerNorm")     \
                              .Device(tensorflow::device)  \
                              .TypeConstraint<T>("T")      \
                              .TypeConstraint<U>("U"),     \
                          LayerNormOp<T, Engine>);         \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>LayerNormGrad") \
                              .Device(tensorflow::device)  \
                              .TypeConstraint<T>("T")      \
                              .TypeConstraint<U>("U"),     \
                          LayerNormGradOp<T, Engine>)

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_LAYER_NORM_OPS_H_
