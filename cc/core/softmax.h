// Softmax of rows, as attention takes it: y = e^(z - max) / sum, where z is x *
// scale, or a number as good as minus infinity where a mask says so. Results
// depend on shape and values only, never on the number of threads.
#ifndef TFO_CC_CORE_SOFTMAX_H_
#define TFO_CC_CORE_SOFTMAX_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/broadcast_rows.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo {

// Which elements are kept: one byte each, 1 or 0.
struct SoftmaxMask : BroadcastRows {
  const std::uint8_t* keep;  // null: all are

  TFO_HOST_DEVICE const std::uint8_t* Row(std::int64_t row) const {
    return keep + Offset(row);
  }
};

// x is [rows, depth], dense.
struct SoftmaxShape {
  DType dtype;
  std::int64_t rows, depth;
};

struct SoftmaxArgs {
  SoftmaxShape shape;
  double scale;
  double masked;     // what z is where it is not kept
  bool zero_masked;  // whether y is zero there, also in rows without others
  SoftmaxMask mask;
  const void* x;
  void* y;  // may be x
};

// x_grad = (dy - sum of dy * y over a row) * y * scale, zero where not kept.
struct SoftmaxGradientArgs {
  SoftmaxShape shape;
  double scale;
  bool zero_masked;  // whether dy there does not count, be it a NaN
  SoftmaxMask mask;
  const void* dy;
  const void* y;
  void* x_grad;  // may be dy or y
};

// False when scratch memory ran out.
using SoftmaxForwardFunction = bool(const SoftmaxArgs&, const Parallel&,
                                    const Scratch&);
using SoftmaxGradientFunction = void(const SoftmaxGradientArgs&,
                                     const Parallel&);

}  // namespace tfo

#endif  // TFO_CC_CORE_SOFTMAX_H_
