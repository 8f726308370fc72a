// Loop counts that the compiler should know.
#ifndef TFO_CC_CORE_COUNTS_H_
#define TFO_CC_CORE_COUNTS_H_

#include <type_traits>

#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

// Calls body(std::integral_constant<int, n>{}) for n of 1 to kMost.
template <int kMost, class Body>
TFO_INLINE void WithCount(std::int64_t n, Body&& body) {
  if constexpr (kMost > 1) {
    if (n < kMost) return WithCount<kMost - 1>(n, body);
  }
  body(std::integral_constant<int, kMost>{});
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_COUNTS_H_
