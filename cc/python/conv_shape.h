// ConvShape in Python, and the shapes of the arrays that it stands for.
#ifndef TFO_CC_PYTHON_CONV_SHAPE_H_
#define TFO_CC_PYTHON_CONV_SHAPE_H_

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/core/conv.h"

namespace tfo::python {

namespace py = pybind11;

using Shape = std::vector<py::ssize_t>;
using Pair = std::pair<std::int64_t, std::int64_t>;

inline ConvShape NewConvShape(std::int64_t batch, Pair in_size,
                              std::int64_t in_c, Pair out_size,
                              std::int64_t out_c, Pair kernel, Pair strides,
                              Pair dilations, Pair pads,
                              bool input_channels_first,
                              bool output_channels_first,
                              bool filters_transposed, std::int64_t groups) {
  const auto positive = [](Pair p) { return p.first > 0 && p.second > 0; };
  if (!positive(kernel) || !positive(strides) || !positive(dilations)) {
    throw py::value_error("kernel, strides and dilations must be positive");
  }
  if (groups < 1 || in_c % groups != 0 || out_c % groups != 0) {
    throw py::value_error("groups must divide in_c and out_c");
  }
  if (groups > 1 && filters_transposed) {
    throw py::value_error("filters of several groups cannot be transposed");
  }
  return {batch,
          in_size.first,
          in_size.second,
          in_c / groups,
          out_size.first,
          out_size.second,
          out_c / groups,
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
          filters_transposed,
          groups};
}

inline Shape InputShape(const ConvShape& s) {
  return s.input_channels_first
             ? Shape{s.batch, s.InputChannels(), s.in_h, s.in_w}
             : Shape{s.batch, s.in_h, s.in_w, s.InputChannels()};
}

inline Shape OutputShape(const ConvShape& s) {
  return s.output_channels_first
             ? Shape{s.batch, s.OutputChannels(), s.out_h, s.out_w}
             : Shape{s.batch, s.out_h, s.out_w, s.OutputChannels()};
}

inline Shape FilterShape(const ConvShape& s) {
  return s.filters_transposed
             ? Shape{s.kernel_h, s.kernel_w, s.OutputChannels(), s.in_c}
             : Shape{s.kernel_h, s.kernel_w, s.in_c, s.OutputChannels()};
}

// Every module has a class of its own.
inline void BindConvShape(py::module_& m) {
  using namespace py::literals;
  constexpr Pair kOnes{1, 1};
  py::class_<ConvShape>(m, "ConvShape", py::module_local(),
                        "Sizes and layouts of a convolution; pairs are "
                        "(height, width), pads are (top, left).")
      .def(py::init(&NewConvShape), py::kw_only(), "batch"_a, "in_size"_a,
           "in_c"_a, "out_size"_a, "out_c"_a, "kernel"_a, "strides"_a = kOnes,
           "dilations"_a = kOnes, "pads"_a = Pair{0, 0},
           "input_channels_first"_a = false, "output_channels_first"_a = false,
           "filters_transposed"_a = false, "groups"_a = 1)
      .def_static(
          "matmul", &MatMulShape,
          "a [batch, m, k] times b [k, n], as a convolution of [batch, 1, m, "
          "k]; transposed: [batch, k, 1, m] and [n, k].",
          "batch"_a, "m"_a, "k"_a, "n"_a, "transpose_a"_a = false,
          "transpose_b"_a = false);
}

}  // namespace tfo::python

#endif  // TFO_CC_PYTHON_CONV_SHAPE_H_
