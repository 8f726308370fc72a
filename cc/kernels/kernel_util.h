// What the core needs from TensorFlow: threads, scratch memory, element types.
#ifndef TFO_CC_KERNELS_KERNEL_UTIL_H_
#define TFO_CC_KERNELS_KERNEL_UTIL_H_

#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"
#include "cc/kernels/huge_pages.h"
#include "cc/kernels/task_queue.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_fused_ops {

template <class T>
constexpr tfo::DType kDType = tfo::DType::kFloat;
template <>
inline constexpr tfo::DType kDType<Eigen::half> = tfo::DType::kHalf;
template <>
inline constexpr tfo::DType kDType<tensorflow::bfloat16> =
    tfo::DType::kBFloat16;
template <>
inline constexpr tfo::DType kDType<double> = tfo::DType::kDouble;

// The op's intra-op pool, as the core sees it.
inline tfo::Parallel ParallelOf(tensorflow::OpKernelContext* ctx) {
  auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  return {&RunTasks, pool, pool->NumThreads()};
}

// Whether the op's memory is the processor's.
inline bool OnCpu(tensorflow::OpKernelContext* ctx) {
  return ctx->op_device_context() == nullptr;
}

// Scratch memory from the op's allocator, alive as long as this object.
class ScratchOwner {
 public:
  explicit ScratchOwner(tensorflow::OpKernelContext* ctx) : ctx_(ctx) {}

  tfo::Scratch scratch() {
    return {[](void* owner, std::int64_t bytes) {
              return static_cast<ScratchOwner*>(owner)->Allocate(bytes);
            },
            this};
  }

 private:
  void* Allocate(std::int64_t bytes) {
    tensorflow::Tensor tensor;
    if (!ctx_->allocate_temp(tensorflow::DT_UINT8, {bytes}, &tensor).ok()) {
      return nullptr;
    }
    tensors_.push_back(tensor);
    if (OnCpu(ctx_)) AdviseHugePages(tensor.data(), bytes);
    return tensor.data();
  }

  tensorflow::OpKernelContext* ctx_;
  std::vector<tensorflow::Tensor> tensors_;
};

inline absl::Status OutOfScratch() {
  return absl::ResourceExhaustedError("no memory for the op's temporaries");
}

// The tensor of an optional input (a list of at most one), or null.
inline absl::Status OptionalInput(tensorflow::OpKernelContext* ctx,
                                  const char* name,
                                  const tensorflow::Tensor** out) {
  tensorflow::OpInputList list;
  TF_RETURN_IF_ERROR(ctx->input_list(name, &list));
  *out = list.size() == 0 ? nullptr : &list[0];
  return absl::OkStatus();
}

// Output `index` of `shape`: the memory of one of the inputs `candidates` where
// nothing else needs that, or new memory.
inline absl::Status Output(tensorflow::OpKernelContext* ctx,
                           const std::vector<int>& candidates, int index,
                           const tensorflow::TensorShape& shape, void** data) {
  tensorflow::Tensor* tensor = nullptr;
  TF_RETURN_IF_ERROR(
      ctx->forward_input_or_allocate_output(candidates, index, shape, &tensor));
  *data = tensor->data();
  if (OnCpu(ctx)) AdviseHugePages(*data, tensor->TotalBytes());
  return absl::OkStatus();
}

// Allocates output `index` of `shape`, or an empty one where it is not wanted;
// `*data` is its memory, or null.
inline absl::Status OptionalOutput(tensorflow::OpKernelContext* ctx, int index,
                                   bool wanted,
                                   const tensorflow::TensorShape& shape,
                                   void** data) {
  if (wanted) return Output(ctx, {}, index, shape, data);
  *data = nullptr;
  tensorflow::Tensor* empty = nullptr;
  return ctx->allocate_output(index, tensorflow::TensorShape({0}), &empty);
}

inline absl::Status CheckShape(const char* name,
                               const tensorflow::Tensor& tensor,
                               const char* what,
                               const tensorflow::TensorShape& expected) {
  if (tensor.shape() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, " must have the shape of ", what, ", ", expected.DebugString(),
      ", got ", tensor.shape().DebugString()));
}

// The shape that an argument, a vector of `rank` sizes, stands for.
inline absl::Status ShapeOfSizes(const char* name,
                                 const tensorflow::Tensor& sizes, int rank,
                                 tensorflow::TensorShape* out) {
  if (sizes.dims() != 1 || sizes.NumElements() != rank) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must be a vector of ", rank, ", got shape ",
                     sizes.shape().DebugString()));
  }
  const absl::Status status =
      tensorflow::TensorShapeUtils::MakeShape(sizes.vec<std::int32_t>(), out);
  if (status.ok()) return status;
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is no shape: ", status.message()));
}

// As shapes are that may have more elements than one can have.
using Sizes = absl::InlinedVector<std::int64_t, 4>;

inline absl::Status CheckSizes(const char* name, const Sizes& sizes,
                               const char* what, const Sizes& expected) {
  if (sizes == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must have the shape of ", what, ", [",
                   absl::StrJoin(expected, ","), "], got [",
                   absl::StrJoin(sizes, ","), "]"));
}

inline const void* DataOrNull(const tensorflow::Tensor* tensor) {
  return tensor == nullptr ? nullptr : tensor->data();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_KERNEL_UTIL_H_
