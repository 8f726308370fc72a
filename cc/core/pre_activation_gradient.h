// The gradient of a pre-activation as a tensor, for what reads it more than
// once.
#ifndef TFO_CC_CORE_PRE_ACTIVATION_GRADIENT_H_
#define TFO_CC_CORE_PRE_ACTIVATION_GRADIENT_H_

#include "cc/core/conv.h"

namespace tfo {

// The pixels of images, as those of a 1x1 convolution.
ConvShape PixelShape(std::int64_t batch, std::int64_t height,
                     std::int64_t width, std::int64_t channels,
                     bool channels_first);

// dz = dy * slope, where the input or filters gradient is wanted, which read
// it; it is dy itself where there is no activation, and the side input's
// gradient where that is to be stored. The bias's gradient is taken in the same
// pass. `pixels` are dy's. False when scratch memory ran out.
bool ComputePreActivationGradient(const ConvGradientArgs& args,
                                  const ConvShape& pixels,
                                  const Parallel& parallel,
                                  const Scratch& scratch, const void** dz);

}  // namespace tfo

#endif  // TFO_CC_CORE_PRE_ACTIVATION_GRADIENT_H_
