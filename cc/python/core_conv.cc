// Convolution and dense layer on NumPy arrays.
#include <optional>

#include "cc/core/conv.h"
#include "cc/core/dispatch.h"
#include "cc/python/conv_shape.h"
#include "cc/python/core_util.h"

namespace tfo::python {
namespace {

using OptionalArray = std::optional<py::array>;
const void* Optional(const char* name, const OptionalArray& array,
                     const py::dtype& dtype, const Shape& shape) {
  if (!array) return nullptr;
  Require(name, *array, dtype, shape);
  return array->data();
}

// Both return the bytes of scratch memory that were taken.
std::int64_t RunForward(const ConvForwardArgs& args, int num_threads) {
  Threads threads(num_threads);
  Memory memory;
  if (!ActiveKernels().conv_forward(args, threads.parallel(), memory.scratch()))
    throw std::bad_alloc();
  return memory.bytes();
}

std::int64_t RunGradient(const ConvGradientArgs& args, int num_threads) {
  Threads threads(num_threads);
  Memory memory;
  if (!ActiveKernels().conv_gradient(args, threads.parallel(),
                                     memory.scratch()))
    throw std::bad_alloc();
  return memory.bytes();
}

// Filters in the engine's order, where that is wanted.
class Packed {
 public:
  Packed(const ConvForwardArgs& args, int num_threads) {
    const Kernels& kernels = ActiveKernels();
    Threads threads(num_threads);
    Memory temporary;
    const std::int64_t bytes =
        kernels.conv_packed_bytes(args, temporary.scratch());
    if (bytes == 0) return;
    data_ = memory_.scratch().Allocate<char>(bytes);
    if (data_ == nullptr ||
        !kernels.conv_pack_filters(args, threads.parallel(),
                                   temporary.scratch(), data_)) {
      throw std::bad_alloc();
    }
  }

  const void* data() const { return data_; }

 private:
  Memory memory_;
  void* data_ = nullptr;
};

py::tuple Forward(const ConvShape& shape, const py::array& input,
                  const py::array& filters, const OptionalArray& bias,
                  const OptionalArray& side_input, const OptionalArray& scale,
                  const std::string& activation, double alpha, bool pack_first,
                  bool winograd, bool save_pre_activation, int num_threads) {
  const py::dtype dtype = input.dtype();
  Require("input", input, dtype, InputShape(shape));
  Require("filters", filters, dtype, FilterShape(shape));
  py::array y = AlignedArray(dtype, OutputShape(shape));
  OptionalArray pre;
  if (save_pre_activation) pre = AlignedArray(dtype, OutputShape(shape));
  ConvForwardArgs args{
      DTypeOf("input", input),
      shape,
      ActivationOf(activation),
      alpha,
      input.data(),
      filters.data(),
      Optional("scale", scale, dtype, {shape.OutputChannels()}),
      Optional("bias", bias, dtype, {shape.OutputChannels()}),
      Optional("side_input", side_input, dtype, OutputShape(shape)),
      y.mutable_data(),
      pre.has_value() ? pre->mutable_data() : nullptr,
      nullptr,
      nullptr,
      winograd};
  std::optional<Packed> packed;
  if (pack_first)
    args.packed_filters = packed.emplace(args, num_threads).data();
  RunForward(args, num_threads);
  return py::make_tuple(y, pre);
}

py::tuple ForwardMoments(const ConvShape& shape, const py::array& input,
                         const py::array& filters, const OptionalArray& bias,
                         const std::string& activation, int num_threads) {
  const py::dtype dtype = input.dtype();
  Require("input", input, dtype, InputShape(shape));
  Require("filters", filters, dtype, FilterShape(shape));
  py::array y = AlignedArray(dtype, OutputShape(shape));
  py::array_t<double> moments(Shape{3, shape.OutputChannels()});
  ConvForwardArgs args{};
  args.dtype = DTypeOf("input", input);
  args.shape = shape;
  args.activation = ActivationOf(activation);
  args.input = input.data();
  args.filters = filters.data();
  args.bias = Optional("bias", bias, dtype, {shape.OutputChannels()});
  args.y = y.mutable_data();
  args.moments = moments.mutable_data();
  RunForward(args, num_threads);
  return py::make_tuple(y, moments);
}

py::tuple Gradient(const ConvShape& shape, const py::array& dy,
                   const py::array& input, const py::array& filters,
                   const OptionalArray& saved, const std::string& activation,
                   double alpha, bool winograd, bool side_input_gradient,
                   int num_threads) {
  const py::dtype dtype = input.dtype();
  Require("dy", dy, dtype, OutputShape(shape));
  Require("input", input, dtype, InputShape(shape));
  Require("filters", filters, dtype, FilterShape(shape));
  if (!saved && activation != "none") {
    throw py::value_error("saved is needed for activation " + activation);
  }
  py::array dx = AlignedArray(dtype, InputShape(shape));
  py::array dw = AlignedArray(dtype, FilterShape(shape));
  py::array db(dtype, Shape{shape.OutputChannels()});
  OptionalArray dz;
  if (side_input_gradient) dz = py::array(dtype, OutputShape(shape));
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
      dz.has_value() ? dz->mutable_data() : nullptr,
      winograd};
  RunGradient(args, num_threads);
  return py::make_tuple(dx, dw, db, dz);
}

// Of a float32 convolution with relu, without and with its gradients.
py::tuple ScratchBytes(const ConvShape& shape, int num_threads, bool winograd) {
  const py::dtype dtype = py::dtype::of<float>();
  py::array x(dtype, InputShape(shape)), w(dtype, FilterShape(shape)),
      y(dtype, OutputShape(shape)), dx(dtype, InputShape(shape)),
      dw(dtype, FilterShape(shape)), db(dtype, Shape{shape.OutputChannels()});
  const std::int64_t forward = RunForward(
      {DType::kFloat, shape, Activation::kRelu, 0, x.data(), w.data(), nullptr,
       nullptr, nullptr, y.mutable_data(), nullptr, nullptr, nullptr, winograd},
      num_threads);
  const std::int64_t gradient =
      RunGradient({DType::kFloat, shape, Activation::kRelu, 0, y.data(),
                   y.data(), x.data(), w.data(), dx.mutable_data(),
                   dw.mutable_data(), db.mutable_data(), nullptr, winograd},
                  num_threads);
  return py::make_tuple(forward, gradient);
}

}  // namespace

void BindConv(py::module_& m) {
  using namespace py::literals;
  BindConvShape(m);
  m.def("conv_forward", &Forward,
        "Returns (y, pre_activation), or (y, None) if that is not to be saved.",
        "shape"_a, "input"_a, "filters"_a, "bias"_a = py::none(),
        "side_input"_a = py::none(), py::kw_only(), "scale"_a = py::none(),
        "activation"_a = "none", "alpha"_a = 0.2, "pack_first"_a = false,
        "winograd"_a = false, "save_pre_activation"_a = true,
        "num_threads"_a = 1);
  m.def("conv_moments", &ForwardMoments,
        "Returns (y, moments): [3, channels], of y's channels the number of "
        "elements, their mean and the sum of squared deviations from it.",
        "shape"_a, "input"_a, "filters"_a, "bias"_a = py::none(), py::kw_only(),
        "activation"_a = "none", "num_threads"_a = 1);
  m.def(
      "conv_gradient", &Gradient,
      "Returns the gradients (input, filters, bias, side_input), None for the "
      "last if it is not wanted.",
      "shape"_a, "dy"_a, "input"_a, "filters"_a, "saved"_a = py::none(),
      py::kw_only(), "activation"_a = "none", "alpha"_a = 0.2,
      "winograd"_a = false, "side_input_gradient"_a = true,
      "num_threads"_a = 1);
  m.def("conv_scratch_bytes", &ScratchBytes,
        "Returns the bytes of scratch memory that a float32 convolution takes, "
        "(forward, gradients of input, filters and bias).",
        "shape"_a, "num_threads"_a = 1, "winograd"_a = false);
}

}  // namespace tfo::python
