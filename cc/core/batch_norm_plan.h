// How batch normalisation cuts a tensor into tasks: from the shape only, so
// that results do not depend on threads.
//
// Lanes. Reductions keep one accumulator per *lane* and merge the lanes of a
// channel at the end.
//  - Interleaved (channels last, or tiny planes): the tensor is a dense matrix
//  whose rows are `fold` times
//    [channels, inner], `fold` chosen so that a few channels still fill
//    vectors. A lane is a column; lane j belongs to channel (j / inner) %
//    channels. The last row may be partial: it has `tail` columns.
//  - Planes (channels first): each plane of `inner` elements is rows of
//  kPlaneLanes elements, all of one channel.
#ifndef TFO_CC_CORE_BATCH_NORM_PLAN_H_
#define TFO_CC_CORE_BATCH_NORM_PLAN_H_

#include <cstdint>

#include "cc/core/batch_norm.h"

namespace tfo {

constexpr std::int64_t kPlaneLanes = 64;
constexpr std::int64_t kMaxTileLanes = 1056;
constexpr std::int64_t kMaxSplits = 64;

struct BatchNormPlan {
  std::int64_t outer, channels, inner;
  std::int64_t elements;
  std::int64_t elements_of_all;  // batches
  bool planes;

  // Interleaved.
  std::int64_t fold;   // groups of [channels, inner] in a row
  std::int64_t width;  // columns: fold * channels * inner
  std::int64_t rows;   // complete rows
  std::int64_t tail;   // columns of the partial row
  std::int64_t tile;   // columns of a reduction task, whole channels
  std::int64_t num_tiles;
  std::int64_t rows_per_split;

  // Planes: a plane is read in pieces, a task sums some pieces of some
  // channels.
  std::int64_t piece;
  std::int64_t pieces_per_plane;
  std::int64_t pieces_per_split;
  std::int64_t channels_per_task;
  std::int64_t num_channel_groups;

  // Parts into which the reduction of each channel is cut; their results are
  // merged in order.
  std::int64_t num_splits;

  // Elementwise passes: consecutive elements per task, a multiple of 64.
  std::int64_t chunk;
  std::int64_t num_chunks;
};

BatchNormPlan PlanBatchNorm(const BatchNormShape& shape);

// Length of per-lane arrays: a whole vector may be read at any lane.
constexpr std::int64_t PaddedLanes(std::int64_t lanes) {
  return (lanes + 31) / 16 * 16;
}

}  // namespace tfo

#endif  // TFO_CC_CORE_BATCH_NORM_PLAN_H_
