// Cross entropy of rows of logits without the softmax in memory, with a class
// for each row, log(sum of e^x) - x[label], or a number for each class, the sum
// of label * (log(sum of e^x) - x).
#ifndef TFO_CC_CORE_CROSS_ENTROPY_H_
#define TFO_CC_CORE_CROSS_ENTROPY_H_

#include <cstdint>

#include "cc/core/parallel.h"
#include "cc/core/softmax.h"

namespace tfo {

// One number below the depth for each row, int32 or int64.
struct Labels {
  const void* data;
  bool wide;

  TFO_HOST_DEVICE std::int64_t operator[](std::int64_t row) const {
    return wide ? static_cast<const std::int64_t*>(data)[row]
                : static_cast<const std::int32_t*>(data)[row];
  }

  TFO_HOST_DEVICE static bool IsClass(std::int64_t label, std::int64_t depth) {
    return label >= 0 && label < depth;
  }
  // Zero for what is no class: memory of others may change once it was checked.
  std::int64_t ClassOf(std::int64_t row, std::int64_t depth) const {
    const std::int64_t label = (*this)[row];
    return IsClass(label, depth) ? label : 0;
  }
};

// One number for each x, of its type; they need not add up to one.
struct Probabilities {
  bool given;  // in the place of labels
  const void* data;
  bool one_row;  // which is that of all rows
};

// What the gradient keeps of the rows, in accumulators: the largest x, and 1 /
// the sum of e^(x - largest).
struct CrossEntropyArgs {
  SoftmaxShape shape;
  Labels labels;
  Probabilities probabilities;
  const void* x;
  bool one_x;  // one row, which is that of all; beside probabilities alone
  void* loss;  // one for each row
  void* largest;
  void* inverse_sum;
};

struct CrossEntropyGradientArgs {
  CrossEntropyArgs forward;
  const void* dloss;
  void* x_grad;  // may be x or the probabilities
};

using CrossEntropyForwardFunction = void(const CrossEntropyArgs&,
                                         const Parallel&);
using CrossEntropyGradientFunction = void(const CrossEntropyGradientArgs&,
                                          const Parallel&);

}  // namespace tfo

#endif  // TFO_CC_CORE_CROSS_ENTROPY_H_
