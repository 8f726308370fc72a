// Softmax and SoftmaxGrad on the CPU.
#include "cc/core/dispatch.h"
#include "cc/kernels/decimals.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/softmax_mask.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <class T>
class SoftmaxBase : public tensorflow::OpKernel {
 public:
  explicit SoftmaxBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int num_masks;
    float scale;
    OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_masks", &num_masks));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("scale", &scale));
    scale_ = AsWritten(scale);
  }

  void Compute(OpKernelContext* ctx) final { OP_REQUIRES_OK(ctx, Run(ctx)); }

 protected:
  virtual absl::Status Run(OpKernelContext* ctx) const = 0;

  // x as rows of its last dimension, and the mask beside them.
  absl::Status RowsOf(OpKernelContext* ctx, const Tensor& x,
                      tfo::SoftmaxShape* shape, tfo::SoftmaxMask* mask) const {
    if (x.dims() == 0)
      return Invalid("x must have rank at least 1, got shape []");
    const std::int64_t depth = x.dim_size(x.dims() - 1);
    *shape = {kDType<T>, depth == 0 ? 0 : x.NumElements() / depth, depth};
    *mask = {};
    const Tensor* keep;
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "mask", &keep));
    if (keep == nullptr) return absl::OkStatus();
    TF_RETURN_IF_ERROR(CheckMaskRank(keep->dims(), x.dims()));
    mask->keep = static_cast<const std::uint8_t*>(keep->data());
    mask->rank = x.dims() - 1;
    std::int64_t stride = 1;
    for (int i = 1; i <= x.dims(); ++i) {
      const std::int64_t size = x.dim_size(x.dims() - i);
      const std::int64_t kept =
          i <= keep->dims() ? keep->dim_size(keep->dims() - i) : 1;
      TF_RETURN_IF_ERROR(CheckMaskSize(x.dims() - i, i == 1, kept, size));
      if (i > 1) {
        mask->size[x.dims() - i] = size;
        mask->stride[x.dims() - i] = kept == 1 ? 0 : stride;
      }
      stride *= kept;
    }
    return absl::OkStatus();
  }

  double scale() const { return scale_; }

 private:
  double scale_;
};

template <class T>
class SoftmaxOp : public SoftmaxBase<T> {
 public:
  explicit SoftmaxOp(OpKernelConstruction* ctx) : SoftmaxBase<T>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("masked", &masked_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("zero_masked", &zero_masked_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    const Tensor& x = ctx->input(0);
    tfo::SoftmaxArgs args{};
    TF_RETURN_IF_ERROR(this->RowsOf(ctx, x, &args.shape, &args.mask));
    args.scale = this->scale();
    args.masked = masked_;
    args.zero_masked = zero_masked_;
    args.x = x.data();
    TF_RETURN_IF_ERROR(Output(ctx, {0}, 0, x.shape(), &args.y));
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().softmax_forward(args, ParallelOf(ctx),
                                                scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  float masked_;
  bool zero_masked_;
};

template <class T>
class SoftmaxGradOp : public SoftmaxBase<T> {
 public:
  using SoftmaxBase<T>::SoftmaxBase;

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    const Tensor& dy = ctx->input(0);
    const Tensor& y = ctx->input(1);
    tfo::SoftmaxGradientArgs args{};
    TF_RETURN_IF_ERROR(CheckShape("dy", dy, "y", y.shape()));
    TF_RETURN_IF_ERROR(this->RowsOf(ctx, y, &args.shape, &args.mask));
    args.scale = this->scale();
    args.dy = dy.data();
    args.y = y.data();
    TF_RETURN_IF_ERROR(Output(ctx, {0, 1}, 0, y.shape(), &args.x_grad));
    tfo::ActiveKernels().softmax_gradient(args, ParallelOf(ctx));
    return absl::OkStatus();
  }
};

#define TFO_REGISTER_SOFTMAX(T)                               \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>Softmax")          \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          SoftmaxOp<T>);                      \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>SoftmaxGrad")      \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          SoftmaxGradOp<T>)

TFO_REGISTER_SOFTMAX(Eigen::half);
TFO_REGISTER_SOFTMAX(tensorflow::bfloat16);
TFO_REGISTER_SOFTMAX(float);
TFO_REGISTER_SOFTMAX(double);

}  // namespace
}  // namespace tf_fused_ops
