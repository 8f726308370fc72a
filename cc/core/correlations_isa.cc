// What the engine computes as a source image * filters -> epilogue: the
// convolution, its input gradient, the transposed convolution, a dense layer's
// filter gradient of few columns. They are instances of the same templates,
// which one file compiles once.
#include "cc/core/batch_norm.h"
#include "cc/core/correlate_in_parts.h"
#include "cc/core/few_channels.h"
#include "cc/core/few_rows.h"
#include "cc/core/groups.h"
#include "cc/core/input_gradient.h"
#include "cc/core/small_groups.h"
#include "cc/core/storage.h"
#include "cc/core/winograd.h"

namespace tfo::TFO_SHARED_ISA {

ConvPackedBytesFunction ConvPackedBytes;
ConvPackFiltersFunction ConvPackFilters;
ConvForwardFunction ConvForward, ConvTranspose;
ConvGradientFunction ConvInputGradient, ConvFilterGradientOfFewColumns;

}  // namespace tfo::TFO_SHARED_ISA

namespace tfo::TFO_ISA {

BatchNormMomentsFunction BatchNormMoments;

namespace {

enum class Algorithm {
  kTiles,
  kFewRows,
  kFewColumns,
  kFewChannels,
  kWinograd,
  kSmallGroups
};

template <class T>
struct ForwardPass {
  Correlation<T> correlation;
  Algorithm algorithm;
  bool packs;  // whether filters are read in an order of its own
};

// `s` is flattened; `packed`: whether filters are, if need be. False when
// scratch memory ran out.
template <class T>
bool PlanForward(const ConvForwardArgs& args, const ConvShape& s, bool packed,
                 const Scratch& scratch, ForwardPass<T>* out) {
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  ForwardTaps(s, &taps);
  out->correlation = {
      InputWindows<T>(s, args.input, taps),
      s.out_c,
      static_cast<const T*>(args.filters),
      FilterMapOf(s),
      {static_cast<T*>(args.y), static_cast<T*>(args.pre_activation),
       static_cast<const T*>(args.bias), static_cast<const T*>(args.side_input),
       args.activation, static_cast<Accumulator<T>>(args.alpha),
       AddressMap::Of(
           s.out_h, s.out_w,
           args.pixel_pitch > 0 ? args.pixel_pitch : s.OutputChannels(),
           s.output_channels_first),
       static_cast<const T*>(args.scale)}};
  const Correlation<T>& c = out->correlation;
  out->algorithm = HasSmallGroups<T>(s) ? Algorithm::kSmallGroups
                   : args.winograd && WinogradPays(s, c.x, s.out_c)
                       ? Algorithm::kWinograd
                   : HasFewRows(c, packed ? kFewRowsOfPacked<T> : kFewRows<T>)
                       ? Algorithm::kFewRows
                   : HasFewColumns(c)  ? Algorithm::kFewColumns
                   : HasFewChannels(c) ? Algorithm::kFewChannels
                                       : Algorithm::kTiles;
  // Panels are of all taps, whatever image they meet.
  out->packs = out->algorithm == Algorithm::kWinograd ||
               (out->algorithm == Algorithm::kTiles &&
                taps.count == s.kernel_h * s.kernel_w && DepthParts(c) == 1);
  return true;
}

template <class T>
bool Compute(const ForwardPass<T>& pass, const ConvShape& s,
             const Parallel& parallel, const Scratch& scratch) {
  const Correlation<T>& c = pass.correlation;
  switch (pass.algorithm) {
    case Algorithm::kTiles:
      return CorrelateInParts(c, parallel, scratch);
    case Algorithm::kFewRows:
      return CorrelateFewRows(c, parallel, scratch);
    case Algorithm::kFewColumns:
      return CorrelateFewColumns(c, parallel, scratch);
    case Algorithm::kFewChannels:
      return CorrelateFewChannels(c, parallel, scratch);
    case Algorithm::kWinograd:
      return CorrelateByWinograd(c, parallel, scratch);
    case Algorithm::kSmallGroups:
      return CorrelateSmallGroups(&c, 1, s, parallel, scratch);
  }
  return false;
}

// The outputs but for moments, unless `*mean` is not null and the engine takes
// them on its way: it becomes null.
template <class T>
bool ForwardOutputs(const ConvForwardArgs& args, const Parallel& parallel,
                    const Scratch& scratch, double** mean) {
  const ConvShape s = Flatten(args.shape);
  ForwardPass<T> pass;
  const bool packed = args.packed_filters != nullptr;
  if (!PlanForward(args, s, packed, scratch, &pass)) return false;
  Correlation<T>& c = pass.correlation;
  if (pass.packs) c.packed = args.packed_filters;
  if (*mean != nullptr && pass.algorithm == Algorithm::kTiles &&
      TilesSeeAll(c)) {
    c.moments = *mean;
    *mean = nullptr;
  }
  return Compute(pass, s, parallel, scratch);
}

template <class T>
bool Forward(const ConvForwardArgs& args, const Parallel& parallel,
             const Scratch& scratch) {
  const ConvShape& s = args.shape;
  const std::int64_t channels = s.OutputChannels();
  double* mean = args.moments == nullptr ? nullptr : args.moments + channels;
  if (s.groups == 1 || HasSmallGroups<T>(s)) {
    if (!ForwardOutputs<T>(args, parallel, scratch, &mean)) return false;
  } else {
    double* none = nullptr;
    const auto group = [&](const ConvForwardArgs& one, const Parallel& threads,
                           const Scratch& own) {
      return ForwardOutputs<T>(one, threads, own, &none);
    };
    if (!ForGroups<T>(args, parallel, scratch, group)) return false;
  }
  if (args.moments == nullptr) return true;
  const std::int64_t pixels = s.out_h * s.out_w;
  for (std::int64_t k = 0; k < channels; ++k)
    args.moments[k] = static_cast<double>(s.batch * pixels);
  if (mean == nullptr) return true;
  const BatchNormShape y =
      s.output_channels_first
          ? BatchNormShape{args.dtype, s.batch, channels, pixels}
          : BatchNormShape{args.dtype, s.batch * pixels, channels, 1};
  return BatchNormMoments(y, args.y, parallel, scratch, mean, mean + channels);
}

template <class T>
std::int64_t PackedBytes(const ConvForwardArgs& args, const Scratch& scratch) {
  using A = Accumulator<T>;
  using E = Operand<T>;
  const ConvShape s = Flatten(args.shape);
  ForwardPass<T> pass;
  if (s.groups > 1 || !PlanForward(args, s, true, scratch, &pass) ||
      !pass.packs)
    return 0;
  if (pass.algorithm == Algorithm::kWinograd)
    return WinogradFiltersSize<T>(s.in_c, s.out_c) * sizeof(A);
  const std::int64_t rows = s.kernel_h * s.kernel_w * NumOperands<E>(s.in_c);
  return PackedSize<T>(rows, s.out_c) * sizeof(E);
}

template <class T>
bool Pack(const ConvForwardArgs& args, const Parallel& parallel,
          const Scratch& scratch, void* packed) {
  const ConvShape s = Flatten(args.shape);
  ForwardPass<T> pass;
  if (!PlanForward(args, s, true, scratch, &pass)) return false;
  const Correlation<T>& c = pass.correlation;
  if constexpr (kHasWinograd<T>) {
    if (pass.algorithm == Algorithm::kWinograd)
      return TransformFilters(c, static_cast<Accumulator<T>*>(packed), parallel,
                              scratch);
  }
  FilterPacking<T>(c.filters, c.filter_map, c.x.taps, s.in_c, s.out_c,
                   static_cast<Operand<T>*>(packed))
      .Run(parallel);
  return true;
}

// The input gradient alone, of one group or of all that are computed together.
template <class T>
bool InputGradient(const ConvGradientArgs& args, const Parallel& parallel,
                   const Scratch& scratch) {
  const ConvShape s = Flatten(args.shape);
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  const Epilogue<T> x{static_cast<T*>(args.input_gradient),
                      nullptr,
                      nullptr,
                      nullptr,
                      Activation::kNone,
                      0,
                      InputMap(s)};
  return ComputeInputGradient<T>(
      {PreActivationGradient<T>(args), OutputMap(s),
       static_cast<const T*>(args.filters), FilterMapOf(s).Transposed(), x,
       args.winograd},
      s, taps, parallel, scratch);
}

// The filter gradient of one line of pixels under one tap as a product of few
// rows, the channels of dz.
template <class T>
bool FilterGradientOfFewColumns(const ConvGradientArgs& args,
                                const Parallel& parallel,
                                const Scratch& scratch) {
  const ConvShape s = Flatten(args.shape);
  const AddressMap x = InputMap(s), dz = OutputMap(s);
  const FilterMap map = FilterMapOf(s);
  Tap tap{0, 0, 0};
  TapList taps{&tap};
  taps.Add(tap);
  const Correlation<T> c{{PreActivationGradient<T>(args),
                          {0, 0, dz.c, dz.w},
                          1,
                          1,
                          s.out_c,
                          s.out_w,
                          taps,
                          1,
                          1,
                          1,
                          s.out_c},
                         s.in_c,
                         static_cast<const T*>(args.input),
                         {x.w, 1, 0},
                         {static_cast<T*>(args.filters_gradient),
                          nullptr,
                          nullptr,
                          nullptr,
                          Activation::kNone,
                          0,
                          {0, 0, map.column, map.row}}};
  return CorrelateFewRows(c, parallel, scratch);
}

// The output is that of the input gradient of the shape's convolution.
template <class T>
bool Transposed(const ConvForwardArgs& args, const Parallel& parallel,
                const Scratch& scratch) {
  const ConvShape s = Flatten(args.shape);
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  Epilogue<T> y{static_cast<T*>(args.y),
                static_cast<T*>(args.pre_activation),
                nullptr,
                static_cast<const T*>(args.side_input),
                args.activation,
                static_cast<Accumulator<T>>(args.alpha),
                InputMap(s)};
  // A pixel may stand for a line of them.
  const std::int64_t channels = args.shape.in_c;
  if (!Repeat(static_cast<const T*>(args.bias), channels, s.in_c / channels,
              scratch, &y.bias)) {
    return false;
  }
  return ComputeInputGradient<T>(
      {{static_cast<const T*>(args.input), nullptr, Activation::kNone, 0},
       OutputMap(s),
       static_cast<const T*>(args.filters),
       FilterMapOf(s).Transposed(),
       y,
       false},
      s, taps, parallel, scratch);
}

}  // namespace

std::int64_t ConvPackedBytes(const ConvForwardArgs& args,
                             const Scratch& scratch) {
  const auto own = [&](auto storage) {
    return PackedBytes<typename decltype(storage)::type>(args, scratch);
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::ConvPackedBytes(args, scratch);
  };
  return WithStorage(args.dtype, UnlessShared(own, shared));
}

bool ConvPackFilters(const ConvForwardArgs& args, const Parallel& parallel,
                     const Scratch& scratch, void* packed) {
  const auto own = [&](auto storage) {
    return Pack<typename decltype(storage)::type>(args, parallel, scratch,
                                                  packed);
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::ConvPackFilters(args, parallel, scratch, packed);
  };
  return WithStorage(args.dtype, UnlessShared(own, shared));
}

bool ConvForward(const ConvForwardArgs& args, const Parallel& parallel,
                 const Scratch& scratch) {
  const auto own = [&](auto storage) {
    return Forward<typename decltype(storage)::type>(args, parallel, scratch);
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::ConvForward(args, parallel, scratch);
  };
  return WithStorage(args.dtype, UnlessShared(own, shared));
}

bool ConvInputGradient(const ConvGradientArgs& args, const Parallel& parallel,
                       const Scratch& scratch) {
  const auto own = [&](auto storage) {
    return InputGradient<typename decltype(storage)::type>(args, parallel,
                                                           scratch);
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::ConvInputGradient(args, parallel, scratch);
  };
  return WithStorage(args.dtype, UnlessShared(own, shared));
}

bool ConvFilterGradientOfFewColumns(const ConvGradientArgs& args,
                                    const Parallel& parallel,
                                    const Scratch& scratch) {
  const auto own = [&](auto storage) {
    return FilterGradientOfFewColumns<typename decltype(storage)::type>(
        args, parallel, scratch);
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::ConvFilterGradientOfFewColumns(args, parallel,
                                                          scratch);
  };
  return WithStorage(args.dtype, UnlessShared(own, shared));
}

bool ConvTranspose(const ConvForwardArgs& args, const Parallel& parallel,
                   const Scratch& scratch) {
  const auto own = [&](auto storage) {
    return Transposed<typename decltype(storage)::type>(args, parallel,
                                                        scratch);
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::ConvTranspose(args, parallel, scratch);
  };
  return WithStorage(args.dtype, UnlessShared(own, shared));
}

}  // namespace tfo::TFO_ISA
