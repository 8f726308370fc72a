// The mask of a softmax, as the core takes it.
#ifndef TFO_CC_KERNELS_SOFTMAX_MASK_H_
#define TFO_CC_KERNELS_SOFTMAX_MASK_H_

#include "cc/core/softmax.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/softmax_mask.h"

namespace tf_fused_ops {

// The input "mask", if there is one, for what has `sizes` and what errors call
// `name`.
inline absl::Status MaskOf(tensorflow::OpKernelContext* ctx, const char* name,
                           absl::Span<const std::int64_t> sizes,
                           tfo::SoftmaxMask* mask) {
  *mask = {};
  const tensorflow::Tensor* keep;
  TF_RETURN_IF_ERROR(OptionalInput(ctx, "mask", &keep));
  if (keep == nullptr) return absl::OkStatus();
  const int rank = static_cast<int>(sizes.size());
  TF_RETURN_IF_ERROR(CheckMaskRank(name, keep->dims(), rank));
  for (int i = 1; i <= keep->dims(); ++i) {
    TF_RETURN_IF_ERROR(CheckMaskSize(name, rank - i, i == 1,
                                     keep->dim_size(keep->dims() - i),
                                     sizes[rank - i]));
  }
  const auto mask_sizes = keep->shape().dim_sizes();
  *mask =
      tfo::BroadcastMask(static_cast<const std::uint8_t*>(keep->data()),
                         keep->dims(), mask_sizes.data(), rank, sizes.data());
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_SOFTMAX_MASK_H_
