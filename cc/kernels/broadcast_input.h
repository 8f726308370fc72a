// The mask of a softmax and the bias of scores, as the core takes them.
#ifndef TFO_CC_KERNELS_BROADCAST_INPUT_H_
#define TFO_CC_KERNELS_BROADCAST_INPUT_H_

#include "cc/core/softmax.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/broadcast_input.h"

namespace tf_fused_ops {

// The optional input `input`, null if it is not there, as rows broadcast to
// what has `sizes` and what errors call `name`.
inline absl::Status BroadcastInput(tensorflow::OpKernelContext* ctx,
                                   const char* input, const char* name,
                                   absl::Span<const std::int64_t> sizes,
                                   tfo::BroadcastRows* rows,
                                   const void** data) {
  *rows = {};
  *data = nullptr;
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(OptionalInput(ctx, input, &tensor));
  if (tensor == nullptr) return absl::OkStatus();
  const int rank = static_cast<int>(sizes.size());
  TF_RETURN_IF_ERROR(CheckBroadcastRank(input, tensor->dims(), name, rank));
  for (int i = 1; i <= tensor->dims(); ++i) {
    TF_RETURN_IF_ERROR(
        CheckBroadcastSize(input, tensor->dim_size(tensor->dims() - i), name,
                           rank - i, i == 1, sizes[rank - i]));
  }
  const auto own_sizes = tensor->shape().dim_sizes();
  *rows =
      tfo::BroadcastTo(tensor->dims(), own_sizes.data(), rank, sizes.data());
  *data = tensor->data();
  return absl::OkStatus();
}

// The input "mask", if there is one, for what has `sizes` and what errors call
// `name`.
inline absl::Status MaskOf(tensorflow::OpKernelContext* ctx, const char* name,
                           absl::Span<const std::int64_t> sizes,
                           tfo::SoftmaxMask* mask) {
  const void* keep;
  TF_RETURN_IF_ERROR(BroadcastInput(ctx, "mask", name, sizes, mask, &keep));
  mask->keep = static_cast<const std::uint8_t*>(keep);
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_BROADCAST_INPUT_H_
