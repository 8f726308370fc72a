// Dense layers of which the weights alone are quantized: y = act(a w + bias),
//
//   w[k, n] = (q[k, n] - zero[g, n]) * scale[g, n], g = group[k],
//
// with integers q of 8 or 4 bits.
#ifndef TFO_CC_CORE_WEIGHT_ONLY_MATMUL_H_
#define TFO_CC_CORE_WEIGHT_ONLY_MATMUL_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo {

// How integers lie in bytes: one in each; or two of 4 bits, the first in the
// lower ones, which are neighbours of a row in memory, or of two rows. The last
// byte, or row of bytes, may be half empty.
enum class Packing : std::uint8_t { kNone, kAlongRows, kAcrossRows };

struct QuantizedWeights {
  std::int64_t depth, columns, groups;
  bool transposed;  // [columns, depth] and so on, not [depth, columns]
  bool is_signed;
  Packing packing;
  const std::uint8_t* numbers;
  const float* scale;         // [groups, columns]
  const float* zero;          // the same; null: zeros
  const std::int32_t* group;  // [depth], from 0 to groups - 1
};

struct WeightOnlyMatMulArgs {
  DType dtype;  // any but kDouble
  std::int64_t rows;
  QuantizedWeights weights;
  Activation activation;
  double alpha;
  const void* a;     // [rows, depth]
  const void* bias;  // [columns]; null: zero
  void* y;           // [rows, columns]
};

// False when scratch memory ran out.
using WeightOnlyMatMulFunction = bool(const WeightOnlyMatMulArgs&,
                                      const Parallel&, const Scratch&);

// The numbers that weights stand for, [depth, columns] or [columns, depth] as
// the integers are. False when scratch memory ran out.
using DequantizeFunction = bool(DType, const QuantizedWeights&, void* to,
                                const Parallel&, const Scratch&);

}  // namespace tfo

#endif  // TFO_CC_CORE_WEIGHT_ONLY_MATMUL_H_
