// Correlations of long sums, as several of shorter ones.
#ifndef TFO_CC_CORE_CORRELATE_IN_PARTS_H_
#define TFO_CC_CORE_CORRELATE_IN_PARTS_H_

#include "cc/core/correlate.h"
#include "cc/core/shared_scratch.h"

namespace tfo::TFO_ISA {
namespace {

// The depth of which a panel of filters leaves room for enough pixels beside it
// in the second-level cache, where each filter takes several operands (measured
// with AMX, 2048 rows of 3072 elements: 0.7 of the time). 3x3 filters of 128
// channels are this deep (1.0 to 1.1 of the time in two parts).
constexpr std::int64_t kMostDepth = 9 * 128;
// Where a filter takes one operand, that pays once no cache keeps the filters
// from band to band: a deep band has few pixels to read them for (measured with
// AVX-512, 1000 rows times 4096x4096: 0.85 to 0.9 of the time, times 8192x2048:
// 0.66; but 1.02 to 1.05 times 3072x1000).
constexpr std::int64_t kUncachedBytes = 24 << 20, kMostUncachedDepth = 12 * 128;

// The parts of its channels in which a correlation is best computed; each adds
// to what the ones before have written.
template <class T>
std::int64_t DepthParts(const Correlation<T>& c) {
  using E = Operand<T>;
  if (HasNoOutput(c) || !std::is_same_v<T, Accumulator<T>>) return 1;
  const std::int64_t taps = Max(c.x.taps.count, 1);
  const std::int64_t filters = taps * c.x.channels * c.out_channels;
  const bool uncached =
      taps == 1 && filters * std::int64_t{sizeof(T)} >= kUncachedBytes;
  if (kPlanes<E> == 1 && !uncached) return 1;
  const std::int64_t depth = kPlanes<E> > 1 ? kMostDepth : kMostUncachedDepth;
  const std::int64_t parts =
      CeilDiv(c.x.channels, Max(depth / taps, kLanes<float>));
  if (parts <= 1) return 1;
  // Few pixels leave room for blocks of filters of any depth (measured with
  // AMX, 3x3, 512 channels of 7x7 pixels: 0.82 to 0.9 of the time; but 1.0 to
  // 1.1 under one tap).
  const std::int64_t numbers =
      c.x.batch * c.x.height * c.x.width * c.x.channels;
  const bool few =
      kPlanes<E> == 1 ||
      (taps > 1 && numbers * kOperandBytes<E> / kElements<E> <= kMostBandBytes);
  return few && Plan(c, 1).late ? 1 : parts;
}

// Correlates, part by part.
template <class T>
bool CorrelateInParts(const Correlation<T>& c, const Parallel& parallel,
                      const Scratch& scratch) {
  const std::int64_t count = DepthParts(c);
  if (count == 1 || c.packed != nullptr) return Correlate(c, parallel, scratch);
  constexpr std::int64_t kLine = 64 / sizeof(T);
  const std::int64_t channels =
      CeilDiv(CeilDiv(c.x.channels, count), kLine) * kLine;
  SharedScratch shared(scratch);
  for (std::int64_t first = 0; first < c.x.channels; first += channels) {
    Correlation<T> part = c;
    part.x.channels = Min(channels, c.x.channels - first);
    part.x.source.data += first * c.x.map.c;
    if (c.x.source.saved != nullptr) part.x.source.saved += first * c.x.map.c;
    part.filters += first * c.filter_map.row;
    if (first > 0) part.epilogue.side_input = c.epilogue.y;
    if (first + channels < c.x.channels) {
      part.epilogue.bias = nullptr;
      part.epilogue.pre_activation = nullptr;
      part.epilogue.activation = Activation::kNone;
      part.epilogue.partial = true;
      part.moments = nullptr;
    }
    if (!Correlate(part, parallel, shared.Next())) return false;
  }
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_CORRELATE_IN_PARTS_H_
