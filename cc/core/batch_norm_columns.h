// Per-column parameters of batch normalisation, and elementwise passes that use
// them.
#ifndef TFO_CC_CORE_BATCH_NORM_COLUMNS_H_
#define TFO_CC_CORE_BATCH_NORM_COLUMNS_H_

#include <cstdint>

#include "cc/core/batch_norm_reduce.h"
#include "cc/core/batch_norm_rows.h"
#include "cc/core/vector_math.h"

namespace tfo::TFO_ISA {
namespace {

// Elements whose pre-activations or slopes wait in a buffer in the first-level
// cache. Multiple of 64, and at least a row of any reduction task.
constexpr int64_t kBufferElements = 2048;

// Parameters in scratch memory: a value per column where channels are
// interleaved, a value per channel for planes.
template <class A>
bool AllocateColumns(const BatchNormPlan& plan, const Scratch& scratch,
                     Columns<A>* columns) {
  const int64_t n = PaddedLanes(plan.planes ? plan.channels : plan.width);
  A* at = scratch.Allocate<A>(5 * n);
  if (at == nullptr) return false;
  Fill(at, 5 * n, A(0));
  *columns = {at, at + n, at + 2 * n, at + 3 * n, at + 4 * n};
  return true;
}

// Calls set(column, channel) for every column (for planes: once for every
// channel).
template <class Set>
TFO_INLINE void ForColumnChannels(const BatchNormPlan& plan, const Set& set) {
  if (plan.planes) {
    for (int64_t c = 0; c < plan.channels; ++c) set(c, c);
    return;
  }
  int64_t j = 0;
  for (int64_t g = 0; g < plan.fold; ++g) {
    for (int64_t c = 0; c < plan.channels; ++c) {
      for (int64_t i = 0; i < plan.inner; ++i) set(j++, c);
    }
  }
}

template <class A>
void SetColumns(const BatchNormPlan& plan,
                const BatchNormParameters& parameters,
                const Columns<A>& columns) {
  const A* mean = static_cast<const A*>(parameters.mean);
  const A* inv_std = static_cast<const A*>(parameters.inv_std);
  const A* scale = static_cast<const A*>(parameters.scale);
  const A* offset = static_cast<const A*>(parameters.offset);
  ForColumnChannels(plan, [&](int64_t j, int64_t c) {
    columns.mean[j] = mean[c];
    columns.scale[j] = scale[c] * inv_std[c];
    columns.offset[j] = offset[c];
  });
}

// The parameters of the rows at hand: columns of the scratch arrays or, for
// planes, one channel's on all lanes.
template <class A>
class LocalColumns {
 public:
  Columns<A> Of(const BatchNormPlan& plan, const Columns<A>& all,
                int64_t column) {
    if (!plan.planes) return all.At(column);
    A* const from[5] = {all.mean, all.scale, all.offset, all.pull, all.pull_x};
    for (int i = 0; i < 5; ++i) Fill(lanes_[i], kPlaneLanes, from[i][column]);
    return {lanes_[0], lanes_[1], lanes_[2], lanes_[3], lanes_[4]};
  }

 private:
  alignas(64) A lanes_[5][PaddedLanes(kPlaneLanes)];
};

// Calls body(first_element, rows, width, columns) over the elements [begin,
// end): dense rows that share their columns.
template <class A, class Body>
TFO_INLINE void ForDenseRows(const BatchNormPlan& plan, const Columns<A>& all,
                             int64_t begin, int64_t end, const Body& body) {
  LocalColumns<A> local;
  while (begin < end) {
    if (plan.planes) {
      const int64_t channel = begin / plan.inner % plan.channels;
      const int64_t length = Min(end - begin, plan.inner - begin % plan.inner);
      const int64_t rows = length / kPlaneLanes;
      const Columns<A> columns = local.Of(plan, all, channel);
      if (rows > 0) body(begin, rows, kPlaneLanes, columns);
      const int64_t rest = length - rows * kPlaneLanes;
      if (rest > 0) body(begin + rows * kPlaneLanes, int64_t{1}, rest, columns);
      begin += length;
    } else {
      const int64_t column = begin % plan.width;
      const int64_t whole = column == 0 ? (end - begin) / plan.width : 0;
      const int64_t width =
          whole > 0 ? plan.width : Min(end - begin, plan.width - column);
      const int64_t rows = whole > 0 ? whole : 1;
      body(begin, rows, width, all.At(column));
      begin += rows * width;
    }
  }
}

// Whether to store an output past the caches: rows, too, must be made of
// aligned vectors.
template <class T>
bool Streams(const BatchNormPlan& plan, const void* output, const void* input,
             const void* other) {
  const int64_t period = plan.planes ? plan.inner : plan.width;
  return period % 16 == 0 &&
         Streams<T>(plan.elements_of_all, output, input, other);
}

template <class A>
using ArrayFunction = void(A* values, int64_t n, A alpha);

template <Activation kActivation, bool kSlope, class A>
void ActivateArray(A* values, int64_t n, A alpha) {
  const auto act = [&](Vec<A> z) {
    using F = VectorActivation<A>;
    const Vec<A> a = Splat(alpha);
    if constexpr (!kSlope) {
      return F::template Value<kActivation>(z, a);
    } else if constexpr (kActivation <= Activation::kTanh &&
                         kActivation != Activation::kLeakyRelu) {
      return F::template Slope<kActivation>(
          F::template Value<kActivation>(z, a), a);
    } else {
      return F::template Slope<kActivation>(z, a);
    }
  };
  ForColumns<A>(n, [&](int64_t j, auto partial, int count) {
    constexpr bool kPartial = decltype(partial)::value;
    StoreColumns<kPartial>(
        values + j, act(LoadColumns<kPartial>(values + j, count)), count);
  });
}

// The activation, or its slope, of pre-activations, in their place.
template <bool kSlope, class A>
ArrayFunction<A>* ArrayActivation(Activation activation) {
  ArrayFunction<A>* function = nullptr;
  WithActivation(activation, [&](auto a) {
    function = &ActivateArray<decltype(a)::value, kSlope, A>;
  });
  return function;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_BATCH_NORM_COLUMNS_H_
