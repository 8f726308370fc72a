// Products of fewer rows than columns, with filters whose depth lies together:
// the filters are read as pixels of an image, and the rows are packed as
// filters, since they are smaller.
//
//   y[row, c] = sum over k of filters[c, k] * x[row, k]
#ifndef TFO_CC_CORE_EXCHANGED_H_
#define TFO_CC_CORE_EXCHANGED_H_

#include "cc/core/correlate_in_parts.h"

namespace tfo::TFO_ISA {
namespace {

// So many columns for each row, and so long sums, make up for y, which is
// transposed (measured with AVX-512 and AMX, 768x3072 and 4096x4096: 0.6 to
// 0.85 of the time with 32 and 128 rows, bfloat16 with AMX 0.35 and 0.55; half
// as many rows as columns and sums of twice as many terms 0.95, and of as many
// or of 256 terms 1.0 to 1.3).
constexpr std::int64_t kColumnsPerRow = 2, kDepthPerRow = 2, kLeastDepth = 512;
// Up to so many rows, dot products are better (measured as above: the same time
// with 12 to 16; of pairs with two).
template <class T>
constexpr std::int64_t kFewRowsOfExchanged =
    kElements<Operand<T>> > 1 && kPlanes<Operand<T>> == 1 ? 2 : 12;
// Rows whose slopes are computed at a time.
constexpr std::int64_t kRowsPerTask = 4;

// Whether a product without scale and bias, seen as one line of pixels, is such
// a one.
template <class T>
bool IsExchanged(const Correlation<T>& c) {
  const Windows<T>& x = c.x;
  return x.batch * x.grid_h == 1 && x.grid_w >= 1 && x.taps.count == 1 &&
         x.taps.min_h == 0 && x.taps.min_w == 0 && x.stride_w == 1 &&
         x.grid_w <= x.width && c.filter_map.row == 1 &&
         c.epilogue.map.c == 1 && c.epilogue.bias == nullptr &&
         c.epilogue.scale == nullptr &&
         x.grid_w * kColumnsPerRow <= c.out_channels &&
         x.channels >= Max(x.grid_w * kDepthPerRow, kLeastDepth);
}

template <class T>
bool CorrelateExchanged(const Correlation<T>& c, const Parallel& parallel,
                        const Scratch& scratch) {
  const Windows<T>& x = c.x;
  const std::int64_t rows = x.grid_w, depth = x.channels;
  const T* from = x.source.data;
  FilterMap map{x.map.c, x.map.w, 0};
  if (x.source.saved != nullptr) {
    // In x's own type, as if x had been stored. The last of an odd number of
    // bfloat16 is made a pair.
    const std::int64_t pitch = CeilDiv(depth, 2) * 2;
    T* const to = scratch.Allocate<T>(rows * pitch);
    if (to == nullptr) return false;
    auto gather = [&](std::int64_t task, int) {
      const std::int64_t first = task * kRowsPerTask;
      const std::int64_t count = Min(rows - first, kRowsPerTask);
      Gather(x.source, x.map, 0, 1, x.width, {0, first, 0, 1, count, depth},
             to + first * pitch, pitch, count * pitch);
    };
    ParallelFor(parallel, CeilDiv(rows, kRowsPerTask), kRowsPerTask * depth,
                gather);
    from = to;
    map = {1, pitch, 0};
  }
  const T* const filters =
      c.filters + x.taps.taps[0].filter * c.filter_map.matrix;
  Correlation<T> exchanged{{{filters, nullptr, Activation::kNone, 0},
                            {0, 0, c.filter_map.column, 1},
                            1,
                            1,
                            c.out_channels,
                            depth,
                            x.taps,
                            1,
                            1,
                            1,
                            c.out_channels},
                           rows,
                           from,
                           map,
                           c.epilogue};
  exchanged.epilogue.map = {0, 0, 1, c.epilogue.map.w};
  return CorrelateInParts(exchanged, parallel, scratch);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_EXCHANGED_H_
