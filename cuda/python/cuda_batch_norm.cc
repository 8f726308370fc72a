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
  double* Rows(const char* name, const py::object& object) {
    return static_cast<double*>(Hold(ArrayOf(
        name, object, stream, ElementType::kFloat64, {3, shape.channels})));
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

// The arguments of both forward functions.
BatchNormForwardArgs ForwardArgs(
    Call* call, const py::object& scale, const py::object& offset,
    const py::object& mean, const py::object& variance, const py::object& y,
    const py::object& new_mean, const py::object& new_variance,
    const py::object& saved_mean, const py::object& saved_inv_std,
    const py::object& side_input, const py::object& mask, double epsilon,
    double momentum, bool unbiased, const std::string& activation,
    double alpha) {
  BatchNormForwardArgs args{};
  args.apply.shape = call->shape;
  args.apply.parameters.scale = call->Vector("scale", scale);
  args.apply.parameters.offset = call->Vector("offset", offset);
  args.apply.activation = ActivationOf(activation);
  args.apply.alpha = alpha;
  args.apply.x = call->x.data;
  args.apply.side = call->Like("side_input", side_input, true);
  args.apply.y = call->Like("y", y);
  args.apply.mask = call->Mask(mask);
  args.moving_mean = call->Vector("mean", mean);
  args.moving_variance = call->Vector("variance", variance);
  args.epsilon = epsilon;
  args.momentum = momentum;
  args.training = true;
  args.unbiased = unbiased;
  args.new_mean = call->Vector("new_mean", new_mean);
  args.new_variance = call->Vector("new_variance", new_variance);
  args.saved_mean = call->Vector("saved_mean", saved_mean);
  args.saved_inv_std = call->Vector("saved_inv_std", saved_inv_std);
  return args;
}

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
  BatchNormForwardArgs args =
      ForwardArgs(&call, scale, offset, mean, variance, y, new_mean,
                  new_variance, saved_mean, saved_inv_std, side_input, mask,
                  epsilon, momentum, unbiased, activation, alpha);
  args.training = training;
  Memory memory(call.stream);
  Raise(BatchNormForward(args, memory.scratch(), call.stream));
}

void ForwardFromMoments(
    const py::object& x, const py::object& scale, const py::object& offset,
    const py::object& mean, const py::object& variance,
    const py::object& moments_object, const py::object& y,
    const py::object& new_mean, const py::object& new_variance,
    const py::object& saved_mean, const py::object& saved_inv_std,
    const py::object& side_input, const py::object& mask, bool channels_first,
    double epsilon, double momentum, bool unbiased,
    const std::string& activation, double alpha, std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  const BatchNormForwardArgs args =
      ForwardArgs(&call, scale, offset, mean, variance, y, new_mean,
                  new_variance, saved_mean, saved_inv_std, side_input, mask,
                  epsilon, momentum, unbiased, activation, alpha);
  const Array moments = ArrayOf("moments", moments_object, call.stream);
  if (moments.type != ElementType::kFloat64 || moments.shape.size() != 3 ||
      moments.shape[1] != 3 || moments.shape[2] != call.shape.channels) {
    throw py::value_error(
        "moments must be float64 [num_replicas, 3, channels]");
  }
  Raise(BatchNormForwardFromMoments(args, moments.shape[0],
                                    static_cast<const double*>(moments.data),
                                    call.stream));
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

void LocalMoments(const py::object& x, const py::object& moments,
                  bool channels_first, std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  Memory memory(call.stream);
  Raise(BatchNormLocalMoments(call.shape, call.x.data, memory.scratch(),
                              call.stream, call.Rows("moments", moments)));
}

void LocalSums(const py::object& dy, const py::object& x,
               const py::object& scale, const py::object& offset,
               const py::object& saved_mean, const py::object& saved_inv_std,
               const py::object& sums, const py::object& scale_grad,
               const py::object& offset_grad, const py::object& side_input,
               const py::object& mask, bool channels_first,
               const std::string& activation, double alpha,
               std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  BatchNormGradientArgs args =
      GradientArgs(&call, dy, scale, offset, saved_mean, saved_inv_std,
                   side_input, mask, true, activation, alpha);
  args.scale_grad = call.Vector("scale_grad", scale_grad);
  args.offset_grad = call.Vector("offset_grad", offset_grad);
  Memory memory(call.stream);
  Raise(BatchNormLocalSums(args, memory.scratch(), call.stream,
                           call.Rows("sums", sums)));
}

void GradientFromSums(const py::object& dy, const py::object& x,
                      const py::object& scale, const py::object& offset,
                      const py::object& saved_mean,
                      const py::object& saved_inv_std, const py::object& sums,
                      const py::object& x_grad, const py::object& side_input,
                      const py::object& mask, const py::object& side_input_grad,
                      bool channels_first, const std::string& activation,
                      double alpha, std::uintptr_t stream) {
  Call call(x, channels_first, stream);
  BatchNormGradientArgs args =
      GradientArgs(&call, dy, scale, offset, saved_mean, saved_inv_std,
                   side_input, mask, true, activation, alpha);
  args.x_grad = call.Like("x_grad", x_grad);
  args.side_grad = call.Like("side_input_grad", side_input_grad, true);
  Memory memory(call.stream);
  Raise(BatchNormGradientFromSums(args, call.Rows("sums", sums),
                                  memory.scratch(), call.stream));
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
  module.def("batch_norm_local_moments", &LocalMoments, py::arg("x"),
             py::arg("moments"), py::kw_only(),
             py::arg("channels_first") = false, py::arg("stream"),
             "moments, float64 [3, channels]: count, mean and sum of squared "
             "deviations.");
  module.def(
      "batch_norm_forward_from_moments", &ForwardFromMoments, py::arg("x"),
      py::arg("scale"), py::arg("offset"), py::arg("mean"), py::arg("variance"),
      py::arg("moments"), py::arg("y"), py::arg("new_mean"),
      py::arg("new_variance"), py::arg("saved_mean"), py::arg("saved_inv_std"),
      py::kw_only(), py::arg("side_input") = none, py::arg("mask") = none,
      py::arg("channels_first") = false, py::arg("epsilon") = 1e-3,
      py::arg("momentum") = 0.99, py::arg("unbiased") = true,
      py::arg("activation") = "none", py::arg("alpha") = 0.2, py::arg("stream"),
      "batch_norm_forward with the statistics of several replicas: moments is "
      "float64 [num_replicas, 3, channels].");
  module.def(
      "batch_norm_local_sums", &LocalSums, py::arg("dy"), py::arg("x"),
      py::arg("scale"), py::arg("offset"), py::arg("saved_mean"),
      py::arg("saved_inv_std"), py::arg("sums"), py::arg("scale_grad"),
      py::arg("offset_grad"), py::kw_only(), py::arg("side_input") = none,
      py::arg("mask") = none, py::arg("channels_first") = false,
      py::arg("activation") = "none", py::arg("alpha") = 0.2, py::arg("stream"),
      "sums, float64 [3, channels]: count, the sum of dz and of dz * (x - "
      "mean), dz being the gradient of the pre-activation.");
  module.def("batch_norm_gradient_from_sums", &GradientFromSums, py::arg("dy"),
             py::arg("x"), py::arg("scale"), py::arg("offset"),
             py::arg("saved_mean"), py::arg("saved_inv_std"), py::arg("sums"),
             py::arg("x_grad"), py::kw_only(), py::arg("side_input") = none,
             py::arg("mask") = none, py::arg("side_input_grad") = none,
             py::arg("channels_first") = false, py::arg("activation") = "none",
             py::arg("alpha") = 0.2, py::arg("stream"),
             "x_grad and side_input_grad from the sums of all replicas.");
}

}  // namespace tfo::cuda::python
