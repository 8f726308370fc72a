// Products of few rows: the time is that of reading the filters, which is done
// once and in the order in which they lie.
#ifndef TFO_CC_CORE_FEW_ROWS_H_
#define TFO_CC_CORE_FEW_ROWS_H_

#include <type_traits>

#include "cc/core/correlate.h"

namespace tfo::TFO_ISA {
namespace {

constexpr std::int64_t kFewRows = 4;
// Rows of filters that are added to the sums at a time.
constexpr int kTogether = 8;
// Sums of a task, which should stay in the first-level cache, and what makes it
// worth a thread.
constexpr std::int64_t kChunkColumns = 1024;
constexpr std::int64_t kChunkElements = 1 << 17;
// Parts of the depth, whose sums are added in their order.
constexpr std::int64_t kMostParts = 8;

// Whether a convolution, flattened and with these taps, is such a product.
TFO_INLINE bool HasFewRows(const ConvShape& s, const TapList& taps) {
  return s.batch * s.out_h == 1 && s.out_w >= 1 && s.out_w <= kFewRows &&
         taps.count == 1 && taps.min_h == 0 && taps.min_w == 0 &&
         s.stride_w == 1 && s.out_c > 0 && !s.filters_transposed;
}

// Adds kCount rows of filters, `b` and those behind it, times their elements of
// kRows rows of x.
template <class T, int kRows, int kCount>
void AddRows(const T* a, const AddressMap& map, const T* b,
             std::int64_t b_stride, std::int64_t columns, Accumulator<T>* sums,
             std::int64_t sums_stride) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  constexpr int kLine = 64 / sizeof(T);
  Vec<A> factor[kRows][kCount];
  for (int i = 0; i < kRows; ++i) {
    for (int r = 0; r < kCount; ++r)
      factor[i][r] = Splat(LoadOne(a + i * map.w + r * map.c));
  }
  const auto add = [&](std::int64_t j, auto load) TFO_INLINE_LAMBDA {
    Vec<A> row[kCount];
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) row[r] = load(b + r * b_stride + j);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      A* const to = sums + i * sums_stride + j;
      Vec<A> sum = Load(to);
#pragma GCC unroll 8
      for (int r = 0; r < kCount; ++r) sum += factor[i][r] * row[r];
      Store(to, sum);
    }
  };
  std::int64_t j = 0;
  for (; j + lanes <= columns; j += lanes) {
    // The rows after these, which may lie on other pages.
    if (j % kLine == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < kCount; ++r)
        __builtin_prefetch(b + (kCount + r) * b_stride + j);
    }
    add(j, [](const T* p) TFO_INLINE_LAMBDA { return LoadAs(p); });
  }
  if (j < columns) {
    const int rest = static_cast<int>(columns - j);
    add(j,
        [&](const T* p) TFO_INLINE_LAMBDA { return LoadAsPartial(p, rest); });
  }
}

template <class T, int kRows>
bool CorrelateRows(const Correlation<T>& c, const Parallel& parallel,
                   const Scratch& scratch) {
  using A = Accumulator<T>;
  constexpr int kColumns = kTileColumns<A>;
  const Windows<T>& x = c.x;
  const std::int64_t depth = x.channels, columns = c.out_channels;
  const std::int64_t chunks = CeilDiv(columns, kChunkColumns);
  const std::int64_t chunk_elements = depth * Min(columns, kChunkColumns);
  const std::int64_t wanted_parts =
      Min(chunk_elements / kChunkElements + 1, kMostParts);
  const std::int64_t part_rows =
      Max(CeilDiv(EvenPart(depth, CeilDiv(depth, wanted_parts)), kTogether),
          1) *
      kTogether;
  const std::int64_t parts = Max(CeilDiv(depth, part_rows), 1);
  const std::int64_t stride = CeilDiv(columns, kColumns) * kColumns;
  A* const sums = scratch.Allocate<A>(parts * kRows * stride);
  if (sums == nullptr) return false;
  const T* const filters =
      c.filters + x.taps.taps[0].filter * c.filter_map.matrix;

  auto task = [&](std::int64_t index, int) {
    const std::int64_t part = index / chunks;
    const std::int64_t channel = index % chunks * kChunkColumns;
    const std::int64_t end = Min((part + 1) * part_rows, depth);
    const std::int64_t n = Min(columns - channel, kChunkColumns);
    A* const to = sums + part * kRows * stride + channel;
    for (int i = 0; i < kRows; ++i)
      Zero(to + i * stride, Min(stride - channel, kChunkColumns));
    std::int64_t k = part * part_rows;
    const auto add = [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      for (; k + kCount <= end; k += kCount) {
        AddRows<T, kRows, kCount>(x.source.data + k * x.map.c, x.map,
                                  filters + k * c.filter_map.row + channel,
                                  c.filter_map.row, n, to, stride);
      }
    };
    add(std::integral_constant<int, kTogether>{});
    add(std::integral_constant<int, 1>{});
  };
  ParallelFor(parallel, parts * chunks, part_rows * Min(columns, kChunkColumns),
              task);

  A tile[kRows * kColumns + kLanes<A>];
  for (std::int64_t channel = 0; channel < columns; channel += kColumns) {
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kColumns; j += kLanes<A>) {
        const A* from = sums + i * stride + channel + j;
        Vec<A> sum = Load(from);
        for (std::int64_t part = 1; part < parts; ++part)
          sum += Load(from + part * kRows * stride);
        Store(tile + i * kColumns + j, sum);
      }
    }
    WriteTile(c.epilogue, 0, channel, tile, kRows,
              static_cast<int>(Min(columns - channel, kColumns)));
  }
  return true;
}

// For what HasFewRows.
template <class T>
bool CorrelateFewRows(const Correlation<T>& c, const Parallel& parallel,
                      const Scratch& scratch) {
  switch (c.x.grid_w) {
    case 1:
      return CorrelateRows<T, 1>(c, parallel, scratch);
    case 2:
      return CorrelateRows<T, 2>(c, parallel, scratch);
    case 3:
      return CorrelateRows<T, 3>(c, parallel, scratch);
    default:
      return CorrelateRows<T, 4>(c, parallel, scratch);
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_FEW_ROWS_H_
