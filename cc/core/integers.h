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
TFO_INLINE void Swap(std::int64_t& a, std::int64_t& b) {
  const std::int64_t old = a;
  a = b;
  b = old;
}
TFO_INLINE constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
struct Quotient {
  std::int64_t whole, rest;
};
// Of numbers that are not negative, and most often less than what they are
// divided by: divisions take as long as several rows of a tile.
TFO_INLINE Quotient Divide(std::int64_t a, std::int64_t b) {
  if (a < b) return {0, a};
  const std::int64_t whole = a / b;
  return {whole, a - whole * b};
}
TFO_INLINE std::int64_t GreatestCommonDivisor(std::int64_t a, std::int64_t b) {
  while (b != 0) {
    a %= b;
    Swap(a, b);
  }
  return a;
}
// The fewest tasks from `tasks` on that workers share evenly, `times` over.
TFO_INLINE std::int64_t EvenTasks(std::int64_t tasks, std::int64_t times,
                                  std::int64_t workers) {
  const std::int64_t step = workers / GreatestCommonDivisor(times, workers);
  return CeilDiv(tasks, step) * step;
}
// The part of `total` that falls to each of the fewest equal parts of at most
// `most`.
TFO_INLINE std::int64_t EvenPart(std::int64_t total, std::int64_t most) {
  return total == 0 ? 1 : CeilDiv(total, CeilDiv(total, most));
}
// The fewest parts of at most `most` that make up `total`, equal to within one.
class EvenParts {
 public:
  TFO_INLINE EvenParts(std::int64_t total, std::int64_t most)
      : count_(CeilDiv(total, most)),
        size_(total / Max(count_, 1)),
        longer_(total - count_ * size_) {}

  TFO_INLINE std::int64_t count() const { return count_; }
  TFO_INLINE std::int64_t Size(std::int64_t part) const {
    return size_ + (part < longer_);
  }
  TFO_INLINE std::int64_t Begin(std::int64_t part) const {
    return part * size_ + Min(part, longer_);
  }

 private:
  std::int64_t count_, size_, longer_;  // the first `longer_` are one longer
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_INTEGERS_H_
