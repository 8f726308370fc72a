// What a correlation is asked for, source image * filters -> epilogue, and how
// its work is cut.
#ifndef TFO_CC_CORE_CORRELATION_PLAN_H_
#define TFO_CC_CORE_CORRELATION_PLAN_H_

#include "cc/core/edge_columns.h"
#include "cc/core/epilogue.h"
#include "cc/core/pack.h"
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
// But half as many where bands would have no more than so many pixels for
// filters that no cache keeps until the next one (measured with a Zen 4, 3x3,
// 256 to 512 channels: 0.87 to 0.96 of the time in float32, 0.92 to 0.96 in
// bfloat16). Not with AVX2, whose tiles go from line to line (1.01).
constexpr std::int64_t kFewPixelsOfBand = 64;
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
// Filters that meet no more tiles, or pixels, than this are packed block by
// block, and used at once: they would be written to memory and read again for
// little (measured with AVX-512, 256 and 512 rows times 4096x4096: 0.77 and
// 0.9 of the time; with AVX2, 190: 0.83).
constexpr std::int64_t kFewTiles = 40;
template <class E>
constexpr std::int64_t kFewPixels =
    (kTransposesRows<E> ? 16 : kFewTiles) * kRegisterRows;
// Of lines that make more tiles, though.
constexpr std::int64_t kFewOfShortLines = 16 * kRegisterRows;
// What is gathered of so few pixels; a block of filters meets but a part of it
// (measured with AVX-512, 128 rows times 4096x4096: 0.8 of the time of two
// bands).
constexpr std::int64_t kFewPixelsBytes = 16 << 20;
// Panels that should be in such a block: of rows that lie pages apart, more
// than a few bytes should be read. Tasks must not become few, though: more
// panels than the least are taken where that leaves enough of them, and even
// those only where there is more than a task or two (measured with two threads,
// 128 rows times 2048x128: 0.7 of the time). Fewer rows of more panels start
// and finish sums more often (AVX-512, 64 rows times 4096x4096: 1.1).
constexpr std::int64_t kLeastTogether = 4, kMostTogether = kHasAmx ? 16 : 8;
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
  bool together;  // the only band is gathered by all workers
  bool late;      // filters are packed block by block
  bool joined;    // tiles go on from one line of the grid to the next
  bool flat;      // and take what is gathered between them for pixels, too
  bool paired;    // tiles are of two lines
  bool edges;     // edge columns have tiles of their own
  std::int64_t pitch, row_pitch, image_pitch;
  Bands bands;
  std::int64_t num_bands;  // of all images
  std::int64_t panels, panels_per_task, panels_together;
  std::int64_t block_rows;  // of filters

  std::int64_t PanelGroups() const { return CeilDiv(panels, panels_per_task); }
  // Panels of a block lie a line further apart than `rows` of them take: the
  // same row of all of them would fall into one set of the first-level cache.
  static constexpr std::int64_t PanelStride(std::int64_t rows) {
    return rows * kColumns + 64 / sizeof(Operand<T>);
  }
  // A worker's memory: operands that are gathered and a block of filters; sums
  // of tiles between blocks and a finished tile.
  static constexpr std::int64_t kTileSize = kTileRows<Operand<T>> * kColumns;
  std::int64_t BandSize() const {
    return direct ? 0 : bands.images * image_pitch + kLanes<A>;
  }
  std::int64_t BlockSize() const {
    return late ? panels_together * PanelStride(block_rows) : 0;
  }
  // Of a band, at most.
  std::int64_t Tiles() const { return bands.Tiles(kTileRows<Operand<T>>); }
  std::int64_t SumsSize() const {
    return late ? panels_together * Tiles() * kTileSize : 0;
  }
  std::int64_t WorkerOperands() const {
    return kPlanes<Operand<T>> * (BlockSize() + (together ? 0 : BandSize()));
  }
  // What workers share.
  std::int64_t SharedOperands() const {
    return together ? kPlanes<Operand<T>> * BandSize() : 0;
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
  const bool many_filters =
      work * kOperandBytes<Operand<T>> > kManyFiltersBytes;
  const auto bands_of = [&](std::int64_t panels_per_task) {
    return CeilDiv(wanted, Max(p.panels / panels_per_task, 1));
  };
  std::int64_t wanted_bands =
      x.source.saved != nullptr ? wanted : bands_of(kPanelsPerTask);
  if (many_filters && !kRowsAnywhere && !p.direct &&
      x.source.saved == nullptr && grid <= kFewPixelsOfBand * wanted_bands) {
    wanted_bands = bands_of(kPanelsPerTask / 2);
  }
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
  p.together = false;
  if (grid <= kFewPixels<Operand<T>>) {
    p.bands = cut(kFewTiles * kTileRows<Operand<T>>, kFewPixelsBytes);
    p.together = p.bands.Count(x.batch) == 1 &&
                 (p.Tiles() <= kFewTiles || grid <= kFewOfShortLines);
  }
  if (!p.together) p.bands = cut(CeilDiv(grid, wanted_bands), kBandBytes);
  p.num_bands = p.bands.Count(x.batch);
  // As many as workers share evenly; each band reads the filters anew, which
  // costs as much as half a tile.
  const auto load = [&](const Bands& bands) {
    return CeilDiv(bands.Count(x.batch), num_workers) *
           (2 * bands.Tiles(kTileRows<Operand<T>>) + 1);
  };
  const bool evens =
      cut_freely && !p.together && p.num_bands < kEvenBands * num_workers;
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
  p.late = p.together && c.packed == nullptr && p.Tiles() <= kFewTiles;
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
  p.edges = !large && !p.late && c.epilogue.map.c == 1 &&
            EdgeColumnsPay(x, p.bands, p.joined);
  p.joined = p.joined && !p.edges;
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

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_CORRELATION_PLAN_H_
