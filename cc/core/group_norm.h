// Group normalization with an activation: y = act((x - mean) * inv_std * scale
// + offset), with mean and inverse standard deviation of the groups of channels
// of every image. A channel a group is instance normalization. Results depend
// on shape and values only, never on the number of threads.
#ifndef TFO_CC_CORE_GROUP_NORM_H_
#define TFO_CC_CORE_GROUP_NORM_H_

#include <cstdint>

#include "cc/core/batch_norm.h"

namespace tfo {

// x is images of the shape that batch normalization takes, dense.
struct GroupNormShape {
  std::int64_t images;
  BatchNormShape image;
  std::int64_t groups;  // divides image.channels
};

struct GroupNormArgs {
  GroupNormShape shape;
  Activation activation;
  double alpha;
  double epsilon;
  const void* x;
  const void* scale;   // [channels] of Accumulator<dtype>
  const void* offset;  // [channels] of Accumulator<dtype>
  void* y;             // may be x
  void* mean;          // [images, groups] of Accumulator<dtype>
  void* inv_std;       // [images, groups] of Accumulator<dtype>
};

struct GroupNormGradientArgs {
  GroupNormShape shape;
  Activation activation;
  double alpha;
  const void* dy;
  const void* x;
  const void* scale;
  const void* offset;
  const void* mean;
  const void* inv_std;
  void* x_grad;       // may be dy or x
  void* scale_grad;   // [channels] of Accumulator<dtype>
  void* offset_grad;  // [channels] of Accumulator<dtype>
};

// False when scratch memory ran out.
using GroupNormForwardFunction = bool(const GroupNormArgs&, const Parallel&,
                                      const Scratch&);
using GroupNormGradientFunction = bool(const GroupNormGradientArgs&,
                                       const Parallel&, const Scratch&);

}  // namespace tfo

#endif  // TFO_CC_CORE_GROUP_NORM_H_
