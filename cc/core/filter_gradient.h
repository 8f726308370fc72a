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

#include "cc/core/filter_gradient_plan.h"
#include "cc/core/gradient_panels.h"
#include "cc/core/tile.h"

namespace tfo::TFO_ISA {
namespace {

// The memory that a filter gradient takes while it is computed, and what is
// done to each of its bands.
template <class T>
class FilterGradientWork {
 public:
  FilterGradientWork(const FilterGradient<T>& g, int num_workers)
      : g_(g),
        s_(g.shape),
        p_(PlanFilterGradient(g, num_workers)),
        map_(FilterMapOf(g.shape)),
        dz_(g, p_) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    const Bands& bands = p_.bands;
    x_size_ = p_.rows == 0 || p_.direct ? 0
              : p_.transposed ? p_.block * p_.pitch / kElements<E>
                              : p_.bands.images * p_.image_pitch + kLanes<A>;
    num_lines_ = bands.images * bands.rows;
    if (g_.input_gradient != nullptr &&
        !dense_.Prepare(s_, g_.filters, {map_.column, map_.row, map_.matrix},
                        g_.input_gradient, g_.x_map, dz_.pixels(), parallel,
                        scratch)) {
      return false;
    }
    const int workers = parallel.num_workers;
    runs_ = scratch.Allocate<Segment>(g_.x.taps.count + 1);
    lines_ = scratch.Allocate<Segment>(num_lines_ * workers);
    dz_lines_ = scratch.Allocate<std::int64_t>(num_lines_ * workers);
    sums_ = scratch.Allocate<A>(p_.slices * p_.panels * p_.PanelSize<A>());
    x_ = scratch.Allocate<E>(kPlanes<E> * x_size_ * workers);
    dx_tile_ = scratch.Allocate<A>(dense_.kTileSize * workers);
    if (runs_ == nullptr || lines_ == nullptr || dz_lines_ == nullptr ||
        sums_ == nullptr || x_ == nullptr || dx_tile_ == nullptr ||
        !dz_.Allocate(g_.input_gradient != nullptr ? &dense_ : nullptr, workers,
                      scratch)) {
      return false;
    }
    num_runs_ = p_.rows > 0 ? BuildRuns() : 0;
    return true;
  }

  void AddBands(const Parallel& parallel) {
    auto task = [&](std::int64_t index, int worker) {
      const std::int64_t slice = index / p_.groups, group = index % p_.groups;
      const std::int64_t some = group / p_.BlockGroups() * p_.panels_per_group;
      const Range panels{some, Min(p_.panels, some + p_.panels_per_group)};
      const std::int64_t channels = p_.blocks_per_group * p_.block;
      const std::int64_t first_channel = group % p_.BlockGroups() * channels;
      const Range inputs{first_channel, Min(s_.in_c, first_channel + channels)};
      A* const sums = sums_ + slice * p_.panels * p_.PanelSize<A>();
      const std::int64_t first = p_.num_bands * slice / p_.slices;
      const std::int64_t last = p_.num_bands * (slice + 1) / p_.slices;
      for (std::int64_t band = first; band < last; ++band)
        AddBand(BandAt(band, band == first), panels, inputs, sums, worker);
    };
    const std::int64_t pixels = s_.batch * s_.out_h * s_.out_w;
    ParallelFor(parallel, p_.slices * p_.groups,
                pixels / p_.slices * (p_.rows + 1) * p_.panels_per_group, task);
  }

  void Reduce(const Parallel& parallel) {
    if (p_.rows > 0 && !p_.in_place) {
      constexpr std::int64_t kRows = 16;
      const std::int64_t parts = CeilDiv(s_.in_c, kRows);
      auto reduce = [&](std::int64_t index, int) {
        const std::int64_t tap = index / parts, c = index % parts * kRows;
        ReduceRows(sums_ + (tap * s_.in_c + c) * kColumns,
                   Min(kRows, s_.in_c - c), p_, s_.out_c, map_.column, map_.row,
                   g_.filters_gradient +
                       g_.x.taps.taps[tap].filter * map_.matrix + c * map_.row);
      };
      ParallelFor(parallel, g_.x.taps.count * parts,
                  kRows * p_.slices * s_.out_c, reduce);
    }
    if (g_.bias_gradient != nullptr) {
      ReduceRows(sums_ + p_.SumRows() * kColumns, 1, p_, s_.out_c, 1, 0,
                 g_.bias_gradient);
    }
  }

 private:
  using A = Accumulator<T>;
  using E = Operand<T>;
  static constexpr int kColumns = kTileColumns<A>;
  static constexpr bool kPaired = kElements<E> > 1;
  using Band = FilterGradientBand;

  // Channels of x, and where they are.
  struct Block {
    std::int64_t first, count;
    const E* x;
  };

  std::int64_t BuildRuns() {
    const TapList& taps = g_.x.taps;
    if (!p_.transposed && !p_.taps_apart) {
      return BuildSegments(taps, {0, taps.PerRow()}, p_.block, p_.pitch,
                           p_.row_pitch, runs_);
    }
    const std::int64_t pitch = p_.transposed ? 1 : p_.pitch;
    for (std::int64_t t = 0; t < taps.count; ++t) {
      const Tap& tap = taps.taps[t];
      runs_[t] = {
          (tap.h - taps.min_h) * p_.row_pitch + (tap.w - taps.min_w) * pitch,
          p_.block};
    }
    return taps.count;
  }

  Band BandAt(std::int64_t index, bool first) const {
    return {{g_.x, p_.bands, index}, index, first};
  }

  // `inputs` are channels of x.
  void AddBand(const Band& band, const Range& panels, const Range& inputs,
               A* sums, int worker) {
    const E* const dz = dz_.Of(worker);
    dz_.Gather(band, panels, inputs.begin == 0, sums, worker);
    if (g_.input_gradient != nullptr) {
      const E* const from = dz_.OfInputGradient(worker);
      for (std::int64_t m = 0; m < band.images; ++m) {
        const std::int64_t pixel =
            p_.transposed ? p_.dz_front + m * p_.dz_image : m * band.columns;
        dense_.Compute(from + pixel * dense_.kRow, band.n + m, band.j,
                       band.columns, dx_tile_ + worker * dense_.kTileSize);
      }
    }
    if (p_.rows == 0) return;
    Lookahead<T> next_dz = GradientAfter(band, panels);
    for (std::int64_t c = inputs.begin; c < inputs.end; c += p_.block) {
      const Block block =
          GatherInput(band, c, Min(p_.block, s_.in_c - c), worker);
      Lookahead<T> next_x = InputAfter(band, c, panels);
      const std::int64_t together =
          p_.by_rows || kTransposesRows<E> ? panels.end : 1;
      for (std::int64_t panel = panels.begin; panel < panels.end;
           panel += together)
        AddProducts(band, {panel, Min(panel + together, panels.end)}, block,
                    dz + (panel - panels.begin) * dz_.panel_size(), sums,
                    worker, &next_x, &next_dz);
    }
    if (p_.streamed) FlushStores();
  }

  Block GatherInput(const Band& band, std::int64_t first, std::int64_t count,
                    int worker) {
    const Windows<T>& x = g_.x;
    if (p_.direct) {
      return {
          first, count,
          reinterpret_cast<const E*>(
              x.source.data + x.map.Offset(band.n, band.h, band.w) + first)};
    }
    E* const to = x_ + worker * kPlanes<E> * x_size_;
    if constexpr (kTransposesRows<E>) {
      if (p_.transposed) {
        GatherTransposed(band, first, count, Elements<E>({to, x_size_}));
        return {first, count, to};
      }
    }
    const Box box{band.h,     band.w, first, p_.bands.source_rows,
                  p_.columns, count};
    for (std::int64_t m = 0; m < band.images; ++m) {
      E* const image = to + m * p_.image_pitch;
      if constexpr (kPaired) {
        GatherPairs(x.source, x.map, band.n + m, x.height, x.width, box,
                    p_.pairs, {image, x_size_}, p_.pitch);
      } else {
        Gather(x.source, x.map, band.n + m, x.height, x.width, box, image,
               p_.pitch, p_.row_pitch);
      }
    }
    return {first, count, to};
  }

  // Pixels take the place of channels, and lie together.
  template <class To>
  void GatherTransposed(const Band& band, std::int64_t first,
                        std::int64_t count, To to) const {
    const Windows<T>& x = g_.x;
    const AddressMap map{x.map.batch, x.map.h, x.map.c, x.map.w};
    const Range inside = Inside(band.w, 1, p_.bands.source_columns, x.width);
    // Whether all that products read is written anyway.
    const bool whole = p_.dz_front == 0 && p_.dz_back == 0 &&
                       p_.image_pitch == inside.end - inside.begin;
    if (!whole) Zero(to, count * p_.pitch);
    if (inside.begin == inside.end) return;
    WithTransform(x.source, [&](auto transform) {
      for (std::int64_t m = 0; m < band.images; ++m) {
        for (std::int64_t i = 0; i < p_.bands.source_rows; ++i) {
          const std::int64_t row = band.h + i;
          const To line = to + m * p_.image_pitch + i * p_.line;
          if (row < 0 || row >= x.height) continue;
          const std::int64_t at =
              x.map.Offset(band.n + m, row, band.w + inside.begin) +
              first * x.map.c;
          CopyRow(x.source.data + at,
                  x.source.saved == nullptr ? nullptr : x.source.saved + at,
                  map, count, inside.end - inside.begin, line + inside.begin,
                  p_.pitch, transform);
        }
      }
    });
  }

  // What follows a band in dz and, after its channels from `c` on, in x.
  Lookahead<T> GradientAfter(const Band& band, const Range& panels) const {
    const AddressMap& map = g_.dz_map;
    const std::int64_t pixels =
        map.c == 1 ? band.images * band.rows * band.columns : 0;
    const std::int64_t first = panels.begin * kColumns;
    const std::int64_t channels = Min(panels.end * kColumns, s_.out_c) - first;
    const std::int64_t begin =
        map.Offset(band.n, band.i, band.j) + pixels * map.w + first;
    const std::int64_t end = s_.batch * map.batch;
    const std::int64_t tiles = NumTiles(panels, p_.rows);
    if (channels == s_.out_c)
      return {g_.dz, begin, pixels * channels, end, tiles};
    return {g_.dz, begin, pixels, channels, map.w, end, tiles};
  }

  Lookahead<T> InputAfter(const Band& band, std::int64_t c,
                          const Range& panels) const {
    const Windows<T>& x = g_.x;
    const AddressMap& map = x.map;
    const std::int64_t end = s_.batch * map.batch;
    const std::int64_t tiles =
        NumTiles(panels, x.taps.count * Min(p_.block, s_.in_c - c));
    if (p_.block < s_.in_c) {
      const bool last = c + p_.block >= s_.in_c;
      const Band next = last ? BandAt(band.index + 1, false) : band;
      const std::int64_t first = last ? 0 : c + p_.block;
      const std::int64_t pixels =
          map.c != 1 ? 0
          : p_.bands.images > 1
              ? next.images * x.height * x.width
              : (p_.bands.across > 1 ? p_.bands.source_columns
                                     : p_.bands.source_rows * x.width);
      return {
          x.source, map.Offset(next.n, Max(next.h, 0), Max(next.w, 0)) + first,
          pixels,   Min(p_.block, s_.in_c - first),
          map.w,    end,
          tiles};
    }
    return x.After(p_.bands, band.n, band.h, band.w, tiles);
  }

  std::int64_t NumTiles(const Range& panels, std::int64_t rows) const {
    return Max((panels.end - panels.begin) * CeilDiv(rows, kTileRows<E>), 1);
  }

  // What the products of a run are summed over.
  struct Pixels {
    const E* x;
    std::int64_t x_row;  // from one of its rows to the next
    const E* dz;
    const Segment* lines;
    std::int64_t num_lines;
    const std::int64_t* dz_lines;  // where those of dz begin; null: together
  };

  Pixels PixelsUnder(std::int64_t run, const Band& band, const Block& block,
                     const E* dz, int worker) const {
    const TapList& taps = g_.x.taps;
    const std::int64_t runs_per_row = num_runs_ / Max(taps.rows, 1);
    Segment* const lines = lines_ + worker * num_lines_;
    std::int64_t* const dz_lines = dz_lines_ + worker * num_lines_;
    // Pixels whose tap lies beyond the image add nothing.
    const Range inside = Inside(band.h + run / runs_per_row * taps.RowStep(),
                                g_.x.stride_h, band.rows, g_.x.height);
    if (!p_.transposed) {
      const std::int64_t length = NumOperands<E>(band.columns);
      const Range columns = p_.taps_apart
                                ? PixelsInside(g_.x, run % runs_per_row, band)
                                : Range{0, length};
      std::int64_t count = 0;
      for (std::int64_t i = inside.begin; i < inside.end; ++i) {
        for (std::int64_t m = 0; m < band.images; ++m, ++count) {
          lines[count] = {m * p_.image_pitch +
                              i * g_.x.stride_h * p_.row_pitch +
                              columns.begin * p_.k_stride,
                          columns.end - columns.begin};
          dz_lines[count] =
              ((i * band.images + m) * length + columns.begin) * kColumns;
        }
      }
      const E* const x = block.x + runs_[run].offset;
      if (p_.taps_apart) return {x, 1, dz, lines, count, dz_lines};
      return {x, 1, count > 0 ? dz + dz_lines[0] : dz, lines, count, nullptr};
    }
    // Whole steps of a tile, of x from cache lines on; what they have too much
    // adds nothing.
    constexpr std::int64_t kStep = 64 / sizeof(BFloat16);
    constexpr std::int64_t kPair = kElements<E>;
    const std::int64_t shift = runs_[run].offset;
    const std::int64_t begin = (shift + inside.begin * p_.line) / kStep * kStep;
    const std::int64_t last = (band.images - 1) * p_.image_pitch;
    const std::int64_t end =
        CeilDiv(shift + last + inside.end * p_.line, kStep) * kStep;
    const std::int64_t pixel = p_.dz_front + begin - shift;
    *lines = {begin / kPair, (end - begin) / kPair};
    *dz_lines = pixel / kPair * kColumns + pixel % kPair * dz_.parity_size();
    return {block.x, p_.pitch / kPair,          dz,
            lines,   inside.begin < inside.end, dz_lines};
  }

  // Adds the products of a block of x and some panels of dz.
  void AddProducts(const Band& band, const Range& panels, const Block& block,
                   const E* dz, A* sums, int worker, Lookahead<T>* next_x,
                   Lookahead<T>* next_dz) {
    const TapList& taps = g_.x.taps;
    const bool whole = p_.block == s_.in_c;
    PrefetchList prefetch;
    std::int64_t row_offset[kTileRows<E>];
    for (int i = 0; i < kTileRows<E>; ++i)
      row_offset[i] = i * (p_.transposed ? p_.pitch / kElements<E> : 1);
    // What tiles have in common is set once: there are few steps to each.
    TileOperands<E> tile{};
    tile.row_offset = row_offset;
    tile.k_stride = p_.k_stride;
    tile.b_stride = kColumns;
    tile.prefetch = &prefetch;
    tile.a_plane = x_size_;
    tile.b_plane = dz_.plane();
    tile.y_stride = map_.row;
    tile.stream = p_.streamed;
    std::int64_t first_row = block.first;
    for (std::int64_t run = 0; run < num_runs_; ++run) {
      const std::int64_t length = whole ? runs_[run].length : block.count;
      const EvenParts parts(length, kTileRows<E>);
      const Pixels pixels = PixelsUnder(run, band, block, dz, worker);
      tile.segments = pixels.lines;
      tile.num_segments = pixels.num_lines;
      tile.b_offset = pixels.dz_lines;
      const std::int64_t out =
          taps.taps[first_row / s_.in_c].filter * map_.matrix +
          first_row % s_.in_c * map_.row;
      for (std::int64_t part = 0, i = 0; i < length; ++part) {
        const int num_rows = static_cast<int>(parts.Size(part));
        for (std::int64_t panel = panels.begin; panel < panels.end;) {
          const std::int64_t columns = s_.out_c - panel * kColumns;
          const int num_columns = static_cast<int>(Min(columns, kColumns));
          A edge[kTileRows<E> * kColumns];
          A* c = edge;
          std::int64_t c_stride = kColumns;
          T* to = nullptr;
          bool in_edge = false;
          if (!p_.in_place) {
            c = sums + panel * p_.PanelSize<A>() + (first_row + i) * kColumns;
          } else {
            to = g_.filters_gradient + out + i * map_.row + panel * kColumns;
            // Not of T, or with a vector that reaches over the end of a row.
            in_edge = !kTilesHold<T> || num_columns % kLanes<A> != 0;
            if constexpr (std::is_same_v<T, A>) {
              if (!in_edge) {
                c = to;
                c_stride = map_.row;
              } else if (!band.first) {
                CopyRows(to, map_.row, num_rows, num_columns, edge);
              }
            }
          }
          tile.a = pixels.x + i * pixels.x_row;
          tile.b = pixels.dz + (panel - panels.begin) * dz_.panel_size();
          tile.start = band.first ? nullptr : c;
          tile.c = c;
          tile.start_stride = tile.c_stride = c_stride;
          tile.num_panels = 1;
          if constexpr (kTilesHold<T>) {
            const bool in_tile =
                p_.in_place && !in_edge && (kIs16Bit<T> || p_.streamed);
            tile.y = in_tile ? to : nullptr;
          }
          prefetch.Clear();
          if (p_.by_rows && band.first && !in_edge) {
            tile.JoinPanels(Min(columns, (panels.end - panel) * kColumns),
                            dz_.panel_size());
          } else if (kTransposesRows<E> && !p_.in_place) {
            tile.num_panels = static_cast<int>(panels.end - panel);
            tile.b_panel = dz_.panel_size();
            tile.c_panel = p_.PanelSize<A>();
          } else if (p_.in_place) {
            // The next tile's sums, which lie lines apart (measured on an
            // Emerald Rapids, 2048x768x3072: 0.89 of the time, beside this
            // tile's).
            const T* const next =
                p_.by_rows ? to + kColumns : to + num_rows * map_.row;
            for (int j = 0; j < num_columns; j += 64 / sizeof(T)) {
              prefetch.Add(next + j, num_rows,
                           map_.row * static_cast<std::int64_t>(sizeof(T)));
            }
          }
          next_x->Advance(tile.num_panels, &prefetch);
          next_dz->Advance(tile.num_panels, &prefetch);
          const int tile_columns =
              tile.num_panels > 1 ? static_cast<int>(kColumns) : num_columns;
          kTransposesRows<E>&& p_.transposed
              ? RunTile<E, kTransposesRows<E>>(num_rows, tile_columns, tile)
              : RunTile<E, false>(num_rows, tile_columns, tile);
          for (int row = 0; in_edge && row < num_rows; ++row) {
            for (int j = 0; j < num_columns; j += kLanes<A>) {
              StoreColumns(to + row * map_.row + j,
                           Load(edge + row * kColumns + j),
                           Min(num_columns - j, kLanes<A>), 1);
            }
          }
          panel += tile.num_panels;
        }
        i += num_rows;
      }
      first_row += whole ? length : s_.in_c;
    }
  }

  // Copies what a tile has of rows that are `stride` apart.
  static void CopyRows(const A* from, std::int64_t stride, int rows,
                       int columns, A* tile) {
    for (int i = 0; i < rows; ++i)
      __builtin_memcpy(tile + i * kColumns, from + i * stride,
                       columns * sizeof(A));
  }

  const FilterGradient<T>& g_;
  const ConvShape& s_;
  const FilterGradientPlan p_;
  const FilterMap map_;
  DenseInputGradient<T> dense_;
  // Rows of dw that lie together under x: a tap's channels, or those of several
  // neighbouring taps.
  Segment* runs_;
  std::int64_t num_runs_;
  // Of each worker: the lines of a band that a run meets, in the order of dz.
  Segment* lines_;
  std::int64_t* dz_lines_;
  std::int64_t num_lines_;
  A* sums_;
  GradientPanels<T> dz_;
  // Of each worker: what is gathered of x; a tile of dx.
  E* x_;
  A* dx_tile_;
  std::int64_t x_size_;
};

template <class T>
bool ComputeFilterGradient(const FilterGradient<T>& g, const Parallel& parallel,
                           const Scratch& scratch) {
  const ConvShape& s = g.shape;
  const bool empty = s.batch * s.out_h * s.out_w * s.out_c == 0;
  if (g.filters_gradient != nullptr &&
      (empty || g.x.taps.count < s.kernel_h * s.kernel_w)) {
    // Those of other groups lie between them.
    const std::int64_t rows = s.kernel_h * s.kernel_w * s.in_c;
    for (std::int64_t row = 0; row < rows; ++row)
      Zero(g.filters_gradient + row * s.OutputChannels(), s.out_c);
  }
  if (empty) {
    if (g.bias_gradient != nullptr) Zero(g.bias_gradient, s.out_c);
    return true;
  }
  FilterGradientWork<T> work(g, parallel.num_workers);
  if (!work.Prepare(parallel, scratch)) return false;
  work.AddBands(parallel);
  work.Reduce(parallel);
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_FILTER_GRADIENT_H_
