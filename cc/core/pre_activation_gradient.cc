#include "cc/core/pre_activation_gradient.h"

#include "cc/core/dispatch.h"

namespace tfo {

ConvShape PixelShape(std::int64_t batch, std::int64_t height,
                     std::int64_t width, std::int64_t channels,
                     bool channels_first) {
  return {batch,
          height,
          width,
          channels,
          height,
          width,
          channels,
          1,
          1,
          1,
          1,
          1,
          1,
          0,
          0,
          channels_first,
          channels_first,
          false};
}

bool ComputePreActivationGradient(const ConvGradientArgs& args,
                                  const ConvShape& pixels,
                                  const Parallel& parallel,
                                  const Scratch& scratch, const void** dz) {
  ConvGradientArgs sums = args;
  sums.shape = pixels;
  sums.input = sums.filters = args.dy;
  sums.input_gradient = sums.filters_gradient = nullptr;
  const bool is_dy = args.activation == Activation::kNone;
  const bool is_read =
      args.input_gradient != nullptr || args.filters_gradient != nullptr;
  if (sums.side_input_gradient == nullptr && is_read && !is_dy) {
    sums.side_input_gradient =
        scratch.Allocate<char>(pixels.batch * pixels.in_h * pixels.in_w *
                               pixels.in_c * SizeOf(args.dtype));
    if (sums.side_input_gradient == nullptr) return false;
  }
  *dz = is_dy ? args.dy : sums.side_input_gradient;
  const bool wanted =
      sums.side_input_gradient != nullptr || sums.bias_gradient != nullptr;
  return !wanted || ComputeConvGradient(sums, parallel, scratch);
}

}  // namespace tfo
