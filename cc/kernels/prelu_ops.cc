// Prelu and PreluGrad on the CPU: the core on the op's own threads and memory.
#include "cc/core/dispatch.h"
#include "cc/core/prelu.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/prelu.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// x as rows, an element of each for every one of alpha.
template <class T>
absl::Status RowsOf(const Tensor& x, const Tensor& alpha,
                    tfo::PreluShape* shape) {
  TF_RETURN_IF_ERROR(CheckPreluRank(alpha.dims(), x.dims()));
  PreluDimensions dimensions;
  for (int i = 1; i <= alpha.dims(); ++i) {
    TF_RETURN_IF_ERROR(dimensions.Add(x.dims() - i,
                                      alpha.dim_size(alpha.dims() - i),
                                      x.dim_size(x.dims() - i)));
  }
  const std::int64_t depth = alpha.NumElements();
  *shape = {kDType<T>, depth == 0 ? 0 : x.NumElements() / depth, depth};
  return absl::OkStatus();
}

template <class T>
class PreluOp : public OpKernel {
 public:
  explicit PreluOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    const Tensor& alpha = ctx->input(1);
    tfo::PreluArgs args{};
    OP_REQUIRES_OK(ctx, RowsOf<T>(x, alpha, &args.shape));
    OP_REQUIRES_OK(ctx, Output(ctx, {0}, 0, x.shape(), &args.y));
    if (x.NumElements() == 0) return;
    args.x = x.data();
    args.alpha = alpha.data();
    ScratchOwner scratch(ctx);
    OP_REQUIRES(ctx,
                tfo::ActiveKernels().prelu_forward(args, ParallelOf(ctx),
                                                   scratch.scratch()),
                OutOfScratch());
  }
};

template <class T>
class PreluGradOp : public OpKernel {
 public:
  explicit PreluGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& dy = ctx->input(0);
    const Tensor& x = ctx->input(1);
    const Tensor& alpha = ctx->input(2);
    tfo::PreluGradientArgs args{};
    OP_REQUIRES_OK(ctx, CheckShape("dy", dy, "x", x.shape()));
    OP_REQUIRES_OK(ctx, RowsOf<T>(x, alpha, &args.shape));
    OP_REQUIRES_OK(ctx, Output(ctx, {0, 1}, 0, x.shape(), &args.x_grad));
    Tensor* alpha_grad = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, alpha.shape(), &alpha_grad));
    if (x.NumElements() == 0) {
      alpha_grad->flat<T>().setZero();
      return;
    }
    args.dy = dy.data();
    args.x = x.data();
    args.alpha = alpha.data();
    args.alpha_grad = alpha_grad->data();
    ScratchOwner scratch(ctx);
    OP_REQUIRES(ctx,
                tfo::ActiveKernels().prelu_gradient(args, ParallelOf(ctx),
                                                    scratch.scratch()),
                OutOfScratch());
  }
};

#define TFO_REGISTER_PRELU(T)                                 \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>Prelu")            \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          PreluOp<T>);                        \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>PreluGrad")        \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          PreluGradOp<T>)

TFO_REGISTER_PRELU(Eigen::half);
TFO_REGISTER_PRELU(tensorflow::bfloat16);
TFO_REGISTER_PRELU(float);
TFO_REGISTER_PRELU(double);

}  // namespace
}  // namespace tf_fused_ops
