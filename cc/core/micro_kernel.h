// The register tile: every product of the project is a sum of these.
//
//   c[i, j] = start[i, j] + sum over segments, sum over k:
//                a[segment.offset + i * row_stride + k * k_stride] * b[k, j]
//
// The rows of `b` are consecutive over all segments (a batch-reduce product); a
// segment is where the address of `a` jumps: the next filter row, the next
// image row.
#ifndef TFO_CC_CORE_MICRO_KERNEL_H_
#define TFO_CC_CORE_MICRO_KERNEL_H_

#include "cc/core/streaming.h"

namespace tfo::TFO_ISA {
namespace {

struct Segment {
  std::int64_t offset, length;
};

// As many accumulators as leave registers for one row of b and one broadcast
// element of a.
#if defined(__AVX512F__)
constexpr int kTileRows = 14;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kTileVectors = 2;
template <class A>
constexpr int kTileColumns = kTileVectors * kLanes<A>;

// Cache lines that will be needed after this tile. They are asked for one at a
// time while it is computed, so that memory works while the arithmetic does; a
// burst of requests would stall both.
struct PrefetchList {
  static constexpr int kCapacity = 128;

  const void* lines[kCapacity + 1];
  int count = 0;

  TFO_INLINE void Clear() { count = 0; }
  // As many of the `n` lines from `first` on, `pitch` bytes apart, as there is
  // room for.
  TFO_INLINE void Add(const void* first, std::int64_t n, std::int64_t pitch) {
    const char* line = static_cast<const char*>(first);
    const int end =
        static_cast<int>(n < kCapacity - count ? count + n : kCapacity);
    for (; count < end; line += pitch) lines[count++] = line;
  }
};

template <class A>
struct TileOperands {
  const A* a;
  std::int64_t row_stride;
  std::int64_t k_stride;
  const Segment* segments;
  std::int64_t num_segments;
  const A* b;
  std::int64_t b_stride;
  const A* start;  // what sums begin from; null: zero
  std::int64_t start_stride;
  A* c;
  std::int64_t c_stride;
  PrefetchList* prefetch;
  const A* scale = nullptr;  // a row for the sums; null: one
  const A* bias = nullptr;   // a row added after that; null: zero
  bool relu = false;         // no sum is stored below zero
  bool stream = false;       // stores bypass the caches
};

// Rows of b asked for ahead of their use, from the second-level cache.
constexpr int kRowsAhead = 16;
template <class A>
constexpr int kLineElements = 64 / sizeof(A);

// Short tiles hold several sums for each element, of every n-th k: as many
// multiply-adds are under way at a time as the processor has room for.
template <int kRows, int kVectors>
constexpr int kSums = kRows * kVectors >= 8   ? 1
                      : kRows * kVectors >= 4 ? 2
                                              : 4;

template <class A, int kRows, int kVectors, bool kContiguousK>
void Tile(const TileOperands<A>& t) {
  constexpr int kParts = kSums<kRows, kVectors>;
  Vec<A> sums[kParts][kRows][kVectors]{};
  auto& sum = sums[0];
  A* c = t.c;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = t.start == nullptr
                      ? Vec<A>{}
                      : Load(t.start + i * t.start_stride + j * kLanes<A>);
    }
  }
  // The last entry, a line in use, is repeated until the tile is done.
  t.prefetch->lines[t.prefetch->count] = t.b;
  const void* const* line = t.prefetch->lines;
  const void* const* const last_line = line + t.prefetch->count;
  const A* b = t.b;
  const A* a;
  const std::int64_t b_stride = t.b_stride;
  const std::int64_t row_stride = kContiguousK ? t.row_stride : 1;
  const std::int64_t k_stride = kContiguousK ? 1 : t.k_stride;
  const auto step = [&](auto& to) TFO_INLINE_LAMBDA {
    __builtin_prefetch(*line, 0, 2);
    line += line != last_line;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors * kLanes<A>; j += kLineElements<A>)
      __builtin_prefetch(b + kRowsAhead * b_stride + j, 0, 3);
    Vec<A> row[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) row[j] = Load(b + j * kLanes<A>);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const A element = a[i * row_stride];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) to[i][j] += element * row[j];
    }
    a += k_stride;
    b += b_stride;
  };
  for (std::int64_t s = 0; s < t.num_segments; ++s) {
    a = t.a + t.segments[s].offset;
    std::int64_t k = t.segments[s].length;
    for (; k >= kParts; k -= kParts) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) step(sums[part]);
    }
    if constexpr (kParts > 1)
      for (; k > 0; --k) step(sum);
  }
#pragma GCC unroll 4
  for (int part = 1; part < kParts; ++part) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += sums[part][i][j];
    }
  }
  if (t.scale != nullptr) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const Vec<A> scale = Load(t.scale + j * kLanes<A>);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) sum[i][j] *= scale;
    }
  }
  if (t.bias != nullptr) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const Vec<A> bias = Load(t.bias + j * kLanes<A>);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) sum[i][j] += bias;
    }
  }
  if (t.relu) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        sum[i][j] = sum[i][j] <= Vec<A>{} ? Vec<A>{} : sum[i][j];
    }
  }
  if (t.stream) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        StoreStreaming(c + i * t.c_stride + j * kLanes<A>, sum[i][j]);
    }
    return;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      Store(c + i * t.c_stride + j * kLanes<A>, sum[i][j]);
  }
}

template <class A>
using TileFunction = void (*)(const TileOperands<A>&);

template <class A, bool kContiguousK, int kVectors, int... kRowsMinusOne>
struct TileRow {
  static constexpr TileFunction<A> kFunctions[] = {
      &Tile<A, kRowsMinusOne + 1, kVectors, kContiguousK>...};
};

template <class A, bool kContiguousK, int kVectors>
TFO_INLINE TileFunction<A> SelectRows(int rows) {
#if defined(__AVX512F__)
  using Row = TileRow<A, kContiguousK, kVectors, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
                      10, 11, 12, 13>;
#else
  using Row = TileRow<A, kContiguousK, kVectors, 0, 1, 2, 3, 4, 5>;
#endif
  return Row::kFunctions[rows - 1];
}

// The tile of `rows` rows and `columns` columns; c must have room for whole
// vectors. `k_stride` counts only where not kContiguousK, and `row_stride` only
// where kContiguousK.
template <class A, bool kContiguousK>
TFO_INLINE TileFunction<A> SelectTile(int rows, int columns) {
  return columns > kLanes<A> ? SelectRows<A, kContiguousK, 2>(rows)
                             : SelectRows<A, kContiguousK, 1>(rows);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_MICRO_KERNEL_H_
