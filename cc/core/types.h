// Element types of the core. Storage types are plain bits, so that this header
// needs no framework.
#ifndef TFO_CC_CORE_TYPES_H_
#define TFO_CC_CORE_TYPES_H_

#include <cstdint>

namespace tfo {

enum class DType : std::uint8_t { kHalf, kBFloat16, kFloat, kDouble };

// Of an element, in bytes.
constexpr std::int64_t SizeOf(DType dtype) {
  return dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2;
}

struct Half {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

// The type in which a product of T is accumulated.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <>
struct AccumulatorOf<std::int32_t> {
  using type = std::int32_t;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

}  // namespace tfo

#endif  // TFO_CC_CORE_TYPES_H_
