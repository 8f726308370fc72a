// Activations on NumPy arrays.
#include "cc/core/dispatch.h"
#include "cc/python/core_util.h"

namespace tfo::python {
namespace {

py::array Forward(const py::array& x, const std::string& activation,
                  double alpha, int num_threads) {
  Require("x", x, x.dtype(), ShapeOf(x));
  py::array y(x.dtype(), ShapeOf(x));
  Threads threads(num_threads);
  ActiveKernels().act_forward(
      {DTypeOf("x", x), x.size(), ActivationOf(activation), alpha, x.data(),
       y.mutable_data()},
      threads.parallel());
  return y;
}

py::array Gradient(const py::array& dy, const py::array& saved,
                   const std::string& activation, double alpha,
                   int num_threads) {
  Require("saved", saved, saved.dtype(), ShapeOf(saved));
  Require("dy", dy, saved.dtype(), ShapeOf(saved));
  py::array x_grad(dy.dtype(), ShapeOf(dy));
  Threads threads(num_threads);
  ActiveKernels().act_gradient(
      {DTypeOf("dy", dy), dy.size(), ActivationOf(activation), alpha, dy.data(),
       saved.data(), x_grad.mutable_data()},
      threads.parallel());
  return x_grad;
}

}  // namespace

void BindAct(py::module_& m) {
  using namespace py::literals;
  m.def("act_forward", &Forward, "Returns activation(x).", "x"_a, py::kw_only(),
        "activation"_a, "alpha"_a = 0.2, "num_threads"_a = 1);
  m.def("act_gradient", &Gradient,
        "Returns the gradient of x; saved is y where the slope can be read off "
        "it, otherwise x.",
        "dy"_a, "saved"_a, py::kw_only(), "activation"_a, "alpha"_a = 0.2,
        "num_threads"_a = 1);
}

}  // namespace tfo::python
