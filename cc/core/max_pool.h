// The largest of every window of a channels-last image.
#ifndef TFO_CC_CORE_MAX_POOL_H_
#define TFO_CC_CORE_MAX_POOL_H_

#include <cstdint>

#include "cc/core/parallel.h"
#include "cc/core/types.h"

namespace tfo {

// Every window overlaps the image.
struct MaxPoolShape {
  std::int64_t batch, in_h, in_w, channels;
  std::int64_t out_h, out_w;
  std::int64_t window_h, window_w;
  std::int64_t stride_h, stride_w;
  std::int64_t pad_top, pad_left;
};

// Index of an output through which no gradient flows; those of a window's
// pixels, row by row, are below.
constexpr int kNoMaxPoolIndex = 255;

struct MaxPoolArgs {
  DType dtype;
  MaxPoolShape shape;
  bool relu;  // of the largest, which is the largest relu
  const void* x;
  void* y;
  std::uint8_t* indices;  // where in its window an output was found; or null
};

struct MaxPoolGradientArgs {
  DType dtype;
  MaxPoolShape shape;
  const void* dy;
  const std::uint8_t* indices;
  void* x_grad;
};

using MaxPoolForwardFunction = void(const MaxPoolArgs&, const Parallel&);
using MaxPoolGradientFunction = void(const MaxPoolGradientArgs&,
                                     const Parallel&);

}  // namespace tfo

#endif  // TFO_CC_CORE_MAX_POOL_H_
