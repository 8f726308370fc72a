// Columns of the grid at which a filter reaches over the image's edge. Their
// tiles go down the image, so that all pixels of one lack the same taps, and
// leave these out (measured with AVX-512, 3x3, training steps with a filter
// gradient that does likewise: 0.93 of the time of images 8 pixels wide, 0.96
// of 14, 0.97 of 40).
#ifndef TFO_CC_CORE_EDGE_COLUMNS_H_
#define TFO_CC_CORE_EDGE_COLUMNS_H_

#include "cc/core/scratch.h"
#include "cc/core/windows.h"

namespace tfo::TFO_ISA {
namespace {

// More of them are left to the tiles of the lines.
constexpr std::int64_t kMostEdgeColumns = 8;

// The grid's columns at which all taps meet the image.
template <class T>
Range InnerColumns(const Windows<T>& x) {
  const std::int64_t begin =
      Inside(x.taps.min_w, x.stride_w, x.grid_w, x.width).begin;
  const std::int64_t end =
      Inside(x.taps.max_w, x.stride_w, x.grid_w, x.width).end;
  return {begin, Max(begin, end)};
}

// The taps of a row that meet the image at a column of the grid.
template <class T>
Range TapsInside(const Windows<T>& x, std::int64_t column) {
  return Inside(x.taps.min_w + column * x.stride_w, x.taps.ColumnStep(),
                x.taps.PerRow(), x.width);
}

// Calls visit(column) for those beside the inner ones.
template <class T, class Visit>
void ForEachEdgeColumn(const Windows<T>& x, const Visit& visit) {
  const Range inner = InnerColumns(x);
  for (std::int64_t j = 0; j < inner.begin; ++j) visit(j);
  for (std::int64_t j = inner.end; j < x.grid_w; ++j) visit(j);
}

// Whether a band of whole lines takes less time with tiles of their own for the
// edge columns; otherwise tiles go along the lines, maybe `joined`.
template <class T>
bool EdgeColumnsPay(const Windows<T>& x, const Bands& bands, bool joined) {
  const Range inner = InnerColumns(x);
  const std::int64_t edges = x.grid_w - (inner.end - inner.begin);
  if (bands.across != 1 || edges == 0 || edges > kMostEdgeColumns ||
      x.channels == 0) {
    return false;
  }
  using E = Operand<T>;
  std::int64_t apart =
      bands.rows * StepTime<E>(inner.end - inner.begin) * x.taps.PerRow();
  ForEachEdgeColumn(x, [&](std::int64_t column) {
    const Range taps = TapsInside(x, column);
    apart += StepTime<E>(bands.rows) * (taps.end - taps.begin);
  });
  const std::int64_t together = joined ? StepTime<E>(bands.rows * x.grid_w)
                                       : bands.rows * StepTime<E>(x.grid_w);
  return apart < together * x.taps.PerRow();
}

struct EdgeColumn {
  std::int64_t column;  // of the grid
  Segment* segments;
  std::int64_t* filters;     // where those of a segment begin in a panel
  std::int64_t per_tap_row;  // segments of one row of taps
};

class EdgeColumns {
 public:
  // Of a source whose pixels are `pitch` and whose rows are `row_pitch` apart,
  // under panels of filters `width` wide. False when scratch memory ran out.
  template <class T>
  bool Prepare(const Windows<T>& x, std::int64_t pitch, std::int64_t row_pitch,
               std::int64_t width, const Scratch& scratch) {
    const TapList& taps = x.taps;
    const std::int64_t channels = x.TapDepth();
    bool has_room = true;
    ForEachEdgeColumn(x, [&](std::int64_t column) {
      EdgeColumn& edge = columns_[count_++];
      edge.column = column;
      edge.segments = scratch.Allocate<Segment>(taps.count);
      edge.filters = scratch.Allocate<std::int64_t>(taps.count);
      has_room =
          has_room && edge.segments != nullptr && edge.filters != nullptr;
      if (!has_room) return;
      const Range inside = TapsInside(x, column);
      const std::int64_t count = BuildSegments(taps, inside, channels, pitch,
                                               row_pitch, edge.segments);
      edge.per_tap_row = count / taps.rows;
      for (std::int64_t i = 0, row = 0; i < count; ++i) {
        if (i % edge.per_tap_row == 0) {
          row =
              (i / edge.per_tap_row * taps.PerRow() + inside.begin) * channels;
        }
        edge.filters[i] = row * width;
        row += edge.segments[i].length;
      }
    });
    return has_room;
  }

  std::int64_t count() const { return count_; }
  const EdgeColumn& operator[](std::int64_t i) const { return columns_[i]; }

 private:
  EdgeColumn columns_[kMostEdgeColumns];
  std::int64_t count_ = 0;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_EDGE_COLUMNS_H_
