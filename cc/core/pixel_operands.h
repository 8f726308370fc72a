// Operands whose elements follow each other along the pixels of a line, which
// are the depth of a filter gradient.
#ifndef TFO_CC_CORE_PIXEL_OPERANDS_H_
#define TFO_CC_CORE_PIXEL_OPERANDS_H_

#include "cc/core/address_map.h"
#include "cc/core/integers.h"
#include "cc/core/taps.h"

namespace tfo::TFO_ISA {
namespace {

// Columns of a box, `step` pixels apart, as pairs: of each the pixel itself and
// the one `apart` pixels behind it.
struct PairedColumns {
  std::int64_t step, apart;
};

// Brings a box of image n into `to` as [rows, columns, pitch] pairs, zero
// beyond the image.
template <class T>
void GatherPairs(const Source<T>& source, const AddressMap& map, std::int64_t n,
                 std::int64_t height, std::int64_t width, const Box& box,
                 const PairedColumns& pairs, OperandsIn<Operand<T>> row,
                 std::int64_t pitch) {
  using V = Vec<float>;
  using E = Operand<T>;
  const Range first = Inside(box.w, pairs.step, box.columns, width);
  const Range second =
      Inside(box.w + pairs.apart, pairs.step, box.columns, width);
  const std::int64_t both_end = Max(first.begin, second.end);
  AddressMap columns = map;
  columns.w *= pairs.step;
  const std::int64_t partner = pairs.apart * map.w;
  const std::int64_t row_pitch = box.columns * pitch;
  for (std::int64_t i = 0; i < box.rows; ++i, row = row + row_pitch) {
    if (box.h + i < 0 || box.h + i >= height) {
      Zero(row, row_pitch);
      continue;
    }
    const T* const from =
        source.data + map.Offset(n, box.h + i, box.w) + box.c * map.c;
    const auto copy = [&](std::int64_t begin, std::int64_t end,
                          std::int64_t shift, auto transform) {
      const T* const at = from + begin * columns.w;
      CopyRow(at + shift, at + partner, columns, end - begin, box.channels,
              row + begin * pitch, pitch, transform);
    };
    Zero(row, second.begin * pitch);
    const std::int64_t second_end = Min(second.end, first.begin);
    if (second.begin < second_end) {
      copy(second.begin, second_end, partner,
           [](V v, const T*, std::int64_t, int)
               TFO_INLINE_LAMBDA { return MakePairs<E>(V{}, v); });
    }
    Zero(row + second_end * pitch, (first.begin - second_end) * pitch);
    if (first.begin < both_end) {
      copy(first.begin, both_end, 0,
           [](V v, const T* other, std::int64_t at, int count)
               TFO_INLINE_LAMBDA {
                 return MakePairs<E>(v, count == kLanes<float>
                                            ? LoadAs(other + at)
                                            : LoadAsPartial(other + at, count));
               });
    }
    if (both_end < first.end) {
      copy(both_end, first.end, 0,
           [](V v, const T*, std::int64_t, int)
               TFO_INLINE_LAMBDA { return MakePairs<E>(v, V{}); });
    }
    Zero(row + first.end * pitch, (box.columns - first.end) * pitch);
  }
}

// Rounds lines of `width` rows, each a panel wide, to pairs of rows; the last
// of a line may be half empty.
template <class E>
void PairRows(const float* from, std::int64_t lines, std::int64_t width,
              OperandsIn<E> to) {
  constexpr int kColumns = kTileColumns<float>;
  const auto load = [](const float* p) TFO_INLINE_LAMBDA {
    // Parts are rounded by themselves.
    return kPlanes<E> > 1 ? Load(p) : AsStored<ElementOf<E>>(Load(p));
  };
  for (std::int64_t i = 0; i < lines; ++i) {
    for (std::int64_t j = 0; j < width; j += 2) {
      for (int k = 0; k < kColumns; k += kLanes<float>) {
        StoreAs<E>(to + k,
                   MakePairs<E>(load(from + k), j + 1 < width
                                                    ? load(from + kColumns + k)
                                                    : Vec<float>{}));
      }
      from += j + 1 < width ? 2 * kColumns : kColumns;
      to = to + kColumns;
    }
  }
}

// Rounds rows, each a panel wide and the first `columns` of it in use, to pairs
// of columns; the last in use may be half empty.
template <class E>
void PairColumns(const float* from, std::int64_t rows, std::int64_t columns,
                 OperandsIn<E> to) {
  constexpr int kColumns = kTileColumns<float>;
  auto elements = Elements<E>(to);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (int k = 0; k < kColumns; k += 2 * kLanes<float>)
      StoreAs(elements + k, Load(from + k), Load(from + k + kLanes<float>));
    if (columns % 2 != 0) Zero(elements + columns, 1);
    from += kColumns;
    elements = elements + kColumns;
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_PIXEL_OPERANDS_H_
