#include "cc/core/filter_gradient.h"

namespace tfo::TFO_ISA {
namespace {

template <class T>
bool InputGradient(const ConvGradientArgs& args, const ConvShape& s,
                   const Source<T>& dz, const AddressMap& dz_map,
                   const AddressMap& x_map, TapList taps,
                   const Parallel& parallel, const Scratch& scratch) {
  const FilterMap map = FilterMapOf(s);
  const FilterMap transposed{map.column, map.row, map.matrix};
  // A strided convolution falls into stride_h * stride_w dense ones, each for
  // every stride-th pixel of x.
  for (std::int64_t phase_h = 0; phase_h < Min(s.stride_h, s.in_h); ++phase_h) {
    for (std::int64_t phase_w = 0; phase_w < Min(s.stride_w, s.in_w);
         ++phase_w) {
      const std::int64_t grid_h = CeilDiv(s.in_h - phase_h, s.stride_h);
      const std::int64_t grid_w = CeilDiv(s.in_w - phase_w, s.stride_w);
      InputGradientTaps(s, phase_h, phase_w, grid_h, grid_w, &taps);
      T* dx = static_cast<T*>(args.input_gradient) +
              x_map.Offset(0, phase_h, phase_w);
      if (!Correlate<T>({{dz, dz_map, s.batch, s.out_h, s.out_w, s.out_c, taps,
                          1, 1, grid_h, grid_w},
                         s.in_c,
                         static_cast<const T*>(args.filters),
                         transposed,
                         {dx,
                          nullptr,
                          nullptr,
                          nullptr,
                          Activation::kNone,
                          0,
                          {x_map.batch, x_map.h * s.stride_h,
                           x_map.w * s.stride_w, x_map.c}}},
                        parallel, scratch)) {
        return false;
      }
    }
  }
  return true;
}

template <class T>
bool Gradient(const ConvGradientArgs& args, const Parallel& parallel,
              const Scratch& scratch) {
  const ConvShape s = Flatten(args.shape);
  const AddressMap x_map =
      AddressMap::Of(s.in_h, s.in_w, s.in_c, s.input_channels_first);
  const AddressMap dz_map =
      AddressMap::Of(s.out_h, s.out_w, s.out_c, s.output_channels_first);
  const Source<T> dz{static_cast<const T*>(args.dy),
                     args.activation == Activation::kNone
                         ? nullptr
                         : static_cast<const T*>(args.saved),
                     args.activation, static_cast<Accumulator<T>>(args.alpha)};
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w), 0, 0, 0, 0, 0};
  if (taps.taps == nullptr) return false;
  if (args.filters_gradient != nullptr || args.bias_gradient != nullptr ||
      args.side_input_gradient != nullptr) {
    ForwardTaps(s, &taps);
    if (!ComputeFilterGradient<T>(
            {InputWindows<T>(s, args.input, taps), dz, dz_map, s,
             static_cast<T*>(args.filters_gradient),
             static_cast<T*>(args.bias_gradient),
             static_cast<T*>(args.side_input_gradient)},
            parallel, scratch)) {
      return false;
    }
  }
  return args.input_gradient == nullptr ||
         InputGradient<T>(args, s, dz, dz_map, x_map, taps, parallel, scratch);
}

}  // namespace

bool ConvGradient(const ConvGradientArgs& args, const Parallel& parallel,
                  const Scratch& scratch) {
  switch (args.dtype) {
    case DType::kHalf:
      return Gradient<Half>(args, parallel, scratch);
    case DType::kBFloat16:
      return Gradient<BFloat16>(args, parallel, scratch);
    case DType::kFloat:
      return Gradient<float>(args, parallel, scratch);
    case DType::kDouble:
      return Gradient<double>(args, parallel, scratch);
  }
  return false;
}

}  // namespace tfo::TFO_ISA
