// A filter's windows on a batch of images, cut into bands.
#ifndef TFO_CC_CORE_WINDOWS_H_
#define TFO_CC_CORE_WINDOWS_H_

#include "cc/core/integers.h"
#include "cc/core/lookahead.h"
#include "cc/core/taps.h"

namespace tfo::TFO_ISA {
namespace {

// What is gathered for one task at a time.
constexpr std::int64_t kBandBytes = 640 << 10;

// How the grid is cut into tasks; a function of the shape alone, so that
// results do not depend on threads.
struct Bands {
  std::int64_t rows, columns;                // of the grid, per band
  std::int64_t down, across;                 // bands per image
  std::int64_t source_rows, source_columns;  // gathered for a band
  std::int64_t images = 1;                   // whole ones that make up a band

  // Of `batch` images.
  TFO_INLINE std::int64_t Count(std::int64_t batch) const {
    return CeilDiv(batch, images) * down * across;
  }
  // Of one, at most.
  TFO_INLINE std::int64_t Tiles(std::int64_t most_rows) const {
    return images * rows * CeilDiv(columns, most_rows);
  }
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

  // Operands of a tap.
  TFO_INLINE std::int64_t TapDepth() const {
    return NumOperands<Operand<T>>(channels);
  }

  // Whether memory can be read as it is: the engine's type and layout, and no
  // tap beyond the image's edge.
  TFO_INLINE bool ReadDirectly() const {
    return kHoldsOperands<T> && channels % kElements<Operand<T>> == 0 &&
           source.saved == nullptr && map.c == 1 && taps.min_h >= 0 &&
           taps.min_w >= 0 && (grid_h - 1) * stride_h + taps.max_h < height &&
           (grid_w - 1) * stride_w + taps.max_w < width;
  }

  // Whether the rows of a tile, which are read side by side, lie whole periods
  // apart: of a page, all in the same set of the first-level cache (measured
  // with AVX-512: 1.8 to 2 times the time of gathered ones; but 0.95 to 0.99
  // half a page or less apart, where as many ways hold them).
  TFO_INLINE bool PixelsCollide(std::int64_t period_bytes = 4096) const {
    return stride_w * map.w * std::int64_t{sizeof(T)} % period_bytes == 0;
  }

  // Where in memory the window of a grid pixel begins, which may be outside.
  TFO_INLINE std::int64_t WindowAt(std::int64_t n, std::int64_t i,
                                   std::int64_t j) const {
    return map.Offset(n, i * stride_h + taps.min_h, j * stride_w + taps.min_w);
  }

  // What lies behind the band that begins at source pixel (h, w) of image n,
  // for a time of `steps` tiles.
  TFO_INLINE Lookahead<T> After(const Bands& bands, std::int64_t n,
                                std::int64_t h, std::int64_t w,
                                std::int64_t steps) const {
    if (bands.images > 1) {
      return {source, map.Offset(n + bands.images, 0, 0),
              map.c == 1 ? bands.images * map.batch : 0, batch * map.batch,
              Max(steps, 1)};
    }
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

// One of them: rows [i, i + rows) and columns [j, j + columns) of the grid of
// some images. Its first window begins at source pixel (h, w), which may be
// outside.
struct Band {
  std::int64_t n, images;
  std::int64_t i, j, rows, columns;
  std::int64_t h, w;

  template <class T>
  TFO_INLINE Band(const Windows<T>& x, const Bands& bands, std::int64_t index)
      : n(index / bands.across / bands.down * bands.images),
        images(Min(bands.images, x.batch - n)),
        i(index / bands.across % bands.down * bands.rows),
        j(index % bands.across * bands.columns),
        rows(Min(bands.rows, x.grid_h - i)),
        columns(Min(bands.columns, x.grid_w - j)),
        h(i * x.stride_h + x.taps.min_h),
        w(j * x.stride_w + x.taps.min_w) {}
};

template <class T>
TFO_INLINE Bands CutIntoBands(const Windows<T>& x, std::int64_t pitch,
                              std::int64_t pixels_per_band,
                              std::int64_t bytes) {
  const std::int64_t elements = bytes / kOperandBytes<Operand<T>>;
  const std::int64_t reach_h = x.taps.max_h - x.taps.min_h,
                     reach_w = x.taps.max_w - x.taps.min_w;
  const std::int64_t budget = Max(elements / Max(pitch, 1), 1);
  Bands b;
  // A whole row of the grid if its source rows fit, otherwise a part of one, in
  // whole tiles.
  std::int64_t most_columns =
      (Min(budget, pixels_per_band * x.stride_w) / (reach_h + 1) - reach_w) /
      x.stride_w;
  most_columns =
      Max(most_columns / kTileRows<Operand<T>>, 1) * kTileRows<Operand<T>>;
  b.columns =
      x.grid_w <= most_columns
          ? Max(x.grid_w, 1)
          : CeilDiv(EvenPart(x.grid_w, most_columns), kTileRows<Operand<T>>) *
                kTileRows<Operand<T>>;
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

// One axis of an image as a filter of one tap sees it: what lies between its
// strides might as well not be there.
struct SeenAxis {
  std::int64_t size, step, stride;

  static TFO_INLINE SeenAxis Of(std::int64_t size, std::int64_t kernel,
                                std::int64_t stride, std::int64_t pad,
                                std::int64_t grid) {
    const bool between = kernel == 1 && pad == 0 && (grid - 1) * stride < size;
    return between ? SeenAxis{grid, stride, 1} : SeenAxis{size, 1, stride};
  }
};

// Where x and z, and with it dz, lie in memory.
TFO_INLINE AddressMap InputMap(const ConvShape& s) {
  return AddressMap::Of(s.in_h, s.in_w, s.InputChannels(),
                        s.input_channels_first);
}
TFO_INLINE AddressMap OutputMap(const ConvShape& s) {
  return AddressMap::Of(s.out_h, s.out_w, s.OutputChannels(),
                        s.output_channels_first);
}

// dz = dy * slope.
template <class T>
TFO_INLINE Source<T> PreActivationGradient(const ConvGradientArgs& args) {
  return {static_cast<const T*>(args.dy),
          args.activation == Activation::kNone
              ? nullptr
              : static_cast<const T*>(args.saved),
          args.activation, static_cast<Accumulator<T>>(args.alpha)};
}

// x under the forward filter.
template <class T>
TFO_INLINE Windows<T> InputWindows(const ConvShape& s, const void* x,
                                   const TapList& taps) {
  const SeenAxis h =
      SeenAxis::Of(s.in_h, s.kernel_h, s.stride_h, s.pad_top, s.out_h);
  // Pixels of a layout with channels first are read as runs.
  const SeenAxis w =
      s.input_channels_first
          ? SeenAxis{s.in_w, 1, s.stride_w}
          : SeenAxis::Of(s.in_w, s.kernel_w, s.stride_w, s.pad_left, s.out_w);
  AddressMap map = InputMap(s);
  map.h *= h.step;
  map.w *= w.step;
  return {{static_cast<const T*>(x), nullptr, Activation::kNone, 0},
          map,
          s.batch,
          h.size,
          w.size,
          s.in_c,
          taps,
          h.stride,
          w.stride,
          s.out_h,
          s.out_w};
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_WINDOWS_H_
