#include "cc/core/conv_transpose.h"

#include "cc/core/dispatch.h"
#include "cc/core/pre_activation_gradient.h"

namespace tfo {

bool ComputeConvTranspose(const ConvForwardArgs& args, const Parallel& parallel,
                          const Scratch& scratch) {
  return InputGradientKernels(args.dtype, args.shape)
      .conv_transpose(args, parallel, scratch);
}

bool ComputeConvTransposeGradient(const ConvGradientArgs& args,
                                  const Parallel& parallel,
                                  const Scratch& scratch) {
  const ConvShape& s = args.shape;
  const void* dz;
  if (!ComputePreActivationGradient(
          args,
          PixelShape(s.batch, s.in_h, s.in_w, s.in_c, s.input_channels_first),
          parallel, scratch, &dz)) {
    return false;
  }
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
