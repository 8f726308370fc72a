// Dense layers of 8-bit weights: y = act(q_a q_b / (s_a s_b) + bias), where q_a
// = round(a * s_a) are the rows of a as integers from -127 to 127, s_a = 127 /
// (largest magnitude of the row + epsilon), and q_b and s_b, a column's, are
// given. Sums of products are exact, so that results do not
// depend on the instruction set or the number of threads but for the rounding
// of what follows.
#ifndef TFO_CC_CORE_QUANTIZED_MATMUL_H_
#define TFO_CC_CORE_QUANTIZED_MATMUL_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo {

// As deep as sums have room for.
constexpr std::int64_t kMostQuantizedDepth = 1 << 17;

struct QuantizedMatMulArgs {
  DType dtype;  // any but kDouble
  std::int64_t rows, depth, columns;
  bool transpose_b;
  Activation activation;
  float alpha, epsilon;
  const void* a;         // [rows, depth]
  const std::int8_t* b;  // [depth, columns], or [columns, depth]
  const float* b_scale;  // [columns]
  const void* bias;      // [columns]; null: zero
  void* y;               // [rows, columns]
};

// False when scratch memory ran out.
using QuantizedMatMulFunction = bool(const QuantizedMatMulArgs&,
                                     const Parallel&, const Scratch&);

}  // namespace tfo

#endif  // TFO_CC_CORE_QUANTIZED_MATMUL_H_
