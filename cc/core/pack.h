// Filters in the order in which the tile reads them: panels of kTileColumns
// columns, rows consecutive.
#ifndef TFO_CC_CORE_PACK_H_
#define TFO_CC_CORE_PACK_H_

#include "cc/core/address_map.h"
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

template <class T>
void PackPanel(const T* from, const FilterMap& map, std::int64_t rows,
               int columns, Accumulator<T>* to) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  constexpr int width = kTileColumns<A>;
  if (map.column == 1) {
    for (std::int64_t k = 0; k < rows; ++k) {
      for (int j = 0; j < width; j += lanes) {
        const int n = columns - j < 0       ? 0
                      : columns - j < lanes ? columns - j
                                            : lanes;
        const T* p = from + k * map.row + j;
        Store(to + k * width + j, n == lanes ? LoadAs(p)
                                  : n > 0    ? LoadAsPartial(p, n)
                                             : Vec<A>{});
      }
    }
    return;
  }
  if (columns < width) Zero(to, rows * width);
  for (std::int64_t k = 0; k < rows; k += lanes) {
    const int n = static_cast<int>(rows - k < lanes ? rows - k : lanes);
    for (int j = 0; j < columns; ++j) {
      const T* p = from + k * map.row + j * map.column;
      if (map.row == 1) {
        const Vec<A> v = n == lanes ? LoadAs(p) : LoadAsPartial(p, n);
        for (int i = 0; i < n; ++i) to[(k + i) * width + j] = v[i];
      } else {
        for (int i = 0; i < n; ++i)
          to[(k + i) * width + j] = LoadOne(p + i * map.row);
      }
    }
  }
}

// Packs the matrices of all taps: panel p holds taps x rows x kTileColumns
// elements.
template <class T>
void PackFilters(const T* filters, const FilterMap& map, const TapList& list,
                 std::int64_t rows, std::int64_t columns,
                 Accumulator<T>* packed, const Parallel& parallel) {
  using A = Accumulator<T>;
  const std::int64_t panels = NumPanels<A>(columns);
  auto task = [&](std::int64_t index, int) {
    const std::int64_t panel = index / list.count, tap = index % list.count;
    const std::int64_t column = panel * kTileColumns<A>;
    const std::int64_t left = columns - column;
    PackPanel(
        filters + list.taps[tap].filter * map.matrix + column * map.column, map,
        rows, static_cast<int>(left < kTileColumns<A> ? left : kTileColumns<A>),
        packed + (panel * list.count + tap) * rows * kTileColumns<A>);
  };
  ParallelFor(parallel, panels * list.count, rows * kTileColumns<A>, task);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_PACK_H_
