// What a filter gradient is asked for, and how its work is cut.
#ifndef TFO_CC_CORE_FILTER_GRADIENT_PLAN_H_
#define TFO_CC_CORE_FILTER_GRADIENT_PLAN_H_

#include "cc/core/dense_gradient.h"
#include "cc/core/pixel_operands.h"
#include "cc/core/windows.h"

namespace tfo::TFO_ISA {
namespace {

// Bounds the memory of all partial sums together, unless one filter gradient
// alone is larger.
constexpr std::int64_t kPartialSumBytes = 4 << 20;
constexpr std::int64_t kMaxSlices = 16;
// Each group of panels gathers x anew, so there are no more than keep all
// workers busy, and as many as bound what is gathered of dz at a time.
constexpr std::int64_t kTasksPerWorker = 2;
// Tasks that are enough without groups.
constexpr std::int64_t kEnoughSlices = 8;
// Multiply-adds and channels of x that are worth a block of their own.
constexpr std::int64_t kBlockWork = 1 << 20;
template <class T>
constexpr std::int64_t kLeastBlock = 2 * kTileRows<Operand<T>>;

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
// time with the larger one). Sums that no cache holds are better loaded and
// stored for fewer bands (measured with AVX-512, dense layers of 1024 to 4096
// channels: 0.75 to 0.9 of the time). Processors without AVX-512 often have no
// more than 512 KB (measured on a Zen 3: 0.93 to 0.99 of the time, beside the
// portions for others).
constexpr Portion kSeveralTaps{512, 384 << 10, 512 << 10};
#if defined(__AVX512F__)
constexpr Portion kOneTap{128, 256 << 10, 256 << 10};
constexpr Portion kLargeSums{384, 192 << 10, 1 << 20};
#else
constexpr Portion kOneTap{192, 192 << 10, 192 << 10};
constexpr Portion kLargeSums{256, 192 << 10, 320 << 10};
#endif
constexpr std::int64_t kLargeSumsBytes = 2 << 20;

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

// How the work is cut. What is summed in which order is a function of the shape
// alone; which panels a task has is not.
struct FilterGradientPlan {
  std::int64_t block;  // channels of x at a time
  // Channels of x lie apart, `pitch` elements, and the pixels of an image are
  // one line under all taps; so are images. In dz there are zeros where x's
  // rows, of `line` pixels, are longer, between images, and before and behind
  // all of them: products begin where x does at a cache line, under whatever
  // tap. So dz also comes as pairs that begin at odd pixels.
  bool transposed;
  bool taps_apart;  // each tap leaves out the pixels that it does not meet
  std::int64_t line, dz_image, dz_front, dz_back;
  std::int64_t parities;
  std::int64_t pitch, row_pitch;
  std::int64_t k_stride;  // between operands of a line
  std::int64_t columns;   // gathered for a band
  PairedColumns pairs;
  bool direct;
  Bands bands;
  std::int64_t image_pitch;
  std::int64_t num_bands, panels, rows;
  std::int64_t slices, groups, panels_per_group, fitting_panels;
  std::int64_t blocks, blocks_per_group;

  std::int64_t BlockGroups() const { return CeilDiv(blocks, blocks_per_group); }
  // The filter gradient itself holds the sums; of 16-bit types, which have no
  // more than one band then, takes them as they are done.
  bool in_place;
  // Its rows are written from one end to the other, panel after panel: columns
  // that lie pages apart take several times as long (measured with AVX-512, up
  // to 16 rows of 4096x4096).
  bool by_rows;
  bool streamed;  // past the caches

  // Sums lie as the tiles write them: [slice, panel, row, column of the panel].
  // The last row of a panel is the bias gradient.
  TFO_INLINE std::int64_t SumRows() const { return in_place ? 0 : rows; }
  template <class A>
  TFO_INLINE std::int64_t PanelSize() const {
    return (SumRows() + 1) * kTileColumns<A>;
  }
};

// The pixels that are gathered at a time.
struct FilterGradientBand : Band {
  std::int64_t index;
  bool first;  // of its slice
};

// A number of parts between half of `most` and that, for which parts of `total`
// that two workers share differ least (measured with two threads: 0.87 of the
// time of 3x3 convolutions of 128 channels, beside seven slices of 16 bands).
TFO_INLINE std::int64_t EvenCount(std::int64_t total, std::int64_t most) {
  const auto excess = [total](std::int64_t parts) {
    return CeilDiv(total, parts) * EvenTasks(parts, 1, 2) - total;
  };
  std::int64_t best = most;
  for (std::int64_t parts = most; 2 * parts >= most; --parts)
    if (excess(parts) < excess(best)) best = parts;
  return best;
}

// The pixels at the end of one of x's lines that are also those at the
// beginning of the next: padding of both, and nothing that dz meets. Likewise
// of images.
TFO_INLINE std::int64_t SharedPadding(std::int64_t first, std::int64_t length,
                                      std::int64_t size, std::int64_t of_dz) {
  const std::int64_t behind = first + length - size;
  return Max(Min(Min(-first, behind), length - of_dz), 0);
}

// The pixels of a band's lines that meet the image under a tap of each row.
template <class T>
Range PixelsInside(const Windows<T>& x, std::int64_t tap, const Band& band) {
  return Inside(band.w + tap * x.taps.ColumnStep(), x.stride_w, band.columns,
                x.width);
}

// Whether products of `block` channels that lie `pitch` apart take less time
// when each tap leaves out what it does not meet; where pixels touch, they have
// tiles for all taps of a row at once otherwise.
template <class T>
bool TapsPayApart(const Windows<T>& x, const Bands& bands, std::int64_t block,
                  std::int64_t pitch) {
  using E = Operand<T>;
  const Band band(x, bands, 0);
  const std::int64_t taps = x.taps.PerRow();
  std::int64_t apart = 0;
  for (std::int64_t tap = 0; tap < taps; ++tap) {
    const Range inside = PixelsInside(x, tap, band);
    apart += StepTime<E>(block) * (inside.end - inside.begin);
  }
  const std::int64_t together =
      pitch == block ? StepTime<E>(block * taps) : taps * StepTime<E>(block);
  return apart < together * band.columns;
}

// Cuts x into blocks of so many channels, bands and slices.
template <class T>
void CutInput(const FilterGradient<T>& g, const Portion& portion,
              std::int64_t block, FilterGradientPlan* plan) {
  using A = Accumulator<T>;
  constexpr bool kPaired = kElements<Operand<T>> > 1;
  const ConvShape& s = g.shape;
  FilterGradientPlan& p = *plan;
  p.block = block;
  p.blocks = CeilDiv(Max(s.in_c, 1), Max(block, 1));
  // Blocks of neighbouring taps must not touch: their rows of dw do not.
  p.pitch = p.direct       ? g.x.map.w
            : p.blocks > 1 ? block + kLanes<A>
                           : PixelPitch<Operand<T>>(s.in_c);
  const std::int64_t pixel_operands =
      p.transposed ? NumOperands<Operand<T>>(block) : p.pitch;
  p.bands = CutIntoBands(g.x, pixel_operands, portion.pixels, kBandBytes);
  p.line = p.bands.columns;
  if (p.transposed) {
    const std::int64_t length = p.bands.source_columns;
    const std::int64_t shared =
        p.bands.across == 1
            ? SharedPadding(g.x.taps.min_w, length, g.x.width, p.bands.columns)
            : 0;
    p.line = CeilDiv(length - shared, 2) * 2;
  }
  // Under taps above each other, every other pixel only begins a pair.
  const bool alternate =
      kPaired && g.x.taps.PerRow() == 1 && g.x.stride_w == 1 && g.x.map.c == 1;
  p.pairs = {alternate ? 2 : 1, g.x.stride_w};
  p.columns = alternate ? NumOperands<Operand<T>>(p.bands.columns)
                        : p.bands.source_columns;
  p.k_stride = (alternate ? 1 : kElements<Operand<T>> * g.x.stride_w) * p.pitch;
  p.row_pitch = p.direct       ? g.x.map.h
                : p.transposed ? p.line
                               : p.columns * p.pitch;
  p.num_bands = p.bands.Count(s.batch);
  p.panels = NumPanels<A>(s.out_c);
  p.rows = g.filters_gradient == nullptr ? 0 : g.x.taps.count * s.in_c;
  p.in_place = false;
  const std::int64_t slice_bytes = p.panels * p.PanelSize<A>() * sizeof(A);
  p.slices =
      Max(Min(Min(p.num_bands, kMaxSlices), kPartialSumBytes / slice_bytes), 1);
  // With one tap gathering weighs more than even slices: much fewer of them
  // would mean more groups.
  if (g.x.taps.count > 1) {
    p.slices = EvenCount(p.num_bands, p.slices);
  } else if (p.slices > 1) {
    p.slices -= p.slices % 2;
  }
}

template <class T>
FilterGradientPlan PlanFilterGradient(const FilterGradient<T>& g,
                                      std::int64_t num_workers) {
  using A = Accumulator<T>;
  const ConvShape& s = g.shape;
  const bool large =
      g.x.taps.count == 1 &&
      s.in_c * s.out_c * static_cast<std::int64_t>(sizeof(A)) > kLargeSumsBytes;
  const Portion& portion = large                ? kLargeSums
                           : g.x.taps.count > 1 ? kSeveralTaps
                                                : kOneTap;
  FilterGradientPlan p;
  constexpr bool kPaired = kElements<Operand<T>> > 1;
  p.transposed =
      kTransposesRows<Operand<T>> && g.x.stride_h == 1 && g.x.stride_w == 1;
  const std::int64_t x_operands = portion.x_bytes / kOperandBytes<Operand<T>> *
                                  (p.transposed ? kElements<Operand<T>> : 1);
  p.direct = !kPaired && g.x.ReadDirectly() &&
             PixelPitch<Operand<T>>(s.in_c) == s.in_c;
  // Many channels are taken in blocks, so that a band holds enough pixels.
  const std::int64_t fitting =
      Max(x_operands / (portion.pixels * g.x.stride_h * g.x.stride_w), 64) /
      kTileRows<Operand<T>> * kTileRows<Operand<T>>;
  const auto whole_tiles = [&](std::int64_t most) {
    return CeilDiv(EvenPart(s.in_c, most), kTileRows<Operand<T>>) *
           kTileRows<Operand<T>>;
  };
  CutInput(g, portion,
           !p.direct && s.in_c > fitting + fitting / 2 ? whole_tiles(fitting)
                                                       : s.in_c,
           &p);
  // And so that there are tasks.
  const std::int64_t work =
      s.batch * s.out_h * s.out_w * g.x.taps.count * s.in_c * s.out_c;
  const std::int64_t wanted =
      Min(Min(kEnoughSlices, work / kBlockWork) / (p.slices * Max(p.panels, 1)),
          s.in_c / kLeastBlock<T>);
  if (wanted > p.blocks) CutInput(g, portion, whole_tiles(s.in_c / wanted), &p);
  // Small images share a band, as long as there is one for each slice: all sums
  // are loaded and stored for every band.
  const std::int64_t image_size = p.bands.source_rows * p.row_pitch;
  const std::int64_t image_operands = image_size * (p.transposed ? p.block : 1);
  if (p.num_bands == s.batch) {
    const std::int64_t most =
        Min(Min(portion.pixels / Max(s.out_h * s.out_w, 1),
                x_operands / Max(image_operands, 1)),
            s.batch / p.slices);
    p.bands.images = EvenPart(s.batch, Max(most, 1));
    p.num_bands = p.bands.Count(s.batch);
  }
  p.image_pitch = p.direct ? g.x.map.batch : image_size;
  p.taps_apart = kElements<Operand<T>> == 1 &&
                 TapsPayApart(g.x, p.bands, p.block, p.pitch);
  p.dz_image = p.bands.rows * p.line;
  p.dz_front = 0;
  p.dz_back = 0;
  p.parities = 1;
  if (p.transposed) {
    // An odd number of cache lines, so that channels do not fall into the same
    // few sets of the first-level cache.
    constexpr std::int64_t kLineElements = 64 / sizeof(BFloat16);
    if (p.bands.images > 1) {
      p.image_pitch -= SharedPadding(g.x.taps.min_h, p.bands.source_rows,
                                     g.x.height, p.bands.rows) *
                       p.line;
      p.dz_image = p.image_pitch;
    }
    if (g.x.taps.count > 1 || p.bands.images > 1) {
      p.dz_front = kLineElements;
      p.dz_back = kLineElements;
    } else {
      p.dz_back =
          CeilDiv(p.dz_image, kLineElements) * kLineElements - p.dz_image;
    }
    p.parities = g.x.taps.count > 1 ? 2 : 1;
    const std::int64_t size = (p.bands.images - 1) * p.image_pitch +
                              image_size + g.x.taps.max_w - g.x.taps.min_w +
                              kLineElements;
    p.pitch = (CeilDiv(size, kLineElements) | 1) * kLineElements;
  }
  const std::int64_t groups =
      CeilDiv(Min(kTasksPerWorker * num_workers, kMaxSlices), p.slices);
  const std::int64_t panel_bytes = (p.bands.images * p.dz_image + p.dz_back) *
                                   kTileColumns<A> * kOperandBytes<Operand<T>> /
                                   kElements<Operand<T>>;
  p.fitting_panels = Max(portion.dz_bytes / panel_bytes, 1);
  p.panels_per_group = g.input_gradient != nullptr
                           ? p.panels
                           : Min(CeilDiv(p.panels, EvenCount(p.panels, groups)),
                                 p.fitting_panels);
  std::int64_t panel_groups = CeilDiv(p.panels, p.panels_per_group);
  // A group more, where workers then end together (measured with AMX,
  // 2048x768x3072, eight groups beside seven: 0.93 of the time).
  if (panel_groups > 1) {
    panel_groups = EvenTasks(panel_groups, p.slices, num_workers);
    p.panels_per_group = CeilDiv(p.panels, Min(panel_groups, p.panels));
    panel_groups = CeilDiv(p.panels, p.panels_per_group);
  }
  p.blocks_per_group =
      g.input_gradient != nullptr
          ? p.blocks
          : CeilDiv(p.blocks, CeilDiv(groups, Max(panel_groups, 1)));
  p.groups = panel_groups * CeilDiv(p.blocks, p.blocks_per_group);
  // Rows of neighbouring taps lie together in a tile, so they must in dw.
  const TapList& taps = g.x.taps;
  const bool ascending =
      taps.count < 2 || taps.taps[0].filter < taps.taps[taps.count - 1].filter;
  p.in_place = p.slices == 1 && !s.filters_transposed && ascending &&
               (!kIs16Bit<T> || p.num_bands == 1);
  p.by_rows = p.in_place && large;
  constexpr std::int64_t kLine = 64 / sizeof(T);
  p.streamed = p.by_rows && kTilesHold<T> && p.num_bands == 1 &&
               s.out_c % kLine == 0 &&
               reinterpret_cast<std::uintptr_t>(g.filters_gradient) % 64 == 0 &&
               p.rows * s.out_c * static_cast<std::int64_t>(sizeof(T)) >=
                   StreamedBytes();
  return p;
}

// Whether the input gradient is better computed with the filter gradient; a
// function of the shape alone. What saves reading dz twice costs caches room:
// of operands in parts, too much where there is more of x than of dz (measured
// with AMX, 1x1 convolutions of 512 to 128, 256 to 64 and 128 to 64 channels:
// 1.06 to 1.12 of the time; 256 to 128 and 256 to 256: 1.0).
template <class T>
bool JoinsInputGradient(const FilterGradient<T>& g) {
  if (!IsDense(g.shape) || g.filters_gradient == nullptr ||
      g.shape.in_c * g.shape.out_c == 0 ||
      (kPlanes<Operand<T>> > 1 && g.shape.in_c > g.shape.out_c)) {
    return false;
  }
  const FilterGradientPlan p = PlanFilterGradient(g, 1);
  return p.slices >= kEnoughSlices && p.panels <= p.fitting_panels;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_FILTER_GRADIENT_PLAN_H_
