// Convolutions of volumes, channels last and in one group, and their gradients,
// as convolutions of images: what the planes under a window hold becomes
// channels of one image, some images at a time.
#ifndef TFO_CC_CORE_CONV3D_H_
#define TFO_CC_CORE_CONV3D_H_

#include "cc/core/conv.h"

namespace tfo {

//   z[n, d] = sum over t of the convolution of images x[n, d * stride +
//                           t * dilation - pad] * w[t]
//
// with x zero outside the volume.
struct ConvDepth {
  std::int64_t in, out;  // planes of a volume
  std::int64_t kernel, stride, dilation, pad;
};

// `args.shape` is that of the convolutions of images, its batch that of
// volumes: x and z are [batch, depth, h, w, channels], filters [kernel, r, s,
// c, k]. There are no scale, no moments and no packed filters. False when
// scratch memory ran out.
bool ComputeConv3D(const ConvForwardArgs& args, const ConvDepth& depth,
                   const Parallel& parallel, const Scratch& scratch);
bool ComputeConv3DGradient(const ConvGradientArgs& args, const ConvDepth& depth,
                           const Parallel& parallel, const Scratch& scratch);

}  // namespace tfo

#endif  // TFO_CC_CORE_CONV3D_H_
