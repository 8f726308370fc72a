// Copies that bring the operands of a convolution or product into the layout
// that a library takes.
#ifndef TFO_CUDA_CONV_LAYOUT_H_
#define TFO_CUDA_CONV_LAYOUT_H_

#include <cstdint>

#include "cc/core/types.h"
#include "cuda/status.h"

namespace tfo::cuda {

// output[n, c, b, a] = input[n, a, b, c], both dense.
struct ReverseArgs {
  DType dtype;
  std::int64_t batch, a, b, c;
  const void* input;
  void* output;
};

Status ReverseDimensions(const ReverseArgs& args, Stream stream);

// output[n, i, j, c] = input[n, i + top, j + left, c], and zero where that lies
// outside; both dense, channels in front of i and j where channels_first.
struct WindowArgs {
  DType dtype;
  bool channels_first;
  std::int64_t batch, channels;
  std::int64_t in_h, in_w, out_h, out_w;
  std::int64_t top, left;
  const void* input;
  void* output;
};

Status CopyWindow(const WindowArgs& args, Stream stream);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_CONV_LAYOUT_H_
