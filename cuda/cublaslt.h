// Matrix products with what cuBLASLt can fuse into them.
#ifndef TFO_CUDA_CUBLASLT_H_
#define TFO_CUDA_CUBLASLT_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/types.h"
#include "cuda/call.h"
#include "cuda/status.h"

namespace tfo::cuda {

// A dense row-major matrix, taken transposed or as it is.
struct Operand {
  const void* data;
  bool transposed;
};

// d = activation(op(a) op(b) + addend + bias), row-major and dense; op(a) is
// [m, k], op(b) is [k, n]; none of m, k and n is zero.
struct Product {
  DType dtype;  // not kDouble
  std::int64_t m, n, k;
  Operand a, b;
  void* d;                       // [m, n]
  const void* addend = nullptr;  // [m, n]
  const void* bias = nullptr;    // [n]
  // kNone, kRelu or kGeluTanh.
  Activation activation = Activation::kNone;
  // Of kGeluTanh: gets the activation's argument, [m, n]; n % 8 == 0.
  void* pre_activation = nullptr;
  // Gets the sums of op(a) or op(b) over k: [m] or [n]. Only one of them, and
  // with neither bias nor activation.
  void* a_sums = nullptr;
  void* b_sums = nullptr;
};

// Whether the library was found.
Status CublasLtStatus();

// Unsupported where the library refuses; then nothing was done. An activation
// in the library makes 0 of NaN where it is kRelu, as in stock TensorFlow's
// fused kernels.
Status Multiply(const Product& product, const Call& call);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_CUBLASLT_H_
