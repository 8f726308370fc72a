// One pass over dz for everything that is a sum over pixels, or dz itself:
// filter gradient, bias gradient, side input gradient; and, where a band of dz
// is all that its pixels of x meet, for the input gradient.
//
//   dw[r, s, c, k] = sum over pixels of x[pixel under tap (r, s), c] *
//   dz[pixel, k]
//
// Pixels are cut into slices with partial sums of their own, which are added in
// a fixed order at the end.
#ifndef TFO_CC_CORE_FILTER_GRADIENT_H_
#define TFO_CC_CORE_FILTER_GRADIENT_H_

#include "cc/core/correlate.h"
#include "cc/core/dense_gradient.h"
#include "cc/core/pixel_operands.h"

namespace tfo::TFO_ISA {
namespace {

// Bounds the memory of all partial sums together, unless one filter gradient
// alone is larger.
constexpr std::int64_t kPartialSumBytes = 4 << 20;
constexpr std::int64_t kMaxSlices = 16;
// Each group of panels gathers x anew, so there are no more than keep all
// workers busy, and as many as bound what is gathered of dz at a time.
constexpr std::int64_t kTasksPerWorker = 3;
// Tasks that are enough without groups.
constexpr std::int64_t kEnoughSlices = 8;

// What is gathered at a time.
struct Portion {
  // The length of a tile's products: long enough that loading and storing its
  // sums does not count.
  std::int64_t pixels;
  std::int64_t x_bytes, dz_bytes;
};
// Several taps see neighbouring pixels too, which are gathered anew for each
// band; one tap does not, and a portion that leaves half a second-level cache
// to what streams past it is best (measured with AVX-512: 0.71 to 0.97 of the
// time with the larger one).
constexpr Portion kOneTap{128, 256 << 10, 256 << 10};
constexpr Portion kSeveralTaps{512, 384 << 10, 512 << 10};

template <class T>
struct FilterGradient {
  Windows<T> x;
  Source<T> dz;
  AddressMap dz_map;
  ConvShape shape;
  T* filters_gradient;  // null: not wanted; likewise the others
  T* bias_gradient;
  T* side_input_gradient;
  T* input_gradient = nullptr;  // only for what JoinsInputGradient
  const T* filters = nullptr;
  AddressMap x_map{};
};

template <class A>
TFO_INLINE void SumColumns(const A* rows, std::int64_t num_rows, A* sums,
                           bool accumulate) {
  constexpr int lanes = kLanes<A>;
  for (int j = 0; j < kTileColumns<A>; j += lanes) {
    Vec<A> sum{};
    for (std::int64_t i = 0; i < num_rows; ++i)
      sum += Load(rows + i * kTileColumns<A> + j);
    Store(sums + j, accumulate ? Load(sums + j) + sum : sum);
  }
}

// Writes gathered dz back as the side input's gradient.
template <class T>
void ScatterPanel(const Accumulator<T>* rows, const AddressMap& map,
                  std::int64_t n, const Box& box, T* to) {
  using A = Accumulator<T>;
  const Epilogue<T> identity{to,   nullptr, nullptr, nullptr, Activation::kNone,
                             A(0), map};
  const EpilogueWriter<T, Activation::kNone> writer{identity, Vec<A>{}};
  for (std::int64_t i = 0; i < box.rows; ++i) {
    for (std::int64_t j = 0; j < box.columns; j += kTileRows) {
      const std::int64_t at =
          map.Offset(n, box.h + i, box.w + j) + box.c * map.c;
      const A* tile = rows + (i * box.columns + j) * kTileColumns<A>;
      const int num_rows = static_cast<int>(Min(kTileRows, box.columns - j));
      const int num_columns = static_cast<int>(box.channels);
      map.c == 1 ? writer.Rows(at, box.c, tile, num_rows, num_columns)
                 : writer.Columns(at, box.c, tile, num_rows, num_columns);
    }
  }
}

// How the work is cut. What is summed in which order is a function of the shape
// alone; which panels a task has is not.
struct FilterGradientPlan {
  std::int64_t block;  // channels of x at a time
  std::int64_t pitch, row_pitch;
  std::int64_t k_stride;  // between operands of a line
  std::int64_t columns;   // gathered for a band
  PairedColumns pairs;
  bool direct;
  Bands bands;
  std::int64_t num_bands, panels, rows;
  std::int64_t slices, groups, panels_per_group, fitting_panels;
  bool in_place;  // the filter gradient itself holds the sums

  // Sums lie as the tiles write them: [slice, panel, row, column of the panel].
  // The last row of a panel is the bias gradient.
  TFO_INLINE std::int64_t SumRows() const { return in_place ? 0 : rows; }
  template <class A>
  TFO_INLINE std::int64_t PanelSize() const {
    return (SumRows() + 1) * kTileColumns<A>;
  }
};

template <class T>
FilterGradientPlan PlanFilterGradient(const FilterGradient<T>& g,
                                      std::int64_t num_workers) {
  using A = Accumulator<T>;
  const Portion& portion = g.x.taps.count > 1 ? kSeveralTaps : kOneTap;
  const std::int64_t x_operands = portion.x_bytes / sizeof(Operand<T>);
  const ConvShape& s = g.shape;
  FilterGradientPlan p;
  constexpr bool kPaired = kElements<Operand<T>> > 1;
  p.direct = !kPaired && g.x.ReadDirectly() && PixelPitch<A>(s.in_c) == s.in_c;
  // Many channels are taken in blocks, so that a band holds enough pixels.
  // Blocks of neighbouring taps must not touch: their rows of dw do not.
  p.block = s.in_c;
  p.pitch = p.direct ? g.x.map.w : PixelPitch<A>(s.in_c);
  const std::int64_t fitting =
      Max(x_operands / (portion.pixels * g.x.stride_h * g.x.stride_w), 64) /
      kTileRows * kTileRows;
  if (!p.direct && s.in_c > fitting + fitting / 2) {
    p.block = fitting;
    p.pitch = p.block + kLanes<A>;
  }
  p.bands = CutIntoBands(g.x, p.pitch, portion.pixels, kBandBytes);
  // Under taps above each other, every other pixel only begins a pair.
  const bool alternate =
      kPaired && g.x.taps.PerRow() == 1 && g.x.stride_w == 1 && g.x.map.c == 1;
  p.pairs = {alternate ? 2 : 1, g.x.stride_w};
  p.columns =
      alternate ? NumOperands<T>(p.bands.columns) : p.bands.source_columns;
  p.k_stride = (alternate ? 1 : kElements<Operand<T>> * g.x.stride_w) * p.pitch;
  p.row_pitch = p.direct ? g.x.map.h : p.columns * p.pitch;
  p.num_bands = s.batch * p.bands.down * p.bands.across;
  p.panels = NumPanels<A>(s.out_c);
  p.rows = g.filters_gradient == nullptr ? 0 : g.x.taps.count * s.in_c;
  p.in_place = false;
  const std::int64_t slice_bytes = p.panels * p.PanelSize<A>() * sizeof(A);
  p.slices =
      Max(Min(Min(p.num_bands, kMaxSlices), kPartialSumBytes / slice_bytes), 1);
  const std::int64_t groups =
      CeilDiv(Min(kTasksPerWorker * num_workers, kMaxSlices), p.slices);
  const std::int64_t panel_bytes =
      p.bands.rows * p.bands.columns * kTileColumns<A> * sizeof(A);
  p.fitting_panels = Max(portion.dz_bytes / panel_bytes, 1);
  p.panels_per_group = g.input_gradient != nullptr
                           ? p.panels
                           : Min(CeilDiv(p.panels, groups), p.fitting_panels);
  p.groups = CeilDiv(p.panels, p.panels_per_group);
  p.in_place = p.slices == 1 && !kIs16Bit<T> && !s.filters_transposed &&
               s.out_c % kLanes<A> == 0;
  return p;
}

// Whether the input gradient is better computed with the filter gradient; a
// function of the shape alone.
template <class T>
bool JoinsInputGradient(const FilterGradient<T>& g) {
  if (!IsDense(g.shape) || g.filters_gradient == nullptr ||
      g.shape.in_c * g.shape.out_c == 0) {
    return false;
  }
  const FilterGradientPlan p = PlanFilterGradient(g, 1);
  return p.slices >= kEnoughSlices && p.panels <= p.fitting_panels;
}

// Adds the slices of one row of sums, [slices, panels, rows, columns of the
// panel], and writes it.
template <class T>
void ReduceRow(const Accumulator<T>* sums, const FilterGradientPlan& p,
               std::int64_t columns, std::int64_t stride, T* to) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  const std::int64_t panel_size = p.PanelSize<A>();
  for (std::int64_t j = 0; j < columns; j += lanes) {
    const A* from =
        sums + j / kTileColumns<A> * panel_size + j % kTileColumns<A>;
    Vec<A> sum = Load(from);
    for (std::int64_t s = 1; s < p.slices; ++s)
      sum += Load(from + s * p.panels * panel_size);
    const int n = static_cast<int>(Min(lanes, columns - j));
    if (stride != 1) {
      for (int l = 0; l < n; ++l)
        StoreOne(to + (j + l) * stride, static_cast<A>(sum[l]));
    } else if (n == lanes) {
      StoreAs(to + j, sum);
    } else {
      StoreAsPartial(to + j, sum, n);
    }
  }
}

template <class T>
bool ComputeFilterGradient(const FilterGradient<T>& g, const Parallel& parallel,
                           const Scratch& scratch) {
  using A = Accumulator<T>;
  using E = Operand<T>;
  constexpr int kColumns = kTileColumns<A>;
  constexpr bool kPaired = kElements<E> > 1;
  const ConvShape& s = g.shape;
  const bool empty = s.batch * s.out_h * s.out_w * s.out_c == 0;
  if (g.filters_gradient != nullptr &&
      (empty || g.x.taps.count < s.kernel_h * s.kernel_w)) {
    Zero(g.filters_gradient, s.kernel_h * s.kernel_w * s.in_c * s.out_c);
  }
  if (empty) {
    if (g.bias_gradient != nullptr) Zero(g.bias_gradient, s.out_c);
    return true;
  }
  const FilterGradientPlan p = PlanFilterGradient(g, parallel.num_workers);
  const Bands& bands = p.bands;
  const std::int64_t panel_size = p.PanelSize<A>();
  const bool products = p.rows > 0;
  const FilterMap map = FilterMapOf(s);
  const std::int64_t row_stride = p.in_place ? map.row : kColumns;
  const std::int64_t x_size =
      products && !p.direct
          ? bands.source_rows * p.columns * p.pitch + kLanes<A>
          : 0;
  const std::int64_t dz_panel_size =
      bands.rows * NumOperands<T>(bands.columns) * kColumns;
  // dz as numbers, before they are paired.
  const std::int64_t numbers_size =
      kPaired ? bands.rows * bands.columns * kColumns : 0;
  const bool joined = g.input_gradient != nullptr;
  DenseInputGradient<T> dense;
  if (joined && !dense.Prepare(s, g.filters, {map.column, map.row, map.matrix},
                               g.input_gradient, g.x_map, bands.columns,
                               parallel, scratch)) {
    return false;
  }
  // dz as the input gradient meets it, where that is not as dw does, and a tile
  // of dx.
  const std::int64_t dense_size = joined && kPaired ? dense.size() : 0;
  const std::int64_t worker_size = x_size + p.panels_per_group * dz_panel_size;
  Segment* runs = scratch.Allocate<Segment>(g.x.taps.count + 1);
  Segment* lines = scratch.Allocate<Segment>(2 * bands.rows);
  A* partial = scratch.Allocate<A>(p.slices * p.panels * panel_size);
  E* gathered = scratch.Allocate<E>(worker_size * parallel.num_workers);
  A* numbers = scratch.Allocate<A>(numbers_size * parallel.num_workers);
  E* dense_dz = scratch.Allocate<E>(dense_size * parallel.num_workers);
  A* dx_tiles = scratch.Allocate<A>(dense.kTileSize * parallel.num_workers);
  if (runs == nullptr || lines == nullptr || partial == nullptr ||
      gathered == nullptr || numbers == nullptr || dense_dz == nullptr ||
      dx_tiles == nullptr) {
    return false;
  }
  // Rows of dw that lie together under x: a tap's channels, or those of several
  // neighbouring taps.
  const std::int64_t num_runs =
      products ? BuildSegments(g.x.taps, p.block, p.pitch, p.row_pitch, runs)
               : 0;
  const std::int64_t runs_per_row = num_runs / Max(g.x.taps.rows, 1);
  // The rows of a band under the first tap: whole ones, then those of the last
  // band across.
  for (std::int64_t i = 0; i < bands.rows; ++i) {
    const std::int64_t offset = i * g.x.stride_h * p.row_pitch;
    lines[i] = {offset, NumOperands<T>(bands.columns)};
    lines[bands.rows + i] = {
        offset, NumOperands<T>(s.out_w - (bands.across - 1) * bands.columns)};
  }

  auto task = [&](std::int64_t index, int worker) {
    const std::int64_t slice = index / p.groups, group = index % p.groups;
    const std::int64_t first_panel = group * p.panels_per_group;
    const std::int64_t last_panel =
        Min(p.panels, first_panel + p.panels_per_group);
    A* sums = partial + slice * p.panels * panel_size;
    E* x_band = gathered + worker * worker_size;
    E* dz_band = x_band + x_size;
    const std::int64_t first_band = p.num_bands * slice / p.slices;
    const std::int64_t last_band = p.num_bands * (slice + 1) / p.slices;
    for (std::int64_t band = first_band; band < last_band; ++band) {
      const std::int64_t j0 = band % bands.across * bands.columns;
      const std::int64_t i0 = band / bands.across % bands.down * bands.rows;
      const std::int64_t n = band / bands.across / bands.down;
      const std::int64_t height = Min(bands.rows, s.out_h - i0);
      const std::int64_t width = Min(bands.columns, s.out_w - j0);
      const bool accumulate = band != first_band;
      for (std::int64_t panel = first_panel; panel < last_panel; ++panel) {
        const std::int64_t channel = panel * kColumns;
        const Box box{i0,     j0,    channel,
                      height, width, Min(s.out_c - channel, kColumns)};
        E* const dz_operands = dz_band + (panel - first_panel) * dz_panel_size;
        A* dz;
        if constexpr (kPaired) {
          dz = numbers + worker * numbers_size;
        } else {
          dz = dz_operands;
        }
        Gather(g.dz, g.dz_map, n, s.out_h, s.out_w, box, dz, kColumns);
        if (g.bias_gradient != nullptr) {
          SumColumns(dz, height * width,
                     sums + (panel + 1) * panel_size - kColumns, accumulate);
        }
        if (g.side_input_gradient != nullptr) {
          ScatterPanel(dz, g.dz_map, n, box, g.side_input_gradient);
        }
        if constexpr (kPaired) {
          PairRows(dz, height, width, dz_operands);
          if (joined) {
            PairColumns(
                dz, width, box.channels,
                dense_dz + worker * dense_size + panel * dense.panel_size());
          }
        }
      }
      if (joined) {
        dense.Compute(kPaired ? dense_dz + worker * dense_size : dz_band, n, j0,
                      width, dx_tiles + worker * dense.kTileSize);
      }
      const std::int64_t h = i0 * g.x.stride_h + g.x.taps.min_h;
      const std::int64_t w = j0 * g.x.stride_w + g.x.taps.min_w;
      const std::int64_t tiles =
          (last_panel - first_panel) * CeilDiv(p.rows, kTileRows);
      Lookahead<T> x_ahead = p.block == s.in_c
                                 ? g.x.After(bands, n, h, w, tiles)
                                 : Lookahead<T>(g.x.source, 0, 0, 0, 1);
      const std::int64_t dz_size =
          p.groups == 1 && g.dz_map.c == 1 ? height * width * s.out_c : 0;
      Lookahead<T> dz_ahead(g.dz, g.dz_map.Offset(n, i0, j0) + dz_size, dz_size,
                            s.batch * g.dz_map.batch, Max(tiles, 1));
      PrefetchList prefetch;
      for (std::int64_t c0 = 0; products && c0 < s.in_c; c0 += p.block) {
        const std::int64_t channels = Min(p.block, s.in_c - c0);
        const E* x = x_band;
        if (p.direct) {
          x = reinterpret_cast<const E*>(g.x.source.data +
                                         g.x.map.Offset(n, h, w));
        } else if constexpr (kPaired) {
          GatherPairs(g.x.source, g.x.map, n, g.x.height, g.x.width,
                      {h, w, c0, bands.source_rows, p.columns, channels},
                      p.pairs, x_band, p.pitch);
        } else {
          Gather(g.x.source, g.x.map, n, g.x.height, g.x.width,
                 {h, w, c0, bands.source_rows, bands.source_columns, channels},
                 x_band, p.pitch);
        }
        for (std::int64_t panel = first_panel; panel < last_panel; ++panel) {
          const int num_columns =
              static_cast<int>(Min(s.out_c - panel * kColumns, kColumns));
          std::int64_t first_row = c0;
          for (std::int64_t run = 0; run < num_runs; ++run) {
            const bool whole = p.block == s.in_c;
            const std::int64_t length = whole ? runs[run].length : channels;
            const EvenParts parts(length, kTileRows);
            // Pixels whose tap lies beyond the image add nothing.
            const Range inside =
                Inside(h + run / runs_per_row * g.x.taps.RowStep(),
                       g.x.stride_h, height, g.x.height);
            const Segment* const inside_lines =
                (width == bands.columns ? lines : lines + bands.rows) +
                inside.begin;
            const E* const dz = dz_band +
                                (panel - first_panel) * dz_panel_size +
                                inside.begin * NumOperands<T>(width) * kColumns;
            A* row = sums + panel * panel_size + first_row * kColumns;
            if (p.in_place) {
              // That means that T is A.
              row = reinterpret_cast<A*>(g.filters_gradient) +
                    g.x.taps.taps[first_row / s.in_c].filter * map.matrix +
                    first_row % s.in_c * map.row + panel * kColumns;
            }
            for (std::int64_t part = 0, i = 0; i < length; ++part) {
              const int num_rows = static_cast<int>(parts.Size(part));
              A* const c = row + i * row_stride;
              prefetch.Clear();
              prefetch.Add(c, p.in_place ? num_rows : 0,
                           row_stride * static_cast<std::int64_t>(sizeof(A)));
              x_ahead.Advance(1, &prefetch);
              dz_ahead.Advance(1, &prefetch);
              SelectTile<E, false>(num_rows, num_columns)(
                  {x + runs[run].offset + i, nullptr, p.k_stride, inside_lines,
                   inside.end - inside.begin, dz, kColumns,
                   accumulate ? c : nullptr, row_stride, c, row_stride,
                   &prefetch});
              i += num_rows;
            }
            first_row += whole ? length : s.in_c;
          }
        }
      }
    }
  };
  const std::int64_t pixels = s.batch * s.out_h * s.out_w;
  ParallelFor(parallel, p.slices * p.groups,
              pixels / p.slices * (p.rows + 1) * p.panels_per_group, task);

  if (products && !p.in_place) {
    auto reduce = [&](std::int64_t row, int) {
      const std::int64_t matrix = g.x.taps.taps[row / s.in_c].filter;
      ReduceRow(
          partial + row * kColumns, p, s.out_c, map.column,
          g.filters_gradient + matrix * map.matrix + row % s.in_c * map.row);
    };
    ParallelFor(parallel, p.rows, p.slices * s.out_c, reduce);
  }
  if (g.bias_gradient != nullptr) {
    ReduceRow(partial + p.SumRows() * kColumns, p, s.out_c, 1, g.bias_gradient);
  }
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_FILTER_GRADIENT_H_
