// Dropout: elements at random become zero, the others are scaled.
#ifndef TFO_CC_CORE_DROPOUT_H_
#define TFO_CC_CORE_DROPOUT_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/parallel.h"
#include "cc/core/types.h"

namespace tfo {

// Where a stream of random words by Philox4x32-10 begins (Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in memory of the
// device that draws them. Block i of four words is a function of key and
// counter + i.
struct Philox {
  const std::uint64_t* key;      // one
  const std::uint64_t* counter;  // two, the low half first
};

// What is there.
struct PhiloxStart {
  std::uint64_t key;
  std::uint64_t counter[2];

  TFO_HOST_DEVICE void Store(std::uint64_t* key_out,
                             std::uint64_t* counter_out) const {
    *key_out = key;
    for (int i = 0; i < 2; ++i) counter_out[i] = counter[i];
  }
};

constexpr int kPhiloxRounds = 10;
constexpr std::uint32_t kPhiloxFactors[] = {0xD2511F53, 0xCD9E8D57};
constexpr std::uint32_t kPhiloxWeyl[] = {0x9E3779B9, 0xBB67AE85};

// TensorFlow's uniform numbers are so many random bits, the lowest of a word,
// as a fraction.
template <class T>
constexpr int kUniformBits = 23;
template <>
inline constexpr int kUniformBits<Half> = 10;
template <>
inline constexpr int kUniformBits<BFloat16> = 7;
template <>
inline constexpr int kUniformBits<double> = 52;

// The least bits whose number is not below the rate.
template <class T>
TFO_HOST_DEVICE std::int64_t DropoutThreshold(double rate) {
  constexpr std::int64_t kNone = std::int64_t{1} << kUniformBits<T>;
  if (!(rate < 1)) return kNone;
  const double least = rate < 0 ? 0 : rate * static_cast<double>(kNone);
  const std::int64_t whole = static_cast<std::int64_t>(least);
  return whole + (static_cast<double>(whole) < least);
}

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
