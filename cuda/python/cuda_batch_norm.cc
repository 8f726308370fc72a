// Batch normalisation: the phases and the whole.
#include "cuda/batch_norm.h"
#include "cuda/python/array.h"

namespace tfo::cuda::python {
namespace {

// The arrays of one call on one stream, read by name.
struct Call {
  Stream stream;
  BatchNormShape shape;
  Array x;

  Call(const py::object& x_object, bool channels_first,
       std::uintptr_t stream_handle)
      : stream(StreamOf(stream_handle)), x(ArrayOf("x", x_object, stream)) {
    shape.dtype = DTypeOf("x", x);
    const ChannelShape channel_shape("x", x, channels_first);
    shape.outer = channel_shape.outer;
    shape.channels = channel_shape.channels;
    shape.inner = channel_shape.inner;
  }

  void* Like(const char* name, const py::object& object,
             bool optional = false) {
    return Hold(ArrayOf(name, object, stream, x.type, x.shape, optional));
  }
  float* Vector(const char* name, const py::object& object) {
    return static_cast<float*>(Hold(ArrayOf(
        name, object, stream, ElementType::kFloat32, {shape.channels})));
  }
  std::uint8_t* Mask(const py::object& object) {
    return static_cast<std::uint8_t*>(
        Hold(ArrayOf("mask", object, stream, ElementType::kUInt8,
                     {(x.size() + 7) / 8}, true)));
  }

 private:
  void* Hold(Array array) {
    held_.push_back(array);
    return array.data;
  }

  std::vector<Array> held_;
};

void Forward(const py::object& x, const py::object& scale,
             const py::object& offset, const py::object& mean,
             const py::object& variance, const py::object& y,
             const py::object& new_mean, const py::object& new_variance,
             const py::object& saved_mean, const py::object& saved_inv_std,
             const py::object& side_input, const py::object& mask,
             bool channels_first, double epsilon, double momentum,
             bool training, bool unbiased, const std::string& activation,
             double alpha, std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  BatchNormForwardArgs args{};
  args.apply.shape = call.shape;
  args.apply.parameters.scale = call.Vector("scale", scale);
  args.apply.parameters.offset = call.Vector("offset", offset);
  args.apply.activation = ActivationOf(activation);
  args.apply.alpha = alpha;
  args.apply.x = call.x.data;
  args.apply.side = call.Like("side_input", side_input, true);
  args.apply.y = call.Like("y", y);
  args.apply.mask = call.Mask(mask);
  args.moving_mean = call.Vector("mean", mean);
  args.moving_variance = call.Vector("variance", variance);
  args.epsilon = epsilon;
  args.momentum = momentum;
  args.training = training;
  args.unbiased = unbiased;
  args.new_mean = call.Vector("new_mean", new_mean);
  args.new_variance = call.Vector("new_variance", new_variance);
  args.saved_mean = call.Vector("saved_mean", saved_mean);
  args.saved_inv_std = call.Vector("saved_inv_std", saved_inv_std);
  Memory memory(call.stream);
  Raise(BatchNormForward(args, memory.scratch(), call.stream));
}

BatchNormGradientArgs GradientArgs(
    Call* call, const py::object& dy, const py::object& scale,
    const py::object& offset, const py::object& saved_mean,
    const py::object& saved_inv_std, const py::object& side_input,
    const py::object& mask, bool training, const std::string& activation,
    double alpha) {
  BatchNormGradientArgs args{};
  args.shape = call->shape;
  args.parameters = {call->Vector("saved_mean", saved_mean),
                     call->Vector("saved_inv_std", saved_inv_std),
                     call->Vector("scale", scale),
                     call->Vector("offset", offset)};
  args.activation = ActivationOf(activation);
  args.alpha = alpha;
  args.training = training;
  args.dy = call->Like("dy", dy);
  args.x = call->x.data;
  args.side = call->Like("side_input", side_input, true);
  args.mask = call->Mask(mask);
  return args;
}

void Gradient(const py::object& dy, const py::object& x,
              const py::object& scale, const py::object& offset,
              const py::object& saved_mean, const py::object& saved_inv_std,
              const py::object& x_grad, const py::object& scale_grad,
              const py::object& offset_grad, const py::object& side_input,
              const py::object& mask, const py::object& side_input_grad,
              bool channels_first, bool training, const std::string& activation,
              double alpha, std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  BatchNormGradientArgs args =
      GradientArgs(&call, dy, scale, offset, saved_mean, saved_inv_std,
                   side_input, mask, training, activation, alpha);
  args.x_grad = call.Like("x_grad", x_grad);
  args.side_grad = call.Like("side_input_grad", side_input_grad, true);
  args.scale_grad = call.Vector("scale_grad", scale_grad);
  args.offset_grad = call.Vector("offset_grad", offset_grad);
  Memory memory(call.stream);
  Raise(BatchNormGradient(args, memory.scratch(), call.stream));
}

void Moments(const py::object& x, const py::object& mean,
             const py::object& sum_of_squares, bool channels_first,
             std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  Memory memory(call.stream);
  Raise(BatchNormMoments(call.shape, call.x.data, call.Vector("mean", mean),
                         call.Vector("sum_of_squares", sum_of_squares),
                         memory.scratch(), call.stream));
}

void Apply(const py::object& x, const py::object& scale,
           const py::object& offset, const py::object& mean,
           const py::object& inv_std, const py::object& y,
           const py::object& side_input, const py::object& mask,
           bool channels_first, const std::string& activation, double alpha,
           std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  Raise(BatchNormApply(
      {call.shape,
       {call.Vector("mean", mean), call.Vector("inv_std", inv_std),
        call.Vector("scale", scale), call.Vector("offset", offset)},
       ActivationOf(activation),
       alpha,
       call.x.data,
       call.Like("side_input", side_input, true),
       call.Like("y", y),
       call.Mask(mask)},
      call.stream));
}

void GradientSums(const py::object& dy, const py::object& x,
                  const py::object& scale, const py::object& offset,
                  const py::object& mean, const py::object& inv_std,
                  const py::object& sum_dz, const py::object& sum_dz_x,
                  const py::object& side_input, const py::object& mask,
                  bool channels_first, const std::string& activation,
                  double alpha, std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  Memory memory(call.stream);
  Raise(BatchNormGradientSums(
      GradientArgs(&call, dy, scale, offset, mean, inv_std, side_input, mask,
                   true, activation, alpha),
      call.Vector("sum_dz", sum_dz), call.Vector("sum_dz_x", sum_dz_x),
      memory.scratch(), call.stream));
}

void GradientApply(const py::object& dy, const py::object& x,
                   const py::object& scale, const py::object& offset,
                   const py::object& mean, const py::object& inv_std,
                   const py::object& sum_dz, const py::object& sum_dz_x,
                   double count, const py::object& x_grad,
                   const py::object& side_input, const py::object& mask,
                   const py::object& side_input_grad, bool channels_first,
                   const std::string& activation, double alpha,
                   std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  BatchNormGradientArgs args =
      GradientArgs(&call, dy, scale, offset, mean, inv_std, side_input, mask,
                   true, activation, alpha);
  args.x_grad = call.Like("x_grad", x_grad);
  args.side_grad = call.Like("side_input_grad", side_input_grad, true);
  Raise(BatchNormGradientApply(args, count, call.Vector("sum_dz", sum_dz),
                               call.Vector("sum_dz_x", sum_dz_x), call.stream));
}

}  // namespace

void BindBatchNorm(py::module_& module) {
  const auto none = py::none();
  module.def(
      "batch_norm_forward", &Forward, py::arg("x"), py::arg("scale"),
      py::arg("offset"), py::arg("mean"), py::arg("variance"), py::arg("y"),
      py::arg("new_mean"), py::arg("new_variance"), py::arg("saved_mean"),
      py::arg("saved_inv_std"), py::kw_only(), py::arg("side_input") = none,
      py::arg("mask") = none, py::arg("channels_first") = false,
      py::arg("epsilon") = 1e-3, py::arg("momentum") = 0.99,
      py::arg("training") = true, py::arg("unbiased") = true,
      py::arg("activation") = "none", py::arg("alpha") = 0.2, py::arg("stream"),
      "y = act((x - mu) * r * scale + offset + side_input), the moving "
      "averages, mu and r. mask: uint8, one bit an element, where y > 0.");
  module.def("batch_norm_gradient", &Gradient, py::arg("dy"), py::arg("x"),
             py::arg("scale"), py::arg("offset"), py::arg("saved_mean"),
             py::arg("saved_inv_std"), py::arg("x_grad"), py::arg("scale_grad"),
             py::arg("offset_grad"), py::kw_only(),
             py::arg("side_input") = none, py::arg("mask") = none,
             py::arg("side_input_grad") = none,
             py::arg("channels_first") = false, py::arg("training") = true,
             py::arg("activation") = "none", py::arg("alpha") = 0.2,
             py::arg("stream"), "The gradients of batch_norm_forward.");
  module.def("batch_norm_moments", &Moments, py::arg("x"), py::arg("mean"),
             py::arg("sum_of_squares"), py::kw_only(),
             py::arg("channels_first") = false, py::arg("stream"),
             "Each channel's mean and sum of squared deviations from it.");
  module.def("batch_norm_apply", &Apply, py::arg("x"), py::arg("scale"),
             py::arg("offset"), py::arg("mean"), py::arg("inv_std"),
             py::arg("y"), py::kw_only(), py::arg("side_input") = none,
             py::arg("mask") = none, py::arg("channels_first") = false,
             py::arg("activation") = "none", py::arg("alpha") = 0.2,
             py::arg("stream"),
             "y = act((x - mean) * inv_std * scale + offset + side_input).");
  module.def(
      "batch_norm_gradient_sums", &GradientSums, py::arg("dy"), py::arg("x"),
      py::arg("scale"), py::arg("offset"), py::arg("mean"), py::arg("inv_std"),
      py::arg("sum_dz"), py::arg("sum_dz_x"), py::kw_only(),
      py::arg("side_input") = none, py::arg("mask") = none,
      py::arg("channels_first") = false, py::arg("activation") = "none",
      py::arg("alpha") = 0.2, py::arg("stream"),
      "With dz = dy * act'(z): each channel's sum of dz and of dz * (x - "
      "mean).");
  module.def("batch_norm_gradient_apply", &GradientApply, py::arg("dy"),
             py::arg("x"), py::arg("scale"), py::arg("offset"), py::arg("mean"),
             py::arg("inv_std"), py::arg("sum_dz"), py::arg("sum_dz_x"),
             py::arg("count"), py::arg("x_grad"), py::kw_only(),
             py::arg("side_input") = none, py::arg("mask") = none,
             py::arg("side_input_grad") = none,
             py::arg("channels_first") = false, py::arg("activation") = "none",
             py::arg("alpha") = 0.2, py::arg("stream"),
             "x_grad and side_input_grad from the sums over `count` elements a "
             "channel.");
}

}  // namespace tfo::cuda::python
