#include "cuda/conv.h"

#include "cc/core/types.h"
#include "cuda/conv_cudnn.h"
#include "cuda/conv_elementwise.h"
#include "cuda/cublaslt.h"
#include "cuda/cudnn.h"
#include "cuda/matmul.h"

namespace tfo::cuda {
namespace {

Status CheckSupported(DType dtype, const ConvShape& s) {
  if (dtype == DType::kDouble) {
    return Unsupported("convolution", "float64 is not computed on the GPU");
  }
  if (s.groups != 1) {
    return Unsupported("convolution", "groups are not computed on the GPU");
  }
  if (!IsProduct(s) && (s.input_channels_first != s.output_channels_first ||
                        s.filters_transposed)) {
    return Unsupported("convolution", "input and output differ in layout");
  }
  return {};
}

Status LibraryStatus(const ConvShape& s) {
  return IsProduct(s) ? CublasLtStatus() : CudnnStatus();
}

Status SetElementsZero(DType dtype, void* data, std::int64_t elements,
                       const Call& call) {
  return data == nullptr ? Status{}
                         : SetZero(data, elements * SizeOf(dtype), call);
}

// dz and the bias gradient, where they are not just dy and unwanted. `*dz` may
// be the side input's gradient or scratch memory.
Status PreActivationGradient(const ConvGradientArgs& args, const Call& call,
                             const void** dz) {
  auto elementwise = ElementwiseArgs<BiasActGradientArgs>(
      args.dtype, args.shape, args.activation, args.alpha);
  elementwise.dy = args.dy;
  elementwise.saved = args.saved;
  elementwise.dz = args.side_input_gradient;
  elementwise.bias_grad = args.bias_gradient;
  const bool dz_is_dy = args.activation == Activation::kNone;
  const bool wants_products = args.input_gradient || args.filters_gradient;
  if (elementwise.dz == nullptr && !dz_is_dy && wants_products) {
    TFO_CUDA_RETURN_IF_ERROR(
        AllocateScratch(call, OutputElements(args.shape) * SizeOf(args.dtype),
                        &elementwise.dz));
  }
  *dz = elementwise.dz != nullptr ? elementwise.dz : args.dy;
  if (elementwise.dz == nullptr && elementwise.bias_grad == nullptr) return {};
  return BiasActGradient(elementwise, call.scratch, call.stream);
}

}  // namespace

Status ConvForward(const ConvForwardArgs& args, const Call& call) {
  TFO_CUDA_RETURN_IF_ERROR(CheckSupported(args.dtype, args.shape));
  if (OutputElements(args.shape) == 0) return {};
  if (InputElements(args.shape) == 0) {
    TFO_CUDA_RETURN_IF_ERROR(
        SetElementsZero(args.dtype, args.y, OutputElements(args.shape), call));
    return BiasAct(args, args.y, call);
  }
  if (args.scale != nullptr) {
    // No library scales channels.
    ConvForwardArgs product = args;
    product.activation = Activation::kNone;
    product.scale = product.bias = product.side_input = nullptr;
    product.pre_activation = nullptr;
    TFO_CUDA_RETURN_IF_ERROR(ConvForward(product, call));
    return BiasAct(args, args.y, call);
  }
  TFO_CUDA_RETURN_IF_ERROR(LibraryStatus(args.shape));
  return IsProduct(args.shape) ? MatMulForward(args, call)
                               : CudnnForward(args, call);
}

Status ConvGradient(const ConvGradientArgs& args, const Call& call) {
  const ConvShape& shape = args.shape;
  TFO_CUDA_RETURN_IF_ERROR(CheckSupported(args.dtype, shape));
  ConvGradientArgs left = args;
  const bool empty = InputElements(shape) == 0 || OutputElements(shape) == 0;
  if (empty) {
    TFO_CUDA_RETURN_IF_ERROR(SetElementsZero(args.dtype, args.input_gradient,
                                             InputElements(shape), call));
    TFO_CUDA_RETURN_IF_ERROR(SetElementsZero(args.dtype, args.filters_gradient,
                                             FilterElements(shape), call));
    left.input_gradient = left.filters_gradient = nullptr;
  }
  if (left.input_gradient || left.filters_gradient) {
    TFO_CUDA_RETURN_IF_ERROR(LibraryStatus(shape));
  }
  // Where nothing else reads dy, the product sums it up in passing.
  if (args.activation == Activation::kNone && !args.side_input_gradient &&
      args.bias_gradient && left.filters_gradient && IsProduct(shape)) {
    const Status status =
        MatMulFiltersGradient(args, args.dy, args.bias_gradient, call);
    if (status.ok()) {
      left.bias_gradient = left.filters_gradient = nullptr;
    } else if (!IsUnsupported(status)) {
      return status;
    }
  }
  const void* dz = nullptr;
  TFO_CUDA_RETURN_IF_ERROR(PreActivationGradient(left, call, &dz));
  if (left.input_gradient) {
    TFO_CUDA_RETURN_IF_ERROR(IsProduct(shape)
                                 ? MatMulInputGradient(left, dz, call)
                                 : CudnnInputGradient(left, dz, call));
  }
  if (left.filters_gradient) {
    TFO_CUDA_RETURN_IF_ERROR(
        IsProduct(shape) ? MatMulFiltersGradient(left, dz, nullptr, call)
                         : CudnnFiltersGradient(left, dz, call));
  }
  return {};
}

}  // namespace tfo::cuda
