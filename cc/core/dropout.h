// Dropout: elements at random become zero, the others are scaled.
#ifndef TFO_CC_CORE_DROPOUT_H_
#define TFO_CC_CORE_DROPOUT_H_

#include <cstdint>

#include "cc/core/parallel.h"
#include "cc/core/types.h"

namespace tfo {

// Where a stream of random words begins.
struct Philox {
  std::uint64_t key;
  std::uint64_t counter[2];  // the low half first
};

// The element at index i of a tensor becomes zero where the i-th uniform number
// that TensorFlow makes for the tensor's type is below the rate.
struct Dropout {
  double rate;
  double scale;
  Philox random;
};

struct DropoutArgs {
  DType dtype;
  std::int64_t size;
  Dropout dropout;
  const void* x;
  void* y;  // may be x
};

using DropoutFunction = void(const DropoutArgs&, const Parallel&);

}  // namespace tfo

#endif  // TFO_CC_CORE_DROPOUT_H_
