// The mask of a softmax, as the core takes it.
#ifndef TFO_CC_KERNELS_SOFTMAX_MASK_H_
#define TFO_CC_KERNELS_SOFTMAX_MASK_H_

#include "cc/core/softmax.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/softmax_mask.h"

namespace tf_fused_ops {

// The input "mask", if there is one, for what has `shape` and what errors call
// `name`.
inline absl::Status MaskOf(tensorflow::OpKernelContext* ctx, const char* name,
                           const tensorflow::TensorShape& shape,
                           tfo::SoftmaxMask* mask) {
  *mask = {};
  const tensorflow::Tensor* keep;
  TF_RETURN_IF_ERROR(OptionalInput(ctx, "mask", &keep));
  if (keep == nullptr) return absl::OkStatus();
  TF_RETURN_IF_ERROR(CheckMaskRank(name, keep->dims(), shape.dims()));
  for (int i = 1; i <= keep->dims(); ++i) {
    TF_RETURN_IF_ERROR(CheckMaskSize(name, shape.dims() - i, i == 1,
                                     keep->dim_size(keep->dims() - i),
                                     shape.dim_size(shape.dims() - i)));
  }
  const auto sizes = shape.dim_sizes();
  const auto mask_sizes = keep->shape().dim_sizes();
  *mask = tfo::BroadcastMask(static_cast<const std::uint8_t*>(keep->data()),
                             keep->dims(), mask_sizes.data(), shape.dims(),
                             sizes.data());
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_SOFTMAX_MASK_H_
