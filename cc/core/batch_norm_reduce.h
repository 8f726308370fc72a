// Sums over the elements of each channel: lanes, tasks and splits as
// BatchNormPlan cuts them.
#ifndef TFO_CC_CORE_BATCH_NORM_REDUCE_H_
#define TFO_CC_CORE_BATCH_NORM_REDUCE_H_

#include <cstdint>

#include "cc/core/batch_norm_plan.h"
#include "cc/core/elementwise.h"
#include "cc/core/parallel.h"

namespace tfo::TFO_ISA {
namespace {

using std::int64_t;

constexpr int64_t kStackLanes = PaddedLanes(kMaxTileLanes);

template <class A>
TFO_INLINE void Fill(A* to, int64_t n, A value) {
  for (int64_t i = 0; i < n; ++i) to[i] = value;
}

// Element of [inner] planes at which a split begins, counted within its
// channel.
TFO_INLINE int64_t SplitBegin(const BatchNormPlan& p, int64_t split) {
  if (p.planes) {
    const int64_t piece =
        Min(split * p.pieces_per_split, p.outer * p.pieces_per_plane);
    return piece / p.pieces_per_plane * p.inner +
           Min(piece % p.pieces_per_plane * p.piece, p.inner);
  }
  if (split == p.num_splits) return p.outer * p.inner;
  return Min(split * p.rows_per_split, p.rows) * p.fold * p.inner;
}

// A Reducer takes rows of lanes and gives two numbers per channel:
//   Reducer(context, lanes, column)                 lanes are columns [column,
//   column + lanes), or those of one plane Add(offset, rows, stride, width)
//   rows of `width` lanes; fewer than `lanes` in a partial row Finish(fold,
//   group, inner, first, second)       merges lanes: fold groups of `group`,
//   then `inner` neighbours
// Results go to first[split][channel] and second[split][channel].
template <class Reducer>
struct Reduction {
  const BatchNormPlan& plan;
  const typename Reducer::Context& context;
  double* first;
  double* second;

  void operator()(int64_t task, int /*worker*/) const {
    if (plan.planes) {
      Planes(task);
    } else {
      Interleaved(task);
    }
  }

  void Interleaved(int64_t task) const {
    const int64_t split = task / plan.num_tiles;
    const int64_t column = task % plan.num_tiles * plan.tile;
    const int64_t lanes = Min(plan.tile, plan.width - column);
    const int64_t begin = split * plan.rows_per_split;
    const int64_t end = Min(begin + plan.rows_per_split, plan.rows);
    Reducer reducer(context, lanes, column);
    if (begin < end) {
      reducer.Add(begin * plan.width + column, end - begin, plan.width, lanes);
    }
    if (split == plan.num_splits - 1 && plan.tail > 0) {
      reducer.Add(plan.rows * plan.width, 1, plan.width, plan.tail);
    }
    const int64_t to = split * plan.channels + column / plan.inner;
    reducer.Finish(plan.fold, lanes / plan.fold, plan.inner, first + to,
                   second + to);
  }

  void Planes(int64_t task) const {
    const int64_t split = task / plan.num_channel_groups;
    const int64_t begin =
        task % plan.num_channel_groups * plan.channels_per_task;
    const int64_t end = Min(begin + plan.channels_per_task, plan.channels);
    const int64_t first_piece = split * plan.pieces_per_split;
    const int64_t last_piece = Min(first_piece + plan.pieces_per_split,
                                   plan.outer * plan.pieces_per_plane);
    for (int64_t c = begin; c < end; ++c) {
      Reducer reducer(context, kPlaneLanes, c);
      for (int64_t i = first_piece; i < last_piece; ++i) {
        const int64_t from = i % plan.pieces_per_plane * plan.piece;
        const int64_t length = Min(plan.piece, plan.inner - from);
        const int64_t offset =
            (i / plan.pieces_per_plane * plan.channels + c) * plan.inner + from;
        const int64_t rows = length / kPlaneLanes;
        if (rows > 0) reducer.Add(offset, rows, kPlaneLanes, kPlaneLanes);
        const int64_t rest = length % kPlaneLanes;
        if (rest > 0)
          reducer.Add(offset + rows * kPlaneLanes, 1, kPlaneLanes, rest);
      }
      const int64_t to = split * plan.channels + c;
      reducer.Finish(1, kPlaneLanes, kPlaneLanes, first + to, second + to);
    }
  }
};

template <class Reducer>
void Reduce(const BatchNormPlan& plan, const typename Reducer::Context& context,
            double* first, double* second, const Parallel& parallel) {
  Reduction<Reducer> reduction{plan, context, first, second};
  const int64_t tasks = plan.num_splits * (plan.planes ? plan.num_channel_groups
                                                       : plan.num_tiles);
  ParallelFor(parallel, tasks, plan.elements / tasks, reduction);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_BATCH_NORM_REDUCE_H_
