// Convolution with its bias, side input and activation, and its gradients. A
// dense layer is the 1x1 case.
#ifndef TFO_CC_CORE_CONV_H_
#define TFO_CC_CORE_CONV_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo {

//   z[n, i, j, k] = sum_{r, s, c} x[n, i * stride_h + r * dilation_h - pad_top,
//                                      j * stride_w + s * dilation_w -
//                                      pad_left, c] * w[r, s, c, k]
//
// with x zero outside the image. Of several groups, each is a convolution of
// its own: the channels of all lie beside each other in x and z, and the output
// channels in w.
struct ConvShape {
  std::int64_t batch;
  std::int64_t in_h, in_w, in_c;  // channels are those of a group
  std::int64_t out_h, out_w, out_c;
  std::int64_t kernel_h, kernel_w;
  std::int64_t stride_h, stride_w;
  std::int64_t dilation_h, dilation_w;
  std::int64_t pad_top, pad_left;
  bool input_channels_first;   // x is [n, c, h, w], not [n, h, w, c]
  bool output_channels_first;  // the same for y and side input
  bool filters_transposed;     // w is [r, s, k, c], not [r, s, c, k]
  std::int64_t groups = 1;     // no more where filters are transposed

  std::int64_t InputChannels() const { return groups * in_c; }
  std::int64_t OutputChannels() const { return groups * out_c; }
};

// a [batch, m, k] (or [batch, k, m]) times b [k, n] (or [n, k]), as a
// convolution: the rows of a are pixels.
inline ConvShape MatMulShape(std::int64_t batch, std::int64_t m, std::int64_t k,
                             std::int64_t n, bool transpose_a,
                             bool transpose_b) {
  return {batch, 1, m, k, 1, m, n,           1,     1,
          1,     1, 1, 1, 0, 0, transpose_a, false, transpose_b};
}

// The same convolution where windows stand side by side along a line, as those
// of a patch embedding do: their lines are pixels of as many channels.
inline __attribute__((always_inline)) ConvShape
JoinLinesOfWindows(ConvShape s) {
  if (s.kernel_w == s.stride_w && s.dilation_w == 1 && s.pad_left == 0 &&
      s.in_w == s.out_w * s.stride_w && s.groups == 1 &&
      !s.input_channels_first && !s.filters_transposed) {
    s.in_c *= s.kernel_w;
    s.in_w = s.out_w;
    s.kernel_w = s.stride_w = 1;
  }
  return s;
}

// Joins the lines of windows. A 1x1 convolution of stride 1 then sees pixels,
// not images: one row of them, over all images where both tensors allow it.
inline __attribute__((always_inline)) ConvShape
Flatten(const ConvShape& shape) {
  ConvShape s = JoinLinesOfWindows(shape);
  if (s.kernel_h != 1 || s.kernel_w != 1 || s.stride_h != 1 ||
      s.stride_w != 1 || s.pad_top != 0 || s.pad_left != 0 ||
      s.in_h != s.out_h || s.in_w != s.out_w) {
    return s;
  }
  s.in_w *= s.in_h;
  s.in_h = 1;
  if (!s.input_channels_first && !s.output_channels_first) {
    s.in_w *= s.batch;
    s.batch = 1;
  }
  s.out_h = 1;
  s.out_w = s.in_w;
  return s;
}

// y = activation(z * scale + bias + side_input). Null pointers: no scale, no
// bias, no side input, pre-activation not wanted, filters not packed yet.
struct ConvForwardArgs {
  DType dtype;
  ConvShape shape;
  Activation activation;
  double alpha;
  const void* input;
  const void* filters;
  const void* scale;
  const void* bias;
  const void* side_input;
  void* y;
  void* pre_activation;
  const void* packed_filters;  // what ConvPackFiltersFunction made of filters
  // Of y's channels, see BatchNormLocalMoments; null: not wanted.
  double* moments = nullptr;
  bool winograd = false;  // whether Winograd's algorithm may be used
  // From one pixel of y to the next, where that is not the number of its
  // channels: they are some of those of a larger output.
  std::int64_t pixel_pitch = 0;
};

// With dz = dy * slope: the gradients of input, filters and bias, and dz
// itself, the side input's gradient. `saved` is y or the pre-activation, see
// SlopeFromValue. Null pointers: gradients that are not wanted.
struct ConvGradientArgs {
  DType dtype;
  ConvShape shape;
  Activation activation;
  double alpha;
  const void* dy;
  const void* saved;
  const void* input;
  const void* filters;
  void* input_gradient;
  void* filters_gradient;
  void* bias_gradient;
  void* side_input_gradient;
  bool winograd = false;  // whether Winograd's algorithm may be used
};

// False when scratch memory ran out.
using ConvForwardFunction = bool(const ConvForwardArgs&, const Parallel&,
                                 const Scratch&);
using ConvGradientFunction = bool(const ConvGradientArgs&, const Parallel&,
                                  const Scratch&);

// For filters that meet many inputs: the bytes that they take in the order in
// which the engine reads them for these, 0 if it reads them as they are, and
// how they get there. That order depends on the instruction set, on the types,
// on the filters' shape and on the number of bytes.
using ConvPackedBytesFunction = std::int64_t(const ConvForwardArgs&,
                                             const Scratch&);
using ConvPackFiltersFunction = bool(const ConvForwardArgs&, const Parallel&,
                                     const Scratch&, void* packed);

}  // namespace tfo

#endif  // TFO_CC_CORE_CONV_H_
