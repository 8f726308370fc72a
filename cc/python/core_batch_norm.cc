// Batch normalization on NumPy arrays.
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <utility>

#include "cc/core/batch_norm.h"
#include "cc/core/dispatch.h"
#include "cc/python/core_util.h"

namespace tfo::python {
namespace {

using OptionalArray = std::optional<py::array>;

BatchNormShape BatchShape(const py::array& x, bool channels_first) {
  if (x.ndim() < 2 || x.ndim() > 5) {
    throw py::value_error("x must have rank 2 to 5");
  }
  Require("x", x, x.dtype(), ShapeOf(x));
  const py::ssize_t channel_dim = channels_first ? 1 : x.ndim() - 1;
  BatchNormShape shape{DTypeOf("x", x), 1, x.shape(channel_dim), 1};
  for (py::ssize_t i = 0; i < channel_dim; ++i) shape.outer *= x.shape(i);
  for (py::ssize_t i = channel_dim + 1; i < x.ndim(); ++i) {
    shape.inner *= x.shape(i);
  }
  return shape;
}

py::dtype StatisticsType(const BatchNormShape& shape) {
  return shape.dtype == DType::kDouble ? py::dtype::of<double>()
                                       : py::dtype::of<float>();
}

const void* Vector(const char* name, const py::array& array,
                   const BatchNormShape& shape) {
  Require(name, array, StatisticsType(shape), {shape.channels});
  return array.data();
}

const void* Like(const char* name, const OptionalArray& array,
                 const py::array& x) {
  if (!array) return nullptr;
  Require(name, *array, x.dtype(), ShapeOf(x));
  return array->data();
}

py::array NewVector(const BatchNormShape& shape) {
  return {StatisticsType(shape), std::vector<py::ssize_t>{shape.channels}};
}

py::array_t<std::uint8_t> NewMask(const py::array& x) {
  return py::array_t<std::uint8_t>((x.size() + 7) / 8);
}

void Check(bool done) {
  if (!done) throw std::bad_alloc();
}

py::tuple Moments(const py::array& x, bool channels_first, int num_threads) {
  const BatchNormShape shape = BatchShape(x, channels_first);
  py::array_t<double> mean(shape.channels), squares(shape.channels);
  Threads threads(num_threads);
  Memory memory;
  Check(ActiveKernels().batch_norm_moments(
      shape, x.data(), threads.parallel(), memory.scratch(),
      mean.mutable_data(), squares.mutable_data()));
  return py::make_tuple(mean, squares);
}

py::tuple Forward(const py::array& x, const py::array& scale,
                  const py::array& offset, const py::array& mean,
                  const py::array& variance, const OptionalArray& side_input,
                  const std::string& activation, double alpha, double epsilon,
                  double momentum, bool training, bool unbiased,
                  bool channels_first, bool save_mask, int num_threads) {
  BatchNormForwardArgs args{};
  const BatchNormShape shape = BatchShape(x, channels_first);
  args.apply.shape = shape;
  args.apply.parameters.scale = Vector("scale", scale, shape);
  args.apply.parameters.offset = Vector("offset", offset, shape);
  args.moving_mean = Vector("mean", mean, shape);
  args.moving_variance = Vector("variance", variance, shape);
  args.apply.activation = ActivationOf(activation);
  args.apply.alpha = alpha;
  args.apply.x = x.data();
  args.apply.side = Like("side_input", side_input, x);
  py::array y(x.dtype(), ShapeOf(x));
  py::array_t<std::uint8_t> mask = NewMask(x);
  args.apply.y = y.mutable_data();
  args.apply.mask = save_mask ? mask.mutable_data() : nullptr;
  args.epsilon = epsilon;
  args.momentum = momentum;
  args.training = training;
  args.unbiased = unbiased;
  py::array vectors[4];
  void** const outputs[4] = {&args.new_mean, &args.new_variance,
                             &args.saved_mean, &args.saved_inv_std};
  for (int i = 0; i < 4; ++i) {
    vectors[i] = NewVector(shape);
    *outputs[i] = vectors[i].mutable_data();
  }
  Threads threads(num_threads);
  Memory memory;
  Check(BatchNormForward(args, threads.parallel(), memory.scratch()));
  return py::make_tuple(y, vectors[0], vectors[1], vectors[2], vectors[3],
                        save_mask ? py::object(mask) : py::none());
}

py::tuple Gradient(const py::array& dy, const py::array& x,
                   const py::array& scale, const py::array& offset,
                   const py::array& saved_mean, const py::array& saved_inv_std,
                   const OptionalArray& side_input, const OptionalArray& mask,
                   const std::string& activation, double alpha, bool training,
                   bool channels_first, bool side_input_gradient,
                   const std::string& x_grad_is, int num_threads) {
  BatchNormGradientArgs args{};
  const BatchNormShape shape = BatchShape(x, channels_first);
  args.shape = shape;
  args.parameters = {Vector("saved_mean", saved_mean, shape),
                     Vector("saved_inv_std", saved_inv_std, shape),
                     Vector("scale", scale, shape),
                     Vector("offset", offset, shape)};
  args.activation = ActivationOf(activation);
  args.alpha = alpha;
  args.training = training;
  args.dy = Like("dy", dy, x);
  args.x = x.data();
  args.side = Like("side_input", side_input, x);
  if (mask) {
    Require("mask", *mask, py::dtype::of<std::uint8_t>(), {(x.size() + 7) / 8});
    args.mask = static_cast<const std::uint8_t*>(mask->data());
  }
  py::array x_grad(x.dtype(), ShapeOf(x)), side_grad(x.dtype(), ShapeOf(x));
  py::array scale_grad = NewVector(shape), offset_grad = NewVector(shape);
  args.x_grad = x_grad.mutable_data();
  for (const auto& [name, input] :
       {std::pair("dy", &args.dy), {"x", &args.x}}) {
    if (x_grad_is != name) continue;
    std::memcpy(args.x_grad, *input, x.nbytes());
    *input = args.x_grad;
  }
  args.side_grad = side_input_gradient ? side_grad.mutable_data() : nullptr;
  args.scale_grad = scale_grad.mutable_data();
  args.offset_grad = offset_grad.mutable_data();
  Threads threads(num_threads);
  Memory memory;
  Check(BatchNormGradient(args, threads.parallel(), memory.scratch()));
  return py::make_tuple(
      x_grad, scale_grad, offset_grad,
      side_input_gradient ? py::object(side_grad) : py::none());
}

}  // namespace

void BindBatchNorm(py::module_& m) {
  using namespace py::literals;
  m.def("batch_norm_moments", &Moments,
        "Returns (mean, sum of squared deviations) per channel, as float64.",
        "x"_a, py::kw_only(), "channels_first"_a = false, "num_threads"_a = 1);
  m.def("batch_norm_forward", &Forward,
        "Returns (y, new_mean, new_variance, saved_mean, saved_inv_std, mask).",
        "x"_a, "scale"_a, "offset"_a, "mean"_a, "variance"_a, py::kw_only(),
        "side_input"_a = py::none(), "activation"_a = "none", "alpha"_a = 0.2,
        "epsilon"_a = 1e-3, "momentum"_a = 0.99, "training"_a = true,
        "unbiased"_a = true, "channels_first"_a = false, "save_mask"_a = false,
        "num_threads"_a = 1);
  m.def(
      "batch_norm_gradient", &Gradient,
      "Returns (x_grad, scale_grad, offset_grad, side_input_grad). x_grad_is: "
      "'dy' or 'x' for x_grad in that one's memory.",
      "dy"_a, "x"_a, "scale"_a, "offset"_a, "saved_mean"_a, "saved_inv_std"_a,
      py::kw_only(), "side_input"_a = py::none(), "mask"_a = py::none(),
      "activation"_a = "none", "alpha"_a = 0.2, "training"_a = true,
      "channels_first"_a = false, "side_input_gradient"_a = false,
      "x_grad_is"_a = "", "num_threads"_a = 1);
}

}  // namespace tfo::python
