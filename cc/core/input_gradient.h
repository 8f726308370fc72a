// The input gradient of a convolution, with an epilogue: so it is a transposed
// convolution, too.
#ifndef TFO_CC_CORE_INPUT_GRADIENT_H_
#define TFO_CC_CORE_INPUT_GRADIENT_H_

#include "cc/core/block_taps.h"
#include "cc/core/exchanged.h"
#include "cc/core/few_channels.h"
#include "cc/core/few_rows.h"
#include "cc/core/small_groups.h"
#include "cc/core/winograd.h"

namespace tfo::TFO_ISA {
namespace {

// What the ways of computing an input gradient have in common.
template <class T>
struct InputGradientOperands {
  Source<T> dz;
  AddressMap dz_map;
  const T* filters;
  FilterMap filter_map;
  Epilogue<T> x;
  bool winograd;  // whether Winograd's algorithm may be used
};

// `n` numbers, `count` times; null stays null. False when scratch memory ran
// out.
template <class T>
bool Repeat(const T* from, std::int64_t n, std::int64_t count,
            const Scratch& scratch, const T** to) {
  *to = from;
  if (from == nullptr || count == 1) return true;
  T* const numbers = scratch.Allocate<T>(n * count);
  if (numbers == nullptr) return false;
  for (std::int64_t i = 0; i < n * count; ++i) numbers[i] = from[i % n];
  *to = numbers;
  return true;
}

// The epilogue of every h-th pixel down and every w-th across, from element
// `first` on.
template <class T>
Epilogue<T> EveryPixel(Epilogue<T> x, std::int64_t h, std::int64_t w,
                       std::int64_t first = 0) {
  x.y += first;
  if (x.pre_activation != nullptr) x.pre_activation += first;
  if (x.side_input != nullptr) x.side_input += first;
  x.map.h *= h;
  x.map.w *= w;
  return x;
}

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
  Correlation<T> c{{g.dz, g.dz_map, s.batch, s.out_h, s.out_w, s.out_c, taps, 1,
                    1, s.in_h / block.h, s.in_w / block.w},
                   columns,
                   filters,
                   map,
                   EveryPixel(g.x, block.h, block.w)};
  c.epilogue.columns_together = block.LineSize();
  c.epilogue.columns_pitch = g.x.map.h;
  return Repeat(g.x.bias, s.in_c, block.Pixels(), scratch, &c.epilogue.bias) &&
         CorrelateInParts(c, parallel, scratch);
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
       EveryPixel(g.x, block.h, block.w)},
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
          EveryPixel(g.x, s.stride_h, s.stride_w, g.x.map.Offset(0, h, w))};
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

// `taps` has room for all of the filters'.
template <class T>
bool ComputeInputGradient(const InputGradientOperands<T>& g, const ConvShape& s,
                          const TapList& taps, const Parallel& parallel,
                          const Scratch& scratch) {
  if (HasSmallGroupsBackwards<T>(s))
    return InputGradientOfSmallGroups<T>(g, s, taps, parallel, scratch);
  const PixelBlock block = ChooseBlock<Accumulator<T>>(s, g.x.map);
  return block.Pixels() > 1
             ? InputGradientInBlocks<T>(g, s, block, parallel, scratch)
             : InputGradientInPhases<T>(g, s, taps, parallel, scratch);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_INPUT_GRADIENT_H_
