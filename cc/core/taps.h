// The taps of a filter as the engine sees them: displacements in the source
// image.
#ifndef TFO_CC_CORE_TAPS_H_
#define TFO_CC_CORE_TAPS_H_

#include "cc/core/conv.h"
#include "cc/core/micro_kernel.h"

namespace tfo::TFO_ISA {
namespace {

// Grid pixel (i, j) reads source pixel (i * stride_h + h, j * stride_w + w)
// through matrix `filter` = r * kernel_w + s.
struct Tap {
  std::int64_t h, w, filter;
};

// In ascending order of h: `rows` rows, equally far apart and with the same
// displacements in w.
struct TapList {
  Tap* taps;
  std::int64_t count = 0, rows = 0;
  std::int64_t min_h = 0, max_h = 0, min_w = 0, max_w = 0;

  TFO_INLINE void Add(const Tap& tap) {
    if (count == 0) {
      min_h = max_h = tap.h;
      min_w = max_w = tap.w;
    }
    rows += count == 0 || tap.h != max_h;
    min_h = tap.h < min_h ? tap.h : min_h;
    max_h = tap.h > max_h ? tap.h : max_h;
    min_w = tap.w < min_w ? tap.w : min_w;
    max_w = tap.w > max_w ? tap.w : max_w;
    taps[count++] = tap;
  }

  TFO_INLINE std::int64_t PerRow() const { return rows > 0 ? count / rows : 0; }
  TFO_INLINE std::int64_t RowStep() const {
    return rows > 1 ? (max_h - min_h) / (rows - 1) : 1;
  }
  TFO_INLINE std::int64_t ColumnStep() const {
    return PerRow() > 1 ? (max_w - min_w) / (PerRow() - 1) : 1;
  }
};

struct Range {
  std::int64_t begin, end;
};

// The i of [0, count) for which begin + i * step lies in [0, size); step > 0.
TFO_INLINE Range Inside(std::int64_t begin, std::int64_t step,
                        std::int64_t count, std::int64_t size) {
  // Most often all of them do, and there is nothing to divide.
  if (begin >= 0 && begin + (count - 1) * step < size) return {0, count};
  const std::int64_t first = begin < 0 ? (-begin + step - 1) / step : 0;
  const std::int64_t end = begin < size ? (size - 1 - begin) / step + 1 : 0;
  const std::int64_t last = end < count ? end : count;
  return {first < last ? first : last, last};
}

// Whether any of `grid` windows, `stride` apart, puts this tap inside an image
// of `size`. The others add nothing, and would only widen what is gathered.
TFO_INLINE bool Meets(std::int64_t tap, std::int64_t stride, std::int64_t grid,
                      std::int64_t size) {
  return tap < size && tap + (grid - 1) * stride >= 0;
}

// The forward direction: source is x, the grid is z.
TFO_INLINE void ForwardTaps(const ConvShape& s, TapList* list) {
  *list = TapList{list->taps};
  for (std::int64_t r = 0; r < s.kernel_h; ++r) {
    const std::int64_t h = r * s.dilation_h - s.pad_top;
    if (!Meets(h, s.stride_h, s.out_h, s.in_h)) continue;
    for (std::int64_t c = 0; c < s.kernel_w; ++c) {
      const std::int64_t w = c * s.dilation_w - s.pad_left;
      if (!Meets(w, s.stride_w, s.out_w, s.in_w)) continue;
      list->Add({h, w, r * s.kernel_w + c});
    }
  }
}

// The input gradient, for the pixels (phase_h + i * stride_h, phase_w + j *
// stride_w) of x, a grid of grid_h x grid_w: source is dz, and a tap counts
// only where it meets the stride. Last tap first, so that neighbouring taps are
// neighbouring pixels.
TFO_INLINE void InputGradientTaps(const ConvShape& s, std::int64_t phase_h,
                                  std::int64_t phase_w, std::int64_t grid_h,
                                  std::int64_t grid_w, TapList* list) {
  *list = TapList{list->taps};
  for (std::int64_t r = s.kernel_h - 1; r >= 0; --r) {
    const std::int64_t h = phase_h + s.pad_top - r * s.dilation_h;
    if (h % s.stride_h != 0 || !Meets(h / s.stride_h, 1, grid_h, s.out_h))
      continue;
    for (std::int64_t c = s.kernel_w - 1; c >= 0; --c) {
      const std::int64_t w = phase_w + s.pad_left - c * s.dilation_w;
      if (w % s.stride_w != 0 || !Meets(w / s.stride_w, 1, grid_w, s.out_w))
        continue;
      list->Add({h / s.stride_h, w / s.stride_w, r * s.kernel_w + c});
    }
  }
}

// Segments over a source whose pixels are `pitch` and whose rows are
// `row_pitch` apart, relative to pixel (min_h, min_w), of taps `inside` each
// row. Neighbouring taps of a row become one segment where their channels
// touch; every row has equally many.
TFO_INLINE std::int64_t BuildSegments(const TapList& list, const Range& inside,
                                      std::int64_t channels, std::int64_t pitch,
                                      std::int64_t row_pitch,
                                      Segment* segments) {
  std::int64_t count = 0;
  for (std::int64_t t = 0; t < list.count; ++t) {
    const std::int64_t column = t % list.PerRow();
    if (column < inside.begin || column >= inside.end) continue;
    const Tap& tap = list.taps[t];
    const std::int64_t offset =
        (tap.h - list.min_h) * row_pitch + (tap.w - list.min_w) * pitch;
    if (column > inside.begin &&
        segments[count - 1].offset + segments[count - 1].length == offset) {
      segments[count - 1].length += channels;
    } else {
      segments[count++] = {offset, channels};
    }
  }
  return count;
}

// The distance between pixels in gathered memory: a little more than the
// channels where rows of a tile, which are read side by side, would otherwise
// fall into the same few sets of the first-level cache. Tiles of many rows want
// an odd number of cache lines (measured with AMX: half of the time from 256
// channels on).
template <class E>
TFO_INLINE std::int64_t PixelPitch(std::int64_t channels) {
  constexpr std::int64_t kLine = 64 / sizeof(E);
  if (kTileRows<E> > kRegisterRows)
    return channels < 4 * kLine ? channels
                                : (CeilDiv(channels, kLine) | 1) * kLine;
  constexpr std::int64_t kAliasing = 1024 / sizeof(E);
  return channels >= kAliasing && channels % kAliasing == 0 ? channels + kLine
                                                            : channels;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_TAPS_H_
