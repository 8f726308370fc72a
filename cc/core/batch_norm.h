// Batch normalisation with a side input and an activation: y = act((x - mean) *
// inv_std * scale + offset (+ side)).
//
// The statistics are a phase of their own, as is their use, so that replicas
// can exchange them in between: moments and apply forward, sums and apply
// backward. BatchNormForward and BatchNormGradient run both on one device. All
// results depend on shape and values only, never on the number of threads.
#ifndef TFO_CC_CORE_BATCH_NORM_H_
#define TFO_CC_CORE_BATCH_NORM_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo {

// x is [outer, channels, inner], dense; channels last means inner == 1.
struct BatchNormShape {
  DType dtype;
  std::int64_t outer, channels, inner;
  std::int64_t batches = 1;  // that follow each other and are normalized one by
                             // one: their outputs share the caches
};

// Vectors of [channels] elements of Accumulator<dtype>.
struct BatchNormParameters {
  const void* mean;
  const void* inv_std;
  const void* scale;
  const void* offset;
};

struct BatchNormApplyArgs {
  BatchNormShape shape;
  BatchNormParameters parameters;
  Activation activation;
  double alpha;
  const void* x;
  const void* side;  // null: none
  void* y;           // may be x or side
  std::uint8_t*
      mask;  // null: not wanted; bit i tells whether element i of y is positive
};

struct BatchNormGradientArgs {
  BatchNormShape shape;
  BatchNormParameters parameters;
  Activation activation;
  double alpha;
  bool training;
  const void* dy;
  const void* x;
  const void* side;          // null: none, or not needed for the slope
  const std::uint8_t* mask;  // null: the slope is computed from x and side
  void* x_grad;              // may be dy or x
  void* side_grad;           // null: not wanted
  void* scale_grad;          // [channels] of Accumulator<dtype>
  void* offset_grad;         // [channels] of Accumulator<dtype>
};

struct BatchNormForwardArgs {
  BatchNormApplyArgs apply;  // parameters.mean and inv_std are set from saved_*
  const void* moving_mean;
  const void* moving_variance;
  double epsilon;
  double momentum;  // 0: the moving averages are not read
  bool training, unbiased;
  // [channels] of Accumulator<dtype>
  void* new_mean;
  void* new_variance;
  void* saved_mean;
  void* saved_inv_std;
};

// ---- Phases, one implementation per instruction set (see dispatch.h); false
// when scratch memory ran out --------

// Per channel: the mean of x, and the sum of squared deviations from it. Zero
// for an empty batch.
using BatchNormMomentsFunction = bool(const BatchNormShape&, const void* x,
                                      const Parallel&, const Scratch&,
                                      double* mean, double* sum_of_squares);

using BatchNormApplyFunction = bool(const BatchNormApplyArgs&, const Parallel&,
                                    const Scratch&);

// With dz = dy * act'(z): per channel, the sum of dz and of dz * (x - mean).
// Where `dz` is not null, which may be dy, dz is kept there.
using BatchNormGradientSumsFunction = bool(const BatchNormGradientArgs&,
                                           void* dz, const Parallel&,
                                           const Scratch&, double* sum_dz,
                                           double* sum_dz_x);

// side_grad = dz, and x_grad = dz * scale * inv_std - pull[0] - (x - mean) *
// pull[1], what comes through the statistics: [2, channels], not read unless
// training.
using BatchNormGradientApplyFunction = bool(const BatchNormGradientArgs&,
                                            const double* pull, const Parallel&,
                                            const Scratch&);

// Where the sums can leave dz for x_grad and side_grad, so that slopes that
// take time are computed once; null: nowhere.
void* BatchNormPlaceOfDz(const BatchNormGradientArgs& args);

// The arguments of the second phase where the sums have left dz at `dz`, or
// nowhere if that is null.
BatchNormGradientArgs BatchNormFromDz(const BatchNormGradientArgs& args,
                                      const void* dz);

// ---- What replicas exchange, [3, channels] each; false when scratch memory
// ran out --------------------------------------

// Count, mean and sum of squared deviations of x.
bool BatchNormLocalMoments(const BatchNormShape& shape, const void* x,
                           const Parallel& parallel, const Scratch& scratch,
                           double* moments);

// The forward op with the statistics of all replicas, moments being
// [num_replicas, 3, channels].
bool BatchNormForwardFromMoments(const BatchNormForwardArgs& args,
                                 std::int64_t num_replicas,
                                 const double* moments,
                                 const Parallel& parallel,
                                 const Scratch& scratch);

// Count, sum_dz and sum_dz_x; scale_grad and offset_grad, which are of this
// replica's elements alone. Reads neither x_grad nor side_grad.
bool BatchNormLocalSums(const BatchNormGradientArgs& args,
                        const Parallel& parallel, const Scratch& scratch,
                        double* sums);

// x_grad and side_grad, from the sums added up over all replicas.
bool BatchNormGradientFromSums(const BatchNormGradientArgs& args,
                               const double* sums, const Parallel& parallel,
                               const Scratch& scratch);

// ---- Both phases on one device; false when scratch memory ran out
// ------------

bool BatchNormForward(const BatchNormForwardArgs& args,
                      const Parallel& parallel, const Scratch& scratch);
bool BatchNormGradient(const BatchNormGradientArgs& args,
                       const Parallel& parallel, const Scratch& scratch);

}  // namespace tfo

#endif  // TFO_CC_CORE_BATCH_NORM_H_
