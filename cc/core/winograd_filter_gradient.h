// The filter gradient of a 3x3 convolution of stride 1 by Winograd's algorithm:
// tiles of x and of dz are transformed into points, whose products are summed
// over all tiles, and the sums are transformed into the gradient.
#ifndef TFO_CC_CORE_WINOGRAD_FILTER_GRADIENT_H_
#define TFO_CC_CORE_WINOGRAD_FILTER_GRADIENT_H_

#include "cc/core/correlation_plan.h"
#include "cc/core/filter_gradient.h"
#include "cc/core/winograd_tiles.h"

namespace tfo::TFO_ISA {
namespace {

// Panels that a task sums up at most.
constexpr std::int64_t kWinogradPanels = 4;
// Parts of the tiles that are summed up by themselves, and their sums together.
constexpr std::int64_t kWinogradSlices = 16;
constexpr std::int64_t kWinogradSumsBytes = 16 << 20;

// How the work is cut. Slices of the tiles, a function of the shape alone, have
// sums of their own, tasks some panels of a slice's.
template <class A>
struct WinogradFilterGradientPlan {
  static constexpr std::int64_t kColumns = kTileColumns<A>;

  WinogradGrid grid;
  std::int64_t band, num_bands, slices;
  std::int64_t panels, panels_per_task;
  std::int64_t x_pitch, x_points_pitch;  // [points, tiles, channels]
  std::int64_t dz_points_pitch;          // [panels, points, tiles, columns]
  std::int64_t sums_pitch;               // [panels, points, channels, columns]

  std::int64_t Groups() const { return CeilDiv(panels, panels_per_task); }
  std::int64_t DzPanelSize() const { return kWinogradPoints * dz_points_pitch; }
  // A panel's sums: its points and, of the bias, its columns.
  std::int64_t PointsSize() const { return kWinogradPoints * sums_pitch; }
  std::int64_t SumsSize() const { return PointsSize() + kColumns; }
  // A worker's memory: tiles that cannot be read as they lie, tiles of x and of
  // dz as points; the sums, where there is one slice.
  std::int64_t PatchSize() const {
    return Max(RunSize(kWinogradInputs, x_pitch),
               RunSize(kWinogradOutputs, panels_per_task * kColumns));
  }
  std::int64_t XSize() const { return kWinogradPoints * x_points_pitch; }
  std::int64_t TilesSize() const {
    return PatchSize() + XSize() + panels_per_task * DzPanelSize();
  }
  std::int64_t WorkerSize() const {
    return TilesSize() + (slices == 1 ? panels_per_task * SumsSize() : 0);
  }
  // What workers share: the sums of several slices.
  std::int64_t SharedSize() const {
    return slices == 1 ? 0 : slices * panels * SumsSize();
  }
};

template <class T>
WinogradFilterGradientPlan<Accumulator<T>> PlanWinogradFilterGradient(
    const FilterGradient<T>& g, int num_workers) {
  using A = Accumulator<T>;
  constexpr std::int64_t kColumns = kTileColumns<A>, kSize = sizeof(A);
  WinogradFilterGradientPlan<A> p;
  p.grid = WinogradGrid::Of(g.x.batch, g.x.grid_h, g.x.grid_w);
  p.panels = NumPanels<A>(g.shape.out_c);
  p.x_pitch = TilePitch<A>(g.x.channels);
  p.sums_pitch = PointPitch<A>(g.x.channels * kColumns);
  p.band = p.grid.Band(kWinogradPoints * p.x_pitch * kSize, kWinogradSlices);
  p.num_bands = CeilDiv(p.grid.count, p.band);
  const std::int64_t most =
      Max(kWinogradSumsBytes / (p.panels * p.SumsSize() * kSize), 1);
  p.slices = Min(Min(most, p.num_bands), kWinogradSlices);
  p.panels_per_task = CeilDiv(
      p.panels, PanelGroups(p.slices, p.panels,
                            CeilDiv(p.panels, kWinogradPanels), num_workers));
  p.x_points_pitch = PointPitch<A>(p.band * p.x_pitch);
  p.dz_points_pitch = PointPitch<A>(p.band * kColumns);
  return p;
}

template <class T>
class WinogradFilterGradient {
 public:
  using A = Accumulator<T>;
  static constexpr std::int64_t kColumns = kTileColumns<A>;

  WinogradFilterGradient(const FilterGradient<T>& g, int num_workers)
      : g_(g), x_(g.x), p_(PlanWinogradFilterGradient(g, num_workers)) {}

  // False when scratch memory ran out.
  bool Run(const Parallel& parallel, const Scratch& scratch) {
    A* const own = scratch.Allocate<A>(p_.WorkerSize() * parallel.num_workers);
    A* const shared = scratch.Allocate<A>(p_.SharedSize());
    if (own == nullptr || shared == nullptr) return false;
    auto add = [&](std::int64_t index, int worker) {
      const std::int64_t slice = index / p_.Groups(),
                         panel = index % p_.Groups() * p_.panels_per_task;
      const Range panels{panel, Min(p_.panels, panel + p_.panels_per_task)};
      A* const memory = own + worker * p_.WorkerSize();
      if (p_.slices > 1)
        return AddSlice(slice, panels, memory,
                        shared + (slice * p_.panels + panel) * p_.SumsSize());
      A* const sums = memory + p_.TilesSize();
      AddSlice(slice, panels, memory, sums);
      for (std::int64_t i = panels.begin; i < panels.end; ++i)
        Write(i, sums + (i - panel) * p_.SumsSize());
    };
    ParallelFor(parallel, p_.slices * p_.Groups(),
                kWinogradPoints * x_.channels * p_.grid.count / p_.slices *
                    p_.panels_per_task,
                add);
    if (p_.slices == 1) return true;
    auto reduce = [&](std::int64_t panel, int) {
      A* const sums = shared + panel * p_.SumsSize();
      for (std::int64_t slice = 1; slice < p_.slices; ++slice) {
        const A* const from = sums + slice * p_.panels * p_.SumsSize();
        for (std::int64_t i = 0; i < p_.SumsSize(); i += kLanes<A>)
          Store(sums + i, Load(sums + i) + Load(from + i));
      }
      Write(panel, sums);
    };
    ParallelFor(parallel, p_.panels, p_.slices * p_.SumsSize() / 8, reduce);
    return true;
  }

 private:
  // The columns that there are of some panels.
  std::int64_t Columns(const Range& panels) const {
    return Min(g_.shape.out_c, panels.end * kColumns) - panels.begin * kColumns;
  }

  // Sums up some panels of a slice.
  void AddSlice(std::int64_t slice, const Range& panels, A* own,
                A* sums) const {
    A* const x = own + p_.PatchSize();
    A* const dz = x + p_.XSize();
    for (std::int64_t i = panels.begin; i < panels.end; ++i)
      Zero(sums + (i - panels.begin) * p_.SumsSize() + p_.PointsSize(),
           kColumns);
    const std::int64_t first = p_.num_bands * slice / p_.slices;
    const std::int64_t last = p_.num_bands * (slice + 1) / p_.slices;
    for (std::int64_t i = first; i < last; ++i) {
      const Range band{i * p_.band, Min(p_.grid.count, (i + 1) * p_.band)};
      TransformTiles(x_, p_.grid, band, p_.x_pitch, p_.x_points_pitch, own, x);
      TransformGradient(band, panels, own, dz, sums);
      AddProducts(band.end - band.begin, panels, i == first, x, dz, sums);
    }
  }

  // Transforms the tiles of dz, and adds what they have of each channel to the
  // bias's sums.
  void TransformGradient(const Range& band, const Range& panels, A* memory,
                         A* to, A* sums) const {
    constexpr int kSide = kWinogradOutputs;
    const std::int64_t columns = Columns(panels);
    const TileReader<T> reader(g_.dz, g_.dz_map, x_.grid_h, x_.grid_w,
                               panels.begin * kColumns, columns, kSide);
    const auto transform = [&](std::int64_t t, const Patch<A>& patch) {
      for (std::int64_t k = 0; k < columns; k += kLanes<A>) {
        const std::int64_t panel = k / kColumns, column = k % kColumns;
        const A* const from = patch.data + k;
        TransformOutputGradient(from, patch.row, patch.column,
                                to + panel * p_.DzPanelSize() +
                                    (t - band.begin) * kColumns + column,
                                p_.dz_points_pitch);
        A* const bias = sums + panel * p_.SumsSize() + p_.PointsSize() + column;
        Vec<A> sum = Load(bias);
        for (std::int64_t i = 0; i < kSide; ++i) {
          for (std::int64_t j = 0; j < kSide; ++j)
            sum += Load(from + i * patch.row + j * patch.column);
        }
        Store(bias, sum);
      }
    };
    reader.ForEach(p_.grid, band, 0, 0, memory, p_.panels_per_task * kColumns,
                   transform);
  }

  // Rows of a register tile are channels of x, its depth are tiles.
  void AddProducts(std::int64_t num_tiles, const Range& panels, bool starts,
                   const A* x, const A* dz, A* sums) const {
    const Segment depth{0, num_tiles};
    const EvenParts parts(x_.channels, kTileRows<A>);
    PrefetchList prefetch;
    for (int point = 0; point < kWinogradPoints; ++point) {
      for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
        A* const to = sums + (panel - panels.begin) * p_.SumsSize() +
                      point * p_.sums_pitch;
        const A* const b = dz + (panel - panels.begin) * p_.DzPanelSize() +
                           point * p_.dz_points_pitch;
        const int columns = static_cast<int>(Columns({panel, panel + 1}));
        for (std::int64_t part = 0; part < parts.count(); ++part) {
          const std::int64_t channel = parts.Begin(part);
          A* const sum = to + channel * kColumns;
          RunTile<A, false>(
              static_cast<int>(parts.Size(part)), columns,
              {x + point * p_.x_points_pitch + channel, nullptr, p_.x_pitch,
               &depth, 1, b, kColumns, starts ? nullptr : sum, kColumns, sum,
               kColumns, &prefetch});
        }
      }
    }
  }

  // Writes the gradient of a panel.
  void Write(std::int64_t panel, const A* sums) const {
    const FilterMap map = FilterMapOf(g_.shape);
    const std::int64_t channel = panel * kColumns;
    const std::int64_t columns = Columns({panel, panel + 1});
    const auto rest = [&](std::int64_t j) {
      return static_cast<int>(Min(kLanes<A>, columns - j));
    };
    A taps[kWinogradTaps * kWinogradTaps * kLanes<A>];
    for (std::int64_t c = 0; c < x_.channels; ++c) {
      for (std::int64_t j = 0; j < columns; j += kLanes<A>) {
        TransformFilterGradient(sums + c * kColumns + j, p_.sums_pitch, taps,
                                kLanes<A>);
        T* const to =
            g_.filters_gradient + c * map.row + (channel + j) * map.column;
        for (std::int64_t t = 0; t < x_.taps.count; ++t)
          StoreColumns(to + x_.taps.taps[t].filter * map.matrix,
                       Load(taps + t * kLanes<A>), rest(j), map.column);
      }
    }
    if (g_.bias_gradient == nullptr) return;
    for (std::int64_t j = 0; j < columns; j += kLanes<A>)
      StoreColumns(g_.bias_gradient + channel + j,
                   Load(sums + p_.PointsSize() + j), rest(j), 1);
  }

  const FilterGradient<T>& g_;
  const Windows<T>& x_;
  const WinogradFilterGradientPlan<A> p_;
};

// For WinogradPays, and where dz itself is not wanted. False when scratch
// memory ran out.
template <class T>
bool FilterGradientByWinograd(const FilterGradient<T>& g,
                              const Parallel& parallel,
                              const Scratch& scratch) {
  if constexpr (kHasWinograd<T>) {
    return WinogradFilterGradient<T>(g, parallel.num_workers)
        .Run(parallel, scratch);
  } else {
    return ComputeFilterGradient(g, parallel, scratch);
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_WINOGRAD_FILTER_GRADIENT_H_
