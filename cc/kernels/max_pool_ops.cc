// MaxPoolAct and MaxPoolActGrad on the CPU.
#include "cc/core/dispatch.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/max_pool_attrs.h"

namespace tf_fused_ops {
namespace {

// What `attrs` make of an image of shape `x`; `*y` is the output's shape.
absl::Status Bind(const MaxPoolAttrs& attrs, const tensorflow::TensorShape& x,
                  tfo::MaxPoolShape* out, tensorflow::TensorShape* y) {
  std::int64_t size[2], pad[2];
  *y = x;
  for (int i = 0; i < 2; ++i) {
    TF_RETURN_IF_ERROR(
        MaxPoolOutputSize(attrs, i, x.dim_size(1 + i), &size[i], &pad[i]));
    TF_RETURN_IF_ERROR(y->SetDimWithStatus(1 + i, size[i]));
  }
  *out = {x.dim_size(0),           x.dim_size(1),  x.dim_size(2),
          x.dim_size(3),           size[0],        size[1],
          attrs.ksize[0],          attrs.ksize[1], attrs.windows.stride[0],
          attrs.windows.stride[1], pad[0],         pad[1]};
  return absl::OkStatus();
}

template <class T>
class MaxPoolActOp : public tensorflow::OpKernel {
 public:
  explicit MaxPoolActOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadMaxPoolAttrs(ctx, &attrs_));
    std::string activation;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("activation", &activation));
    relu_ = activation == "relu";
    OP_REQUIRES_OK(ctx, ctx->GetAttr("save_indices", &save_indices_));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& x = ctx->input(0);
    OP_REQUIRES(
        ctx, x.dims() == 4,
        Invalid("x must have rank 4, got shape ", x.shape().DebugString()));
    tfo::MaxPoolShape shape;
    tensorflow::TensorShape out;
    OP_REQUIRES_OK(ctx, Bind(attrs_, x.shape(), &shape, &out));
    void *y, *indices;
    OP_REQUIRES_OK(ctx, Output(ctx, {}, 0, out, &y));
    OP_REQUIRES_OK(ctx, OptionalOutput(ctx, 1, save_indices_, out, &indices));
    if (out.num_elements() == 0) return;
    tfo::ActiveKernels().max_pool_forward({kDType<T>, shape, relu_, x.data(), y,
                                           static_cast<std::uint8_t*>(indices)},
                                          ParallelOf(ctx));
  }

 private:
  MaxPoolAttrs attrs_;
  bool relu_, save_indices_;
};

template <class T>
class MaxPoolActGradOp : public tensorflow::OpKernel {
 public:
  explicit MaxPoolActGradOp(tensorflow::OpKernelConstruction* ctx)
      : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadMaxPoolAttrs(ctx, &attrs_));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& dy = ctx->input(0);
    const tensorflow::Tensor& indices = ctx->input(1);
    tensorflow::TensorShape x;
    OP_REQUIRES_OK(ctx, ShapeOfSizes("input_sizes", ctx->input(2), 4, &x));
    tfo::MaxPoolShape shape;
    tensorflow::TensorShape out;
    OP_REQUIRES_OK(ctx, Bind(attrs_, x, &shape, &out));
    OP_REQUIRES_OK(ctx, CheckShape("dy", dy, "the output", out));
    OP_REQUIRES_OK(ctx, CheckShape("indices", indices, "dy", out));
    void* x_grad;
    OP_REQUIRES_OK(ctx, Output(ctx, {}, 0, x, &x_grad));
    if (x.num_elements() == 0) return;
    tfo::ActiveKernels().max_pool_gradient(
        {kDType<T>, shape, dy.data(),
         static_cast<const std::uint8_t*>(indices.data()), x_grad},
        ParallelOf(ctx));
  }

 private:
  MaxPoolAttrs attrs_;
};

#define TFO_REGISTER_MAX_POOL(T)                              \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>MaxPoolAct")       \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          MaxPoolActOp<T>);                   \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>MaxPoolActGrad")   \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          MaxPoolActGradOp<T>)

TFO_REGISTER_MAX_POOL(Eigen::half);
TFO_REGISTER_MAX_POOL(tensorflow::bfloat16);
TFO_REGISTER_MAX_POOL(float);
TFO_REGISTER_MAX_POOL(double);

}  // namespace
}  // namespace tf_fused_ops
