// One pass over dz for everything that is a sum over pixels, or dz itself:
// filter gradient, bias gradient, side input gradient.
//
//   dw[r, s, c, k] = sum over pixels of x[pixel under tap (r, s), c] *
//   dz[pixel, k]
//
// Pixels are cut into slices with partial sums of their own, which are added in
// a fixed order at the end.
#ifndef TFO_CC_CORE_FILTER_GRADIENT_H_
#define TFO_CC_CORE_FILTER_GRADIENT_H_

#include "cc/core/correlate.h"

namespace tfo::TFO_ISA {
namespace {

// Bounds the memory of all partial sums together, unless one filter gradient
// alone is larger.
constexpr std::int64_t kPartialSumBytes = 4 << 20;
constexpr std::int64_t kMaxSlices = 16;
// Long enough that loading and storing a tile's sums does not count, short
// enough for the first-level cache.
constexpr std::int64_t kPixelsPerBand = 256;

template <class T>
struct FilterGradient {
  Windows<T> x;
  Source<T> dz;
  AddressMap dz_map;
  ConvShape shape;
  T* filters_gradient;  // null: not wanted; likewise the others
  T* bias_gradient;
  T* side_input_gradient;
};

template <class A>
TFO_INLINE void AddColumnSums(const A* rows, std::int64_t num_rows, A* sums) {
  constexpr int lanes = kLanes<A>;
  for (int j = 0; j < kTileColumns<A>; j += lanes) {
    Vec<A> sum{};
    for (std::int64_t i = 0; i < num_rows; ++i)
      sum += Load(rows + i * kTileColumns<A> + j);
    Store(sums + j, Load(sums + j) + sum);
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

// Adds the slices of [rows, columns padded to panels] sums and writes them with
// the filters' own layout.
template <class T>
void ReduceSlices(const Accumulator<T>* partial, std::int64_t slices,
                  std::int64_t slice_size, std::int64_t rows,
                  std::int64_t channels, std::int64_t columns,
                  const FilterMap& map, T* to, const Parallel& parallel) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  const std::int64_t padded = NumPanels<A>(columns) * kTileColumns<A>;
  auto task = [&](std::int64_t row, int) {
    T* target = to + row / channels * map.matrix + row % channels * map.row;
    for (std::int64_t j = 0; j < columns; j += lanes) {
      const A* from = partial + row * padded + j;
      Vec<A> sum = Load(from);
      for (std::int64_t s = 1; s < slices; ++s)
        sum += Load(from + s * slice_size);
      const int n = static_cast<int>(Min(lanes, columns - j));
      if (map.column != 1) {
        for (int l = 0; l < n; ++l)
          StoreOne(target + (j + l) * map.column, static_cast<A>(sum[l]));
      } else if (n == lanes) {
        StoreAs(target + j, sum);
      } else {
        StoreAsPartial(target + j, sum, n);
      }
    }
  };
  ParallelFor(parallel, rows, slices * columns, task);
}

template <class T>
bool ComputeFilterGradient(const FilterGradient<T>& g, const Parallel& parallel,
                           const Scratch& scratch) {
  using A = Accumulator<T>;
  constexpr int kColumns = kTileColumns<A>;
  const ConvShape& s = g.shape;
  const bool products = g.filters_gradient != nullptr;
  const std::int64_t panels = NumPanels<A>(s.out_c);
  const std::int64_t rows = products ? g.x.taps.count * s.in_c : 0;
  const FilterMap filter_map = s.filters_transposed
                                   ? FilterMap{1, s.in_c, s.in_c * s.out_c}
                                   : FilterMap{s.out_c, 1, s.in_c * s.out_c};
  if (s.batch * s.out_h * s.out_w * panels == 0) {
    if (products) Zero(g.filters_gradient, rows * s.out_c);
    if (g.bias_gradient != nullptr) Zero(g.bias_gradient, s.out_c);
    return true;
  }

  const bool direct = g.x.ReadDirectly();
  const std::int64_t pitch = s.in_c;
  const Bands bands = CutIntoBands(g.x, pitch, kPixelsPerBand);
  const std::int64_t row_pitch =
      direct ? g.x.map.h : bands.source_columns * pitch;
  const std::int64_t num_bands = s.batch * bands.down * bands.across;

  // The last row of a slice's sums is the bias gradient.
  const std::int64_t padded = panels * kColumns;
  const std::int64_t slice_size = (rows + 1) * padded;
  const std::int64_t slices =
      Max(1, Min(Min(num_bands, kMaxSlices),
                 kPartialSumBytes / static_cast<std::int64_t>(sizeof(A)) /
                     slice_size));
  const std::int64_t groups = Min(panels, CeilDiv(kMaxSlices, slices));
  const std::int64_t panels_per_group = CeilDiv(panels, groups);

  Segment* runs = scratch.Allocate<Segment>(g.x.taps.count + 1);
  Segment* image_rows = scratch.Allocate<Segment>(2 * bands.rows);
  A* partial = scratch.Allocate<A>(slices * slice_size);
  const std::int64_t x_size =
      direct || !products
          ? 0
          : bands.source_rows * bands.source_columns * pitch + kLanes<A>;
  const std::int64_t dz_size = bands.rows * bands.columns * kColumns;
  A* gathered = scratch.Allocate<A>((x_size + dz_size) * parallel.num_workers);
  if (runs == nullptr || image_rows == nullptr || partial == nullptr ||
      gathered == nullptr) {
    return false;
  }
  // Rows of dw that lie together under x: a tap's channels, or those of several
  // neighbouring taps.
  const std::int64_t num_runs =
      products ? BuildSegments(g.x.taps, s.in_c, pitch, row_pitch, runs) : 0;

  auto task = [&](std::int64_t index, int worker) {
    const std::int64_t slice = index / groups, group = index % groups;
    const std::int64_t first_panel = group * panels_per_group;
    const std::int64_t last_panel = Min(panels, first_panel + panels_per_group);
    A* sums = partial + slice * slice_size;
    A* bias_sums = sums + rows * padded;
    A* x_band = gathered + worker * (x_size + dz_size);
    A* dz_band = x_band + x_size;
    if (first_panel < last_panel) {
      Zero(bias_sums + first_panel * kColumns,
           (last_panel - first_panel) * kColumns);
    }
    const std::int64_t first_band = num_bands * slice / slices;
    const std::int64_t last_band = num_bands * (slice + 1) / slices;
    for (std::int64_t band = first_band; band < last_band; ++band) {
      const std::int64_t j0 = band % bands.across * bands.columns;
      const std::int64_t i0 = band / bands.across % bands.down * bands.rows;
      const std::int64_t n = band / bands.across / bands.down;
      const std::int64_t height = Min(bands.rows, s.out_h - i0);
      const std::int64_t width = Min(bands.columns, s.out_w - j0);
      const std::int64_t h = i0 * s.stride_h + g.x.taps.min_h,
                         w = j0 * s.stride_w + g.x.taps.min_w;
      const A* x = x_band;
      if (products && direct) {
        x = reinterpret_cast<const A*>(g.x.source.data +
                                       g.x.map.Offset(n, h, w));
      } else if (products) {
        Gather(g.x.source, g.x.map, n, s.in_h, s.in_w,
               {h, w, 0, bands.source_rows, bands.source_columns, s.in_c},
               x_band, pitch);
      }
      const Segment* lines =
          width == bands.columns ? image_rows : image_rows + bands.rows;
      for (std::int64_t panel = first_panel; panel < last_panel; ++panel) {
        const std::int64_t channel = panel * kColumns;
        const std::int64_t num_columns = Min(s.out_c - channel, kColumns);
        const Box box{i0, j0, channel, height, width, num_columns};
        Gather(g.dz, g.dz_map, n, s.out_h, s.out_w, box, dz_band, kColumns);
        if (g.bias_gradient != nullptr) {
          AddColumnSums(dz_band, height * width, bias_sums + channel);
        }
        if (g.side_input_gradient != nullptr) {
          ScatterPanel(dz_band, g.dz_map, n, box, g.side_input_gradient);
        }
        A* c = sums + channel;
        for (std::int64_t run = 0; run < num_runs; ++run) {
          const std::int64_t length = runs[run].length;
          const std::int64_t tile_rows = EvenPart(length, kTileRows);
          for (std::int64_t i = 0; i < length; i += tile_rows) {
            const int num_rows = static_cast<int>(Min(length - i, tile_rows));
            SelectTile<A, false>(num_rows, static_cast<int>(num_columns))(
                {x + runs[run].offset + i, 1, s.stride_w * pitch, lines, height,
                 dz_band, kColumns, c, padded, band != first_band});
            c += num_rows * padded;
          }
        }
      }
    }
  };
  // The rows of a band under the first tap: whole ones, then those of the last
  // band across.
  const std::int64_t last_width = s.out_w - (bands.across - 1) * bands.columns;
  for (std::int64_t i = 0; i < bands.rows; ++i) {
    image_rows[i] = {i * s.stride_h * row_pitch, bands.columns};
    image_rows[bands.rows + i] = {i * s.stride_h * row_pitch, last_width};
  }
  ParallelFor(
      parallel, slices * groups,
      num_bands * bands.rows * bands.columns / slices * Max(rows, 1) * kColumns,
      task);

  if (products) {
    ReduceSlices(partial, slices, slice_size, rows, s.in_c, s.out_c, filter_map,
                 g.filters_gradient, parallel);
  }
  if (g.bias_gradient != nullptr) {
    ReduceSlices(partial + rows * padded, slices, slice_size, 1, 1, s.out_c,
                 {0, 1, 0}, g.bias_gradient, parallel);
  }
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_FILTER_GRADIENT_H_
