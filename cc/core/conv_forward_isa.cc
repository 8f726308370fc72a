#include "cc/core/correlate.h"

namespace tfo::TFO_ISA {
namespace {

template <class T>
bool Forward(const ConvForwardArgs& args, const Parallel& parallel,
             const Scratch& scratch) {
  const ConvShape s = Flatten(args.shape);
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  ForwardTaps(s, &taps);
  return Correlate<T>(
      {InputWindows<T>(s, args.input, taps),
       s.out_c,
       static_cast<const T*>(args.filters),
       FilterMapOf(s),
       {static_cast<T*>(args.y), static_cast<T*>(args.pre_activation),
        static_cast<const T*>(args.bias),
        static_cast<const T*>(args.side_input), args.activation,
        static_cast<Accumulator<T>>(args.alpha),
        AddressMap::Of(s.out_h, s.out_w, s.out_c, s.output_channels_first),
        static_cast<const T*>(args.scale)}},
      parallel, scratch);
}

}  // namespace

bool ConvForward(const ConvForwardArgs& args, const Parallel& parallel,
                 const Scratch& scratch) {
  switch (args.dtype) {
    case DType::kHalf:
      return Forward<Half>(args, parallel, scratch);
    case DType::kBFloat16:
      return Forward<BFloat16>(args, parallel, scratch);
    case DType::kFloat:
      return Forward<float>(args, parallel, scratch);
    case DType::kDouble:
      return Forward<double>(args, parallel, scratch);
  }
  return false;
}

}  // namespace tfo::TFO_ISA
