// Which elements dropout leaves.
#ifndef TFO_CC_CORE_DROPOUT_ELEMENTS_H_
#define TFO_CC_CORE_DROPOUT_ELEMENTS_H_

#include <type_traits>

#include "cc/core/philox.h"

namespace tfo::TFO_ISA {
namespace {

// Random words that the number of an element takes.
template <class T>
constexpr int64_t kWordsPerElement = sizeof(Accumulator<T>) / 4;

template <class T>
class DropoutElements {
  using A = Accumulator<T>;
  using Integer = typename IntegerOf<A>::type;

 public:
  // Elements at a time, and the memory for them.
  static constexpr int64_t kMost = 512;
  using Room = std::uint32_t[PhiloxRoom(kMost * kWordsPerElement<T>)];

  explicit DropoutElements(const Dropout& dropout)
      : random_(dropout.random),
        threshold_(IntVec<A>{} +
                   static_cast<Integer>(DropoutThreshold<T>(dropout.rate))),
        scale_(Splat(static_cast<A>(dropout.scale))) {}

  // What Apply needs for `count` elements from `first` on, at most kMost.
  TFO_INLINE const std::uint32_t* Draw(int64_t first, int64_t count,
                                       Room& room) const {
    return PhiloxWords(random_,
                       static_cast<std::uint64_t>(first) * kWordsPerElement<T>,
                       count * kWordsPerElement<T>, room);
  }

  // v scaled or zero, by the words from the first element's on. Reads those of
  // a whole vector.
  TFO_INLINE Vec<A> Apply(const std::uint32_t* words, Vec<A> v) const {
    IntVec<A> bits;
    __builtin_memcpy(&bits, words, sizeof(bits));
    if constexpr (std::is_same_v<A, double>) {
      // The upper bits are in the first word.
      using Unsigned = Vec<std::uint64_t>;
      bits = (IntVec<A>)((Unsigned)bits << 32 | (Unsigned)bits >> 32);
    }
    constexpr Integer kMask = (Integer{1} << kUniformBits<T>)-1;
    return (bits & kMask) >= threshold_ ? v * scale_ : Vec<A>{};
  }

 private:
  const Philox random_;
  const IntVec<A> threshold_;
  const Vec<A> scale_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_DROPOUT_ELEMENTS_H_
