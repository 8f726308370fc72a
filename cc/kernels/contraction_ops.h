// The kernels of the contraction ops, forward and gradient. A Geometry says
// what is peculiar to an op: its attributes, its arguments' names, and the
// convolution that its shapes stand for, whether that takes a scale, whether it
// yields moments, whether it is of volumes, and whether it is transposed, as
// the op is then told its output's shape. An Engine runs it on a device, and
// keeps what it likes from call to call.
#ifndef TFO_CC_KERNELS_CONTRACTION_OPS_H_
#define TFO_CC_KERNELS_CONTRACTION_OPS_H_

#include <utility>

#include "cc/core/conv.h"
#include "cc/core/conv3d.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// What a Geometry makes of the shapes of an op's two operands; of a transposed
// convolution also of y's, which an argument tells.
struct BoundShapes {
  tfo::ConvShape conv;
  tfo::ConvDepth depth;  // where kHasDepth
  tensorflow::TensorShape y;
  const char* told_by = nullptr;
};

template <class Geometry>
std::int64_t OutputChannels(const tfo::ConvShape& conv) {
  return Geometry::kTransposed ? conv.InputChannels() : conv.OutputChannels();
}

template <class T, class Geometry, class Engine>
class ContractionOp : public tensorflow::OpKernel {
 public:
  explicit ContractionOp(tensorflow::OpKernelConstruction* ctx)
      : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, geometry_.Read(ctx));
    OP_REQUIRES_OK(ctx, ReadActivationAttrs(ctx, &activation_));
    OP_REQUIRES_OK(ctx,
                   ctx->GetAttr("save_pre_activation", &save_pre_activation_));
    if constexpr (Geometry::kConstantAttr != nullptr) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr(Geometry::kConstantAttr, &is_constant_));
    }
    int count;
    OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_bias", &count));
    OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_side_inputs", &count));
    if (Geometry::kHasScale) {
      OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_scale", &count));
    }
    if (Geometry::kHasMoments) {
      OP_REQUIRES_OK(ctx, ReadOptionalCount(ctx, "num_moments", &num_moments_));
    }
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, Run(ctx));
  }

 private:
  absl::Status Run(tensorflow::OpKernelContext* ctx) {
    const tensorflow::Tensor& a = ctx->input(0);
    const tensorflow::Tensor& b = ctx->input(1);
    BoundShapes shapes;
    if constexpr (Geometry::kTransposed) {
      const tensorflow::Tensor* sizes;
      TF_RETURN_IF_ERROR(ctx->input("output_shape", &sizes));
      shapes.told_by = "output_shape";
      TF_RETURN_IF_ERROR(ShapeOfSizes(shapes.told_by, *sizes, 4, &shapes.y));
    }
    TF_RETURN_IF_ERROR(geometry_.Bind(a.shape(), b.shape(), &shapes));
    const std::int64_t channels = OutputChannels<Geometry>(shapes.conv);
    const tensorflow::Tensor *scale = nullptr, *bias, *side_input;
    if (Geometry::kHasScale) {
      TF_RETURN_IF_ERROR(OptionalInput(ctx, "scale", &scale));
    }
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "bias", &bias));
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "side_input", &side_input));
    for (const auto& [name, vector] :
         {std::pair{"scale", scale}, std::pair{"bias", bias}}) {
      if (vector == nullptr) continue;
      TF_RETURN_IF_ERROR(
          CheckShape(name, *vector, "the output's channels", {channels}));
    }
    if (side_input != nullptr) {
      TF_RETURN_IF_ERROR(
          CheckShape("side_input", *side_input, "the output", shapes.y));
    }
    void *y, *pre_activation;
    TF_RETURN_IF_ERROR(OptionalOutput(ctx, 0, true, shapes.y, &y));
    TF_RETURN_IF_ERROR(OptionalOutput(ctx, 1, save_pre_activation_, shapes.y,
                                      &pre_activation));
    double* moments = nullptr;
    if (num_moments_ > 0) {
      tensorflow::Tensor* tensor = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(2, {3, channels}, &tensor));
      moments = tensor->flat<double>().data();
    }
    const bool empty = shapes.y.num_elements() == 0;
    if (empty && channels * num_moments_ == 0) return absl::OkStatus();
    const tfo::ConvForwardArgs args{kDType<T>,
                                    shapes.conv,
                                    activation_.activation,
                                    activation_.alpha,
                                    a.data(),
                                    b.data(),
                                    DataOrNull(scale),
                                    DataOrNull(bias),
                                    DataOrNull(side_input),
                                    y,
                                    pre_activation,
                                    nullptr,
                                    moments,
                                    geometry_.winograd};
    if constexpr (Geometry::kHasDepth) {
      return engine_.Forward(ctx, args, shapes.depth);
    } else {
      return engine_.Forward(ctx, args, is_constant_ ? &b : nullptr);
    }
  }

  Geometry geometry_;
  Engine engine_;
  ActivationAttrs activation_;
  bool save_pre_activation_, is_constant_ = false;
  int num_moments_ = 0;
};

template <class T, class Geometry, class Engine>
class ContractionGradOp : public tensorflow::OpKernel {
 public:
  explicit ContractionGradOp(tensorflow::OpKernelConstruction* ctx)
      : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, geometry_.Read(ctx));
    OP_REQUIRES_OK(ctx, ReadActivationAttrs(ctx, &activation_));
    OP_REQUIRES_OK(ctx, CheckSavedCount(ctx, activation_));
    const char* const names[] = {Geometry::kGradientAttrs[0],
                                 Geometry::kGradientAttrs[1], "bias_gradient",
                                 "side_input_gradient"};
    for (int i = 0; i < 4; ++i) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr(names[i], &wanted_[i]));
    }
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, Run(ctx));
  }

 private:
  absl::Status Run(tensorflow::OpKernelContext* ctx) {
    const tensorflow::Tensor& dy = ctx->input(0);
    const tensorflow::Tensor& a = ctx->input(1);
    const tensorflow::Tensor& b = ctx->input(2);
    BoundShapes shapes{{}, {}, dy.shape(), "dy"};
    TF_RETURN_IF_ERROR(geometry_.Bind(a.shape(), b.shape(), &shapes));
    TF_RETURN_IF_ERROR(CheckShape("dy", dy, "the forward op's y", shapes.y));
    const tensorflow::Tensor* saved;
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "saved", &saved));
    if (saved != nullptr) {
      TF_RETURN_IF_ERROR(CheckShape("saved", *saved, "dy", shapes.y));
    }
    const tensorflow::TensorShape output_shapes[] = {
        a.shape(),
        b.shape(),
        {OutputChannels<Geometry>(shapes.conv)},
        shapes.y};
    void* gradients[4];
    for (int i = 0; i < 4; ++i) {
      TF_RETURN_IF_ERROR(
          OptionalOutput(ctx, i, wanted_[i], output_shapes[i], &gradients[i]));
    }
    const tfo::ConvGradientArgs args{
        kDType<T>,         shapes.conv,  activation_.activation,
        activation_.alpha, dy.data(),    DataOrNull(saved),
        a.data(),          b.data(),     gradients[0],
        gradients[1],      gradients[2], gradients[3],
        geometry_.winograd};
    if constexpr (Geometry::kHasDepth) {
      return engine_.Gradient(ctx, args, shapes.depth);
    } else {
      return engine_.Gradient(ctx, args);
    }
  }

  Geometry geometry_;
  Engine engine_;
  ActivationAttrs activation_;
  bool wanted_[4];
};

#define TFO_REGISTER_CONTRACTION(NAME, DEVICE, GEOMETRY, ENGINE, T)        \
  REGISTER_KERNEL_BUILDER(                                                 \
      Name(NAME).Device(tensorflow::DEVICE).TypeConstraint<T>("T"),        \
      ContractionOp<T, GEOMETRY, ENGINE>);                                 \
  REGISTER_KERNEL_BUILDER(                                                 \
      Name(NAME "Grad").Device(tensorflow::DEVICE).TypeConstraint<T>("T"), \
      ContractionGradOp<T, GEOMETRY, ENGINE>)

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_CONTRACTION_OPS_H_
