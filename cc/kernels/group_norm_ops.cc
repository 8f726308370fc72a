// GroupNormAct and GroupNormActGrad on the CPU.
#include "cc/core/dispatch.h"
#include "cc/kernels/batch_norm_ops.h"

namespace tf_fused_ops {
namespace {

template <class T>
class GroupNormBase : public BatchNormBase<T> {
 public:
  explicit GroupNormBase(OpKernelConstruction* ctx) : BatchNormBase<T>(ctx) {
    OP_REQUIRES_OK(ctx, ReadActivationAttrs(ctx, &activation_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("groups", &groups_));
  }

 protected:
  // Of x; and the vectors scale and offset, from input `first` on.
  absl::Status ReadShape(OpKernelContext* ctx, const Tensor& x, int first,
                         tfo::GroupNormShape* out) const {
    TF_RETURN_IF_ERROR(this->ShapeOf(x, &out->image));
    out->groups = groups_;
    out->images = x.dim_size(0);
    // Where channels are dimension 1 the images are all that is outside.
    std::int64_t& outer = out->image.outer;
    outer = 1;
    for (int i = 1; this->channels_last() && i < x.dims() - 1; ++i)
      outer *= x.dim_size(i);
    for (const char* name : {"scale", "offset"})
      TF_RETURN_IF_ERROR(CheckShape(name, ctx->input(first++),
                                    "the channels of x",
                                    {out->image.channels}));
    return CheckGroups(groups_, out->image.channels);
  }

  ActivationAttrs activation_;

 private:
  int groups_;
};

template <class T>
class GroupNormActOp : public GroupNormBase<T> {
 public:
  explicit GroupNormActOp(OpKernelConstruction* ctx) : GroupNormBase<T>(ctx) {
    float epsilon;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &epsilon));
    epsilon_ = AsWritten(epsilon);
  }

 private:
  absl::Status Run(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    tfo::GroupNormShape shape;
    TF_RETURN_IF_ERROR(this->ReadShape(ctx, x, 1, &shape));
    const TensorShape statistics({shape.images, shape.groups});
    void *y, *mean, *inv_std;
    TF_RETURN_IF_ERROR(Output(ctx, {0}, 0, x.shape(), &y));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 1, statistics, &mean));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 2, statistics, &inv_std));
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().group_norm_forward(
               {shape, this->activation_.activation, this->activation_.alpha,
                epsilon_, x.data(), ctx->input(1).data(), ctx->input(2).data(),
                y, mean, inv_std},
               ParallelOf(ctx), scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  double epsilon_;
};

template <class T>
class GroupNormActGradOp : public GroupNormBase<T> {
 public:
  using GroupNormBase<T>::GroupNormBase;

 private:
  absl::Status Run(OpKernelContext* ctx) override {
    const Tensor& dy = ctx->input(0);
    const Tensor& x = ctx->input(1);
    tfo::GroupNormShape shape;
    TF_RETURN_IF_ERROR(this->ReadShape(ctx, x, 2, &shape));
    TF_RETURN_IF_ERROR(CheckShape("dy", dy, "x", x.shape()));
    const TensorShape statistics({shape.images, shape.groups});
    for (const auto& [name, index] : {std::pair("mean", 4), {"inv_std", 5}})
      TF_RETURN_IF_ERROR(
          CheckShape(name, ctx->input(index), "images and groups", statistics));
    const TensorShape vector({shape.image.channels});
    void *x_grad, *scale_grad, *offset_grad;
    TF_RETURN_IF_ERROR(Output(ctx, {0, 1}, 0, x.shape(), &x_grad));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 1, vector, &scale_grad));
    TF_RETURN_IF_ERROR(Output(ctx, {}, 2, vector, &offset_grad));
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().group_norm_gradient(
               {shape, this->activation_.activation, this->activation_.alpha,
                dy.data(), x.data(), ctx->input(2).data(), ctx->input(3).data(),
                ctx->input(4).data(), ctx->input(5).data(), x_grad, scale_grad,
                offset_grad},
               ParallelOf(ctx), scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }
};

#define TFO_REGISTER_GROUP_NORM(T, U)                         \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>GroupNormAct")     \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T")         \
                              .TypeConstraint<U>("U"),        \
                          GroupNormActOp<T>);                 \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>GroupNormActGrad") \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T")         \
                              .TypeConstraint<U>("U"),        \
                          GroupNormActGradOp<T>)

TFO_REGISTER_GROUP_NORM(Eigen::half, float);
TFO_REGISTER_GROUP_NORM(tensorflow::bfloat16, float);
TFO_REGISTER_GROUP_NORM(float, float);
TFO_REGISTER_GROUP_NORM(double, double);

}  // namespace
}  // namespace tf_fused_ops
