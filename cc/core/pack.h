// Filters in the order in which the tile reads them: panels of kTileColumns
// columns, rows consecutive.
#ifndef TFO_CC_CORE_PACK_H_
#define TFO_CC_CORE_PACK_H_

#include "cc/core/address_map.h"
#include "cc/core/integers.h"
#include "cc/core/taps.h"

namespace tfo::TFO_ISA {
namespace {

// One matrix [rows, columns] of the filters, by element strides.
struct FilterMap {
  std::int64_t row, column, matrix;
};

// Rows are input channels, columns output channels.
TFO_INLINE FilterMap FilterMapOf(const ConvShape& s) {
  const std::int64_t columns = s.OutputChannels(), size = s.in_c * columns;
  return s.filters_transposed ? FilterMap{1, s.in_c, size}
                              : FilterMap{columns, 1, size};
}

template <class A>
TFO_INLINE std::int64_t NumPanels(std::int64_t columns) {
  return (columns + kTileColumns<A> - 1) / kTileColumns<A>;
}

// Operands of filters that are packed in a cycle. Small ones are not worth
// waking a thread for.
constexpr std::int64_t kPackedPerCycle = 4;
// How far to look ahead over pages, where the processor does not itself.
constexpr int kPackedRowsAhead = 8;

// Operands of neighbouring columns (all of a vector, or the first n): elements
// of this row of filters and, if there is one, of the next.
template <class T>
TFO_INLINE Vec<Accumulator<T>> LoadRow(const T* from, std::int64_t n) {
  return n >= kLanes<Accumulator<T>> ? LoadAs(from)
                                     : LoadAsPartial(from, static_cast<int>(n));
}
template <class T>
TFO_INLINE Vec<Accumulator<T>> LoadOperands(const T* from, std::int64_t next,
                                            bool has_next, std::int64_t n) {
  const auto row = LoadRow(from, n);
  if constexpr (kElements<Operand<T>> == 1) {
    return row;
  } else {
    return Pair(row, has_next ? LoadRow(from + next, n) : Vec<float>{});
  }
}
template <class T>
TFO_INLINE Operand<T> LoadOperand(const T* from, std::int64_t next,
                                  bool has_next) {
  if constexpr (kElements<Operand<T>> == 1) {
    return LoadOne(from);
  } else {
    return {from->bits | (has_next ? std::uint32_t{from[next].bits} << 16 : 0)};
  }
}
// As many operands as a vector holds, of rows that lie together.
template <class T>
TFO_INLINE Vec<Accumulator<T>> LoadColumn(const T* from) {
  if constexpr (kElements<Operand<T>> == 1) {
    return LoadAs(from);
  } else {
    return Load(reinterpret_cast<const Operand<T>*>(from));
  }
}

// `rows` rows of neighbouring panels, which lie `panel_stride` apart; `columns`
// are those that there are, the rest of the last panel is zero.
template <class T>
void PackPanels(const T* from, const FilterMap& map, std::int64_t rows,
                std::int64_t columns, std::int64_t panel_stride,
                Operand<T>* to) {
  using A = Accumulator<T>;
  using E = Operand<T>;
  constexpr int lanes = kLanes<A>;
  constexpr int width = kTileColumns<A>;
  constexpr int depth = kElements<E>;
  const std::int64_t panels = NumPanels<A>(columns);
  if (map.column == 1) {
    for (std::int64_t k = 0; k < rows; k += depth) {
      for (std::int64_t j = 0; j < panels * width; j += lanes) {
        const T* p = from + k * map.row + j;
        __builtin_prefetch(p + kPackedRowsAhead * map.row);
        Store(to + j / width * panel_stride + k / depth * width + j % width,
              columns > j ? LoadOperands(p, map.row, k + 1 < rows, columns - j)
                          : Vec<A>{});
      }
    }
    return;
  }
  if (columns < panels * width)
    Zero(to + (panels - 1) * panel_stride, NumOperands<T>(rows) * width);
  for (std::int64_t k = 0; k < rows; k += depth * lanes) {
    const std::int64_t n = Min(rows - k, depth * lanes);
    for (std::int64_t j = 0; j < columns; j += lanes) {
      const std::int64_t m = Min(columns - j, lanes);
      const T* p = from + k * map.row + j * map.column;
      E* block = to + j / width * panel_stride + k / depth * width + j % width;
      if (map.row == 1 && n == depth * lanes && m == lanes) {
        Vec<A> v[lanes];
        for (int i = 0; i < lanes; ++i) v[i] = LoadColumn(p + i * map.column);
        Transpose<A>(v);
        for (int i = 0; i < lanes; ++i) Store(block + i * width, v[i]);
        continue;
      }
      for (std::int64_t c = 0; c < m; ++c) {
        for (std::int64_t i = 0; i < n; i += depth) {
          block[i / depth * width + c] =
              LoadOperand(p + i * map.row + c * map.column, map.row, i + 1 < n);
        }
      }
    }
  }
}

// Packs rows [begin, end) of some panels, counted in operands: row k is that of
// tap k / n and operand k % n of its n. `columns` are those from the first
// panel's on.
template <class T>
void PackRows(const T* filters, const FilterMap& map, const TapList& list,
              std::int64_t channels, std::int64_t begin, std::int64_t end,
              std::int64_t columns, std::int64_t panel_stride, Operand<T>* to) {
  using E = Operand<T>;
  const std::int64_t per_tap = NumOperands<T>(channels);
  while (begin < end) {
    const std::int64_t tap = begin / per_tap, row = begin % per_tap;
    const std::int64_t rows = Min(per_tap - row, end - begin);
    const std::int64_t channel = row * kElements<E>;
    PackPanels(filters + list.taps[tap].filter * map.matrix + channel * map.row,
               map, Min(channels - channel, rows * kElements<E>), columns,
               panel_stride, to);
    begin += rows;
    to += rows * kTileColumns<Accumulator<T>>;
  }
}

// Packs the matrices of all taps: panel p holds the rows of all taps, each of
// kTileColumns operands.
template <class T>
void PackFilters(const T* filters, const FilterMap& map, const TapList& list,
                 std::int64_t channels, std::int64_t columns,
                 Operand<T>* packed, const Parallel& parallel) {
  using A = Accumulator<T>;
  constexpr int width = kTileColumns<A>;
  const std::int64_t rows = NumOperands<T>(channels);
  const std::int64_t panel_stride = list.count * rows * width;
  constexpr std::int64_t kPart = 8 * width;
  const std::int64_t groups = CeilDiv(columns, kPart);
  auto task = [&](std::int64_t index, int) {
    const std::int64_t tap = index / groups;
    const std::int64_t column = index % groups * kPart;
    PackRows(filters + column * map.column, map, list, channels, tap * rows,
             (tap + 1) * rows, Min(columns - column, kPart), panel_stride,
             packed + column / width * panel_stride + tap * rows * width);
  };
  ParallelFor(parallel, list.count * groups, rows * kPart / kPackedPerCycle,
              task);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_PACK_H_
