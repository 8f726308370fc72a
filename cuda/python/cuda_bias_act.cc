// Bias, side input and activation; dz and the bias gradient.
#include "cuda/bias_act.h"
#include "cuda/python/array.h"

namespace tfo::cuda::python {
namespace {

void Forward(const py::object& x_object, const py::object& y_object,
             const py::object& scale_object, const py::object& bias_object,
             const py::object& side_object, const py::object& pre_object,
             bool channels_first, const std::string& activation, double alpha,
             std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Array x = ArrayOf("x", x_object, stream);
  BiasActArgs args{};
  args.dtype = DTypeOf("x", x);
  const ChannelShape shape("x", x, channels_first);
  args.outer = shape.outer;
  args.channels = shape.channels;
  args.inner = shape.inner;
  const Array y = ArrayOf("y", y_object, stream, x.type, x.shape);
  const Array scale =
      ArrayOf("scale", scale_object, stream, x.type, {args.channels}, true);
  const Array bias =
      ArrayOf("bias", bias_object, stream, x.type, {args.channels}, true);
  const Array side =
      ArrayOf("side_input", side_object, stream, x.type, x.shape, true);
  const Array pre =
      ArrayOf("pre_activation", pre_object, stream, x.type, x.shape, true);
  args.activation = ActivationOf(activation);
  args.alpha = alpha;
  args.x = x.data;
  args.scale = scale.data;
  args.bias = bias.data;
  args.side = side.data;
  args.y = y.data;
  args.pre_activation = pre.data;
  Raise(BiasActForward(args, stream));
}

void Gradient(const py::object& dy_object, const py::object& saved_object,
              const py::object& dz_object, const py::object& bias_grad_object,
              bool channels_first, const std::string& activation, double alpha,
              std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Array dy = ArrayOf("dy", dy_object, stream);
  BiasActGradientArgs args{};
  args.dtype = DTypeOf("dy", dy);
  const ChannelShape shape("dy", dy, channels_first);
  args.outer = shape.outer;
  args.channels = shape.channels;
  args.inner = shape.inner;
  args.activation = ActivationOf(activation);
  const Array saved = ArrayOf("saved", saved_object, stream, dy.type, dy.shape,
                              args.activation == Activation::kNone);
  const Array dz = ArrayOf("dz", dz_object, stream, dy.type, dy.shape, true);
  const Array bias_grad = ArrayOf("bias_grad", bias_grad_object, stream,
                                  dy.type, {args.channels}, true);
  args.alpha = alpha;
  args.dy = dy.data;
  args.saved = saved.data;
  args.dz = dz.data;
  args.bias_grad = bias_grad.data;
  Memory memory(stream);
  Raise(BiasActGradient(args, memory.scratch(), stream));
}

}  // namespace

void BindBiasAct(py::module_& module) {
  module.def(
      "bias_act_forward", &Forward, py::arg("x"), py::arg("y"), py::kw_only(),
      py::arg("scale") = py::none(), py::arg("bias") = py::none(),
      py::arg("side_input") = py::none(),
      py::arg("pre_activation") = py::none(), py::arg("channels_first") = false,
      py::arg("activation") = "none", py::arg("alpha") = 0.2, py::arg("stream"),
      "y = act(x * scale + bias + side_input), on `stream`. Arrays of float16, "
      "bfloat16 or float32; y may be x or side_input.");
  module.def("bias_act_gradient", &Gradient, py::arg("dy"), py::kw_only(),
             py::arg("saved") = py::none(), py::arg("dz") = py::none(),
             py::arg("bias_grad") = py::none(),
             py::arg("channels_first") = false, py::arg("activation") = "none",
             py::arg("alpha") = 0.2, py::arg("stream"),
             "dz = dy * act' and its sum per channel. saved: y where the slope "
             "can be read off it, else the pre-activation; dz may be dy.");
}

}  // namespace tfo::cuda::python
