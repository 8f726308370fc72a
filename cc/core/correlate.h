// The engine: source image * filters -> epilogue, for the convolution and for
// its input gradient.
#ifndef TFO_CC_CORE_CORRELATE_H_
#define TFO_CC_CORE_CORRELATE_H_

#include "cc/core/epilogue.h"
#include "cc/core/lookahead.h"
#include "cc/core/pack.h"
#include "cc/core/pixel_block.h"
#include "cc/core/scratch.h"

namespace tfo::TFO_ISA {
namespace {

// What is gathered for one task at a time; it shares the second-level cache
// with a panel of filters.
constexpr std::int64_t kBandBytes = 640 << 10;
// Panels that stay there while the band passes: a tile's rows are read, and its
// rows of the output written, for all of them in turn.
constexpr std::int64_t kPanelsBytes = 256 << 10;
// Fewer multiply-adds than this are not worth a task of their own.
constexpr std::int64_t kTaskWork = 1 << 20;
constexpr std::int64_t kWantedTasks = 32;
// Filters that meet no more pixels than this are not worth packing.
constexpr std::int64_t kUnpackedPixels = 4 * kTileRows;
// A task gathers its band anew, so it should have this many panels to use it
// for.
constexpr std::int64_t kPanelsPerTask = 8;

// How the grid is cut into tasks; a function of the shape alone, so that
// results do not depend on threads.
struct Bands {
  std::int64_t rows, columns;                // of the grid, per band
  std::int64_t down, across;                 // bands per image
  std::int64_t source_rows, source_columns;  // gathered for a band
};

// A batch of images under a filter that stops at every pixel of a grid.
template <class T>
struct Windows {
  Source<T> source;
  AddressMap map;
  std::int64_t batch, height, width, channels;
  TapList taps;
  std::int64_t stride_h, stride_w;
  std::int64_t grid_h, grid_w;

  // Whether memory can be read as it is: the engine's type and layout, and no
  // tap beyond the image's edge.
  TFO_INLINE bool ReadDirectly() const {
    return !kIs16Bit<T> && source.saved == nullptr && map.c == 1 &&
           taps.min_h >= 0 && taps.min_w >= 0 &&
           (grid_h - 1) * stride_h + taps.max_h < height &&
           (grid_w - 1) * stride_w + taps.max_w < width;
  }

  // What lies behind the band that begins at source pixel (h, w) of image n,
  // for a time of `steps` tiles.
  TFO_INLINE Lookahead<T> After(const Bands& bands, std::int64_t n,
                                std::int64_t h, std::int64_t w,
                                std::int64_t steps) const {
    const bool whole_rows = bands.across == 1;
    const std::int64_t begin =
        whole_rows ? map.Offset(n, Max(h, 0) + bands.source_rows, 0)
                   : map.Offset(n, Max(h, 0), Max(w, 0) + bands.source_columns);
    const std::int64_t size = map.c != 1   ? 0
                              : whole_rows ? bands.rows * stride_h * map.h
                                           : bands.columns * stride_w * map.w;
    return {source, begin, size, batch * map.batch, Max(steps, 1)};
  }
};

template <class T>
struct Correlation {
  Windows<T> x;
  std::int64_t out_channels;
  const T* filters;
  FilterMap filter_map;
  Epilogue<T> epilogue;
  const PixelBlock* block = nullptr;  // null: a grid pixel is one of the output

  // Whether filters are used too few times to be worth packing, and can be read
  // as they are: the engine's type, whole vectors, rows of all taps in order.
  TFO_INLINE bool ReadFiltersDirectly() const {
    if (kIs16Bit<T> || block != nullptr || filter_map.column != 1 ||
        out_channels % kLanes<Accumulator<T>> != 0 ||
        x.batch * x.grid_h * x.grid_w > kUnpackedPixels ||
        filter_map.matrix != x.channels * filter_map.row)
      return false;
    for (std::int64_t t = 0; t < x.taps.count; ++t)
      if (x.taps.taps[t].filter != t) return false;
    return true;
  }
};

template <class T>
TFO_INLINE Bands CutIntoBands(const Windows<T>& x, std::int64_t pitch,
                              std::int64_t pixels_per_band) {
  constexpr std::int64_t kElements = kBandBytes / sizeof(Accumulator<T>);
  const std::int64_t reach_h = x.taps.max_h - x.taps.min_h,
                     reach_w = x.taps.max_w - x.taps.min_w;
  const std::int64_t budget = Max(kElements / Max(pitch, 1), 1);
  Bands b;
  // A whole row of the grid if its source rows fit, otherwise a part of one, in
  // whole tiles.
  std::int64_t most_columns =
      (Min(budget, pixels_per_band * x.stride_w) / (reach_h + 1) - reach_w) /
      x.stride_w;
  most_columns = Max(most_columns / kTileRows, 1) * kTileRows;
  b.columns =
      x.grid_w <= most_columns
          ? Max(x.grid_w, 1)
          : CeilDiv(EvenPart(x.grid_w, most_columns), kTileRows) * kTileRows;
  b.source_columns = (b.columns - 1) * x.stride_w + reach_w + 1;
  const std::int64_t most_rows =
      (budget / b.source_columns - reach_h) / x.stride_h;
  b.rows =
      EvenPart(x.grid_h, Max(Min(most_rows, pixels_per_band / b.columns), 1));
  b.source_rows = (b.rows - 1) * x.stride_h + reach_h + 1;
  b.across = CeilDiv(x.grid_w, b.columns);
  b.down = CeilDiv(x.grid_h, b.rows);
  return b;
}

template <class T>
bool Correlate(const Correlation<T>& c, const Parallel& parallel,
               const Scratch& scratch) {
  using A = Accumulator<T>;
  const Windows<T>& x = c.x;
  constexpr int kColumns = kTileColumns<A>;
  const std::int64_t depth = x.taps.count * x.channels;
  const std::int64_t panels = NumPanels<A>(c.out_channels);
  if (x.batch * x.grid_h * x.grid_w * panels == 0) return true;

  const bool direct =
      x.ReadDirectly() && PixelPitch<A>(x.channels) == x.channels;
  const std::int64_t work = Max(depth, 1) * panels * kColumns;
  const std::int64_t grid = x.batch * x.grid_h * x.grid_w;
  const std::int64_t wanted =
      Max(Min(grid * work / kTaskWork, kWantedTasks), 1);
  const std::int64_t pitch = direct ? x.map.w : PixelPitch<A>(x.channels);
  // Tasks differ in panels before bands become small.
  const std::int64_t wanted_bands =
      CeilDiv(wanted, Max(panels / kPanelsPerTask, 1));
  const Bands bands =
      CutIntoBands(x, pitch, Max(CeilDiv(grid, wanted_bands), kTileRows));
  const std::int64_t row_pitch =
      direct ? x.map.h : bands.source_columns * pitch;
  const std::int64_t images_and_bands = x.batch * bands.down * bands.across;
  const std::int64_t panels_per_task =
      CeilDiv(panels, Min(panels, CeilDiv(wanted, images_and_bands)));
  const std::int64_t panel_groups = CeilDiv(panels, panels_per_task);

  const std::int64_t panels_together =
      Max(kPanelsBytes / static_cast<std::int64_t>(sizeof(A)) /
              (Max(depth, 1) * kColumns),
          1);

  Epilogue<T> epilogue = c.epilogue;
  epilogue.stream = epilogue.ShouldStream(grid * c.out_channels);

  Segment* segments = scratch.Allocate<Segment>(x.taps.count + 1);
  const bool unpacked = c.ReadFiltersDirectly();
  A* packed = scratch.Allocate<A>(unpacked ? 0 : panels * depth * kColumns);
  const std::int64_t band_size =
      direct ? 0 : bands.source_rows * bands.source_columns * pitch + kLanes<A>;
  A* gathered =
      direct ? nullptr : scratch.Allocate<A>(band_size * parallel.num_workers);
  if (segments == nullptr || packed == nullptr ||
      (!direct && gathered == nullptr))
    return false;
  // The rows of filters as the tile reads them.
  const A* b = packed;
  std::int64_t b_stride = kColumns, panel_stride = depth * kColumns;
  if (unpacked) {
    // Reading directly means that T is A.
    b = reinterpret_cast<const A*>(c.filters);
    b_stride = c.filter_map.row;
    panel_stride = kColumns;
  } else if (c.block != nullptr) {
    PackBlockFilters(c.filters, c.filter_map, x.taps, x.channels, *c.block,
                     packed);
  } else {
    PackFilters(c.filters, c.filter_map, x.taps, x.channels, c.out_channels,
                packed, parallel);
  }
  const std::int64_t segments_per_row =
      BuildSegments(x.taps, x.channels, pitch, row_pitch, segments) /
      Max(x.taps.rows, 1);
  const std::int64_t depth_per_row = x.taps.PerRow() * x.channels;

  auto task = [&](std::int64_t index, int worker) {
    const std::int64_t group = index % panel_groups;
    std::int64_t band = index / panel_groups;
    const std::int64_t across = band % bands.across;
    band /= bands.across;
    const std::int64_t i0 = band % bands.down * bands.rows,
                       n = band / bands.down;
    const std::int64_t j0 = across * bands.columns;
    const std::int64_t rows = Min(bands.rows, x.grid_h - i0);
    const std::int64_t columns = Min(bands.columns, x.grid_w - j0);
    const std::int64_t h = i0 * x.stride_h + x.taps.min_h,
                       w = j0 * x.stride_w + x.taps.min_w;
    const A* from;
    if (direct) {
      // Direct reading means that T is A.
      from = reinterpret_cast<const A*>(x.source.data + x.map.Offset(n, h, w));
    } else {
      A* to = gathered + worker * band_size;
      Gather(x.source, x.map, n, x.height, x.width,
             {h, w, 0, bands.source_rows, bands.source_columns, x.channels}, to,
             pitch);
      from = to;
    }
    const EvenParts parts(columns, kTileRows);
    const std::int64_t last_panel = Min(panels, (group + 1) * panels_per_task);
    const std::int64_t tiles =
        rows * parts.count() * (last_panel - group * panels_per_task);
    Lookahead<T> lookahead = x.After(bands, n, h, w, tiles);
    alignas(64) A tile[(kTileRows + 1) * kColumns];
    PrefetchList prefetch;
    TileOperands<A> operands{
        nullptr, x.stride_w * pitch, 1,     nullptr,  0, nullptr, b_stride,
        tile,    kColumns,           false, &prefetch};
    for (std::int64_t first = group * panels_per_task; first < last_panel;
         first += panels_together) {
      const std::int64_t last = Min(first + panels_together, last_panel);
      for (std::int64_t i = 0; i < rows; ++i) {
        // Rows of taps beyond the image add nothing.
        const Range tap_rows =
            Inside(h + i * x.stride_h, x.taps.RowStep(), x.taps.rows, x.height);
        operands.segments = segments + tap_rows.begin * segments_per_row;
        operands.num_segments =
            (tap_rows.end - tap_rows.begin) * segments_per_row;
        for (std::int64_t part = 0, j = 0; j < columns; ++part) {
          const int num_rows = static_cast<int>(parts.Size(part));
          const std::int64_t at = epilogue.map.Offset(n, i0 + i, j0 + j);
          operands.a =
              from + i * x.stride_h * row_pitch + j * x.stride_w * pitch;
          for (std::int64_t panel = first; panel < last; ++panel) {
            const std::int64_t channel = panel * kColumns;
            const int num_columns =
                static_cast<int>(Min(c.out_channels - channel, kColumns));
            operands.b = b + panel * panel_stride +
                         tap_rows.begin * depth_per_row * b_stride;
            prefetch.Clear();
            epilogue.Prefetch(at, channel, num_rows, num_columns, &prefetch);
            lookahead.Advance(&prefetch);
            TileOperands<A> finished = operands;
            const bool in_tile =
                c.block == nullptr &&
                epilogue.LeaveToTile(at, channel, num_columns, &finished);
            SelectTile<A, true>(num_rows, num_columns)(finished);
            if (in_tile) continue;
            if (c.block == nullptr) {
              WriteTile(epilogue, at, channel, tile, num_rows, num_columns);
            } else {
              WriteBlocks(epilogue, at, *c.block, i0 + i, j0 + j, tile,
                          num_rows);
            }
          }
          j += num_rows;
        }
      }
    }
    if (epilogue.stream) FlushStores();
  };
  ParallelFor(
      parallel, images_and_bands * panel_groups,
      work / Max(panel_groups, 1) * bands.rows * bands.columns / kColumns,
      task);
  return true;
}

// A 1x1 convolution of stride 1 sees pixels, not images: one row of them, over
// all images where both tensors allow it.
TFO_INLINE ConvShape Flatten(ConvShape s) {
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

// x under the forward filter.
template <class T>
TFO_INLINE Windows<T> InputWindows(const ConvShape& s, const void* x,
                                   const TapList& taps) {
  return {{static_cast<const T*>(x), nullptr, Activation::kNone, 0},
          AddressMap::Of(s.in_h, s.in_w, s.in_c, s.input_channels_first),
          s.batch,
          s.in_h,
          s.in_w,
          s.in_c,
          taps,
          s.stride_h,
          s.stride_w,
          s.out_h,
          s.out_w};
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_CORRELATE_H_
