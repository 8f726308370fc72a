#include "cc/core/batch_norm.h"
#include "cc/core/few_rows.h"
#include "cc/core/storage.h"

namespace tfo::TFO_ISA {

BatchNormMomentsFunction BatchNormMoments;

namespace {

// Filters are packed with all their taps; few rows read them as they are.
bool ReadsPacked(const ConvShape& s, const TapList& taps) {
  return taps.count == s.kernel_h * s.kernel_w && !HasFewRows(s, taps);
}

template <class T>
bool Forward(const ConvForwardArgs& args, const Parallel& parallel,
             const Scratch& scratch) {
  const ConvShape s = Flatten(args.shape);
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  ForwardTaps(s, &taps);
  const bool reads_packed = ReadsPacked(s, taps);
  Correlation<T> c = {
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
      reads_packed ? static_cast<const Operand<T>*>(args.packed_filters)
                   : nullptr};
  const bool few_rows = HasFewRows(s, taps);
  double* const mean =
      args.moments == nullptr ? nullptr : args.moments + s.out_c;
  if (mean != nullptr && !few_rows && TilesSeeAll(c)) c.moments = mean;
  if (!(few_rows ? CorrelateFewRows(c, parallel, scratch)
                 : Correlate(c, parallel, scratch))) {
    return false;
  }
  if (mean == nullptr) return true;
  const std::int64_t pixels = s.out_h * s.out_w;
  for (std::int64_t k = 0; k < s.out_c; ++k)
    args.moments[k] = static_cast<double>(s.batch * pixels);
  if (c.moments != nullptr) return true;
  const BatchNormShape y =
      s.output_channels_first
          ? BatchNormShape{args.dtype, s.batch, s.out_c, pixels}
          : BatchNormShape{args.dtype, s.batch * pixels, s.out_c, 1};
  return BatchNormMoments(y, args.y, parallel, scratch, mean, mean + s.out_c);
}

template <class T>
std::int64_t PackedBytes(const ConvShape& shape, const Scratch& scratch) {
  using A = Accumulator<T>;
  const ConvShape s = Flatten(shape);
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return 0;
  ForwardTaps(s, &taps);
  if (!ReadsPacked(s, taps)) return 0;
  const std::int64_t rows = s.kernel_h * s.kernel_w * NumOperands<T>(s.in_c);
  const std::int64_t size = sizeof(Operand<T>);
  return NumPanels<A>(s.out_c) * kTileColumns<A> * rows * size;
}

template <class T>
bool Pack(const ConvShape& s, const void* filters, const Parallel& parallel,
          const Scratch& scratch, void* packed) {
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  AllTaps(s, &taps);
  PackFilters(static_cast<const T*>(filters), FilterMapOf(s), taps, s.in_c,
              s.out_c, static_cast<Operand<T>*>(packed), parallel);
  return true;
}

}  // namespace

std::int64_t ConvPackedBytes(DType dtype, const ConvShape& shape,
                             const Scratch& scratch) {
  return WithStorage(dtype, [&](auto storage) {
    return PackedBytes<typename decltype(storage)::type>(shape, scratch);
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
