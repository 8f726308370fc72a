// Sizes of a convolution's tensors, and its elementwise part by our own
// kernels.
#ifndef TFO_CUDA_CONV_ELEMENTWISE_H_
#define TFO_CUDA_CONV_ELEMENTWISE_H_

#include <cstdint>

#include "cc/core/conv.h"
#include "cuda/bias_act.h"
#include "cuda/call.h"
#include "cuda/status.h"

namespace tfo::cuda {

inline std::int64_t InputElements(const ConvShape& s) {
  return s.batch * s.in_h * s.in_w * s.in_c;
}

inline std::int64_t FilterElements(const ConvShape& s) {
  return s.kernel_h * s.kernel_w * s.in_c * s.out_c;
}

inline std::int64_t OutputElements(const ConvShape& s) {
  return s.batch * s.out_h * s.out_w * s.out_c;
}

// The pre-activation as the elementwise kernels take it: [outer, channels,
// inner].
template <class Args>
Args ElementwiseArgs(DType dtype, const ConvShape& s, Activation activation,
                     double alpha) {
  Args args{};
  args.dtype = dtype;
  const std::int64_t pixels = s.out_h * s.out_w;
  args.outer = s.output_channels_first ? s.batch : s.batch * pixels;
  args.inner = s.output_channels_first ? pixels : 1;
  args.channels = s.out_c;
  args.activation = activation;
  args.alpha = alpha;
  return args;
}

// y and pre-activation from the bare convolution x.
inline Status BiasAct(const ConvForwardArgs& args, const void* x,
                      const Call& call) {
  auto rest = ElementwiseArgs<BiasActArgs>(args.dtype, args.shape,
                                           args.activation, args.alpha);
  rest.x = x;
  rest.scale = args.scale;
  rest.bias = args.bias;
  rest.side = args.side_input;
  rest.y = args.y;
  rest.pre_activation = args.pre_activation;
  return BiasActForward(rest, call.stream);
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_CONV_ELEMENTWISE_H_
