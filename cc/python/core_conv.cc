// Convolution and dense layer on NumPy arrays.
#include <pybind11/stl.h>

#include <optional>

#include "cc/core/conv.h"
#include "cc/core/dispatch.h"
#include "cc/python/core_util.h"

namespace tfo::python {
namespace {

using OptionalArray = std::optional<py::array>;
using Shape = std::vector<py::ssize_t>;
using Pair = std::pair<std::int64_t, std::int64_t>;

ConvShape NewConvShape(std::int64_t batch, Pair in_size, std::int64_t in_c,
                       Pair out_size, std::int64_t out_c, Pair kernel,
                       Pair strides, Pair dilations, Pair pads,
                       bool input_channels_first, bool output_channels_first,
                       bool filters_transposed) {
  const auto positive = [](Pair p) { return p.first > 0 && p.second > 0; };
  if (!positive(kernel) || !positive(strides) || !positive(dilations)) {
    throw py::value_error("kernel, strides and dilations must be positive");
  }
  return {batch,
          in_size.first,
          in_size.second,
          in_c,
          out_size.first,
          out_size.second,
          out_c,
          kernel.first,
          kernel.second,
          strides.first,
          strides.second,
          dilations.first,
          dilations.second,
          pads.first,
          pads.second,
          input_channels_first,
          output_channels_first,
          filters_transposed};
}

Shape InputShape(const ConvShape& s) {
  return s.input_channels_first ? Shape{s.batch, s.in_c, s.in_h, s.in_w}
                                : Shape{s.batch, s.in_h, s.in_w, s.in_c};
}

Shape OutputShape(const ConvShape& s) {
  return s.output_channels_first ? Shape{s.batch, s.out_c, s.out_h, s.out_w}
                                 : Shape{s.batch, s.out_h, s.out_w, s.out_c};
}

Shape FilterShape(const ConvShape& s) {
  return s.filters_transposed ? Shape{s.kernel_h, s.kernel_w, s.out_c, s.in_c}
                              : Shape{s.kernel_h, s.kernel_w, s.in_c, s.out_c};
}

const void* Optional(const char* name, const OptionalArray& array,
                     const py::dtype& dtype, const Shape& shape) {
  if (!array) return nullptr;
  Require(name, *array, dtype, shape);
  return array->data();
}

void CheckMemory(bool done) {
  if (!done) throw std::bad_alloc();
}

py::tuple Forward(const ConvShape& shape, const py::array& input,
                  const py::array& filters, const OptionalArray& bias,
                  const OptionalArray& side_input,
                  const std::string& activation, double alpha,
                  int num_threads) {
  const py::dtype dtype = input.dtype();
  Require("input", input, dtype, InputShape(shape));
  Require("filters", filters, dtype, FilterShape(shape));
  py::array y(dtype, OutputShape(shape)), pre(dtype, OutputShape(shape));
  const ConvForwardArgs args{
      DTypeOf("input", input),
      shape,
      ActivationOf(activation),
      alpha,
      input.data(),
      filters.data(),
      Optional("bias", bias, dtype, {shape.out_c}),
      Optional("side_input", side_input, dtype, OutputShape(shape)),
      y.mutable_data(),
      pre.mutable_data()};
  Threads threads(num_threads);
  Memory memory;
  CheckMemory(
      ActiveKernels().conv_forward(args, threads.parallel(), memory.scratch()));
  return py::make_tuple(y, pre);
}

py::tuple Gradient(const ConvShape& shape, const py::array& dy,
                   const py::array& input, const py::array& filters,
                   const OptionalArray& saved, const std::string& activation,
                   double alpha, int num_threads) {
  const py::dtype dtype = input.dtype();
  Require("dy", dy, dtype, OutputShape(shape));
  Require("input", input, dtype, InputShape(shape));
  Require("filters", filters, dtype, FilterShape(shape));
  if (!saved && activation != "none") {
    throw py::value_error("saved is needed for activation " + activation);
  }
  py::array dx(dtype, InputShape(shape)), dw(dtype, FilterShape(shape)),
      db(dtype, Shape{shape.out_c}), dz(dtype, OutputShape(shape));
  const ConvGradientArgs args{
      DTypeOf("input", input),
      shape,
      ActivationOf(activation),
      alpha,
      dy.data(),
      Optional("saved", saved, dtype, OutputShape(shape)),
      input.data(),
      filters.data(),
      dx.mutable_data(),
      dw.mutable_data(),
      db.mutable_data(),
      dz.mutable_data()};
  Threads threads(num_threads);
  Memory memory;
  CheckMemory(ActiveKernels().conv_gradient(args, threads.parallel(),
                                            memory.scratch()));
  return py::make_tuple(dx, dw, db, dz);
}

}  // namespace

void BindConv(py::module_& m) {
  using namespace py::literals;
  constexpr Pair kOnes{1, 1};
  py::class_<ConvShape>(m, "ConvShape",
                        "Sizes and layouts of a convolution; pairs are "
                        "(height, width), pads are (top, left).")
      .def(py::init(&NewConvShape), py::kw_only(), "batch"_a, "in_size"_a,
           "in_c"_a, "out_size"_a, "out_c"_a, "kernel"_a, "strides"_a = kOnes,
           "dilations"_a = kOnes, "pads"_a = Pair{0, 0},
           "input_channels_first"_a = false, "output_channels_first"_a = false,
           "filters_transposed"_a = false)
      .def_static(
          "matmul", &MatMulShape,
          "a [batch, m, k] times b [k, n], as a convolution of [batch, 1, m, "
          "k]; transposed: [batch, k, 1, m] and [n, k].",
          "batch"_a, "m"_a, "k"_a, "n"_a, "transpose_a"_a = false,
          "transpose_b"_a = false);
  m.def("conv_forward", &Forward, "Returns (y, pre_activation).", "shape"_a,
        "input"_a, "filters"_a, "bias"_a = py::none(),
        "side_input"_a = py::none(), py::kw_only(), "activation"_a = "none",
        "alpha"_a = 0.2, "num_threads"_a = 1);
  m.def("conv_gradient", &Gradient,
        "Returns the gradients (input, filters, bias, side_input).", "shape"_a,
        "dy"_a, "input"_a, "filters"_a, "saved"_a = py::none(), py::kw_only(),
        "activation"_a = "none", "alpha"_a = 0.2, "num_threads"_a = 1);
}

}  // namespace tfo::python
