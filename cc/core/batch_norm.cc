#include "cc/core/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "cc/core/batch_norm_plan.h"
#include "cc/core/dispatch.h"

namespace tfo {
namespace {

using std::int64_t;

constexpr int64_t kReductionElements = 128 * 1024;  // of a reduction task
constexpr int64_t kChunkElements = 64 * 1024;       // of an elementwise task
constexpr int64_t kFoldedLanes =
    128;                           // narrower rows are folded to at least this
constexpr int64_t kMinPlane = 16;  // smaller planes are treated as interleaved
constexpr int64_t kMaxChunkUnit = 256 * 1024;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t Splits(int64_t elements) {
  return std::clamp<int64_t>(elements / kReductionElements, 1, kMaxSplits);
}

void PlanInterleaved(BatchNormPlan* p) {
  const int64_t group = p->channels * p->inner;
  p->fold = 16 / std::gcd<int64_t>(group, 16);
  if (p->fold * group > kMaxTileLanes) p->fold = 1;
  p->fold *= std::max<int64_t>(1, CeilDiv(kFoldedLanes, p->fold * group));
  p->width = p->fold * group;
  p->rows = p->outer / p->fold;
  p->tail = p->outer % p->fold * group;
  p->tile = p->width;
  if (p->width > kMaxTileLanes)
    p->tile = kMaxTileLanes / (16 * p->inner) * 16 * p->inner;
  p->num_tiles = CeilDiv(p->width, p->tile);
  const int64_t splits = std::min(Splits(p->outer * p->tile / p->fold),
                                  std::max<int64_t>(1, p->rows));
  p->rows_per_split = std::max<int64_t>(1, CeilDiv(p->rows, splits));
  p->num_splits = std::max<int64_t>(1, CeilDiv(p->rows, p->rows_per_split));
}

void PlanPlanes(BatchNormPlan* p) {
  p->piece = CeilDiv(std::min(p->inner, kReductionElements), kPlaneLanes) *
             kPlaneLanes;
  p->pieces_per_plane = CeilDiv(p->inner, p->piece);
  const int64_t per_channel = p->outer * p->inner;
  const int64_t pieces = p->outer * p->pieces_per_plane;
  p->pieces_per_split = CeilDiv(pieces, std::min(Splits(per_channel), pieces));
  p->num_splits = CeilDiv(pieces, p->pieces_per_split);
  p->channels_per_task = std::clamp<int64_t>(
      kReductionElements / std::max<int64_t>(1, per_channel), 1, p->channels);
  p->num_channel_groups = CeilDiv(p->channels, p->channels_per_task);
}

// Elements of a channel.
double Count(const BatchNormShape& shape) {
  return static_cast<double>(shape.outer) * static_cast<double>(shape.inner);
}

// What is not to be read may be anything, a NaN too.
double Average(double momentum, double moving, double batch) {
  return momentum == 0 ? batch : moving * momentum + batch * (1 - momentum);
}

// Chan's combination of the replicas' moments, in their order: [num_replicas,
// 3, channels] to [3, channels].
void CombineMoments(int64_t num_replicas, int64_t channels,
                    const double* moments, double* combined) {
  std::fill_n(combined, 3 * channels, 0.0);
  double *count = combined, *mean = count + channels,
         *squares = mean + channels;
  for (int64_t replica = 0; replica < num_replicas; ++replica) {
    const double* n = moments + replica * 3 * channels;
    for (int64_t c = 0; c < channels; ++c) {
      if (n[c] == 0) continue;
      const double total = count[c] + n[c];
      const double delta = n[channels + c] - mean[c];
      mean[c] =
          count[c] == 0 ? n[channels + c] : mean[c] + delta * (n[c] / total);
      squares[c] += n[2 * channels + c];
      if (count[c] > 0) squares[c] += delta * delta * (count[c] * n[c] / total);
      count[c] = total;
    }
  }
}

// moments: [3, channels].
template <class A>
void Finalize(const BatchNormForwardArgs& args, const double* moments) {
  const int64_t channels = args.apply.shape.channels;
  const A* moving_mean = static_cast<const A*>(args.moving_mean);
  const A* moving_variance = static_cast<const A*>(args.moving_variance);
  A* new_mean = static_cast<A*>(args.new_mean);
  A* new_variance = static_cast<A*>(args.new_variance);
  A* saved_mean = static_cast<A*>(args.saved_mean);
  A* saved_inv_std = static_cast<A*>(args.saved_inv_std);
  for (int64_t c = 0; c < channels; ++c) {
    double m = moving_mean[c], v = moving_variance[c];
    const double count = args.training ? moments[c] : 0;
    if (count > 0) {
      const double correction =
          args.unbiased && count > 1 ? count / (count - 1) : 1;
      m = moments[channels + c];
      v = moments[2 * channels + c] / count;
      new_mean[c] = static_cast<A>(Average(args.momentum, moving_mean[c], m));
      new_variance[c] = static_cast<A>(
          Average(args.momentum, moving_variance[c], v * correction));
    } else {
      new_mean[c] = moving_mean[c];
      new_variance[c] = moving_variance[c];
      if (args.training) m = v = 0;
    }
    saved_mean[c] = static_cast<A>(m);
    saved_inv_std[c] = static_cast<A>(1 / std::sqrt(v + args.epsilon));
  }
}

// The rest of the forward op.
bool Normalize(const BatchNormForwardArgs& args, const double* moments,
               const Parallel& parallel, const Scratch& scratch) {
  const bool is_double = args.apply.shape.dtype == DType::kDouble;
  (is_double ? Finalize<double> : Finalize<float>)(args, moments);
  BatchNormApplyArgs apply = args.apply;
  apply.parameters.mean = args.saved_mean;
  apply.parameters.inv_std = args.saved_inv_std;
  return ActiveKernels().batch_norm_apply(apply, parallel, scratch);
}

template <class A>
void FinalizeGradient(const BatchNormGradientArgs& args, const double* sum_dz,
                      const double* sum_dz_x) {
  const A* inv_std = static_cast<const A*>(args.parameters.inv_std);
  for (int64_t c = 0; c < args.shape.channels; ++c) {
    static_cast<A*>(args.offset_grad)[c] = static_cast<A>(sum_dz[c]);
    static_cast<A*>(args.scale_grad)[c] =
        static_cast<A>(sum_dz_x[c] * inv_std[c]);
  }
}

// The first phase, which leaves dz at `dz` unless that is null.
bool SumDz(const BatchNormGradientArgs& args, void* dz,
           const Parallel& parallel, const Scratch& scratch, double* sums) {
  const BatchNormShape& shape = args.shape;
  double* sum_dz = sums + shape.channels;
  double* sum_dz_x = sum_dz + shape.channels;
  std::fill_n(sums, shape.channels, Count(shape));
  if (!ActiveKernels().batch_norm_gradient_sums(args, dz, parallel, scratch,
                                                sum_dz, sum_dz_x)) {
    return false;
  }
  const bool is_double = shape.dtype == DType::kDouble;
  (is_double ? FinalizeGradient<double> : FinalizeGradient<float>)(args, sum_dz,
                                                                   sum_dz_x);
  return true;
}

// Whether the slope is a comparison or two.
bool SlopeIsCheap(Activation activation) {
  switch (activation) {
    case Activation::kRelu6:
    case Activation::kLeakyRelu:
    case Activation::kHardSigmoid:
    case Activation::kHardSwish:
      return true;
    default:
      return false;
  }
}

// What BatchNormGradientApply takes, from sums: [3, channels] to [2, channels].
template <class A>
void FinalizePull(const BatchNormGradientArgs& args, const double* sums,
                  double* pull) {
  const int64_t channels = args.shape.channels;
  const A* scale = static_cast<const A*>(args.parameters.scale);
  const A* inv_std = static_cast<const A*>(args.parameters.inv_std);
  const double *count = sums, *sum_dz = count + channels,
               *sum_dz_x = sum_dz + channels;
  for (int64_t c = 0; c < channels; ++c) {
    const double r = inv_std[c], factor = scale[c] * r / count[c];
    pull[c] = factor * sum_dz[c];
    pull[channels + c] = factor * r * r * sum_dz_x[c];
  }
}

}  // namespace

BatchNormPlan PlanBatchNorm(const BatchNormShape& shape) {
  BatchNormPlan p{};
  p.outer = shape.outer;
  p.channels = shape.channels;
  p.inner = shape.inner;
  p.elements = p.outer * p.channels * p.inner;
  p.elements_of_all = shape.batches * p.elements;
  if (p.elements == 0) return p;
  p.planes = p.inner >= kMinPlane;
  if (p.planes) {
    PlanPlanes(&p);
  } else {
    PlanInterleaved(&p);
  }
  // Tasks that begin with a row need no partial row at either end.
  int64_t unit = 64 * (p.planes ? p.inner : p.width);
  if (unit > kMaxChunkUnit) unit = 64;
  p.chunk = unit * std::max<int64_t>(1, kChunkElements / unit);
  p.num_chunks = CeilDiv(p.elements, p.chunk);
  return p;
}

bool BatchNormLocalMoments(const BatchNormShape& shape, const void* x,
                           const Parallel& parallel, const Scratch& scratch,
                           double* moments) {
  std::fill_n(moments, shape.channels, Count(shape));
  return ActiveKernels().batch_norm_moments(shape, x, parallel, scratch,
                                            moments + shape.channels,
                                            moments + 2 * shape.channels);
}

bool BatchNormForwardFromMoments(const BatchNormForwardArgs& args,
                                 int64_t num_replicas, const double* moments,
                                 const Parallel& parallel,
                                 const Scratch& scratch) {
  const int64_t channels = args.apply.shape.channels;
  double* combined = scratch.Allocate<double>(3 * channels);
  if (combined == nullptr) return false;
  CombineMoments(num_replicas, channels, moments, combined);
  return Normalize(args, combined, parallel, scratch);
}

bool BatchNormForward(const BatchNormForwardArgs& args,
                      const Parallel& parallel, const Scratch& scratch) {
  const BatchNormShape& shape = args.apply.shape;
  double* moments = scratch.Allocate<double>(3 * shape.channels);
  if (moments == nullptr) return false;
  if (args.training &&
      !BatchNormLocalMoments(shape, args.apply.x, parallel, scratch, moments)) {
    return false;
  }
  return Normalize(args, moments, parallel, scratch);
}

void* BatchNormPlaceOfDz(const BatchNormGradientArgs& args) {
  const bool in_passing =
      args.activation == Activation::kNone || args.mask != nullptr ||
      (args.activation == Activation::kRelu && args.side == nullptr);
  // Rounded to 16 bits, dz would not be what x_grad is to be made from.
  const bool exact =
      args.shape.dtype == DType::kFloat || args.shape.dtype == DType::kDouble;
  if (in_passing || !exact) return nullptr;
  if (args.side_grad != nullptr) return args.side_grad;
  // Writing once more is dearer than a few instructions.
  if (SlopeIsCheap(args.activation) || args.x_grad == args.x) return nullptr;
  return args.x_grad;
}

BatchNormGradientArgs BatchNormFromDz(const BatchNormGradientArgs& args,
                                      const void* dz) {
  BatchNormGradientArgs from_dz = args;
  if (dz == nullptr) return from_dz;
  from_dz.activation = Activation::kNone;
  from_dz.dy = dz;
  from_dz.side = nullptr;
  if (args.side_grad == dz) from_dz.side_grad = nullptr;
  return from_dz;
}

bool BatchNormLocalSums(const BatchNormGradientArgs& args,
                        const Parallel& parallel, const Scratch& scratch,
                        double* sums) {
  return SumDz(args, nullptr, parallel, scratch, sums);
}

bool BatchNormGradientFromSums(const BatchNormGradientArgs& args,
                               const double* sums, const Parallel& parallel,
                               const Scratch& scratch) {
  double* pull = scratch.Allocate<double>(2 * args.shape.channels);
  if (pull == nullptr) return false;
  const bool is_double = args.shape.dtype == DType::kDouble;
  (is_double ? FinalizePull<double> : FinalizePull<float>)(args, sums, pull);
  return ActiveKernels().batch_norm_gradient_apply(args, pull, parallel,
                                                   scratch);
}

bool BatchNormGradient(const BatchNormGradientArgs& args,
                       const Parallel& parallel, const Scratch& scratch) {
  double* sums = scratch.Allocate<double>(3 * args.shape.channels);
  void* dz = BatchNormPlaceOfDz(args);
  return sums != nullptr && SumDz(args, dz, parallel, scratch, sums) &&
         BatchNormGradientFromSums(BatchNormFromDz(args, dz), sums, parallel,
                                   scratch);
}

}  // namespace tfo
