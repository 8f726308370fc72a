#include "cuda/matmul.h"

#include "cuda/conv_elementwise.h"
#include "cuda/conv_layout.h"
#include "cuda/cublaslt.h"

namespace tfo::cuda {
namespace {

// The input, or its gradient, is a matrix [m, k], or images stored transposed.
// The filters are a matrix [k, n], or its transpose.
struct Matrices {
  DType dtype;
  ConvShape shape;
  std::int64_t pixels, m, k, n;

  Matrices(DType dtype, const ConvShape& s)
      : dtype(dtype),
        shape(s),
        pixels(s.in_h * s.in_w),
        m(s.batch * pixels),
        k(s.in_c),
        n(s.out_c) {}

  // Several transposed images are not a transposed matrix.
  bool input_is_matrix() const {
    return !shape.input_channels_first || shape.batch == 1;
  }
  Status AllocateMatrix(const Call& call, void** out) const {
    return AllocateScratch(call, m * k * SizeOf(dtype), out);
  }
  // output[image, c, r] = input[image, r, c]
  Status TransposeImages(std::int64_t rows, std::int64_t cols,
                         const void* input, void* output,
                         const Call& call) const {
    return ReverseDimensions({dtype, shape.batch, rows, 1, cols, input, output},
                             call.stream);
  }
  Status InputMatrix(const void* input, const Call& call, Operand* out) const {
    *out = {input, shape.input_channels_first};
    if (input_is_matrix()) return {};
    void* matrix = nullptr;
    TFO_CUDA_RETURN_IF_ERROR(AllocateMatrix(call, &matrix));
    *out = {matrix, false};
    return TransposeImages(k, pixels, input, matrix, call);
  }
};

// Whether cuBLASLt knows the activation and stores what is to be stored. Its
// tanh need not be exact to the last bits of float32.
bool FusesActivation(const ConvForwardArgs& args, bool allow_tf32) {
  switch (args.activation) {
    case Activation::kNone:
    case Activation::kRelu:
      return args.pre_activation == nullptr;
    case Activation::kGeluTanh:
      return (args.dtype != DType::kFloat || allow_tf32) &&
             (args.pre_activation == nullptr || args.shape.out_c % 8 == 0);
    default:
      return false;
  }
}

}  // namespace

bool IsProduct(const ConvShape& s) {
  return s.kernel_h == 1 && s.kernel_w == 1 && s.stride_h == 1 &&
         s.stride_w == 1 && s.pad_top == 0 && s.pad_left == 0 &&
         s.in_h == s.out_h && s.in_w == s.out_w && !s.output_channels_first;
}

// The library computes as much as it takes: all, all but the activation, or the
// bare product. Our own kernel does the rest.
Status MatMulForward(const ConvForwardArgs& args, const Call& call) {
  const Matrices matrices(args.dtype, args.shape);
  Operand input{};
  TFO_CUDA_RETURN_IF_ERROR(matrices.InputMatrix(args.input, call, &input));
  Product product = {args.dtype, matrices.m,
                     matrices.n, matrices.k,
                     input,      {args.filters, args.shape.filters_transposed},
                     args.y};
  product.addend = args.side_input;
  product.bias = args.bias;
  if (FusesActivation(args, call.allow_tf32)) {
    product.activation = args.activation;
    product.pre_activation = args.pre_activation;
    const Status status = Multiply(product, call);
    if (!IsUnsupported(status)) return status;
    product.activation = Activation::kNone;
    product.pre_activation = nullptr;
  }
  product.d = args.pre_activation ? args.pre_activation : args.y;
  ConvForwardArgs rest = args;
  const Status status = Multiply(product, call);
  if (IsUnsupported(status)) {
    product.addend = product.bias = nullptr;
    TFO_CUDA_RETURN_IF_ERROR(Multiply(product, call));
  } else {
    TFO_CUDA_RETURN_IF_ERROR(status);
    rest.side_input = rest.bias = rest.pre_activation = nullptr;
  }
  return BiasAct(rest, product.d, call);
}

// dx = dz w^T
Status MatMulInputGradient(const ConvGradientArgs& args, const void* dz,
                           const Call& call) {
  const Matrices matrices(args.dtype, args.shape);
  const std::int64_t m = matrices.m, k = matrices.k, n = matrices.n;
  const bool transposed = args.shape.filters_transposed;
  if (args.shape.input_channels_first && matrices.input_is_matrix()) {
    return Multiply({args.dtype,
                     k,
                     m,
                     n,
                     {args.filters, transposed},
                     {dz, true},
                     args.input_gradient},
                    call);
  }
  void* matrix = args.input_gradient;
  if (!matrices.input_is_matrix()) {
    TFO_CUDA_RETURN_IF_ERROR(matrices.AllocateMatrix(call, &matrix));
  }
  TFO_CUDA_RETURN_IF_ERROR(Multiply(
      {args.dtype, m, k, n, {dz, false}, {args.filters, !transposed}, matrix},
      call));
  if (matrices.input_is_matrix()) return {};
  return matrices.TransposeImages(matrices.pixels, k, matrix,
                                  args.input_gradient, call);
}

// dw = x^T dz
Status MatMulFiltersGradient(const ConvGradientArgs& args, const void* dz,
                             void* bias_gradient, const Call& call) {
  const Matrices matrices(args.dtype, args.shape);
  const std::int64_t m = matrices.m, k = matrices.k, n = matrices.n;
  Operand input{};
  TFO_CUDA_RETURN_IF_ERROR(matrices.InputMatrix(args.input, call, &input));
  if (args.shape.filters_transposed) {
    Product product = {args.dtype,           n, k, m, {dz, true}, input,
                       args.filters_gradient};
    product.a_sums = bias_gradient;
    return Multiply(product, call);
  }
  Product product = {args.dtype,
                     k,
                     n,
                     m,
                     {input.data, !input.transposed},
                     {dz, false},
                     args.filters_gradient};
  product.b_sums = bias_gradient;
  return Multiply(product, call);
}

}  // namespace tfo::cuda
