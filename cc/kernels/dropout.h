// What dropout does, as the core takes it.
#ifndef TFO_CC_KERNELS_DROPOUT_H_
#define TFO_CC_KERNELS_DROPOUT_H_

#include "cc/core/dropout.h"
#include "cc/kernels/decimals.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/dropout.h"

namespace tf_fused_ops {

// An attribute as a number of type T.
template <class T>
double RoundedAttr(float value) {
  return static_cast<double>(static_cast<T>(AsWritten(value)));
}

// Where the words of input `input`, which is `tensor`, are.
inline absl::Status ReadRandomInput(const RandomInput& input,
                                    const tensorflow::Tensor& tensor,
                                    const std::uint64_t** words) {
  if (tensor.dims() != 1) {
    return Invalid(input.name, " must have rank 1, got shape ",
                   tensor.shape().DebugString());
  }
  TF_RETURN_IF_ERROR(CheckRandomInput(input, tensor.NumElements()));
  *words = static_cast<const std::uint64_t*>(tensor.data());
  return absl::OkStatus();
}

inline absl::Status ReadRandom(const tensorflow::Tensor& key,
                               const tensorflow::Tensor& counter,
                               tfo::Philox* random) {
  TF_RETURN_IF_ERROR(ReadRandomInput(kRandomInputs[0], key, &random->key));
  return ReadRandomInput(kRandomInputs[1], counter, &random->counter);
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_DROPOUT_H_
