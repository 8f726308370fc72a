// Blocks of neighbouring pixels of the input, those between the strides, which
// its gradient may take for the columns of one product.
#ifndef TFO_CC_CORE_BLOCK_TAPS_H_
#define TFO_CC_CORE_BLOCK_TAPS_H_

#include "cc/core/conv.h"

namespace tfo {

// The displacements in dz that a block of `block` pixels meets, along one axis
// and without dilation.
struct BlockTaps {
  std::int64_t begin, end;

  inline __attribute__((always_inline)) BlockTaps(std::int64_t block,
                                                  std::int64_t kernel,
                                                  std::int64_t stride,
                                                  std::int64_t pad)
      : begin(kernel - 1 > pad ? -((kernel - 1 - pad) / stride)
                               : (pad - kernel + stride) / stride),
        end((block - 1 + pad) / stride + 1) {}

  inline __attribute__((always_inline)) std::int64_t count() const {
    return end - begin;
  }
};

// Whether blocks are better such columns than computed stride by stride: those
// fill no fewer vectors of so many lanes. Some are zero, where a pixel lacks a
// tap.
inline __attribute__((always_inline)) bool BlocksFillVectors(
    const ConvShape& s, std::int64_t lanes) {
  if (s.groups > 1 || s.dilation_h > 1 || s.dilation_w > 1 ||
      s.input_channels_first || s.stride_h * s.stride_w == 1 ||
      s.in_h % s.stride_h != 0 || s.in_w % s.stride_w != 0) {
    return false;
  }
  const BlockTaps rows(s.stride_h, s.kernel_h, s.stride_h, s.pad_top);
  const BlockTaps columns(s.stride_w, s.kernel_w, s.stride_w, s.pad_left);
  const std::int64_t channels = s.stride_h * s.stride_w * s.in_c;
  return rows.count() * columns.count() * ((channels + lanes - 1) / lanes) <=
         s.kernel_h * s.kernel_w * ((s.in_c + lanes - 1) / lanes);
}

}  // namespace tfo

#endif  // TFO_CC_CORE_BLOCK_TAPS_H_
