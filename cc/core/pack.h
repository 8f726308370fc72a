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

  TFO_INLINE FilterMap Transposed() const { return {column, row, matrix}; }
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

// Cycles to pack an operand of filters, from memory that no cache holds. Small
// ones are not worth waking a thread for.
template <class E>
constexpr std::int64_t kPackCycles = kPlanes<E> > 1 ? 3 : 1;
// How far to look ahead over pages, where the processor does not itself.
constexpr int kPackedRowsAhead = 8;

// All of a vector, or the first n.
template <class T>
TFO_INLINE Vec<Accumulator<T>> LoadSome(const T* from, std::int64_t n) {
  return n >= kLanes<Accumulator<T>> ? LoadAs(from)
         : n > 0                     ? LoadAsPartial(from, static_cast<int>(n))
                                     : Vec<Accumulator<T>>{};
}
// Operands of neighbouring columns, of which there are n: elements of this row
// of filters and, if there is one, of the next.
template <class E, class T>
TFO_INLINE OperandVec<E> LoadOperands(const T* from, std::int64_t next,
                                      bool has_next, std::int64_t n) {
  const auto row = LoadSome(from, n);
  if constexpr (kElements<E> == 1) {
    return {row};
  } else {
    return MakePairs<E>(row,
                        has_next ? LoadSome(from + next, n) : Vec<float>{});
  }
}
// As many operands as a vector holds, of rows that lie together, of which there
// are n.
template <class E, class T>
TFO_INLINE OperandVec<E> LoadColumn(const T* from, std::int64_t n) {
  if constexpr (kElements<E> == 1) {
    return {LoadSome(from, n)};
  } else {
    constexpr int lanes = kLanes<float>;
    OperandVec<E> column;
    const auto elements = Elements<E>({reinterpret_cast<E*>(&column), lanes});
    StoreAs(elements, LoadSome(from, n), LoadSome(from + lanes, n - lanes));
    return column;
  }
}

// `rows` rows of neighbouring panels, which lie `panel_stride` apart; `columns`
// are those that there are, the rest of the last panel is zero.
template <class T, class E>
void PackPanels(const T* from, const FilterMap& map, std::int64_t rows,
                std::int64_t columns, std::int64_t panel_stride,
                OperandsIn<E> to) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  constexpr int width = kTileColumns<A>;
  constexpr int depth = kElements<E>;
  const std::int64_t panels = NumPanels<A>(columns);
  if (map.column == 1) {
    for (std::int64_t k = 0; k < rows; k += depth) {
      for (std::int64_t j = 0; j < panels * width; j += lanes) {
        const T* p = from + k * map.row + j;
        for (int i = 0; i < depth; ++i)
          __builtin_prefetch(p + (kPackedRowsAhead + i) * map.row);
        StoreAs<E>(
            to + j / width * panel_stride + k / depth * width + j % width,
            LoadOperands<E>(p, map.row, k + 1 < rows, columns - j));
      }
    }
    return;
  }
  // Rows lie together (map.row == 1): blocks of them and of columns are
  // transposed.
  for (std::int64_t k = 0; k < rows; k += depth * lanes) {
    const std::int64_t n = Min(NumOperands<E>(rows - k), lanes);
    for (std::int64_t j = 0; j < panels * width; j += lanes) {
      const T* p = from + k + j * map.column;
      OperandVec<E> v[lanes]{};
      for (std::int64_t i = 0; i < Min(columns - j, lanes); ++i) {
        const T* const column = p + i * map.column;
        FetchRun(column + lanes * map.column, depth * lanes);
        v[i] = LoadColumn<E>(column, rows - k);
      }
      Transpose<A>(v);
      const OperandsIn<E> block =
          to + j / width * panel_stride + k / depth * width + j % width;
      for (std::int64_t i = 0; i < n; ++i) StoreAs<E>(block + i * width, v[i]);
    }
  }
}

// Packs rows [begin, end) of some panels, counted in operands: row k is that of
// tap k / n and operand k % n of its n. `columns` are those from the first
// panel's on.
template <class T>
void PackRows(const T* filters, const FilterMap& map, const TapList& list,
              std::int64_t channels, std::int64_t begin, std::int64_t end,
              std::int64_t columns, std::int64_t panel_stride,
              OperandsIn<Operand<T>> to) {
  using E = Operand<T>;
  const std::int64_t per_tap = NumOperands<E>(channels);
  while (begin < end) {
    const std::int64_t tap = begin / per_tap, row = begin % per_tap;
    const std::int64_t rows = Min(per_tap - row, end - begin);
    const std::int64_t channel = row * kElements<E>;
    PackPanels<T, E>(
        filters + list.taps[tap].filter * map.matrix + channel * map.row, map,
        Min(channels - channel, rows * kElements<E>), columns, panel_stride,
        to);
    begin += rows;
    to = to + rows * kTileColumns<Accumulator<T>>;
  }
}

// Rows of zero behind filters that are packed whole: a segment of one row may
// be read as a whole step of AMX's, of 16.
template <class E>
constexpr std::int64_t kRowsBehind = kPlanes<E> > 1 ? 15 : 0;

// Of the filters' rows, in operands: a plane, and all planes and what follows.
template <class T>
TFO_INLINE std::int64_t PackedPlane(std::int64_t rows, std::int64_t columns) {
  using A = Accumulator<T>;
  return NumPanels<A>(columns) * kTileColumns<A> * rows;
}
template <class T>
TFO_INLINE std::int64_t PackedSize(std::int64_t rows, std::int64_t columns) {
  using E = Operand<T>;
  return kPlanes<E> * PackedPlane<T>(rows, columns) +
         kRowsBehind<E> * kTileColumns<Accumulator<T>>;
}

// Packs the matrices of all taps, part by part: panel p holds the rows of all
// taps, each of kTileColumns operands, and a plane all panels. To null:
// nothing.
template <class T>
class FilterPacking {
 public:
  FilterPacking(const T* filters, const FilterMap& map, const TapList& list,
                std::int64_t channels, std::int64_t columns, Operand<T>* packed)
      : filters_(filters),
        map_(map),
        list_(list),
        channels_(channels),
        columns_(columns),
        rows_(NumOperands<E>(channels)),
        parts_(CeilDiv(rows_, kRows)),
        groups_(CeilDiv(columns, kColumns)),
        count_(packed == nullptr ? 0 : list.count * parts_ * groups_),
        to_{packed, PackedPlane<T>(list.count * rows_, columns)} {
    if (packed == nullptr) return;
    Zero(packed + kPlanes<E> * PackedPlane<T>(list.count * rows_, columns),
         kRowsBehind<E> * kWidth);
  }

  void Run(const Parallel& parallel) const {
    auto task = [&](std::int64_t index, int) { (*this)(index); };
    ParallelFor(parallel, count_,
                Min(rows_, kRows) * Min(columns_, kColumns) * kPackCycles<E>,
                task);
  }

  std::int64_t Count() const { return count_; }
  // A part.
  void operator()(std::int64_t index) const {
    const std::int64_t tap = index / groups_ / parts_;
    const std::int64_t row = index / groups_ % parts_ * kRows;
    const std::int64_t column = index % groups_ * kColumns;
    const std::int64_t begin = tap * rows_ + row;
    const std::int64_t panel_stride = list_.count * rows_ * kWidth;
    PackRows(filters_ + column * map_.column, map_, list_, channels_, begin,
             begin + Min(rows_ - row, kRows), Min(columns_ - column, kColumns),
             panel_stride,
             to_ + column / kWidth * panel_stride + begin * kWidth);
  }

 private:
  using E = Operand<T>;
  static constexpr int kWidth = kTileColumns<Accumulator<T>>;
  static constexpr std::int64_t kRows = 256, kColumns = 8 * kWidth;

  const T* const filters_;
  const FilterMap map_;
  const TapList& list_;
  const std::int64_t channels_, columns_, rows_, parts_, groups_, count_;
  const OperandsIn<E> to_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_PACK_H_
