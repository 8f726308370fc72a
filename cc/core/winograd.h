// Correlation with 3x3 filters of stride 1 by Winograd's algorithm: input tiles
// and filters are transformed into points, multiplied point by point in the
// register tile, and transformed back in front of the epilogue.
#ifndef TFO_CC_CORE_WINOGRAD_H_
#define TFO_CC_CORE_WINOGRAD_H_

#include "cc/core/correlation_plan.h"
#include "cc/core/tile.h"
#include "cc/core/winograd_tiles.h"

namespace tfo::TFO_ISA {
namespace {

// Filters that are larger than this as points are transformed when a band meets
// them, and not kept for the next (measured with 512 channels: 0.4 of the
// time).
constexpr std::int64_t kWinogradFilterBytes = 4 << 20;
// Panels that meet a tile in turn.
constexpr std::int64_t kWinogradPanelsTogether = 2;
// Rows of filters that are transformed at a time.
constexpr std::int64_t kWinogradFilterRows = 64;

// A panel of filters as points: [points, channels, columns].
template <class A>
struct FilterPoints {
  std::int64_t pitch, size;

  static TFO_INLINE FilterPoints Of(std::int64_t channels) {
    const std::int64_t pitch = PointPitch<A>(channels * kTileColumns<A>);
    return {pitch, kWinogradPoints * pitch};
  }
};

// What a panel needs while it is transformed.
template <class A>
constexpr std::int64_t kWinogradPackedSize =
    kWinogradTaps * kWinogradTaps * kWinogradFilterRows * kTileColumns<A>;

// Transforms a panel of a correlation's filters.
template <class T>
void TransformPanel(const Correlation<T>& c, std::int64_t panel,
                    Accumulator<T>* packed, Accumulator<T>* to) {
  using A = Accumulator<T>;
  constexpr std::int64_t kColumns = kTileColumns<A>;
  const FilterMap& map = c.filter_map;
  const std::int64_t channels = c.x.channels, column = panel * kColumns;
  const std::int64_t columns = Min(c.out_channels - column, kColumns);
  const std::int64_t pitch = FilterPoints<A>::Of(channels).pitch;
  const auto tap = [&](std::int64_t t, std::int64_t channel) {
    return c.filters + c.x.taps.taps[t].filter * map.matrix +
           channel * map.row + column * map.column;
  };
  if constexpr (std::is_same_v<T, A>) {
    if (map.column == 1 && columns == kColumns) {
      for (std::int64_t k = 0; k < channels; ++k, to += kColumns) {
        for (std::int64_t j = 0; j < kColumns; j += kLanes<A>)
          TransformFilter(tap(0, k) + j, tap(1, k) - tap(0, k), to + j, pitch);
      }
      return;
    }
  }
  for (std::int64_t k = 0; k < channels; k += kWinogradFilterRows) {
    const std::int64_t size = Min(channels - k, kWinogradFilterRows) * kColumns;
    for (std::int64_t t = 0; t < c.x.taps.count; ++t)
      PackPanels<T, A>(tap(t, k), map, size / kColumns, columns, 0,
                       {packed + t * size, 0});
    for (std::int64_t i = 0; i < size; i += kLanes<A>)
      TransformFilter(packed + i, size, to + k * kColumns + i, pitch);
  }
}

// The size of all filters as points: [panels] of them.
template <class T>
std::int64_t WinogradFiltersSize(std::int64_t channels, std::int64_t columns) {
  using A = Accumulator<T>;
  return NumPanels<A>(columns) * FilterPoints<A>::Of(channels).size;
}

// Transforms all filters of a correlation. False when scratch memory ran out.
template <class T>
bool TransformFilters(const Correlation<T>& c, Accumulator<T>* to,
                      const Parallel& parallel, const Scratch& scratch) {
  using A = Accumulator<T>;
  const std::int64_t size = FilterPoints<A>::Of(c.x.channels).size;
  A* const packed =
      scratch.Allocate<A>(kWinogradPackedSize<A> * parallel.num_workers);
  if (packed == nullptr) return false;
  auto task = [&](std::int64_t panel, int worker) {
    TransformPanel(c, panel, packed + worker * kWinogradPackedSize<A>,
                   to + panel * size);
  };
  ParallelFor(parallel, NumPanels<A>(c.out_channels), size / 8, task);
  return true;
}

// How the work is cut.
template <class A>
struct WinogradPlan {
  WinogradGrid grid;
  std::int64_t band, num_bands;
  std::int64_t panels, panels_per_task, panels_together;
  bool late;  // filters are transformed when they are needed
  FilterPoints<A> filters;
  // Between tiles, and between their points.
  std::int64_t tile_pitch, tile_points_pitch;
  std::int64_t product_pitch, product_points_pitch;

  std::int64_t PanelGroups() const { return CeilDiv(panels, panels_per_task); }
  // A worker's memory: input tiles that cannot be read as they lie; tiles as
  // points; their products with some panels; output tiles; filters.
  std::int64_t PatchSize() const {
    return RunSize(kWinogradInputs, tile_pitch);
  }
  std::int64_t TilesSize() const { return kWinogradPoints * tile_points_pitch; }
  std::int64_t ProductsSize() const {
    return kWinogradPoints * product_points_pitch;
  }
  std::int64_t PixelsSize() const {
    return kWinogradRun * kWinogradOutputs * kWinogradOutputs * kTileColumns<A>;
  }
  std::int64_t FiltersSize() const {
    return late ? kWinogradPackedSize<A> + panels_together * filters.size : 0;
  }
  std::int64_t WorkerSize() const {
    return PatchSize() + TilesSize() + ProductsSize() + PixelsSize() +
           FiltersSize();
  }
};

template <class T>
WinogradPlan<Accumulator<T>> PlanWinograd(const Correlation<T>& c,
                                          int num_workers) {
  using A = Accumulator<T>;
  constexpr std::int64_t kSize = sizeof(A);
  WinogradPlan<A> p;
  p.grid = WinogradGrid::Of(c.x.batch, c.x.grid_h, c.x.grid_w);
  p.panels = NumPanels<A>(c.out_channels);
  p.filters = FilterPoints<A>::Of(c.x.channels);
  p.tile_pitch = TilePitch<A>(c.x.channels);
  const std::int64_t work = p.grid.count * kWinogradPoints * c.x.channels *
                            p.panels * kTileColumns<A>;
  const std::int64_t wanted = Max(Min(work / kTaskWork, kWantedTasks), 1);
  p.band = p.grid.Band(kWinogradPoints * p.tile_pitch * kSize, wanted);
  p.num_bands = CeilDiv(p.grid.count, p.band);
  p.panels_per_task =
      CeilDiv(p.panels, PanelGroups(p.num_bands, p.panels, 1, num_workers));
  p.panels_together = Min(kWinogradPanelsTogether, p.panels_per_task);
  p.late = c.packed == nullptr &&
           p.panels * p.filters.size * kSize > kWinogradFilterBytes;
  p.tile_points_pitch = PointPitch<A>(p.band * p.tile_pitch);
  p.product_pitch = p.panels_together * kTileColumns<A>;
  p.product_points_pitch = PointPitch<A>(p.band * p.product_pitch);
  return p;
}

template <class T>
class WinogradCorrelation {
 public:
  using A = Accumulator<T>;
  static constexpr std::int64_t kColumns = kTileColumns<A>;
  static constexpr std::int64_t kSide = kWinogradOutputs;

  WinogradCorrelation(const Correlation<T>& c, int num_workers)
      : c_(c),
        x_(c.x),
        p_(PlanWinograd(c, num_workers)),
        epilogue_(c.epilogue) {
    epilogue_.stream = epilogue_.ShouldStream(x_.batch * x_.grid_h * x_.grid_w *
                                              c.out_channels);
  }

  // False when scratch memory ran out.
  bool Run(const Parallel& parallel, const Scratch& scratch) {
    filters_ = static_cast<const A*>(c_.packed);
    if (filters_ == nullptr && !p_.late) {
      A* const to = scratch.Allocate<A>(p_.panels * p_.filters.size);
      if (to == nullptr || !TransformFilters(c_, to, parallel, scratch))
        return false;
      filters_ = to;
    }
    A* const own = scratch.Allocate<A>(p_.WorkerSize() * parallel.num_workers);
    if (own == nullptr) return false;
    auto task = [&](std::int64_t index, int worker) {
      const std::int64_t first = index / p_.PanelGroups() * p_.band;
      const std::int64_t panel = index % p_.PanelGroups() * p_.panels_per_task;
      RunTask({first, Min(p_.grid.count, first + p_.band)},
              {panel, Min(p_.panels, panel + p_.panels_per_task)},
              own + worker * p_.WorkerSize());
    };
    ParallelFor(parallel, p_.num_bands * p_.PanelGroups(),
                kWinogradPoints * x_.channels * p_.band * p_.panels_per_task,
                task);
    return true;
  }

 private:
  void RunTask(const Range& band, const Range& panels, A* own) const {
    A* const tiles = own + p_.PatchSize();
    A* const products = tiles + p_.TilesSize();
    A* const pixels = products + p_.ProductsSize();
    A* const packed = pixels + p_.PixelsSize();
    A* const late = packed + kWinogradPackedSize<A>;
    TransformTiles(x_, p_.grid, band, p_.tile_pitch, p_.tile_points_pitch, own,
                   tiles);
    for (std::int64_t i = panels.begin; i < panels.end;
         i += p_.panels_together) {
      const Range some{i, Min(panels.end, i + p_.panels_together)};
      for (std::int64_t k = i; p_.late && k < some.end; ++k)
        TransformPanel(c_, k, packed, late + (k - i) * p_.filters.size);
      Multiply(band.end - band.begin, some, tiles,
               p_.late ? late : filters_ + i * p_.filters.size, products);
      Write(band, some, products, pixels);
    }
    if (epilogue_.stream) FlushStores();
  }

  // The columns that there are of some panels.
  std::int64_t Columns(const Range& panels) const {
    return Min(c_.out_channels, panels.end * kColumns) -
           panels.begin * kColumns;
  }

  void Multiply(std::int64_t num_tiles, const Range& panels, const A* tiles,
                const A* filters, A* products) const {
    const Segment depth{0, x_.channels};
    std::int64_t row_offset[kTileRows<A>];
    for (int i = 0; i < kTileRows<A>; ++i) row_offset[i] = i * p_.tile_pitch;
    const EvenParts parts(num_tiles, kTileRows<A>);
    PrefetchList prefetch;
    for (int point = 0; point < kWinogradPoints; ++point) {
      for (std::int64_t part = 0; part < parts.count(); ++part) {
        const std::int64_t tile = parts.Begin(part);
        for (std::int64_t column = 0, rest = Columns(panels); rest > 0;) {
          TileOperands<A> operands{
              tiles + tile * p_.tile_pitch,
              row_offset,
              1,
              &depth,
              1,
              filters + column / kColumns * p_.filters.size,
              kColumns,
              nullptr,
              kColumns,
              products + tile * p_.product_pitch + column,
              p_.product_pitch,
              &prefetch};
          operands.JoinPanels(rest, p_.filters.size);
          RunTile<A, true>(static_cast<int>(parts.Size(part)),
                           static_cast<int>(Min(rest, kColumns)), operands);
          column += operands.num_panels * kColumns;
          rest -= operands.num_panels * kColumns;
        }
      }
      tiles += p_.tile_points_pitch;
      filters += p_.filters.pitch;
      products += p_.product_points_pitch;
    }
  }

  // Runs of tiles beside each other are written together.
  void Write(const Range& band, const Range& panels, const A* products,
             A* pixels) const {
    for (std::int64_t t = band.begin, run; t < band.end; t += run) {
      const WinogradGrid::Place at = p_.grid.At(t);
      run = p_.grid.Run(t, band.end);
      const std::int64_t rows = Min(x_.grid_h - at.i, kSide),
                         width = Min(x_.grid_w - at.j, run * kSide);
      for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
        const int columns = static_cast<int>(Columns({panel, panel + 1}));
        const A* from = products + (t - band.begin) * p_.product_pitch +
                        (panel - panels.begin) * kColumns;
        for (std::int64_t i = 0; i < run; ++i, from += p_.product_pitch) {
          for (int k = 0; k < columns; k += kLanes<A>)
            TransformOutput(from + k, p_.product_points_pitch,
                            pixels + i * kSide * kColumns + k,
                            run * kSide * kColumns, kColumns);
        }
        for (std::int64_t i = 0; i < rows; ++i) {
          WriteTile(epilogue_, epilogue_.map.Offset(at.n, at.i + i, at.j),
                    panel * kColumns, pixels + i * run * kSide * kColumns,
                    static_cast<int>(width), columns);
        }
      }
    }
  }

  const Correlation<T>& c_;
  const Windows<T>& x_;
  const WinogradPlan<A> p_;
  Epilogue<T> epilogue_;
  const A* filters_ = nullptr;
};

// False when scratch memory ran out.
template <class T>
bool CorrelateByWinograd(const Correlation<T>& c, const Parallel& parallel,
                         const Scratch& scratch) {
  if constexpr (kHasWinograd<T>) {
    return WinogradCorrelation<T>(c, parallel.num_workers)
        .Run(parallel, scratch);
  } else {
    return Correlate(c, parallel, scratch);
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_WINOGRAD_H_
