#include "cc/core/conv_transpose.h"

#include "cc/core/dispatch.h"

namespace tfo {
namespace {

// The pixels of y, as those of a 1x1 convolution.
ConvShape Pixels(const ConvShape& s) {
  return {s.batch,
          s.in_h,
          s.in_w,
          s.in_c,
          s.in_h,
          s.in_w,
          s.in_c,
          1,
          1,
          1,
          1,
          1,
          1,
          0,
          0,
          s.input_channels_first,
          s.input_channels_first,
          false};
}

// dz = dy * slope, where it is read and not dy itself or to be stored, and the
// bias's gradient, in one pass. False when scratch memory ran out.
bool PreActivationGradient(const ConvGradientArgs& args,
                           const Parallel& parallel, const Scratch& scratch,
                           const void** dz) {
  ConvGradientArgs sums = args;
  sums.shape = Pixels(args.shape);
  sums.input = sums.filters = args.dy;
  sums.input_gradient = sums.filters_gradient = nullptr;
  const bool is_dy = args.activation == Activation::kNone;
  const bool is_read =
      args.input_gradient != nullptr || args.filters_gradient != nullptr;
  if (sums.side_input_gradient == nullptr && is_read && !is_dy) {
    const ConvShape& s = args.shape;
    sums.side_input_gradient = scratch.Allocate<char>(
        s.batch * s.in_h * s.in_w * s.in_c * SizeOf(args.dtype));
    if (sums.side_input_gradient == nullptr) return false;
  }
  *dz = is_dy ? args.dy : sums.side_input_gradient;
  const bool wanted =
      sums.side_input_gradient != nullptr || sums.bias_gradient != nullptr;
  return !wanted || ComputeConvGradient(sums, parallel, scratch);
}

}  // namespace

bool ComputeConvTranspose(const ConvForwardArgs& args, const Parallel& parallel,
                          const Scratch& scratch) {
  return InputGradientKernels(args.dtype, args.shape)
      .conv_transpose(args, parallel, scratch);
}

bool ComputeConvTransposeGradient(const ConvGradientArgs& args,
                                  const Parallel& parallel,
                                  const Scratch& scratch) {
  const void* dz;
  if (!PreActivationGradient(args, parallel, scratch, &dz)) return false;
  if (args.input_gradient != nullptr) {
    const ConvForwardArgs input{
        args.dtype, args.shape,          Activation::kNone, 0,
        dz,         args.filters,        nullptr,           nullptr,
        nullptr,    args.input_gradient, nullptr,           nullptr};
    if (!ForwardKernels(args.dtype, args.shape)
             .conv_forward(input, parallel, scratch)) {
      return false;
    }
  }
  if (args.filters_gradient == nullptr) return true;
  // x's pixels are dz's there.
  const ConvGradientArgs filters{
      args.dtype, args.shape, Activation::kNone, 0,       args.input,
      nullptr,    dz,         args.filters,      nullptr, args.filters_gradient,
      nullptr,    nullptr};
  return ComputeConvGradient(filters, parallel, scratch);
}

}  // namespace tfo
