// Cross entropy of logits and numbers of classes.
#include "cuda/cross_entropy.h"
#include "cuda/python/array.h"

namespace tfo::cuda::python {
namespace {

// The arguments that both passes have, and the arrays behind them.
struct Arguments {
  Array x, labels, largest, inverse_sum;
  Shape shape;  // of what each row has one of
  CrossEntropyArgs args{};

  Arguments(const py::object& x_object, const py::object& labels_object,
            const py::object& largest_object,
            const py::object& inverse_sum_object, Stream stream)
      : x(ArrayOf("x", x_object, stream)), shape(x.shape) {
    if (shape.empty() || shape.back() == 0)
      throw py::value_error("x must have rank 1 or more and a class");
    shape.pop_back();
    labels = ArrayOf("labels", labels_object, stream);
    const bool wide = labels.type == ElementType::kInt64;
    if ((!wide && labels.type != ElementType::kInt32) || labels.shape != shape)
      throw py::value_error("labels must be int32 or int64, one for each row");
    const auto statistics = [&](const char* name, const py::object& object) {
      return ArrayOf(name, object, stream, ElementType::kFloat32, shape);
    };
    largest = statistics("largest", largest_object);
    inverse_sum = statistics("inverse_sum", inverse_sum_object);
    const std::int64_t depth = x.shape.back();
    args.shape = {DTypeOf("x", x), x.size() / depth, depth};
    args.labels = {labels.data, wide};
    args.x = x.data;
    args.largest = largest.data;
    args.inverse_sum = inverse_sum.data;
  }
};

void Forward(const py::object& x, const py::object& labels,
             const py::object& loss_object, const py::object& largest,
             const py::object& inverse_sum, std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  Arguments arguments(x, labels, largest, inverse_sum, stream);
  const Array loss =
      ArrayOf("loss", loss_object, stream, arguments.x.type, arguments.shape);
  arguments.args.loss = loss.data;
  Raise(CrossEntropyForward(arguments.args, stream));
}

void Gradient(const py::object& dloss_object, const py::object& x,
              const py::object& labels, const py::object& largest,
              const py::object& inverse_sum, const py::object& x_grad_object,
              std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Arguments arguments(x, labels, largest, inverse_sum, stream);
  const Array dloss =
      ArrayOf("dloss", dloss_object, stream, arguments.x.type, arguments.shape);
  const Array x_grad = ArrayOf("x_grad", x_grad_object, stream,
                               arguments.x.type, arguments.x.shape);
  Raise(
      CrossEntropyGradient({arguments.args, dloss.data, x_grad.data}, stream));
}

}  // namespace

void BindCrossEntropy(py::module_& module) {
  module.def("cross_entropy_forward", &Forward, py::arg("x"), py::arg("labels"),
             py::arg("loss"), py::arg("largest"), py::arg("inverse_sum"),
             py::kw_only(), py::arg("stream"),
             "loss = log(sum of e^x) - x[label] over the last dimension, on "
             "`stream`; largest x and 1 / sum of e^(x - largest), float32, are "
             "for the gradient. NaN where the label is no class.");
  module.def("cross_entropy_gradient", &Gradient, py::arg("dloss"),
             py::arg("x"), py::arg("labels"), py::arg("largest"),
             py::arg("inverse_sum"), py::arg("x_grad"), py::kw_only(),
             py::arg("stream"),
             "x_grad = (e^(x - largest) * inverse_sum - [the class is the "
             "label]) * dloss; x_grad may be x.");
}

}  // namespace tfo::cuda::python
