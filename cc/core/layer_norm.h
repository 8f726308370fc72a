// Layer normalization: y = (x - mean) * inv_std * scale + offset, with mean and
// inverse standard deviation of every row; RMS normalization takes zero for the
// mean. Results depend on shape and values only, never on the number of
// threads.
#ifndef TFO_CC_CORE_LAYER_NORM_H_
#define TFO_CC_CORE_LAYER_NORM_H_

#include <cstdint>

#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo {

// x is [rows, depth], dense.
struct LayerNormShape {
  DType dtype;
  std::int64_t rows, depth;
  bool subtract_mean;
};

struct LayerNormArgs {
  LayerNormShape shape;
  double epsilon;
  const void* x;
  const void* scale;   // [depth] of Accumulator<dtype>
  const void* offset;  // [depth] of Accumulator<dtype>
  void* y;             // may be x
  void* mean;          // [rows] of Accumulator<dtype>
  void* inv_std;       // [rows] of Accumulator<dtype>
};

struct LayerNormGradientArgs {
  LayerNormShape shape;
  const void* dy;
  const void* x;
  const void* scale;
  const void* mean;
  const void* inv_std;
  void* x_grad;       // may be dy or x
  void* scale_grad;   // [depth] of Accumulator<dtype>
  void* offset_grad;  // [depth] of Accumulator<dtype>
};

using LayerNormForwardFunction = void(const LayerNormArgs&, const Parallel&);
// False when scratch memory ran out.
using LayerNormGradientFunction = bool(const LayerNormGradientArgs&,
                                       const Parallel&, const Scratch&);

}  // namespace tfo

#endif  // TFO_CC_CORE_LAYER_NORM_H_
