#include "cc/core/few_rows.h"
#include "cc/core/storage.h"

namespace tfo::TFO_ISA {
namespace {

template <class T>
bool Forward(const ConvForwardArgs& args, const Parallel& parallel,
             const Scratch& scratch) {
  const ConvShape s = Flatten(args.shape);
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  ForwardTaps(s, &taps);
  // Filters are packed with all their taps.
  const bool is_packed = taps.count == s.kernel_h * s.kernel_w;
  const Correlation<T> c = {
      InputWindows<T>(s, args.input, taps),
      s.out_c,
      static_cast<const T*>(args.filters),
      FilterMapOf(s),
      {static_cast<T*>(args.y), static_cast<T*>(args.pre_activation),
       static_cast<const T*>(args.bias), static_cast<const T*>(args.side_input),
       args.activation, static_cast<Accumulator<T>>(args.alpha),
       AddressMap::Of(s.out_h, s.out_w, s.out_c, s.output_channels_first),
       static_cast<const T*>(args.scale)},
      nullptr,
      is_packed ? static_cast<const Accumulator<T>*>(args.packed_filters)
                : nullptr};
  return HasFewRows(c) ? CorrelateFewRows(c, parallel, scratch)
                       : Correlate(c, parallel, scratch);
}

template <class T>
std::int64_t PackedBytes(const ConvShape& s) {
  using A = Accumulator<T>;
  const std::int64_t rows = s.kernel_h * s.kernel_w * s.in_c, size = sizeof(A);
  return NumPanels<A>(s.out_c) * kTileColumns<A> * rows * size;
}

template <class T>
bool Pack(const ConvShape& s, const void* filters, const Parallel& parallel,
          const Scratch& scratch, void* packed) {
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  AllTaps(s, &taps);
  PackFilters(static_cast<const T*>(filters), FilterMapOf(s), taps, s.in_c,
              s.out_c, static_cast<Accumulator<T>*>(packed), parallel);
  return true;
}

}  // namespace

std::int64_t ConvPackedBytes(DType dtype, const ConvShape& shape) {
  return WithStorage(dtype, [&](auto storage) {
    return PackedBytes<typename decltype(storage)::type>(shape);
  });
}

bool ConvPackFilters(DType dtype, const ConvShape& shape, const void* filters,
                     const Parallel& parallel, const Scratch& scratch,
                     void* packed) {
  return WithStorage(dtype, [&](auto storage) {
    return Pack<typename decltype(storage)::type>(shape, filters, parallel,
                                                  scratch, packed);
  });
}

bool ConvForward(const ConvForwardArgs& args, const Parallel& parallel,
                 const Scratch& scratch) {
  return WithStorage(args.dtype, [&](auto storage) {
    return Forward<typename decltype(storage)::type>(args, parallel, scratch);
  });
}

}  // namespace tfo::TFO_ISA
