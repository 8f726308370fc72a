// The kernel of Dropout on the CPU.
#include "cc/core/dispatch.h"
#include "cc/kernels/dropout.h"

namespace tf_fused_ops {
namespace {

template <class T>
class DropoutOp : public tensorflow::OpKernel {
 public:
  explicit DropoutOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    float rate, scale;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rate", &rate));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("scale", &scale));
    dropout_ = {RoundedAttr<T>(rate), RoundedAttr<T>(scale), {}};
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& x = ctx->input(0);
    tfo::DropoutArgs args{kDType<T>, x.NumElements(), dropout_, x.data(),
                          nullptr};
    OP_REQUIRES_OK(
        ctx, ReadRandom(ctx->input(1), ctx->input(2), &args.dropout.random));
    OP_REQUIRES_OK(ctx, Output(ctx, {0}, 0, x.shape(), &args.y));
    tfo::ActiveKernels().drop_out(args, ParallelOf(ctx));
  }

 private:
  tfo::Dropout dropout_;
};

#define TFO_REGISTER_DROPOUT(T)                               \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>Dropout")          \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          DropoutOp<T>)

TFO_REGISTER_DROPOUT(Eigen::half);
TFO_REGISTER_DROPOUT(tensorflow::bfloat16);
TFO_REGISTER_DROPOUT(float);
TFO_REGISTER_DROPOUT(double);

}  // namespace
}  // namespace tf_fused_ops
