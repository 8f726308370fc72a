// Bias, side input and activation; dz and the bias gradient.
#include "cuda/bias_act.h"
#include "cuda/python/array.h"

namespace tfo::cuda::python {
namespace {

// Dimension 1 or the last holds the channels.
void SetShape(const Array& x, bool channels_first, std::int64_t* outer,
              std::int64_t* channels, std::int64_t* inner) {
  if (x.shape.size() < 2) throw py::value_error("x must have rank 2 or more");
  const std::size_t dim = channels_first ? 1 : x.shape.size() - 1;
  *outer = *inner = 1;
  for (std::size_t i = 0; i < dim; ++i) *outer *= x.shape[i];
  *channels = x.shape[dim];
  for (std::size_t i = dim + 1; i < x.shape.size(); ++i) *inner *= x.shape[i];
}

void Forward(const py::object& x_object, const py::object& y_object,
             const py::object& bias_object, const py::object& side_object,
             const py::object& pre_object, bool channels_first,
             const std::string& activation, double alpha,
             std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Array x = ArrayOf("x", x_object, stream);
  BiasActArgs args{};
  args.dtype = DTypeOf("x", x);
  SetShape(x, channels_first, &args.outer, &args.channels, &args.inner);
  const Array y = ArrayOf("y", y_object, stream, x.type, x.shape);
  const Array bias =
      ArrayOf("bias", bias_object, stream, x.type, {args.channels}, true);
  const Array side =
      ArrayOf("side_input", side_object, stream, x.type, x.shape, true);
  const Array pre =
      ArrayOf("pre_activation", pre_object, stream, x.type, x.shape, true);
  args.activation = ActivationOf(activation);
  args.alpha = alpha;
  args.x = x.data;
  args.bias = bias.data;
  args.side = side.data;
  args.y = y.data;
  args.pre_activation = pre.data;
  Raise(BiasActForward(args, stream));
}

}  // namespace

void BindBiasAct(py::module_& module) {
  module.def(
      "bias_act_forward", &Forward, py::arg("x"), py::arg("y"), py::kw_only(),
      py::arg("bias") = py::none(), py::arg("side_input") = py::none(),
      py::arg("pre_activation") = py::none(), py::arg("channels_first") = false,
      py::arg("activation") = "none", py::arg("alpha") = 0.2, py::arg("stream"),
      "y = act(x + bias + side_input), on `stream`. Arrays of float16, "
      "bfloat16 or float32; y may be x or side_input.");
}

}  // namespace tfo::cuda::python
