// What the launchers need from TensorFlow's GPU device: the op's stream. No
// CUDA header is needed for that.
#ifndef TFO_CUDA_TF_CUDA_UTIL_H_
#define TFO_CUDA_TF_CUDA_UTIL_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/kernel_util.h"
#include "cuda/status.h"
#include "tensorflow/core/platform/stream_executor.h"

namespace tf_fused_ops {

// TensorFlow's own stream: the op's work is queued behind its inputs' and
// before its outputs' readers, so nothing is ever waited for here.
inline tfo::cuda::Stream StreamOf(tensorflow::OpKernelContext* ctx) {
  return static_cast<tfo::cuda::Stream>(
      ctx->op_device_context()->stream()->platform_specific_handle().stream);
}

inline absl::Status ToAbsl(const tfo::cuda::Status& status) {
  if (status.ok()) return absl::OkStatus();
  if (status.source == tfo::cuda::Status::Source::kUnsupported) {
    return absl::UnimplementedError(
        absl::StrCat(status.call, ": ", status.text));
  }
  return absl::InternalError(
      absl::StrCat(status.call, ": ", tfo::cuda::SourceName(status.source),
                   " error ", status.code, " (", status.text, ")"));
}

}  // namespace tf_fused_ops

#endif  // TFO_CUDA_TF_CUDA_UTIL_H_
