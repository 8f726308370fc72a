// Transposed convolution with its bias, side input and activation, and its
// gradients.
#ifndef TFO_CC_CORE_CONV_TRANSPOSE_H_
#define TFO_CC_CORE_CONV_TRANSPOSE_H_

#include "cc/core/conv.h"

namespace tfo {

// The shape is that of the convolution whose input gradient is computed: it
// makes of an image of y's size, its input, one of x's, its output. Of one
// group, without scale, moments and packed filters. False when scratch memory
// ran out.
bool ComputeConvTranspose(const ConvForwardArgs& args, const Parallel& parallel,
                          const Scratch& scratch);
// dy, saved and the side input's gradient are of y's shape.
bool ComputeConvTransposeGradient(const ConvGradientArgs& args,
                                  const Parallel& parallel,
                                  const Scratch& scratch);

}  // namespace tfo

#endif  // TFO_CC_CORE_CONV_TRANSPOSE_H_
