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
  return s.filters_transposed ? FilterMap{1, s.in_c, s.in_c * s.out_c}
                              : FilterMap{s.out_c, 1, s.in_c * s.out_c};
}

template <class A>
TFO_INLINE std::int64_t NumPanels(std::int64_t columns) {
  return (columns + kTileColumns<A> - 1) / kTileColumns<A>;
}

// How far to look ahead over pages, where the processor does not itself.
constexpr int kPackedRowsAhead = 8;

// `rows` rows of neighbouring panels, which lie `panel_stride` apart; `columns`
// are those that there are, the rest of the last panel is zero.
template <class T>
void PackPanels(const T* from, const FilterMap& map, std::int64_t rows,
                std::int64_t columns, std::int64_t panel_stride,
                Accumulator<T>* to) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  constexpr int width = kTileColumns<A>;
  const std::int64_t panels = NumPanels<A>(columns);
  if (map.column == 1) {
    for (std::int64_t k = 0; k < rows; ++k) {
      for (std::int64_t j = 0; j < panels * width; j += lanes) {
        const T* p = from + k * map.row + j;
        __builtin_prefetch(p + kPackedRowsAhead * map.row);
        Store(to + j / width * panel_stride + k * width + j % width,
              columns - j >= lanes ? LoadAs(p)
              : columns > j ? LoadAsPartial(p, static_cast<int>(columns - j))
                            : Vec<A>{});
      }
    }
    return;
  }
  if (columns < panels * width)
    Zero(to + (panels - 1) * panel_stride, rows * width);
  for (std::int64_t k = 0; k < rows; k += lanes) {
    const int n = static_cast<int>(Min(rows - k, lanes));
    for (std::int64_t j = 0; j < columns; j += lanes) {
      const int m = static_cast<int>(Min(columns - j, lanes));
      const T* p = from + k * map.row + j * map.column;
      A* block = to + j / width * panel_stride + k * width + j % width;
      if (map.row == 1 && n == lanes && m == lanes) {
        Vec<A> v[lanes];
        for (int i = 0; i < lanes; ++i) v[i] = LoadAs(p + i * map.column);
        Transpose<A>(v);
        for (int i = 0; i < lanes; ++i) Store(block + i * width, v[i]);
        continue;
      }
      for (int c = 0; c < m; ++c)
        for (int i = 0; i < n; ++i)
          block[i * width + c] = LoadOne(p + i * map.row + c * map.column);
    }
  }
}

// Packs rows [begin, end) of some panels: row k is row k % channels of tap k /
// channels. `columns` are those from the first panel's on.
template <class T>
void PackRows(const T* filters, const FilterMap& map, const TapList& list,
              std::int64_t channels, std::int64_t begin, std::int64_t end,
              std::int64_t columns, std::int64_t panel_stride,
              Accumulator<T>* to) {
  while (begin < end) {
    const std::int64_t tap = begin / channels, channel = begin % channels;
    const std::int64_t rows = Min(channels - channel, end - begin);
    PackPanels(filters + list.taps[tap].filter * map.matrix + channel * map.row,
               map, rows, columns, panel_stride, to);
    begin += rows;
    to += rows * kTileColumns<Accumulator<T>>;
  }
}

// Packs the matrices of all taps: panel p holds taps x rows x kTileColumns
// elements.
template <class T>
void PackFilters(const T* filters, const FilterMap& map, const TapList& list,
                 std::int64_t rows, std::int64_t columns,
                 Accumulator<T>* packed, const Parallel& parallel) {
  using A = Accumulator<T>;
  constexpr int width = kTileColumns<A>;
  const std::int64_t panel_stride = list.count * rows * width;
  constexpr std::int64_t kPart = 8 * width;
  const std::int64_t groups = CeilDiv(columns, kPart);
  auto task = [&](std::int64_t index, int) {
    const std::int64_t tap = index / groups;
    const std::int64_t column = index % groups * kPart;
    PackRows(filters + column * map.column, map, list, rows, tap * rows,
             (tap + 1) * rows, Min(columns - column, kPart), panel_stride,
             packed + column / width * panel_stride + tap * rows * width);
  };
  ParallelFor(parallel, list.count * groups, rows * kPart, task);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_PACK_H_
