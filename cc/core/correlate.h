// The engine: source image * filters -> epilogue, for the convolution and for
// its input gradient.
#ifndef TFO_CC_CORE_CORRELATE_H_
#define TFO_CC_CORE_CORRELATE_H_

#include "cc/core/band_moments.h"
#include "cc/core/depth.h"
#include "cc/core/epilogue.h"
#include "cc/core/pack.h"
#include "cc/core/scratch.h"
#include "cc/core/shared_scratch.h"
#include "cc/core/shared_work.h"
#include "cc/core/tile.h"
#include "cc/core/windows.h"

namespace tfo::TFO_ISA {
namespace {

// Fewer multiply-adds than this are not worth a task of their own.
constexpr std::int64_t kTaskWork = 1 << 20;
constexpr std::int64_t kWantedTasks = 32;
// Where sums are the same in whatever tile, tasks are no more than workers need
// to end together, and bands as large (measured with AMX, two threads: 0.88 to
// 1.0 of the time). So they are fewer where gathering means to compute slopes,
// and panels do not tell tasks apart (0.94 to 1.02, beside four).
constexpr std::int64_t kWantedOfWorker = 4, kWantedWithSlopes = 2;
// A task gathers its band anew, so it should have this many panels to use it
// for; and all, where gathering means to compute slopes too (measured with
// GELU in bfloat16: 0.83 to 0.93 of the time).
constexpr std::int64_t kPanelsPerTask = 8;
// Panels that stay in the second-level cache while the band passes: a tile's
// rows are read, and its rows of the output written, for all of them in turn.
constexpr std::int64_t kPanelsBytes = (kHasAmx ? 384 : 256) << 10;
// Bands may be larger where workers then share them evenly (measured with AMX,
// dense layers of 512 to 2048 channels: 0.9 to 1.0 of the time).
constexpr std::int64_t kMostBandBytes = 800 << 10;
// So many for each worker end evenly enough.
constexpr std::int64_t kEvenBands = 16;
// Filters of which the second-level cache keeps little until the next band.
// Small images share bands there (measured with AMX, 3x3, 512 channels of 7x7
// pixels: 0.75 to 0.88 of the time in float32, 0.6 to 0.78 in bfloat16; but up
// to 1.8 with fewer filters, since small bands stay in the first level).
constexpr std::int64_t kManyFiltersBytes = 1 << 20;
// Filters that meet no more tiles than this are packed block by block, and used
// at once: they would be written to memory and read again for little.
constexpr std::int64_t kFewTiles = 32;
// What is gathered of so few pixels; a block of filters meets but a part of it
// (measured with AVX-512, 128 rows times 4096x4096: 0.8 of the time with
// half of this, which made two bands of them).
constexpr std::int64_t kFewPixelsBytes = 4 << 20;
// Panels that should be in such a block: of rows that lie pages apart, more
// than a few bytes should be read. Tasks must not become few, though: more
// panels than the least are taken where that leaves enough of them, and even
// those only where there is more than a task or two (measured with two threads,
// 128 rows times 2048x128: 0.7 of the time).
constexpr std::int64_t kLeastTogether = 4, kMostTogether = 16;
constexpr std::int64_t kFewestTasks = 4, kEnoughTasks = 8;
// Where sums are the same in whatever tile, and products so fast that packing
// is what counts, there are enough when each worker has one, of up to a page
// (measured with AMX in bfloat16, two threads, 16 and 128 rows times 4096x4096:
// 0.67 and 0.9 of the time).
constexpr std::int64_t kPageBytes = 4096, kFewestWorkers = 2;

template <class T>
struct Correlation {
  Windows<T> x;
  std::int64_t out_channels;
  const T* filters;
  FilterMap filter_map;
  Epilogue<T> epilogue;
  const void* packed = nullptr;  // the filters, if they are packed
  // [2, out_channels]: mean and sum of squared deviations of the output; null:
  // not wanted. Only where TilesSeeAll.
  double* moments = nullptr;
};

// A tile of a band: what it reads, and where its results go.
template <class E>
struct Place {
  const E* from;
  int rows;
  std::int64_t row_offset[kTileRows<E>];  // of the source, from `from` on
  std::int64_t at;                        // of the output
  // Those rows that belong to it, the others lie between its lines.
  RowRun runs[kTileRows<E>];
  int num_runs;
  std::int64_t first, last;  // the segments inside the image

  TFO_INLINE bool Empty() const { return first >= last; }
};

template <class T>
TFO_INLINE bool HasNoOutput(const Correlation<T>& c) {
  return c.x.batch * c.x.grid_h * c.x.grid_w * c.out_channels == 0;
}

// How the work is cut. What is summed in which order is a function of the shape
// alone.
template <class T>
struct CorrelationPlan {
  using A = Accumulator<T>;
  static constexpr int kColumns = kTileColumns<A>;

  bool direct;
  bool late;    // filters are packed block by block
  bool joined;  // tiles go on from one line of the grid to the next
  bool flat;    // and take what is gathered between them for pixels, too
  bool paired;  // tiles are of two lines
  std::int64_t pitch, row_pitch, image_pitch;
  Bands bands;
  std::int64_t num_bands;  // of all images
  std::int64_t panels, panels_per_task, panels_together;
  std::int64_t block_rows;  // of filters

  std::int64_t PanelGroups() const { return CeilDiv(panels, panels_per_task); }
  // A worker's memory: operands that are gathered and a block of filters; sums
  // of tiles between blocks and a finished tile.
  static constexpr std::int64_t kTileSize = kTileRows<Operand<T>> * kColumns;
  std::int64_t BandSize() const {
    return direct ? 0 : bands.images * image_pitch + kLanes<A>;
  }
  std::int64_t BlockSize() const {
    return late ? panels_together * block_rows * kColumns : 0;
  }
  // Of a band, at most.
  std::int64_t Tiles() const { return bands.Tiles(kTileRows<Operand<T>>); }
  std::int64_t SumsSize() const {
    return late ? panels_together * Tiles() * kTileSize : 0;
  }
  std::int64_t WorkerOperands() const {
    return kPlanes<Operand<T>> * (BandSize() + BlockSize());
  }
  std::int64_t WorkerSums() const { return SumsSize() + kTileSize + kColumns; }
};

template <class T>
CorrelationPlan<T> Plan(const Correlation<T>& c, std::int64_t num_workers) {
  using A = Accumulator<T>;
  const Windows<T>& x = c.x;
  CorrelationPlan<T> p;
  p.panels = NumPanels<A>(c.out_channels);
  constexpr int kPerOperand = kElements<Operand<T>>;
  const std::int64_t channels = x.TapDepth();
  p.direct = x.ReadDirectly() && !x.PixelsCollide();
  p.pitch = p.direct ? x.map.w / kPerOperand : PixelPitch<Operand<T>>(channels);
  const std::int64_t grid = x.batch * x.grid_h * x.grid_w;
  const std::int64_t depth = Max(x.taps.count * channels, 1);
  const std::int64_t work = depth * p.panels * kTileColumns<A>;
  // Whether sums are the same in whatever tile and band.
  const bool cut_freely = kTransposesRows<Operand<T>> && c.moments == nullptr;
  const std::int64_t of_worker =
      x.source.saved != nullptr ? kWantedWithSlopes : kWantedOfWorker;
  const std::int64_t most_wanted =
      cut_freely ? Min(of_worker * num_workers, kWantedTasks) : kWantedTasks;
  const std::int64_t wanted = Max(Min(grid * work / kTaskWork, most_wanted), 1);
  // Tasks differ in panels before bands become small, and in nothing else where
  // tiles are few.
  const bool few = grid <= kFewTiles * kRegisterRows / 2;
  const std::int64_t wanted_bands =
      x.source.saved != nullptr
          ? wanted
          : CeilDiv(wanted, Max(p.panels / kPanelsPerTask, 1));
  const bool many_filters =
      work * kOperandBytes<Operand<T>> > kManyFiltersBytes;
  const auto cut = [&](std::int64_t pixels, std::int64_t bytes) {
    Bands bands =
        CutIntoBands(x, p.pitch, Max(pixels, kTileRows<Operand<T>>), bytes);
    if (many_filters && bands.down * bands.across == 1) {
      const std::int64_t image_bytes = bands.source_rows *
                                       bands.source_columns * p.pitch *
                                       kOperandBytes<Operand<T>>;
      const std::int64_t most =
          Min(bytes / Max(image_bytes, 1), pixels / (x.grid_h * x.grid_w));
      bands.images = EvenPart(x.batch, Max(most, 1));
    }
    return bands;
  };
  p.bands = few ? cut(kFewTiles * kTileRows<Operand<T>>, kFewPixelsBytes)
                : cut(CeilDiv(grid, wanted_bands), kBandBytes);
  p.num_bands = p.bands.Count(x.batch);
  // As many as workers share evenly; each band reads the filters anew, which
  // costs as much as half a tile.
  const auto load = [&](const Bands& bands) {
    return CeilDiv(bands.Count(x.batch), num_workers) *
           (2 * bands.Tiles(kTileRows<Operand<T>>) + 1);
  };
  const bool evens =
      cut_freely && !few && p.num_bands < kEvenBands * num_workers;
  const std::int64_t least = p.num_bands * kBandBytes / kMostBandBytes;
  for (std::int64_t even = CeilDiv(Max(least, 1), num_workers) * num_workers;
       evens && even < 2 * p.num_bands; even += num_workers) {
    const Bands bands = cut(CeilDiv(grid, even), kMostBandBytes);
    if (bands.Count(x.batch) == even && load(bands) < load(p.bands)) {
      p.bands = bands;
      p.num_bands = even;
    }
  }
  p.row_pitch =
      p.direct ? x.map.h / kPerOperand : p.bands.source_columns * p.pitch;
  p.image_pitch =
      p.direct ? x.map.batch / kPerOperand : p.bands.source_rows * p.row_pitch;
  p.panels_per_task =
      CeilDiv(p.panels, Min(p.panels, CeilDiv(wanted, p.num_bands)));
  constexpr std::int64_t kPanelsOperands =
      kPanelsBytes / kOperandBytes<Operand<T>>;
  p.joined = kRowsAnywhere && p.bands.across == 1 &&
             c.epilogue.map.h == x.grid_w * c.epilogue.map.w;
  // Rows of large tiles must lie equally far apart in each half, as those of a
  // line do; or of all lines, together with what is between them, where that
  // makes fewer halves.
  constexpr std::int64_t kRows = kTileRows<Operand<T>>, kHalf = kRows / 2;
  const bool large = kRows > kRegisterRows;
  p.paired = large && p.bands.columns <= kHalf;
  const std::int64_t of_lines =
      p.bands.rows * (p.paired ? 1 : 2 * CeilDiv(p.bands.columns, kRows));
  p.flat =
      large && !p.direct && x.stride_h == 1 && x.stride_w == 1 &&
      CeilDiv((p.bands.rows - 1) * p.bands.source_columns + p.bands.columns,
              kHalf) < of_lines;
  p.paired = p.paired && !p.flat;
  p.late =
      few && c.packed == nullptr && p.num_bands == 1 && p.Tiles() <= kFewTiles;
  if (p.late) {
    const std::int64_t least =
        Max(Min(p.panels / kFewestTasks, kLeastTogether), 1);
    const bool by_pages = cut_freely && kPlanes<Operand<T>> == 1;
    const std::int64_t most =
        by_pages ? kPageBytes / (kTileColumns<A> * std::int64_t{sizeof(T)})
                 : kMostTogether;
    const std::int64_t enough = by_pages ? kFewestWorkers : kEnoughTasks;
    p.panels_together = Max(Min(p.panels / enough, most), least);
    p.block_rows = kPanelsOperands / (p.panels_together * kTileColumns<A>);
    if (by_pages) {
      p.panels_together =
          Max(Min(p.panels / num_workers, p.panels_together), least);
    }
    p.panels_per_task =
        CeilDiv(p.panels_per_task, p.panels_together) * p.panels_together;
  } else {
    p.panels_together = Max(kPanelsOperands / (depth * kTileColumns<A>), 1);
    p.block_rows = depth;
  }
  return p;
}

// Whether all of the output passes through tiles that write it themselves, so
// that they can take its moments.
template <class T>
bool TilesSeeAll(const Correlation<T>& c) {
  return !HasNoOutput(c) && c.epilogue.FitsTiles(c.out_channels) &&
         !Plan(c, 1).late;
}

template <class T>
bool Correlate(const Correlation<T>& c, const Parallel& parallel,
               const Scratch& scratch) {
  using A = Accumulator<T>;
  using E = Operand<T>;
  const Windows<T>& x = c.x;
  constexpr int kColumns = kTileColumns<A>;
  if (HasNoOutput(c)) return true;
  const CorrelationPlan<T> p = Plan(c, parallel.num_workers);
  const Bands& bands = p.bands;

  Epilogue<T> epilogue = c.epilogue;
  epilogue.stream =
      epilogue.ShouldStream(x.batch * x.grid_h * x.grid_w * c.out_channels);
  if (!epilogue.PrepareForTile(c.out_channels, scratch)) return false;

  Depth depth{p.block_rows};
  if (!CutDepth(x.taps, x.TapDepth(), p.pitch, p.row_pitch, scratch, &depth))
    return false;
  const std::int64_t num_rows = depth.begin[depth.count];  // of filters
  E* own = scratch.Allocate<E>(p.WorkerOperands() * parallel.num_workers);
  A* own_sums = scratch.Allocate<A>(p.WorkerSums() * parallel.num_workers);
  if (own == nullptr || own_sums == nullptr) return false;
  const E* packed = static_cast<const E*>(c.packed);
  E* to = nullptr;
  if (packed == nullptr && !p.late) {
    packed = to = scratch.Allocate<E>(PackedSize<T>(num_rows, c.out_channels));
    if (to == nullptr) return false;
  }
  const FilterPacking<T> packing(c.filters, c.filter_map, x.taps, x.channels,
                                 c.out_channels, to);
  // The tasks do that, where they keep all workers busy.
  const std::int64_t num_tasks = p.num_bands * p.PanelGroups();
  const bool prepared = num_tasks < parallel.num_workers;
  if (prepared) packing.Run(parallel);
  SharedWork preparation;

  BandMoments<A> moments;
  if (c.moments != nullptr && !moments.Prepare(p.num_bands, p.panels, scratch))
    return false;

  auto task = [&](std::int64_t index, int worker) {
    // A worker takes neighbouring tasks: of few panels, of which its cache
    // keeps some (measured with two threads, dense layers: 0.92 to 1.0 of the
    // time).
    const std::int64_t group = index / p.num_bands;
    std::int64_t band = index % p.num_bands;
    const std::int64_t across = band % bands.across;
    band /= bands.across;
    const std::int64_t i0 = band % bands.down * bands.rows,
                       n = band / bands.down * bands.images;
    const std::int64_t images = Min(bands.images, x.batch - n);
    const std::int64_t j0 = across * bands.columns;
    const std::int64_t rows = Min(bands.rows, x.grid_h - i0);
    const std::int64_t columns = Min(bands.columns, x.grid_w - j0);
    const std::int64_t h = i0 * x.stride_h + x.taps.min_h,
                       w = j0 * x.stride_w + x.taps.min_w;
    if (!prepared) preparation.Finish(packing.Count(), packing);
    E* const gathered = own + worker * p.WorkerOperands();
    E* const block_filters = gathered + kPlanes<E> * p.BandSize();
    A* const sums = own_sums + worker * p.WorkerSums();
    A* const finished = sums + p.SumsSize();
    const E* from = gathered;
    if (p.direct) {
      from = reinterpret_cast<const E*>(x.source.data + x.map.Offset(n, h, w));
    } else if (x.taps.count > 0) {
      for (std::int64_t m = 0; m < images; ++m) {
        Gather(x.source, x.map, n + m, x.height, x.width,
               {h, w, 0, bands.source_rows, bands.source_columns, x.channels},
               Elements<E>({gathered + m * p.image_pitch, p.BandSize()}),
               p.pitch * kElements<E>, p.row_pitch * kElements<E>);
      }
    }
    // Pixels of a line, as tiles see it.
    const std::int64_t width = p.flat ? bands.source_columns : columns;
    const bool joined = p.joined || p.flat;
    const EvenParts parts =
        p.paired ? EvenParts(rows, 2)
        : joined ? EvenParts((rows - 1) * width + columns, kTileRows<E>)
                 : EvenParts(columns, kTileRows<E>);
    // A tile's part is of lines, or of pixels.
    const std::int64_t of_part = p.paired ? columns : 1;
    const std::int64_t image_tiles =
        (joined || p.paired ? 1 : rows) * parts.count();
    const std::int64_t tiles = images * image_tiles;
    const std::int64_t first_panel = group * p.panels_per_task;
    const std::int64_t last_panel =
        Min(p.panels, first_panel + p.panels_per_task);
    typename BandMoments<A>::Panel* const band_moments =
        c.moments == nullptr
            ? nullptr
            : moments.Begin(index % p.num_bands, {first_panel, last_panel});
    Lookahead<T> lookahead =
        x.After(bands, n, h, w, tiles * (last_panel - first_panel));
    PrefetchList prefetch;

    // Whether a tile's lines lie apart in the output.
    const bool apart =
        p.flat || (p.paired && epilogue.map.h != columns * epilogue.map.w);
    const auto place = [&](std::int64_t tile) {
      const std::int64_t image = tile / image_tiles;
      tile %= image_tiles;
      const std::int64_t part = tile % parts.count();
      const std::int64_t begin = parts.Begin(part) * of_part;
      const std::int64_t i = tile / parts.count() + begin / width;
      const std::int64_t j = begin % width;
      const std::int64_t line = x.stride_h * p.row_pitch,
                         pixel = x.stride_w * p.pitch;
      Place<E> to;
      to.from = from + image * p.image_pitch + i * line + j * pixel;
      to.rows = static_cast<int>(parts.Size(part) * of_part);
      std::int64_t last_i = i, next_j = j, offset = 0;
      for (int row = 0; row < to.rows; ++row, ++next_j, offset += pixel) {
        if (next_j == width) {
          next_j = 0;
          ++last_i;
          offset += line - width * pixel;
        }
        to.row_offset[row] = offset;
      }
      to.at = epilogue.map.Offset(n + image, i0 + i, j0 + j);
      to.num_runs = 0;
      if (!apart) {
        to.runs[to.num_runs++] = {0, to.rows, 0};
      } else {
        std::int64_t at_i = i, at_j = j;
        for (int row = 0; row < to.rows; ++at_i, at_j = 0) {
          const int count =
              static_cast<int>(Min(columns - at_j, to.rows - row));
          if (count > 0) {
            const std::int64_t at =
                epilogue.map.Offset(n + image, i0 + at_i, j0 + at_j);
            to.runs[to.num_runs++] = {row, count, at - to.at};
          }
          row += static_cast<int>(width - at_j);
        }
      }
      // Rows of taps beyond the image add nothing.
      const auto inside = [&](std::int64_t row) {
        return Inside(h + row * x.stride_h, x.taps.RowStep(), x.taps.rows,
                      x.height);
      };
      to.first = inside(last_i).begin * depth.per_tap_row;
      to.last = inside(i).end * depth.per_tap_row;
      return to;
    };
    // Adds segments [begin, end) to the tiles of `panel` and of as many behind
    // it, up to `last_panel`, as can be computed together; returns how many.
    // `b` are the filters of the first.
    const auto compute = [&](const Place<E>& to, std::int64_t panel,
                             std::int64_t last_panel, std::int64_t begin,
                             std::int64_t end, const E* b,
                             std::int64_t panel_stride, A* sum) {
      const std::int64_t first = Max(begin, to.first);
      const std::int64_t last = Min(end, to.last);
      if (to.Empty() ? begin > 0 : first >= last) return 1;
      const bool starts = to.Empty() || begin <= to.first;
      const bool finishes = to.Empty() || to.last <= end;
      const std::int64_t channel = panel * kColumns;
      const std::int64_t columns =
          Min(c.out_channels, last_panel * kColumns) - channel;
      const int num_columns = static_cast<int>(Min(columns, kColumns));
      if (starts && finishes) sum = finished;
      TileOperands<E> tile{
          to.from,
          to.row_offset,
          1,
          depth.segments + first,
          last - first,
          b + (depth.begin[first] - depth.begin[begin]) * kColumns,
          kColumns,
          starts ? nullptr : sum,
          kColumns,
          sum,
          kColumns,
          &prefetch};
      tile.a_plane = p.BandSize();
      tile.b_plane =
          p.late ? p.BlockSize() : PackedPlane<T>(num_rows, c.out_channels);
      tile.b_goes_on = !p.late;
      tile.runs = to.runs;
      tile.num_runs = to.num_runs;
      prefetch.Clear();
      bool in_tile = false;
      if (finishes) {
        in_tile = epilogue.LeaveToTile(to.at, channel, num_columns, &tile);
        if (in_tile && starts)
          tile.JoinPanels(epilogue.ColumnsFrom(channel, columns), panel_stride);
        if (band_moments != nullptr) tile.moments = band_moments + panel;
        for (int run = 0; run < to.num_runs; ++run) {
          epilogue.Prefetch(
              to.at + to.runs[run].offset, channel, to.runs[run].count,
              Min(columns, tile.num_panels * kColumns), &prefetch);
        }
        lookahead.Advance(tile.num_panels, &prefetch);
      }
      RunTile<E, true>(to.rows, num_columns, tile);
      if (!finishes || in_tile) return tile.num_panels;
      for (int run = 0; run < to.num_runs; ++run) {
        const RowRun& r = to.runs[run];
        WriteTile(epilogue, to.at + r.offset, channel, sum + r.first * kColumns,
                  r.count, num_columns);
      }
      return 1;
    };

    for (std::int64_t first = first_panel; first < last_panel;
         first += p.panels_together) {
      const std::int64_t last = Min(first + p.panels_together, last_panel);
      std::int64_t begin = 0;
      do {
        const std::int64_t end = depth.BlockEnd(begin);
        const std::int64_t row = depth.begin[begin];
        const E* b = packed + (first * num_rows + row) * kColumns;
        std::int64_t panel_stride = num_rows * kColumns;
        if (p.late) {
          b = block_filters;
          panel_stride = (depth.begin[end] - row) * kColumns;
          PackRows(c.filters + first * kColumns * c.filter_map.column,
                   c.filter_map, x.taps, x.channels, row, depth.begin[end],
                   Min(c.out_channels, last * kColumns) - first * kColumns,
                   panel_stride, {block_filters, p.BlockSize()});
        }
        for (std::int64_t t = 0; t < tiles; ++t) {
          const Place<E> to = place(t);
          if (to.num_runs == 0) continue;
          for (std::int64_t panel = first; panel < last;) {
            panel +=
                compute(to, panel, last, begin, end,
                        b + (panel - first) * panel_stride, panel_stride,
                        sums + ((panel - first) * tiles + t) * p.kTileSize);
          }
        }
        begin = end;
      } while (begin < depth.count);
    }
    if (epilogue.stream) FlushStores();
  };
  ParallelFor(parallel, num_tasks,
              Max(num_rows, 1) * Min(p.panels_per_task, p.panels) *
                  bands.images * bands.rows * bands.columns,
              task);
  if (c.moments != nullptr) moments.Reduce(c.out_channels, parallel, c.moments);
  return true;
}

// The depth of which a panel of filters leaves room for enough pixels beside it
// in the second-level cache, where each filter takes several operands (measured
// with AMX, 2048 rows of 3072 elements: 0.7 of the time). 3x3 filters of 128
// channels are this deep (1.0 to 1.1 of the time in two parts).
constexpr std::int64_t kMostDepth = 9 * 128;

// The parts of its channels in which a correlation is best computed; each adds
// to what the ones before have written.
template <class T>
std::int64_t DepthParts(const Correlation<T>& c) {
  using E = Operand<T>;
  if (kPlanes<E> == 1 || !std::is_same_v<T, Accumulator<T>>) return 1;
  // Few pixels leave room for blocks of filters of any depth (measured with
  // AMX, 3x3, 512 channels of 7x7 pixels: 0.82 to 0.9 of the time; but 1.0 to
  // 1.1 under one tap).
  const std::int64_t numbers =
      c.x.batch * c.x.height * c.x.width * c.x.channels;
  if (!HasNoOutput(c) && c.x.taps.count > 1 &&
      numbers * kOperandBytes<E> / kElements<E> <= kMostBandBytes &&
      Plan(c, 1).late) {
    return 1;
  }
  const std::int64_t channels =
      Max(kMostDepth / Max(c.x.taps.count, 1), kLanes<float>);
  return Max(CeilDiv(c.x.channels, channels), 1);
}

// Correlates, part by part.
template <class T>
bool CorrelateInParts(const Correlation<T>& c, const Parallel& parallel,
                      const Scratch& scratch) {
  const std::int64_t count = DepthParts(c);
  if (count == 1 || c.packed != nullptr) return Correlate(c, parallel, scratch);
  constexpr std::int64_t kLine = 64 / sizeof(T);
  const std::int64_t channels =
      CeilDiv(CeilDiv(c.x.channels, count), kLine) * kLine;
  SharedScratch shared(scratch);
  for (std::int64_t first = 0; first < c.x.channels; first += channels) {
    Correlation<T> part = c;
    part.x.channels = Min(channels, c.x.channels - first);
    part.x.source.data += first * c.x.map.c;
    if (c.x.source.saved != nullptr) part.x.source.saved += first * c.x.map.c;
    part.filters += first * c.filter_map.row;
    if (first > 0) part.epilogue.side_input = c.epilogue.y;
    if (first + channels < c.x.channels) {
      part.epilogue.bias = nullptr;
      part.epilogue.pre_activation = nullptr;
      part.epilogue.activation = Activation::kNone;
      part.epilogue.partial = true;
      part.moments = nullptr;
    }
    if (!Correlate(part, parallel, shared.Next())) return false;
  }
  return true;
}

// Joins the lines of windows. A 1x1 convolution of stride 1 then sees pixels,
// not images: one row of them, over all images where both tensors allow it.
TFO_INLINE ConvShape Flatten(const ConvShape& shape) {
  ConvShape s = JoinLinesOfWindows(shape);
  if (s.kernel_h != 1 || s.kernel_w != 1 || s.stride_h != 1 ||
      s.stride_w != 1 || s.pad_top != 0 || s.pad_left != 0 ||
      s.in_h != s.out_h || s.in_w != s.out_w) {
    return s;
  }
  s.in_w *= s.in_h;
  s.in_h = 1;
  if (!s.input_channels_first && !s.output_channels_first) {
    s.in_w *= s.batch;
    s.batch = 1;
  }
  s.out_h = 1;
  s.out_w = s.in_w;
  return s;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_CORRELATE_H_
