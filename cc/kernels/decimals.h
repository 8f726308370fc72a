// Numbers that are attributes of ops.
#ifndef TFO_CC_KERNELS_DECIMALS_H_
#define TFO_CC_KERNELS_DECIMALS_H_

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace tf_fused_ops {

// The number that an attribute was written as: attributes have the digits of
// float, and 0.001f is not 0.001 to an op on doubles.
inline double AsWritten(float value) {
  double written;
  const bool read = absl::SimpleAtod(absl::StrCat(value), &written);
  return read && static_cast<float>(written) == value ? written : value;
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_DECIMALS_H_
