// The engine: source image * filters -> epilogue, for the convolution and for
// its input gradient.
#ifndef TFO_CC_CORE_CORRELATE_H_
#define TFO_CC_CORE_CORRELATE_H_

#include "cc/core/band_moments.h"
#include "cc/core/band_tiles.h"
#include "cc/core/scratch.h"
#include "cc/core/shared_work.h"
#include "cc/core/tile.h"

namespace tfo::TFO_ISA {
namespace {

template <class T>
class CorrelationWork {
 public:
  CorrelationWork(const Correlation<T>& c, int num_workers)
      : c_(c),
        p_(Plan(c, num_workers)),
        epilogue_(c.epilogue),
        depth_{p_.block_rows} {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    const Windows<T>& x = c_.x;
    epilogue_.stream =
        epilogue_.ShouldStream(x.batch * x.grid_h * x.grid_w * c_.out_channels);
    if (!epilogue_.PrepareForTile(c_.out_channels, scratch) ||
        !CutDepth(x.taps, x.TapDepth(), p_.pitch, p_.row_pitch, scratch,
                  &depth_) ||
        (p_.edges &&
         !edges_.Prepare(x, p_.pitch, p_.row_pitch, kColumns, scratch))) {
      return false;
    }
    down_ = epilogue_;
    down_.map.w = epilogue_.map.h;
    num_rows_ = depth_.begin[depth_.count];
    own_ = scratch.Allocate<E>(p_.WorkerOperands() * parallel.num_workers);
    own_sums_ = scratch.Allocate<A>(p_.WorkerSums() * parallel.num_workers);
    shared_ = scratch.Allocate<E>(p_.SharedOperands());
    if (own_ == nullptr || own_sums_ == nullptr || shared_ == nullptr)
      return false;
    packed_ = static_cast<const E*>(c_.packed);
    if (packed_ == nullptr && !p_.late) {
      packed_ = to_pack_ =
          scratch.Allocate<E>(PackedSize<T>(num_rows_, c_.out_channels));
      if (packed_ == nullptr) return false;
    }
    return c_.moments == nullptr ||
           moments_.Prepare(p_.num_bands, p_.panels, scratch);
  }

  void Run(const Parallel& parallel) {
    const FilterPacking<T> packing(c_.filters, c_.filter_map, c_.x.taps,
                                   c_.x.channels, c_.out_channels, to_pack_);
    // The tasks do that, where they keep all workers busy.
    const std::int64_t num_tasks = p_.num_bands * p_.PanelGroups();
    const bool prepared = num_tasks < parallel.num_workers;
    if (prepared) packing.Run(parallel);
    SharedWork preparation, gathering;
    const std::int64_t shared_parts = SharedParts();
    auto task = [&](std::int64_t index, int worker) {
      if (!prepared) preparation.Finish(packing.Count(), packing);
      gathering.Finish(shared_parts,
                       [&](std::int64_t part) { GatherShared(part); });
      RunTask(index, worker);
    };
    ParallelFor(parallel, num_tasks,
                Max(num_rows_, 1) * Min(p_.panels_per_task, p_.panels) *
                    p_.bands.images * p_.bands.rows * p_.bands.columns,
                task);
    if (c_.moments != nullptr)
      moments_.Reduce(c_.out_channels, parallel, c_.moments);
  }

 private:
  using A = Accumulator<T>;
  using E = Operand<T>;
  static constexpr int kColumns = kTileColumns<A>;
  static constexpr std::int64_t kPixelsTogether = 16;

  // What the tiles of a task share.
  struct Task {
    const E* from;  // the source of its band
    A* finished;    // room for a tile
    typename BandMoments<A>::Panel* moments;
    Lookahead<T> lookahead;
    PrefetchList& prefetch;
  };

  // Filters of some panels: those of segments [begin, end).
  struct FilterBlock {
    std::int64_t begin, end;
    const E* data;
    std::int64_t panel_stride;
  };

  void RunTask(std::int64_t index, int worker) {
    // A worker takes neighbouring tasks: of few panels, of which its cache
    // keeps some (measured with two threads, dense layers: 0.92 to 1.0 of the
    // time).
    const std::int64_t group = index / p_.num_bands;
    const Band band(c_.x, p_.bands, index % p_.num_bands);
    const Range panels{group * p_.panels_per_task,
                       Min(p_.panels, (group + 1) * p_.panels_per_task)};
    E* const own = own_ + worker * p_.WorkerOperands();
    A* const sums = own_sums_ + worker * p_.WorkerSums();
    const BandTiles<T> tiles(p_, c_, depth_, edges_, band);
    PrefetchList prefetch;
    Task task{SourceOf(band, own), sums + p_.SumsSize(),
              c_.moments == nullptr
                  ? nullptr
                  : moments_.Begin(index % p_.num_bands, panels),
              c_.x.After(p_.bands, band.n, band.h, band.w,
                         tiles.count() * (panels.end - panels.begin)),
              prefetch};
    for (std::int64_t first = panels.begin; first < panels.end;
         first += p_.panels_together) {
      const Range some{first, Min(first + p_.panels_together, panels.end)};
      std::int64_t begin = 0;
      do {
        const std::int64_t end = depth_.BlockEnd(begin);
        const FilterBlock block = FiltersOf(some, begin, end, own);
        if (p_.late) task.lookahead = FiltersAfter(some, end, tiles.count());
        RunBlock(some, block, tiles, sums, &task);
        begin = end;
      } while (begin < depth_.count);
    }
    if (epilogue_.stream) FlushStores();
  }

  // It is gathered to `own`, if need be.
  const E* SourceOf(const Band& band, E* own) const {
    const Windows<T>& x = c_.x;
    if (p_.direct) {
      return reinterpret_cast<const E*>(x.source.data +
                                        x.map.Offset(band.n, band.h, band.w));
    }
    if (p_.together) return shared_;
    for (std::int64_t m = 0; m < band.images; ++m) {
      GatherPixels(band, m, {0, p_.bands.source_rows},
                   {0, p_.bands.source_columns}, own);
    }
    return own;
  }

  // Parts of the only band that tasks gather together: some pixels of a line.
  std::int64_t SharedParts() const {
    if (!p_.together || p_.direct) return 0;
    return c_.x.batch * p_.bands.source_rows * SharedPartsOfLine();
  }
  std::int64_t SharedPartsOfLine() const {
    return CeilDiv(p_.bands.source_columns, kPixelsTogether);
  }
  void GatherShared(std::int64_t part) const {
    const std::int64_t line = part / SharedPartsOfLine();
    const std::int64_t image = line / p_.bands.source_rows;
    const std::int64_t row = line % p_.bands.source_rows;
    const std::int64_t pixel = part % SharedPartsOfLine() * kPixelsTogether;
    GatherPixels(Band(c_.x, p_.bands, 0), image, {row, row + 1},
                 {pixel, Min(pixel + kPixelsTogether, p_.bands.source_columns)},
                 shared_);
  }

  // Brings rows and columns of image `m` of a band to their place in `to`.
  void GatherPixels(const Band& band, std::int64_t m, const Range& rows,
                    const Range& columns, E* to) const {
    const Windows<T>& x = c_.x;
    if (x.taps.count == 0) return;
    to += m * p_.image_pitch + rows.begin * p_.row_pitch +
          columns.begin * p_.pitch;
    Gather(x.source, x.map, band.n + m, x.height, x.width,
           {band.h + rows.begin, band.w + columns.begin, 0,
            rows.end - rows.begin, columns.end - columns.begin, x.channels},
           Elements<E>({to, p_.BandSize()}), p_.pitch * kElements<E>,
           p_.row_pitch * kElements<E>);
  }

  // They are packed to `own`, if they are not yet.
  FilterBlock FiltersOf(const Range& panels, std::int64_t begin,
                        std::int64_t end, E* own) const {
    const std::int64_t row = depth_.begin[begin];
    if (!p_.late) {
      return {begin, end, packed_ + (panels.begin * num_rows_ + row) * kColumns,
              num_rows_ * kColumns};
    }
    const std::int64_t stride = p_.PanelStride(depth_.begin[end] - row);
    const std::int64_t first = panels.begin * kColumns;
    PackRows(c_.filters + first * c_.filter_map.column, c_.filter_map,
             c_.x.taps, c_.x.channels, row, depth_.begin[end],
             Min(c_.out_channels, panels.end * kColumns) - first, stride,
             {own, p_.BlockSize()});
    return {begin, end, own, stride};
  }

  // What is packed late after the segments of some panels up to `end`, as far
  // as it lies together.
  Lookahead<T> FiltersAfter(const Range& panels, std::int64_t end,
                            std::int64_t tiles) const {
    const Source<T> filters{c_.filters, nullptr, Activation::kNone, 0};
    if (depth_.count == 0) return {filters, 0, 0, 0, 1};
    const FilterMap& map = c_.filter_map;
    const bool goes_on = end < depth_.count;
    const std::int64_t begin = goes_on ? end : 0, row = depth_.begin[begin];
    const std::int64_t per_tap = NumOperands<E>(c_.x.channels);
    const std::int64_t channel = row % per_tap * kElements<E>;
    const std::int64_t rows =
        Min(c_.x.channels - channel,
            (depth_.begin[depth_.BlockEnd(begin)] - row) * kElements<E>);
    const std::int64_t count = panels.end - panels.begin;
    const std::int64_t column =
        (goes_on ? panels.begin : panels.end) * kColumns;
    const std::int64_t columns =
        Max(Min(c_.out_channels - column, count * kColumns), 0);
    const std::int64_t at = c_.x.taps.taps[row / per_tap].filter * map.matrix +
                            channel * map.row + column * map.column;
    return map.column == 1
               ? Lookahead<T>(filters, at, rows, columns, map.row,
                              at + rows * map.row, tiles * count)
               : Lookahead<T>(filters, at, columns, rows, map.column,
                              at + columns * map.column, tiles * count);
  }

  // Adds a block's products to the tiles of some panels; `sums` keep these
  // between blocks.
  void RunBlock(const Range& panels, const FilterBlock& filters,
                const BandTiles<T>& tiles, A* sums, Task* task) {
    for (std::int64_t t = 0; t < tiles.count(); ++t) {
      const Place<E> to = tiles.At(t);
      if (to.num_runs == 0) continue;
      for (std::int64_t panel = panels.begin; panel < panels.end;) {
        const std::int64_t i = panel - panels.begin;
        panel += RunTiles(to, {panel, panels.end}, filters,
                          filters.data + i * filters.panel_stride,
                          sums + (i * tiles.count() + t) * p_.kTileSize, task);
      }
    }
  }

  // Adds a block's products to the tiles of the first of some panels and of as
  // many behind it as can be computed together; returns how many. `b` are the
  // filters of the first.
  std::int64_t RunTiles(const Place<E>& to, const Range& panels,
                        const FilterBlock& filters, const E* b, A* sums,
                        Task* task) {
    const std::int64_t first = Max(filters.begin, to.first);
    const std::int64_t last = Min(filters.end, to.last);
    if (to.Empty() ? filters.begin > 0 : first >= last) return 1;
    const bool starts = to.Empty() || filters.begin <= to.first;
    const bool finishes = to.Empty() || to.last <= filters.end;
    const std::int64_t channel = panels.begin * kColumns;
    const std::int64_t columns =
        Min(c_.out_channels, panels.end * kColumns) - channel;
    const int num_columns = static_cast<int>(Min(columns, kColumns));
    if (starts && finishes) sums = task->finished;
    PrefetchList& prefetch = task->prefetch;
    const bool down = to.edge != nullptr;
    const Epilogue<T>& epilogue = down ? down_ : epilogue_;
    TileOperands<E> tile{
        task->from + to.from,
        to.row_offset,
        1,
        (down ? to.edge->segments : depth_.segments) + first,
        last - first,
        down ? b
             : b + (depth_.begin[first] - depth_.begin[filters.begin]) *
                       kColumns,
        kColumns,
        starts ? nullptr : sums,
        kColumns,
        sums,
        kColumns,
        &prefetch};
    tile.a_plane = p_.BandSize();
    tile.b_plane =
        p_.late ? p_.BlockSize() : PackedPlane<T>(num_rows_, c_.out_channels);
    tile.b_goes_on = !p_.late;
    tile.runs = to.runs;
    tile.num_runs = to.num_runs;
    if (down) tile.b_offset = to.edge->filters + first;
    prefetch.Clear();
    bool in_tile = false;
    if (finishes) {
      in_tile = epilogue.LeaveToTile(to.at, channel, num_columns, &tile);
      if (in_tile && starts) {
        tile.JoinPanels(epilogue.ColumnsFrom(channel, columns),
                        filters.panel_stride);
      }
      if (task->moments != nullptr) tile.moments = task->moments + panels.begin;
      for (int run = 0; run < to.num_runs; ++run) {
        epilogue.Prefetch(to.at + to.runs[run].offset, channel,
                          to.runs[run].count,
                          Min(columns, tile.num_panels * kColumns), &prefetch);
      }
    }
    task->lookahead.Advance(tile.num_panels, &prefetch);
    RunTile<E, true>(to.rows, num_columns, tile);
    if (!finishes || in_tile) return tile.num_panels;
    for (int run = 0; run < to.num_runs; ++run) {
      const RowRun& r = to.runs[run];
      WriteTile(epilogue, to.at + r.offset, channel, sums + r.first * kColumns,
                r.count, num_columns);
    }
    return 1;
  }

  const Correlation<T>& c_;
  const CorrelationPlan<T> p_;
  Epilogue<T> epilogue_;
  Epilogue<T> down_;  // of pixels below each other
  Depth depth_;
  EdgeColumns edges_;
  std::int64_t num_rows_ = 0;  // of filters
  // Of each worker, see CorrelationPlan.
  E* own_ = nullptr;
  A* own_sums_ = nullptr;
  E* shared_ = nullptr;
  const E* packed_ = nullptr;  // the filters; null: they are packed late
  E* to_pack_ = nullptr;       // where they go; null: nothing is to be packed
  BandMoments<A> moments_;
};

// False when scratch memory ran out.
template <class T>
bool Correlate(const Correlation<T>& c, const Parallel& parallel,
               const Scratch& scratch) {
  if (HasNoOutput(c)) return true;
  CorrelationWork<T> work(c, parallel.num_workers);
  if (!work.Prepare(parallel, scratch)) return false;
  work.Run(parallel);
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_CORRELATE_H_
