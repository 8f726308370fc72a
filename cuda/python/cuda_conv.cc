// Convolutions and dense layers on device arrays.
#include <utility>

#include "cc/python/conv_shape.h"
#include "cuda/conv.h"
#include "cuda/python/array.h"

namespace tfo::cuda::python {
namespace {

using tfo::python::FilterShape;
using tfo::python::InputShape;
using tfo::python::OutputShape;
using Sentences = std::vector<std::string>;

// What libraries refused during the call that this thread is in.
thread_local Sentences refusals;

template <class Args>
Sentences Run(Status (*launch)(const Args&, const Call&), const Args& args,
              bool allow_tf32, Stream stream) {
  refusals.clear();
  Memory memory(stream);
  Raise(launch(args, {stream, memory.scratch(), allow_tf32,
                      [](const char* text) { refusals.emplace_back(text); }}));
  return std::move(refusals);
}

Sentences Forward(const ConvShape& shape, const py::object& input_object,
                  const py::object& filters_object, const py::object& y_object,
                  const py::object& scale_object, const py::object& bias_object,
                  const py::object& side_input_object,
                  const py::object& pre_activation_object,
                  const std::string& activation, double alpha, bool allow_tf32,
                  std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Array input = ArrayOf("input", input_object, stream);
  const auto array = [&](const char* name, const py::object& object,
                         const Shape& expected, bool optional = false) {
    return ArrayOf(name, object, stream, input.type, expected, optional);
  };
  const Shape output = OutputShape(shape);
  array("input", input_object, InputShape(shape));
  const Array filters = array("filters", filters_object, FilterShape(shape));
  const Array y = array("y", y_object, output);
  const Array scale =
      array("scale", scale_object, {shape.OutputChannels()}, true);
  const Array bias = array("bias", bias_object, {shape.OutputChannels()}, true);
  const Array side_input = array("side_input", side_input_object, output, true);
  const Array pre_activation =
      array("pre_activation", pre_activation_object, output, true);
  return Run(&ConvForward,
             {DTypeOf("input", input), shape, ActivationOf(activation), alpha,
              input.data, filters.data, scale.data, bias.data, side_input.data,
              y.data, pre_activation.data},
             allow_tf32, stream);
}

Sentences Gradient(const ConvShape& shape, const py::object& dy_object,
                   const py::object& input_object,
                   const py::object& filters_object,
                   const py::object& saved_object,
                   const py::object& input_gradient_object,
                   const py::object& filters_gradient_object,
                   const py::object& bias_gradient_object,
                   const py::object& side_input_gradient_object,
                   const std::string& activation, double alpha, bool allow_tf32,
                   std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Array dy = ArrayOf("dy", dy_object, stream);
  const auto array = [&](const char* name, const py::object& object,
                         const Shape& expected, bool optional = false) {
    return ArrayOf(name, object, stream, dy.type, expected, optional);
  };
  const Shape output = OutputShape(shape);
  array("dy", dy_object, output);
  const Array input = array("input", input_object, InputShape(shape));
  const Array filters = array("filters", filters_object, FilterShape(shape));
  const Array saved =
      array("saved", saved_object, output, activation == "none");
  const Array input_gradient =
      array("input_gradient", input_gradient_object, input.shape, true);
  const Array filters_gradient =
      array("filters_gradient", filters_gradient_object, filters.shape, true);
  const Array bias_gradient = array("bias_gradient", bias_gradient_object,
                                    {shape.OutputChannels()}, true);
  const Array side_input_gradient =
      array("side_input_gradient", side_input_gradient_object, output, true);
  return Run(
      &ConvGradient,
      {DTypeOf("dy", dy), shape, ActivationOf(activation), alpha, dy.data,
       saved.data, input.data, filters.data, input_gradient.data,
       filters_gradient.data, bias_gradient.data, side_input_gradient.data},
      allow_tf32, stream);
}

}  // namespace

void BindConv(py::module_& m) {
  using namespace py::literals;
  tfo::python::BindConvShape(m);
  m.def("conv_forward", &Forward,
        "y = act(conv(input, filters) * scale + bias + side_input), on "
        "`stream`. Dense arrays of float16, bfloat16 or float32. Returns what "
        "cuBLASLt and cuDNN newly refused to fuse, in sentences.",
        "shape"_a, "input"_a, "filters"_a, "y"_a, py::kw_only(),
        "scale"_a = py::none(), "bias"_a = py::none(),
        "side_input"_a = py::none(), "pre_activation"_a = py::none(),
        "activation"_a = "none", "alpha"_a = 0.2, "allow_tf32"_a = true,
        "stream"_a);
  m.def("conv_gradient", &Gradient,
        "The gradients that are given an array to be written to, on `stream`. "
        "Returns what conv_forward does.",
        "shape"_a, "dy"_a, "input"_a, "filters"_a, py::kw_only(),
        "saved"_a = py::none(), "input_gradient"_a = py::none(),
        "filters_gradient"_a = py::none(), "bias_gradient"_a = py::none(),
        "side_input_gradient"_a = py::none(), "activation"_a = "none",
        "alpha"_a = 0.2, "allow_tf32"_a = true, "stream"_a);
}

}  // namespace tfo::cuda::python
