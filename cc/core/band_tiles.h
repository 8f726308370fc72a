// The tiles of a band: what each reads, and where its results go.
#ifndef TFO_CC_CORE_BAND_TILES_H_
#define TFO_CC_CORE_BAND_TILES_H_

#include "cc/core/correlation_plan.h"
#include "cc/core/depth.h"

namespace tfo::TFO_ISA {
namespace {

template <class E>
struct Place {
  std::int64_t from;  // of the band's source
  int rows;
  std::int64_t row_offset[kTileRows<E>];  // of the source, from `from` on
  std::int64_t at;                        // of the output
  // Those rows that belong to it, the others lie between its lines.
  RowRun runs[kTileRows<E>];
  int num_runs;
  const EdgeColumn* edge;    // the column that it goes down; null: it does not
  std::int64_t first, last;  // the segments inside the image

  TFO_INLINE bool Empty() const { return first >= last; }
};

template <class T>
class BandTiles {
 public:
  using E = Operand<T>;

  BandTiles(const CorrelationPlan<T>& p, const Correlation<T>& c,
            const Depth& depth, const EdgeColumns& edges, const Band& band)
      : x_(c.x),
        map_(c.epilogue.map),
        depth_(depth),
        edges_(edges),
        band_(band),
        inner_(p.edges ? InnerColumns(c.x) : Range{0, band.columns}),
        width_(p.flat ? p.bands.source_columns : inner_.end - inner_.begin),
        line_(c.x.stride_h * p.row_pitch),
        pixel_(c.x.stride_w * p.pitch),
        image_(p.image_pitch),
        apart_(p.flat || (p.paired && map_.h != band.columns * map_.w)),
        of_part_(p.paired ? band.columns : 1),
        parts_(p.paired ? EvenParts(band.rows, 2)
               : p.joined || p.flat
                   ? EvenParts((band.rows - 1) * width_ + band.columns,
                               kTileRows<E>)
                   : EvenParts(width_, kTileRows<E>)),
        edge_parts_(band.rows, kTileRows<E>),
        line_tiles_((p.joined || p.flat || p.paired ? 1 : band.rows) *
                    parts_.count()),
        image_tiles_(line_tiles_ + edges.count() * edge_parts_.count()) {}

  std::int64_t count() const { return band_.images * image_tiles_; }

  Place<E> At(std::int64_t tile) const {
    const auto [image, index] = Divide(tile, image_tiles_);
    return index < line_tiles_ ? OnLine(image, index)
                               : OnEdge(image, index - line_tiles_);
  }

 private:
  Place<E> OnLine(std::int64_t image, std::int64_t tile) const {
    const auto [line, part] = Divide(tile, parts_.count());
    const auto [lines, column] = Divide(parts_.Begin(part) * of_part_, width_);
    const std::int64_t i = line + lines, j = inner_.begin + column;
    Place<E> to;
    to.from = image * image_ + i * line_ + j * pixel_;
    to.rows = static_cast<int>(parts_.Size(part) * of_part_);
    std::int64_t last_i = i, next_j = column, offset = 0;
    for (int row = 0; row < to.rows; ++row, ++next_j, offset += pixel_) {
      if (next_j == width_) {
        next_j = 0;
        ++last_i;
        offset += line_ - width_ * pixel_;
      }
      to.row_offset[row] = offset;
    }
    to.at = map_.Offset(band_.n + image, band_.i + i, band_.j + j);
    FindRuns(image, i, j, &to);
    to.edge = nullptr;
    to.first = Inside(last_i).begin * depth_.per_tap_row;
    to.last = Inside(i).end * depth_.per_tap_row;
    return to;
  }

  // The tile's pixels lie below each other.
  Place<E> OnEdge(std::int64_t image, std::int64_t tile) const {
    const auto [column, part] = Divide(tile, edge_parts_.count());
    const EdgeColumn& edge = edges_[column];
    const std::int64_t i = edge_parts_.Begin(part), j = edge.column;
    Place<E> to;
    to.from = image * image_ + i * line_ + j * pixel_;
    to.rows = static_cast<int>(edge_parts_.Size(part));
    for (int row = 0; row < to.rows; ++row) to.row_offset[row] = row * line_;
    to.at = map_.Offset(band_.n + image, band_.i + i, j);
    to.num_runs = 1;
    to.runs[0] = {0, to.rows, 0};
    to.edge = &edge;
    to.first = Inside(i + to.rows - 1).begin * edge.per_tap_row;
    to.last = Inside(i).end * edge.per_tap_row;
    return to;
  }

  // The rows of the output among those of a tile that begins at (i, j).
  void FindRuns(std::int64_t image, std::int64_t i, std::int64_t j,
                Place<E>* to) const {
    to->num_runs = 0;
    if (!apart_) {
      to->runs[to->num_runs++] = {0, to->rows, 0};
      return;
    }
    for (int row = 0; row < to->rows; ++i, j = 0) {
      const int count =
          static_cast<int>(Min(band_.columns - j, to->rows - row));
      if (count > 0) {
        const std::int64_t at =
            map_.Offset(band_.n + image, band_.i + i, band_.j + j);
        to->runs[to->num_runs++] = {row, count, at - to->at};
      }
      row += static_cast<int>(width_ - j);
    }
  }

  // Rows of taps beyond the image add nothing.
  Range Inside(std::int64_t row) const {
    return TFO_ISA::Inside(band_.h + row * x_.stride_h, x_.taps.RowStep(),
                           x_.taps.rows, x_.height);
  }

  const Windows<T>& x_;
  const AddressMap& map_;
  const Depth& depth_;
  const EdgeColumns& edges_;
  const Band& band_;
  const Range inner_;         // the columns whose tiles go along the lines
  const std::int64_t width_;  // pixels of a line, as these see it
  const std::int64_t line_, pixel_, image_;
  const bool apart_;  // whether a tile's lines lie apart in the output
  const std::int64_t of_part_;  // a tile's part is of lines, or of pixels
  const EvenParts parts_, edge_parts_;
  const std::int64_t line_tiles_, image_tiles_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_BAND_TILES_H_
