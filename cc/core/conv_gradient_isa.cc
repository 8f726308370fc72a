#include "cc/core/block_taps.h"
#include "cc/core/exchanged.h"
#include "cc/core/few_channels.h"
#include "cc/core/few_rows.h"
#include "cc/core/filter_gradient.h"
#include "cc/core/groups.h"
#include "cc/core/small_groups_filter_gradient.h"
#include "cc/core/storage.h"
#include "cc/core/winograd.h"
#include "cc/core/winograd_filter_gradient.h"

namespace tfo::TFO_ISA {
namespace {

// What the two ways of computing an input gradient have in common.
template <class T>
struct InputGradientOperands {
  Source<T> dz;
  AddressMap dz_map, x_map;
  const T* filters;
  FilterMap filter_map;
  T* dx;
  bool winograd;  // whether Winograd's algorithm may be used
};

// Whether the pixels between the strides have so few channels that these, of
// neighbouring blocks, are best taken for columns (measured with AVX-512, 3
// channels: 0.7 of the time that they take stride by stride).
template <class A>
bool BlocksAreFewChannels(const ConvShape& s) {
  return s.groups == 1 && s.dilation_h == 1 && s.dilation_w == 1 &&
         s.stride_h * s.stride_w * s.in_c <= kTileColumns<A> &&
         PixelsFillVectors<A>(s.in_c, CeilDiv(s.in_w, s.stride_w));
}

// The pixels of x that are best computed together: those between the strides,
// or 1 x 1. Taps that some of the pixels lack are included.
template <class A>
PixelBlock ChooseBlock(const ConvShape& s, const AddressMap& map) {
  PixelBlock block{1, 1, s.in_c, s.in_h, s.in_w, map.h, map.c};
  if (BlocksAreFewChannels<A>(s) || BlocksFillVectors(s, kLanes<A>)) {
    block.h = s.stride_h;
    block.w = s.stride_w;
  }
  return block;
}

// The same by the tiles of the engine, with filters that are zero where a pixel
// lacks a tap. Of `taps`, each has a matrix of its own.
template <class T>
bool CorrelateBlocks(const InputGradientOperands<T>& g, const ConvShape& s,
                     const PixelBlock& block, const TapList& taps,
                     const Parallel& parallel, const Scratch& scratch) {
  const std::int64_t columns = block.Pixels() * s.in_c;
  const FilterMap map{1, s.out_c, columns * s.out_c};
  T* const filters = scratch.Allocate<T>(taps.count * map.matrix);
  if (filters == nullptr) return false;
  auto copy = [&](std::int64_t i, int) {
    T* to = filters + i * s.in_c * map.column;
    if (block.filters[i] < 0) return Zero(to, s.in_c * map.column);
    const T* from = g.filters + block.filters[i] * g.filter_map.matrix;
    for (std::int64_t c = 0; c < s.in_c; ++c, from += g.filter_map.column) {
      for (std::int64_t k = 0; k < s.out_c; ++k)
        *to++ = from[k * g.filter_map.row];
    }
  };
  ParallelFor(parallel, taps.count * block.Pixels(), s.in_c * map.column, copy);
  Correlation<T> c{
      {g.dz, g.dz_map, s.batch, s.out_h, s.out_w, s.out_c, taps, 1, 1,
       s.in_h / block.h, s.in_w / block.w},
      columns,
      filters,
      map,
      {g.dx,
       nullptr,
       nullptr,
       nullptr,
       Activation::kNone,
       0,
       {g.x_map.batch, g.x_map.h * block.h, g.x_map.w * block.w, 1}}};
  c.epilogue.columns_together = block.LineSize();
  c.epilogue.columns_pitch = g.x_map.h;
  return CorrelateInParts(c, parallel, scratch);
}

template <class T>
bool InputGradientInBlocks(const InputGradientOperands<T>& g,
                           const ConvShape& s, PixelBlock block,
                           const Parallel& parallel, const Scratch& scratch) {
  using A = Accumulator<T>;
  const BlockTaps rows(block.h, s.kernel_h, s.stride_h, s.pad_top);
  const BlockTaps columns(block.w, s.kernel_w, s.stride_w, s.pad_left);
  const std::int64_t count = rows.count() * columns.count();
  TapList taps{scratch.Allocate<Tap>(count)};
  auto* filters = scratch.Allocate<std::int64_t>(count * block.Pixels());
  if (taps.taps == nullptr || filters == nullptr) return false;
  std::int64_t* filter = filters;
  for (std::int64_t h = rows.begin; h < rows.end; ++h) {
    for (std::int64_t w = columns.begin; w < columns.end; ++w) {
      taps.Add({h, w, taps.count});
      for (std::int64_t p = 0; p < block.Pixels(); ++p) {
        const std::int64_t r = p / block.w + s.pad_top - h * s.stride_h;
        const std::int64_t c = p % block.w + s.pad_left - w * s.stride_w;
        const bool inside =
            r >= 0 && r < s.kernel_h && c >= 0 && c < s.kernel_w;
        *filter++ = inside ? r * s.kernel_w + c : -1;
      }
    }
  }
  block.filters = filters;
  if (BlocksFillVectors(s, kLanes<A>) &&
      (kTransposesRows<Operand<T>> || !BlocksAreFewChannels<A>(s))) {
    return CorrelateBlocks(g, s, block, taps, parallel, scratch);
  }
  return CorrelateFewChannels<T>(
      {{g.dz, g.dz_map, s.batch, s.out_h, s.out_w, s.out_c, taps, 1, 1,
        CeilDiv(s.in_h, block.h), CeilDiv(s.in_w, block.w)},
       block.Pixels() * s.in_c,
       g.filters,
       g.filter_map,
       {g.dx,
        nullptr,
        nullptr,
        nullptr,
        Activation::kNone,
        0,
        {g.x_map.batch, g.x_map.h * block.h, g.x_map.w * block.w, g.x_map.c}}},
      block, parallel, scratch);
}

// A strided convolution falls into stride_h * stride_w dense ones, each for
// every stride-th pixel of x.
struct Phases {
  std::int64_t down, across;

  explicit Phases(const ConvShape& s)
      : down(Min(s.stride_h, s.in_h)), across(Min(s.stride_w, s.in_w)) {}

  std::int64_t count() const { return down * across; }
};

// That of a phase; its taps are put into `taps`.
template <class T>
Correlation<T> OfPhase(const InputGradientOperands<T>& g, const ConvShape& s,
                       std::int64_t phase, TapList taps) {
  const std::int64_t h = phase / Phases(s).across, w = phase % Phases(s).across;
  const std::int64_t grid_h = CeilDiv(s.in_h - h, s.stride_h);
  const std::int64_t grid_w = CeilDiv(s.in_w - w, s.stride_w);
  InputGradientTaps(s, h, w, grid_h, grid_w, &taps);
  return {{g.dz, g.dz_map, s.batch, s.out_h, s.out_w, s.out_c, taps, 1, 1,
           grid_h, grid_w},
          s.in_c,
          g.filters,
          g.filter_map,
          {g.dx + g.x_map.Offset(0, h, w),
           nullptr,
           nullptr,
           nullptr,
           Activation::kNone,
           0,
           {g.x_map.batch, g.x_map.h * s.stride_h, g.x_map.w * s.stride_w,
            g.x_map.c}}};
}

// All phases of small groups together.
template <class T>
bool InputGradientOfSmallGroups(const InputGradientOperands<T>& g,
                                const ConvShape& s, TapList taps,
                                const Parallel& parallel,
                                const Scratch& scratch) {
  const std::int64_t count = Phases(s).count();
  auto* const phases = scratch.Allocate<Correlation<T>>(count);
  if (phases == nullptr) return false;
  for (std::int64_t i = 0; i < count; ++i) {
    phases[i] = OfPhase(g, s, i, taps);
    // Each tap belongs to one phase.
    taps.taps += phases[i].x.taps.count;
  }
  return count == 0 ||
         CorrelateSmallGroups(phases, count, s, parallel, scratch);
}

template <class T>
bool InputGradientInPhases(const InputGradientOperands<T>& g,
                           const ConvShape& s, TapList taps,
                           const Parallel& parallel, const Scratch& scratch) {
  SharedScratch shared(scratch);
  for (std::int64_t i = 0; i < Phases(s).count(); ++i) {
    const Correlation<T> c = OfPhase(g, s, i, taps);
    const Scratch own = shared.Next();
    const bool exchanged = IsExchanged(c);
    const std::int64_t few = exchanged ? kFewRowsOfExchanged<T> : kFewRows<T>;
    if (!(HasFewRows(c, few) ? CorrelateFewRows(c, parallel, own)
          : exchanged        ? CorrelateExchanged(c, parallel, own)
          : g.winograd && WinogradPays(s, c.x, s.in_c)
              ? CorrelateByWinograd(c, parallel, own)
          : HasFewChannels(c) ? CorrelateFewChannels(c, parallel, own)
                              : CorrelateInParts(c, parallel, own))) {
      return false;
    }
  }
  return true;
}

// Whether the columns of a filter gradient's tiles are better x's channels than
// dz's: these are few, and x and dz may change places.
template <class T>
bool ExchangesOperands(const FilterGradient<T>& g) {
  using A = Accumulator<T>;
  const ConvShape& s = g.shape;
  // Pairs of pixels are gathered as they are, unless they lie in lines.
  const bool plain = kElements<Operand<T>> == 1 ||
                     kTransposesRows<Operand<T>> || g.dz.saved == nullptr;
  return g.filters_gradient != nullptr && plain && s.groups == 1 &&
         g.x.taps.count > 1 && s.stride_h == 1 && s.stride_w == 1 &&
         2 * s.out_c * CeilDiv(s.in_c, kLanes<A>) <=
             s.in_c * CeilDiv(s.out_c, kLanes<A>);
}

// The same filter gradient as a sum over the pixels of x:
//
//   dw[r, s, c, k] = sum over pixels of dz[pixel under tap -(r, s), k] *
//   x[pixel, c]
template <class T>
bool FilterGradientExchanged(const FilterGradient<T>& g,
                             const Parallel& parallel, const Scratch& scratch) {
  const ConvShape& s = g.shape;
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  InputGradientTaps(s, 0, 0, s.in_h, s.in_w, &taps);
  const Windows<T> dz{g.dz, g.dz_map, s.batch, s.out_h, s.out_w, s.out_c,
                      taps, 1,        1,       s.in_h,  s.in_w};
  ConvShape exchanged = s;
  Swap(exchanged.in_h, exchanged.out_h);
  Swap(exchanged.in_w, exchanged.out_w);
  Swap(exchanged.in_c, exchanged.out_c);
  exchanged.filters_transposed = !s.filters_transposed;
  return ComputeFilterGradient<T>({dz, g.x.source, g.x.map, exchanged,
                                   g.filters_gradient, nullptr, nullptr},
                                  parallel, scratch);
}

// The same filter gradient of one line of pixels under one tap as a product of
// few rows.
template <class T>
Correlation<T> OfFewRows(const FilterGradient<T>& g) {
  const ConvShape& s = g.shape;
  const FilterMap map = FilterMapOf(s);
  return {{g.dz,
           {0, 0, g.dz_map.c, g.dz_map.w},
           1,
           1,
           s.out_c,
           s.out_w,
           g.x.taps,
           1,
           1,
           1,
           s.out_c},
          s.in_c,
          g.x.source.data,
          {g.x.map.w, 1, 0},
          {g.filters_gradient,
           nullptr,
           nullptr,
           nullptr,
           Activation::kNone,
           0,
           {0, 0, map.column, map.row}}};
}

// Whether that is better than tiles of few columns.
template <class T>
bool HasFewColumns(const FilterGradient<T>& g) {
  const ConvShape& s = g.shape;
  return g.filters_gradient != nullptr && s.batch * s.in_h * s.out_h == 1 &&
         s.in_w == s.out_w && s.kernel_h * s.kernel_w == 1 &&
         g.x.taps.count == 1 && g.x.taps.min_w == 0 && g.x.map.c == 1 &&
         s.out_c > 0 && s.out_c <= kFewColumns &&
         s.in_c >= kLeastColumnVectors * kLanes<Accumulator<T>>;
}

// All that a FilterGradient asks for.
template <class T>
bool FilterGradients(FilterGradient<T> g, bool winograd,
                     const Parallel& parallel, const Scratch& scratch) {
  if (HasSmallGroups<T>(g.shape))
    return SmallGroupsFilterGradient(g, parallel, scratch);
  const bool few_columns = HasFewColumns(g);
  if (few_columns || ExchangesOperands(g)) {
    if (!(few_columns ? CorrelateFewRows(OfFewRows(g), parallel, scratch)
                      : FilterGradientExchanged(g, parallel, scratch))) {
      return false;
    }
    g.filters_gradient = nullptr;
    if (g.bias_gradient == nullptr && g.side_input_gradient == nullptr)
      return true;
  }
  return winograd && g.filters_gradient != nullptr &&
                 g.side_input_gradient == nullptr &&
                 WinogradPays(g.shape, g.x, g.shape.out_c)
             ? FilterGradientByWinograd(g, parallel, scratch)
             : ComputeFilterGradient(g, parallel, scratch);
}

// All gradients, of one group or of all that are computed together.
template <class T>
bool Gradients(const ConvGradientArgs& args, const Parallel& parallel,
               const Scratch& scratch) {
  const ConvShape s = Flatten(args.shape);
  const AddressMap x_map =
      AddressMap::Of(s.in_h, s.in_w, s.InputChannels(), s.input_channels_first);
  const AddressMap dz_map = AddressMap::Of(s.out_h, s.out_w, s.OutputChannels(),
                                           s.output_channels_first);
  const Source<T> dz{static_cast<const T*>(args.dy),
                     args.activation == Activation::kNone
                         ? nullptr
                         : static_cast<const T*>(args.saved),
                     args.activation, static_cast<Accumulator<T>>(args.alpha)};
  bool wants_input = args.input_gradient != nullptr;
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  if (args.filters_gradient != nullptr || args.bias_gradient != nullptr ||
      args.side_input_gradient != nullptr) {
    ForwardTaps(s, &taps);
    FilterGradient<T> g{InputWindows<T>(s, args.input, taps),
                        dz,
                        dz_map,
                        s,
                        static_cast<T*>(args.filters_gradient),
                        static_cast<T*>(args.bias_gradient),
                        static_cast<T*>(args.side_input_gradient)};
    if (wants_input && s.groups == 1 && !HasFewColumns(g) &&
        JoinsInputGradient(g)) {
      g.input_gradient = static_cast<T*>(args.input_gradient);
      g.filters = static_cast<const T*>(args.filters);
      g.x_map = x_map;
      wants_input = false;
    }
    if (!FilterGradients(g, args.winograd, parallel, scratch)) return false;
  }
  if (!wants_input) return true;
  const FilterMap map = FilterMapOf(s);
  const InputGradientOperands<T> g{dz,
                                   dz_map,
                                   x_map,
                                   static_cast<const T*>(args.filters),
                                   {map.column, map.row, map.matrix},
                                   static_cast<T*>(args.input_gradient),
                                   args.winograd};
  if (HasSmallGroupsBackwards<T>(s))
    return InputGradientOfSmallGroups<T>(g, s, taps, parallel, scratch);
  const PixelBlock block = ChooseBlock<Accumulator<T>>(s, x_map);
  return block.Pixels() > 1
             ? InputGradientInBlocks<T>(g, s, block, parallel, scratch)
             : InputGradientInPhases<T>(g, s, taps, parallel, scratch);
}

template <class T>
bool Gradient(const ConvGradientArgs& args, const Parallel& parallel,
              const Scratch& scratch) {
  const ConvShape& s = args.shape;
  if (s.groups == 1) return Gradients<T>(args, parallel, scratch);
  const auto group = [](const ConvGradientArgs& one, const Parallel& threads,
                        const Scratch& own) {
    return Gradients<T>(one, threads, own);
  };
  ConvGradientArgs input = args, sums = args;
  input.filters_gradient = input.bias_gradient = nullptr;
  input.side_input_gradient = nullptr;
  sums.input_gradient = nullptr;
  return (HasSmallGroups<T>(s)
              ? Gradients<T>(sums, parallel, scratch)
              : ForGroups<T>(sums, parallel, scratch, group)) &&
         (HasSmallGroupsBackwards<T>(s)
              ? Gradients<T>(input, parallel, scratch)
              : ForGroups<T>(input, parallel, scratch, group));
}

}  // namespace

bool ConvGradient(const ConvGradientArgs& args, const Parallel& parallel,
                  const Scratch& scratch) {
  return WithStorage(args.dtype, [&](auto storage) {
    return Gradient<typename decltype(storage)::type>(args, parallel, scratch);
  });
}

}  // namespace tfo::TFO_ISA
