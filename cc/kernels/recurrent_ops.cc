// The kernels of Recurrent and RecurrentGrad on the CPU.
#include "cc/core/dispatch.h"
#include "cc/core/recurrent.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/recurrent_attrs.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <class T>
class RecurrentBase : public tensorflow::OpKernel {
 public:
  explicit RecurrentBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadRecurrentAttrs(ctx, &attrs_));
  }

  void Compute(OpKernelContext* ctx) final { OP_REQUIRES_OK(ctx, Run(ctx)); }

 protected:
  struct Shapes {
    TensorShape x, y, state, saved;
  };

  virtual absl::Status Run(OpKernelContext* ctx) const = 0;

  // Checks x or y, called `name`, and what both ops read beside it.
  absl::Status ReadInputs(OpKernelContext* ctx, const char* name,
                          tfo::RecurrentInputs* in, Shapes* shapes) const {
    const Tensor *sequence, *kernel, *mask;
    OpInputList states;
    TF_RETURN_IF_ERROR(ctx->input(name, &sequence));
    TF_RETURN_IF_ERROR(ctx->input("kernel", &kernel));
    TF_RETURN_IF_ERROR(ctx->input_list("states", &states));
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "mask", &mask));
    if (sequence->dims() != 3) {
      return Invalid(name, " must have rank 3, got shape ",
                     sequence->shape().DebugString());
    }
    if (kernel->dims() != 2) {
      return Invalid("kernel must have rank 2, got shape ",
                     kernel->shape().DebugString());
    }
    const std::int64_t batch = sequence->dim_size(0);
    const std::int64_t steps = sequence->dim_size(1);
    const std::int64_t units = kernel->dim_size(0);
    const std::int64_t gates = kernel->dim_size(1);
    TF_RETURN_IF_ERROR(CheckGates(attrs_, units, gates));
    const auto shape = [&](std::int64_t width, TensorShape* out) {
      return TensorShape::BuildTensorShape({batch, steps, width}, out);
    };
    TF_RETURN_IF_ERROR(shape(gates, &shapes->x));
    TF_RETURN_IF_ERROR(shape(units, &shapes->y));
    TF_RETURN_IF_ERROR(shape(attrs_.saved() * units, &shapes->saved));
    TF_RETURN_IF_ERROR(
        TensorShape::BuildTensorShape({batch, units}, &shapes->state));
    *in = {{kDType<T>, attrs_.cell, attrs_.relu, attrs_.backwards, batch, steps,
            units},
           kernel->data(),
           {},
           nullptr};
    for (int i = 0; i < states.size(); ++i) {
      TF_RETURN_IF_ERROR(
          CheckShape("states", states[i], "[batch, units]", shapes->state));
      in->states[i] = states[i].data();
    }
    if (mask == nullptr) return absl::OkStatus();
    in->mask = static_cast<const std::uint8_t*>(mask->data());
    return CheckShape("mask", *mask, "[batch, steps]",
                      TensorShape({batch, steps}));
  }

  const RecurrentAttrs& attrs() const { return attrs_; }
  int num_states() const { return tfo::NumStates(attrs_.cell); }

 private:
  RecurrentAttrs attrs_;
};

template <class T>
class RecurrentOp : public RecurrentBase<T> {
 public:
  explicit RecurrentOp(OpKernelConstruction* ctx) : RecurrentBase<T>(ctx) {
    int num_bias;
    OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_bias", &num_bias));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("save", &save_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    typename RecurrentBase<T>::Shapes shapes;
    tfo::RecurrentArgs args{};
    TF_RETURN_IF_ERROR(this->ReadInputs(ctx, "x", &args.inputs, &shapes));
    const Tensor& x = ctx->input(0);
    const Tensor* bias;
    TF_RETURN_IF_ERROR(
        CheckShape("x", x, "[batch, steps, kernel's columns]", shapes.x));
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "bias", &bias));
    if (bias != nullptr) {
      TF_RETURN_IF_ERROR(CheckShape("bias", *bias, "kernel's columns",
                                    TensorShape({shapes.x.dim_size(2)})));
    }
    args.x = x.data();
    args.bias = DataOrNull(bias);
    TF_RETURN_IF_ERROR(Output(ctx, {}, 0, shapes.y, &args.y));
    const int num_states = this->num_states();
    for (int i = 0; i < num_states; ++i) {
      TF_RETURN_IF_ERROR(Output(ctx, {}, 1 + i, shapes.state, &args.last[i]));
    }
    TF_RETURN_IF_ERROR(
        OptionalOutput(ctx, 1 + num_states, save_, shapes.saved, &args.saved));
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().recurrent_forward(args, ParallelOf(ctx),
                                                  scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  bool save_;
};

template <class T>
class RecurrentGradOp : public RecurrentBase<T> {
 public:
  using RecurrentBase<T>::RecurrentBase;

 private:
  absl::Status Run(OpKernelContext* ctx) const override {
    typename RecurrentBase<T>::Shapes shapes;
    tfo::RecurrentGradientArgs args{};
    TF_RETURN_IF_ERROR(this->ReadInputs(ctx, "y", &args.inputs, &shapes));
    const Tensor& dy = ctx->input(0);
    const Tensor *y, *saved;
    OpInputList dlast;
    TF_RETURN_IF_ERROR(ctx->input("y", &y));
    TF_RETURN_IF_ERROR(ctx->input("saved", &saved));
    TF_RETURN_IF_ERROR(ctx->input_list("dlast", &dlast));
    TF_RETURN_IF_ERROR(
        CheckShape("y", *y, "[batch, steps, kernel's rows]", shapes.y));
    TF_RETURN_IF_ERROR(CheckShape("dy", dy, "y", shapes.y));
    TF_RETURN_IF_ERROR(
        CheckShape("saved", *saved, "what the forward op saves", shapes.saved));
    args.y = y->data();
    args.saved = saved->data();
    args.dy = dy.data();
    const int num_states = this->num_states();
    for (int i = 0; i < num_states; ++i) {
      TF_RETURN_IF_ERROR(
          CheckShape("dlast", dlast[i], "[batch, units]", shapes.state));
      args.dlast[i] = dlast[i].data();
      TF_RETURN_IF_ERROR(
          Output(ctx, {}, 2 + i, shapes.state, &args.state_grads[i]));
    }
    TF_RETURN_IF_ERROR(Output(ctx, {}, 0, shapes.x, &args.x_grad));
    TF_RETURN_IF_ERROR(
        OptionalOutput(ctx, 1, this->attrs().cell == tfo::RecurrentCell::kGru,
                       shapes.x, &args.product_grad));
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().recurrent_gradient(args, ParallelOf(ctx),
                                                   scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }
};

#define TFO_REGISTER_RECURRENT(T)                             \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>Recurrent")        \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          RecurrentOp<T>);                    \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>RecurrentGrad")    \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          RecurrentGradOp<T>)

TFO_REGISTER_RECURRENT(Eigen::half);
TFO_REGISTER_RECURRENT(tensorflow::bfloat16);
TFO_REGISTER_RECURRENT(float);
TFO_REGISTER_RECURRENT(double);

}  // namespace
}  // namespace tf_fused_ops
