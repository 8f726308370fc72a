// A leaky relu whose slope below zero is learned: y = x where x > 0, otherwise
// alpha * x (He et al., arXiv:1502.01852). Results depend on shape and values
// only, never on the number of threads.
#ifndef TFO_CC_CORE_PRELU_H_
#define TFO_CC_CORE_PRELU_H_

#include <cstdint>

#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo {

// x is [rows, depth], dense; alpha is [depth].
struct PreluShape {
  DType dtype;
  std::int64_t rows, depth;
};

struct PreluArgs {
  PreluShape shape;
  const void* x;
  const void* alpha;
  void* y;  // may be x
};

struct PreluGradientArgs {
  PreluShape shape;
  const void* dy;
  const void* x;
  const void* alpha;
  void* x_grad;      // may be dy or x
  void* alpha_grad;  // [depth]
};

// False when scratch memory ran out.
using PreluForwardFunction = bool(const PreluArgs&, const Parallel&,
                                  const Scratch&);
using PreluGradientFunction = bool(const PreluGradientArgs&, const Parallel&,
                                   const Scratch&);

}  // namespace tfo

#endif  // TFO_CC_CORE_PRELU_H_
