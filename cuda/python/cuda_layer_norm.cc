// Layer and RMS normalization.
#include "cuda/layer_norm.h"
#include "cuda/python/array.h"

namespace tfo::cuda::python {
namespace {

// x as rows of its last dimension, and vectors along and across them.
struct Call {
  Stream stream;
  Array x;
  LayerNormShape shape;

  Call(const py::object& x_object, bool subtract_mean,
       std::uintptr_t stream_handle)
      : stream(StreamOf(stream_handle)), x(ArrayOf("x", x_object, stream)) {
    if (x.shape.empty()) throw py::value_error("x must have rank 1 or more");
    statistics.assign(x.shape.begin(), x.shape.end() - 1);
    std::int64_t rows = 1;
    for (std::int64_t n : statistics) rows *= n;
    shape = {DTypeOf("x", x), rows, x.shape.back(), subtract_mean};
  }

  void* Like(const char* name, const py::object& object) const {
    return ArrayOf(name, object, stream, x.type, x.shape).data;
  }
  void* Vector(const char* name, const py::object& object) const {
    return ArrayOf(name, object, stream, ElementType::kFloat32, {shape.depth})
        .data;
  }
  void* Statistic(const char* name, const py::object& object) const {
    return ArrayOf(name, object, stream, ElementType::kFloat32, statistics)
        .data;
  }

 private:
  Shape statistics;
};

void Forward(const py::object& x, const py::object& scale,
             const py::object& offset, const py::object& y,
             const py::object& mean, const py::object& inv_std, double epsilon,
             bool subtract_mean, std::uintptr_t stream) {
  const Call call(x, subtract_mean, stream);
  Raise(LayerNormForward(
      {call.shape, epsilon, call.x.data, call.Vector("scale", scale),
       call.Vector("offset", offset), call.Like("y", y),
       call.Statistic("mean", mean), call.Statistic("inv_std", inv_std)},
      call.stream));
}

void Gradient(const py::object& dy, const py::object& x,
              const py::object& scale, const py::object& mean,
              const py::object& inv_std, const py::object& x_grad,
              const py::object& scale_grad, const py::object& offset_grad,
              bool subtract_mean, std::uintptr_t stream) {
  const Call call(x, subtract_mean, stream);
  Memory memory(call.stream);
  Raise(LayerNormGradient(
      {call.shape, call.Like("dy", dy), call.x.data,
       call.Vector("scale", scale), call.Statistic("mean", mean),
       call.Statistic("inv_std", inv_std), call.Like("x_grad", x_grad),
       call.Vector("scale_grad", scale_grad),
       call.Vector("offset_grad", offset_grad)},
      memory.scratch(), call.stream));
}

}  // namespace

void BindLayerNorm(py::module_& module) {
  module.def("layer_norm_forward", &Forward, py::arg("x"), py::arg("scale"),
             py::arg("offset"), py::arg("y"), py::arg("mean"),
             py::arg("inv_std"), py::kw_only(), py::arg("epsilon") = 0.001,
             py::arg("subtract_mean") = true, py::arg("stream"),
             "y = (x - mean) * inv_std * scale + offset over x's last "
             "dimension, on `stream`. Arrays of float16, bfloat16 or float32, "
             "all but x and y float32; y may be x.");
  module.def("layer_norm_gradient", &Gradient, py::arg("dy"), py::arg("x"),
             py::arg("scale"), py::arg("mean"), py::arg("inv_std"),
             py::arg("x_grad"), py::arg("scale_grad"), py::arg("offset_grad"),
             py::kw_only(), py::arg("subtract_mean") = true, py::arg("stream"),
             "The gradients; x_grad may be dy or x.");
}

}  // namespace tfo::cuda::python
