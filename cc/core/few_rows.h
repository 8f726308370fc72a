// Products of few rows, or of few columns: the time is that of reading the
// other factor, which is done once and in the order in which it lies.
//
// Where the filters of a channel lie together, as the output's channels do, the
// sums of all channels grow by some rows of filters at a time; where those of
// an output channel do, a sum is a dot product. So it is with few columns, as
// the channels of a pixel lie together.
#ifndef TFO_CC_CORE_FEW_ROWS_H_
#define TFO_CC_CORE_FEW_ROWS_H_

#include "cc/core/correlation_plan.h"
#include "cc/core/counts.h"

namespace tfo::TFO_ISA {
namespace {

// More rows are better served by filters that are packed, block by block, for
// tiles (measured with AVX-512, of the time of tiles: 768x3072 and 4096x4096
// with twelve rows 0.6 and 0.85, with sixteen 0.75 and 0.82; 0.8 with AVX2,
// 0.6 to 0.9 with AMX), the sooner if tiles multiply pairs of 16-bit numbers
// (AMX, twelve rows: 1.4).
template <class T>
constexpr std::int64_t kFewRows =
    kElements<Operand<T>> > 1 && kPlanes<Operand<T>> == 1 ? 8 : 16;
// The same, of filters that were packed before. Tiles then read what is larger
// than the filters, as large, or of pairs (measured, of the time of these rows:
// AMX's float32 1.0 with eight rows; AVX-512's 1.0 with four and 0.6 with six;
// AMX's bfloat16 0.5 with two to eight).
template <class T>
constexpr std::int64_t kFewRowsOfPacked =
    kOperandBytes<Operand<T>> / kElements<Operand<T>> > std::int64_t{sizeof(T)}
        ? 8
    : kElements<Operand<T>> > 1 ? 0
                                : 4;
// More columns fill enough of a vector (measured with AVX-512, 2048x2048: 0.35
// of the time for one column, 0.5 for four; of 64 channels 0.5 and 1).
constexpr std::int64_t kFewColumns = 4;
constexpr std::int64_t kLeastColumnVectors = 4;
// A dot product should be long beside the addition of its vector's elements.
constexpr std::int64_t kLeastDotVectors = 16;
// Rows whose sums of a dot product fill the registers.
constexpr int kDotRows = 8;
// Rows whose factors fill the registers.
constexpr int kRowsTogether = 4;
// Rows of filters that are added to the sums at a time.
constexpr int kTogether = 8;
// Sums of a task, which should stay in the first-level cache, and what makes it
// worth a thread.
constexpr std::int64_t kChunkSums = 4096;
constexpr std::int64_t kChunkColumns = 1024;
constexpr std::int64_t kChunkElements = 1 << 17;
// Parts of the depth, whose sums are added in their order.
constexpr std::int64_t kMostParts = 8;

// Whether a product, seen as one line of pixels, is one of `most` rows or less.
template <class T>
bool HasFewRows(const Correlation<T>& c, std::int64_t most = kFewRows<T>) {
  const Windows<T>& x = c.x;
  return x.batch * x.grid_h == 1 && x.grid_w >= 1 && x.grid_w <= most &&
         x.taps.count == 1 && x.taps.min_h == 0 && x.taps.min_w == 0 &&
         x.stride_w == 1 && c.out_channels > 0 &&
         (c.filter_map.column == 1 ||
          x.channels >= kLeastDotVectors * kLanes<Accumulator<T>>);
}

// Whether a product, seen as one line of pixels, is one of few columns.
template <class T>
bool HasFewColumns(const Correlation<T>& c) {
  const Windows<T>& x = c.x;
  return x.batch * x.height * x.grid_h == 1 && x.grid_w <= x.width &&
         x.taps.count == 1 && x.taps.min_h == 0 && x.taps.min_w == 0 &&
         x.stride_w == 1 && x.map.c == 1 && x.source.saved == nullptr &&
         c.out_channels > 0 && c.out_channels <= kFewColumns &&
         x.channels >= kLeastColumnVectors * kLanes<Accumulator<T>>;
}

// Adds kCount rows of filters, `b` and those behind it, times their elements of
// kRows rows of x, `pitch` apart. `fetch`: which of as many rows after these to
// ask for.
template <class T, int kRows, int kCount>
void AddRows(const Accumulator<T>* x, std::int64_t pitch, const T* b,
             std::int64_t b_stride, std::int64_t columns, Accumulator<T>* sums,
             std::int64_t sums_stride, const Range& fetch) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  constexpr int kLine = 64 / sizeof(T);
  Vec<A> factor[kRows][kCount];
  for (int i = 0; i < kRows; ++i) {
    for (int r = 0; r < kCount; ++r) factor[i][r] = Splat(x[i * pitch + r]);
  }
  const auto add = [&](std::int64_t j, auto load) TFO_INLINE_LAMBDA {
    Vec<A> row[kCount];
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) row[r] = load(b + r * b_stride + j);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      A* const to = sums + i * sums_stride + j;
      // Those of long sums should be few terms.
      Vec<A> sum = factor[i][0] * row[0];
#pragma GCC unroll 8
      for (int r = 1; r < kCount; ++r) sum += factor[i][r] * row[r];
      Store(to, Load(to) + sum);
    }
  };
  std::int64_t j = 0;
  for (; j + lanes <= columns; j += lanes) {
    // They may lie on other pages. Into the second-level cache, which takes
    // more requests at a time (measured on a Zen 4, up to eight rows of
    // 4096x4096: 0.8 of the time).
    if (j % kLine == 0) {
      for (std::int64_t r = fetch.begin; r < fetch.end; ++r)
        __builtin_prefetch(b + (kCount + r) * b_stride + j, 0, 2);
    }
    add(j, [](const T* p) TFO_INLINE_LAMBDA { return LoadAs(p); });
  }
  if (j < columns) {
    const int rest = static_cast<int>(columns - j);
    add(j,
        [&](const T* p) TFO_INLINE_LAMBDA { return LoadAsPartial(p, rest); });
  }
}

// Writes `rows` rows of sums, `stride` apart, that belong to `channel` and
// those behind it.
template <class T>
void WriteRows(const Correlation<T>& c, const Accumulator<T>* sums,
               std::int64_t stride, std::int64_t rows, std::int64_t channel) {
  using A = Accumulator<T>;
  constexpr int kColumns = kTileColumns<A>;
  A tile[kRowsTogether * kColumns + kLanes<A>];
  const EvenParts parts(rows, kRowsTogether);
  const std::int64_t columns = Min(c.out_channels - channel, kColumns);
  for (std::int64_t part = 0; part < parts.count(); ++part) {
    const std::int64_t begin = parts.Begin(part);
    for (std::int64_t i = 0; i < parts.Size(part); ++i) {
      __builtin_memcpy(tile + i * kColumns, sums + (begin + i) * stride,
                       kColumns * sizeof(A));
    }
    WriteTile(c.epilogue, c.epilogue.map.Offset(0, 0, begin), channel, tile,
              static_cast<int>(parts.Size(part)), static_cast<int>(columns));
  }
}

// The rows as accumulators, whole vectors with zeros behind the last element.
template <class T>
struct FewRows {
  using A = Accumulator<T>;

  A* data;
  std::int64_t count, depth, pitch;

  // False when scratch memory ran out.
  bool Gather(const Windows<T>& x, const Scratch& scratch) {
    count = x.grid_w;
    depth = x.channels;
    pitch = Max(CeilDiv(depth, kLanes<A>), 1) * kLanes<A>;
    data = scratch.Allocate<A>(count * pitch);
    if (data == nullptr) return false;
    Zero(data, count * pitch);
    TFO_ISA::Gather(x.source, x.map, 0, x.height, x.width,
                    {0, 0, 0, 1, count, depth}, data, pitch, count * pitch);
    return true;
  }
};

template <class T>
bool AddRowsOfFilters(const Correlation<T>& c, const Parallel& parallel,
                      const Scratch& scratch) {
  using A = Accumulator<T>;
  constexpr int kColumns = kTileColumns<A>;
  FewRows<T> x;
  if (!x.Gather(c.x, scratch)) return false;
  const std::int64_t rows = x.count, depth = x.depth;
  const std::int64_t columns = c.out_channels;
  // Whole vectors, which tasks would share otherwise.
  const std::int64_t most_columns =
      Min(kChunkSums / rows / kColumns * kColumns, kChunkColumns);
  const std::int64_t chunks = CeilDiv(columns, most_columns);
  const std::int64_t chunk_elements = depth * Min(columns, most_columns);
  const std::int64_t wanted_parts =
      Min(chunk_elements / kChunkElements + 1,
          kMostParts * kRowsTogether / Max(rows, kRowsTogether));
  const std::int64_t part_rows =
      Max(CeilDiv(EvenPart(depth, CeilDiv(depth, wanted_parts)), kTogether),
          1) *
      kTogether;
  const std::int64_t parts = Max(CeilDiv(depth, part_rows), 1);
  // An odd number of panels, so that rows do not fall into the same few sets of
  // the first-level cache, as those of filters often do (measured with AVX-512,
  // eight rows: 0.75 of the time).
  const std::int64_t pitch =
      (CeilDiv(Min(columns, most_columns), kColumns) | 1) * kColumns;
  const std::int64_t chunk_sums = rows * pitch, part_sums = chunks * chunk_sums;
  A* const sums = scratch.Allocate<A>(parts * part_sums);
  if (sums == nullptr) return false;
  const T* const filters =
      c.filters + c.x.taps.taps[0].filter * c.filter_map.matrix;
  const EvenParts groups(rows, kRowsTogether);

  auto task = [&](std::int64_t index, int) {
    const std::int64_t part = index / chunks;
    const std::int64_t channel = index % chunks * most_columns;
    const std::int64_t end = Min((part + 1) * part_rows, depth);
    const std::int64_t n = Min(columns - channel, most_columns);
    A* const to = sums + index * chunk_sums;
    Zero(to, chunk_sums);
    std::int64_t k = part * part_rows;
    const auto add = [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      for (; k + kCount <= end; k += kCount) {
        for (std::int64_t group = 0; group < groups.count(); ++group) {
          const std::int64_t i = groups.Begin(group);
          WithCount<kRowsTogether>(groups.Size(group), [&](auto size) {
            AddRows<T, decltype(size)::value, kCount>(
                x.data + i * x.pitch + k, x.pitch,
                filters + k * c.filter_map.row + channel, c.filter_map.row, n,
                to + i * pitch, pitch,
                {group * kCount / groups.count(),
                 (group + 1) * kCount / groups.count()});
          });
        }
      }
    };
    add(std::integral_constant<int, kTogether>{});
    add(std::integral_constant<int, 1>{});
  };
  ParallelFor(parallel, parts * chunks,
              part_rows * Min(columns, most_columns) * rows, task);

  auto finish = [&](std::int64_t chunk, int) {
    A* const to = sums + chunk * chunk_sums;
    for (std::int64_t part = 1; part < parts; ++part) {
      const A* const from = to + part * part_sums;
      for (std::int64_t i = 0; i < chunk_sums; i += kLanes<A>)
        Store(to + i, Load(to + i) + Load(from + i));
    }
    const std::int64_t first = chunk * most_columns;
    const std::int64_t last = Min(columns, first + most_columns);
    for (std::int64_t channel = first; channel < last; channel += kColumns)
      WriteRows(c, to + (channel - first), pitch, rows, channel);
  };
  ParallelFor(parallel, chunks, parts * chunk_sums, finish);
  return true;
}

// Sums of kRows rows of x, `pitch` apart, times kCount rows of filters, of
// `depth` each.
template <class T, int kRows, int kCount>
TFO_INLINE void DotProducts(const Accumulator<T>* x, std::int64_t pitch,
                            const T* b, std::int64_t b_stride,
                            std::int64_t depth,
                            Accumulator<T> (&to)[kRows][kCount]) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  Vec<A> sums[kRows][kCount]{};
  const auto add = [&](std::int64_t k, auto load) TFO_INLINE_LAMBDA {
    Vec<A> filters[kCount];
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) filters[j] = load(b + j * b_stride + k);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec<A> row = Load(x + i * pitch + k);
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) sums[i][j] += row * filters[j];
    }
  };
  std::int64_t k = 0;
  for (; k + lanes <= depth; k += lanes) {
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j)
      __builtin_prefetch(b + (kCount + j) * b_stride + k);
    add(k, [](const T* p) TFO_INLINE_LAMBDA { return LoadAs(p); });
  }
  if (k < depth) {
    const int rest = static_cast<int>(depth - k);
    add(k,
        [&](const T* p) TFO_INLINE_LAMBDA { return LoadAsPartial(p, rest); });
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kCount; ++j) {
      A elements[lanes];
      Store(elements, sums[i][j]);
#pragma GCC unroll 4
      for (int half = lanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
        for (int l = 0; l < half; ++l) elements[l] += elements[l + half];
      }
      to[i][j] = elements[0];
    }
  }
}

template <class T>
bool DotRowsOfFilters(const Correlation<T>& c, const Parallel& parallel,
                      const Scratch& scratch) {
  using A = Accumulator<T>;
  constexpr int kColumns = kTileColumns<A>;
  FewRows<T> x;
  if (!x.Gather(c.x, scratch)) return false;
  const std::int64_t rows = x.count;
  const T* const filters =
      c.filters + c.x.taps.taps[0].filter * c.filter_map.matrix;
  const std::int64_t stride = c.filter_map.column;
  const EvenParts groups(rows, kDotRows);

  auto task = [&](std::int64_t panel, int) {
    const std::int64_t channel = panel * kColumns;
    const std::int64_t columns = Min(c.out_channels - channel, kColumns);
    A sums[kFewRows<T> * kColumns];
    for (std::int64_t group = 0; group < groups.count(); ++group) {
      const std::int64_t first = groups.Begin(group);
      WithCount<kDotRows>(groups.Size(group), [&](auto size) {
        constexpr int kRows = decltype(size)::value;
        // As many sums as leave registers for their factors.
        constexpr int kCount = kRows <= 2 ? 4 : kRows <= 4 ? 3 : 2;
        const auto dot = [&](std::int64_t j, auto count) {
          A to[kRows][decltype(count)::value];
          DotProducts<T>(x.data + first * x.pitch, x.pitch,
                         filters + (channel + j) * stride, stride, x.depth, to);
          for (int i = 0; i < kRows; ++i) {
            for (int n = 0; n < decltype(count)::value; ++n)
              sums[(first + i) * kColumns + j + n] = to[i][n];
          }
        };
        std::int64_t j = 0;
        for (; j + kCount <= columns; j += kCount)
          dot(j, std::integral_constant<int, kCount>{});
        for (; j < columns; ++j) dot(j, std::integral_constant<int, 1>{});
      });
    }
    WriteRows(c, sums, kColumns, rows, channel);
  };
  ParallelFor(parallel, NumPanels<A>(c.out_channels), x.depth * kColumns * rows,
              task);
  return true;
}

// For what HasFewRows.
template <class T>
bool CorrelateFewRows(const Correlation<T>& c, const Parallel& parallel,
                      const Scratch& scratch) {
  return c.filter_map.column == 1 ? AddRowsOfFilters(c, parallel, scratch)
                                  : DotRowsOfFilters(c, parallel, scratch);
}

// For what HasFewColumns.
template <class T>
bool CorrelateFewColumns(const Correlation<T>& c, const Parallel& parallel,
                         const Scratch& scratch) {
  using A = Accumulator<T>;
  constexpr int kColumns = kTileColumns<A>;
  const Windows<T>& x = c.x;
  // The filters, transposed.
  FewRows<T> filters;
  if (!filters.Gather({{c.filters + x.taps.taps[0].filter * c.filter_map.matrix,
                        nullptr, Activation::kNone, 0},
                       {0, 0, c.filter_map.column, c.filter_map.row},
                       1,
                       1,
                       c.out_channels,
                       x.channels,
                       x.taps,
                       1,
                       1,
                       1,
                       c.out_channels},
                      scratch)) {
    return false;
  }
  auto task = [&](std::int64_t index, int) {
    const std::int64_t first = index * kTileRows<A>;
    const std::int64_t rows = Min(x.grid_w - first, kTileRows<A>);
    A tile[kTileRows<A> * kColumns + kLanes<A>];
    WithCount<kFewColumns>(c.out_channels, [&](auto size) {
      constexpr int kChannels = decltype(size)::value;
      constexpr int kCount = kChannels <= 2 ? 4 : 3;
      const auto dot = [&](std::int64_t row, auto count) {
        A to[kChannels][decltype(count)::value];
        DotProducts<T>(filters.data, filters.pitch,
                       x.source.data + (first + row) * x.map.w, x.map.w,
                       x.channels, to);
        for (int n = 0; n < decltype(count)::value; ++n) {
          for (int i = 0; i < kChannels; ++i)
            tile[(row + n) * kColumns + i] = to[i][n];
        }
      };
      std::int64_t row = 0;
      for (; row + kCount <= rows; row += kCount)
        dot(row, std::integral_constant<int, kCount>{});
      for (; row < rows; ++row) dot(row, std::integral_constant<int, 1>{});
    });
    WriteTile(c.epilogue, c.epilogue.map.Offset(0, 0, first), 0, tile,
              static_cast<int>(rows), static_cast<int>(c.out_channels));
  };
  ParallelFor(parallel, CeilDiv(x.grid_w, kTileRows<A>),
              x.channels * kTileRows<A> * c.out_channels, task);
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_FEW_ROWS_H_
