// Whole numbers: bounds and parts.
#ifndef TFO_CC_CORE_INTEGERS_H_
#define TFO_CC_CORE_INTEGERS_H_

#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

TFO_INLINE std::int64_t Min(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}
TFO_INLINE std::int64_t Max(std::int64_t a, std::int64_t b) {
  return a > b ? a : b;
}
TFO_INLINE std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
// The part of `total` that falls to each of the fewest equal parts of at most
// `most`.
TFO_INLINE std::int64_t EvenPart(std::int64_t total, std::int64_t most) {
  return total == 0 ? 1 : CeilDiv(total, CeilDiv(total, most));
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_INTEGERS_H_
