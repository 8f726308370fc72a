// Softmax with scale and mask.
#include "cuda/python/array.h"
#include "cuda/softmax.h"

namespace tfo::cuda::python {
namespace {

SoftmaxShape RowsOf(const char* name, const Array& array) {
  if (array.shape.empty())
    throw py::value_error(std::string(name) + " must have rank 1 or more");
  const std::int64_t depth = array.shape.back();
  return {DTypeOf(name, array), depth == 0 ? 0 : array.size() / depth, depth};
}

// `mask` is of x's last dimension, otherwise broadcast to x.
SoftmaxMask MaskOf(const Array& mask, const Array& x) {
  if (!mask.owner) return {};
  const Shape& sizes = mask.shape;
  const std::size_t missing = x.shape.size() - sizes.size();
  bool fits = mask.type == ElementType::kUInt8 && !sizes.empty() &&
              sizes.size() <= x.shape.size() &&
              sizes.back() == x.shape.back() &&
              x.shape.size() <= SoftmaxMask::kMaxRank + 1;
  for (std::size_t i = 0; fits && i < sizes.size(); ++i)
    fits = sizes[i] == 1 || sizes[i] == x.shape[missing + i];
  if (!fits)
    throw py::value_error("mask must be uint8, of a shape broadcast to x's");
  return {BroadcastTo(static_cast<int>(sizes.size()), sizes.data(),
                      static_cast<int>(x.shape.size()), x.shape.data()),
          static_cast<const std::uint8_t*>(mask.data)};
}

void Forward(const py::object& x_object, const py::object& y_object,
             const py::object& mask_object, double scale, double masked,
             bool zero_masked, std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Array x = ArrayOf("x", x_object, stream);
  const SoftmaxShape shape = RowsOf("x", x);
  const Array y = ArrayOf("y", y_object, stream, x.type, x.shape);
  const Array mask = ArrayOf("mask", mask_object, stream, true);
  Raise(SoftmaxForward(
      {shape, scale, masked, zero_masked, MaskOf(mask, x), x.data, y.data},
      stream));
}

void Gradient(const py::object& dy_object, const py::object& y_object,
              const py::object& x_grad_object, const py::object& mask_object,
              double scale, bool zero_masked, std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Array y = ArrayOf("y", y_object, stream);
  const SoftmaxShape shape = RowsOf("y", y);
  const Array dy = ArrayOf("dy", dy_object, stream, y.type, y.shape);
  const Array x_grad =
      ArrayOf("x_grad", x_grad_object, stream, y.type, y.shape);
  const Array mask = ArrayOf("mask", mask_object, stream, true);
  Raise(SoftmaxGradient({shape, scale, zero_masked, MaskOf(mask, y), dy.data,
                         y.data, x_grad.data},
                        stream));
}

}  // namespace

void BindSoftmax(py::module_& module) {
  module.def("softmax_forward", &Forward, py::arg("x"), py::arg("y"),
             py::kw_only(), py::arg("mask") = py::none(),
             py::arg("scale") = 1.0, py::arg("masked") = -3e38,
             py::arg("zero_masked") = false, py::arg("stream"),
             "y = softmax of x * scale, or of `masked` where the mask is 0, "
             "over the last dimension, on `stream`. y may be x.");
  module.def("softmax_gradient", &Gradient, py::arg("dy"), py::arg("y"),
             py::arg("x_grad"), py::kw_only(), py::arg("mask") = py::none(),
             py::arg("scale") = 1.0, py::arg("zero_masked") = false,
             py::arg("stream"),
             "x_grad = (dy - sum of dy * y) * y * scale; x_grad may be dy or "
             "y.");
}

}  // namespace tfo::cuda::python
