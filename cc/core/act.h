// An activation on its own: elementwise over one tensor.
#ifndef TFO_CC_CORE_ACT_H_
#define TFO_CC_CORE_ACT_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/parallel.h"
#include "cc/core/types.h"

namespace tfo {

struct ActArgs {
  DType dtype;
  std::int64_t size;
  Activation activation;
  double alpha;
  const void* x;
  void* y;  // may be x
};

struct ActGradientArgs {
  DType dtype;
  std::int64_t size;
  Activation activation;
  double alpha;
  const void* dy;
  const void* saved;  // y where SlopeFromValue(activation, alpha), else x
  void* x_grad;       // may be dy or saved
};

using ActForwardFunction = void(const ActArgs&, const Parallel&);
using ActGradientFunction = void(const ActGradientArgs&, const Parallel&);

}  // namespace tfo

#endif  // TFO_CC_CORE_ACT_H_
