// UpdateCache on the CPU: bytes copied, as few as may be.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cc/kernels/kernel_util.h"
#include "cc/ops/cache_slots.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Bytes that are worth a task.
constexpr std::int64_t kChunk = 1 << 18;

// Copies `size` bytes on the op's threads.
void Copy(OpKernelContext* ctx, const char* from, char* to, std::int64_t size) {
  auto task = [&](std::int64_t index, int) {
    const std::int64_t begin = index * kChunk;
    std::memcpy(to + begin, from + begin, std::min(kChunk, size - begin));
  };
  tfo::ParallelFor(ParallelOf(ctx), (size + kChunk - 1) / kChunk, kChunk / 8,
                   task);
}

class UpdateCacheOp : public tensorflow::OpKernel {
 public:
  explicit UpdateCacheOp(tensorflow::OpKernelConstruction* ctx)
      : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot", &slot_));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  // A cache as [batch, slots, length, row], `row` in bytes.
  struct Layout {
    std::int64_t batch = 1, slots = 1, length = 1, row = 1;

    std::int64_t slot() const { return length * row; }
    std::int64_t sequence() const { return slots * slot(); }
  };

  absl::Status Run(OpKernelContext* ctx) const {
    const Tensor& cache = ctx->input(0);
    const Tensor& key = ctx->input(1);
    const Tensor& value = ctx->input(2);
    TensorShape shape;
    Layout sizes;
    TF_RETURN_IF_ERROR(Read(cache, key, &sizes, &shape));
    TF_RETURN_IF_ERROR(CheckShape("value", value, "key", key.shape()));
    std::int64_t index = 0;
    TF_RETURN_IF_ERROR(ReadIndex(ctx->input(3), &index));
    const std::int64_t rows = key.dim_size(1);
    index = std::clamp<std::int64_t>(index, 0, sizes.length - rows);

    Tensor* updated = nullptr;
    TF_RETURN_IF_ERROR(
        ctx->forward_input_or_allocate_output({0}, 0, cache.shape(), &updated));
    char* const data = static_cast<char*>(updated->data());
    if (data != cache.data()) {
      Copy(ctx, static_cast<const char*>(cache.data()), data,
           cache.TotalBytes());
    }
    const std::int64_t bytes = rows * sizes.row;
    for (int i = 0; i < 2; ++i) {
      if (cache.NumElements() == 0) {
        void* none;
        TF_RETURN_IF_ERROR(Output(ctx, {}, 1 + i, shape, &none));
        continue;
      }
      const char* from = static_cast<const char*>((i ? value : key).data());
      char* to = data + (slot_ + i) * sizes.slot() + index * sizes.row;
      for (std::int64_t b = 0; b < sizes.batch && bytes > 0; ++b) {
        std::memcpy(to + b * sizes.sequence(), from + b * bytes, bytes);
      }
      if (ctx->output_required(1 + i)) {
        TF_RETURN_IF_ERROR(SetSlot(ctx, *updated, sizes, shape, i));
      }
    }
    return absl::OkStatus();
  }

  // Reads `sizes`, and the shape of a slot of all sequences.
  absl::Status Read(const Tensor& cache, const Tensor& key, Layout* sizes,
                    TensorShape* shape) const {
    const int axis = cache.dims() - key.dims() + 1;
    if (key.dims() < 2 || axis < 2) {
      return Invalid(
          "cache must have more dimensions than key, and that at least 2, got ",
          cache.shape().DebugString(), " and ", key.shape().DebugString());
    }
    sizes->batch = cache.dim_size(0);
    std::vector<std::int64_t> slots;
    for (int i = 1; i < axis; ++i) slots.push_back(cache.dim_size(i));
    sizes->slots = ProductOf(slots);
    sizes->length = cache.dim_size(axis);
    TF_RETURN_IF_ERROR(CheckSlots("cache", slot_, 2, sizes->slots));
    TF_RETURN_IF_ERROR(shape->AddDimWithStatus(sizes->batch));
    for (int i = axis; i < cache.dims(); ++i) {
      TF_RETURN_IF_ERROR(shape->AddDimWithStatus(cache.dim_size(i)));
    }
    if (cache.NumElements() > 0) {
      sizes->row =
          cache.TotalBytes() / (sizes->batch * sizes->slots * sizes->length);
    }
    Sizes expected = shape->dim_sizes();
    expected[1] = key.dim_size(1);
    TF_RETURN_IF_ERROR(CheckSizes("key", key.shape().dim_sizes(),
                                  "cache with a number of rows", expected));
    if (key.dim_size(1) > sizes->length) {
      return Invalid("key has ", key.dim_size(1),
                     " rows where cache has room for ", sizes->length);
    }
    return absl::OkStatus();
  }

  static absl::Status ReadIndex(const Tensor& index, std::int64_t* out) {
    if (index.dims() != 0) {
      return Invalid("index must be a scalar, got shape ",
                     index.shape().DebugString());
    }
    *out = index.dtype() == tensorflow::DT_INT32
               ? index.scalar<std::int32_t>()()
               : index.scalar<std::int64_t>()();
    return absl::OkStatus();
  }

  // Sets output 1 + i: a view of a slot where that is in one piece.
  absl::Status SetSlot(OpKernelContext* ctx, const Tensor& updated,
                       const Layout& sizes, const TensorShape& shape,
                       int i) const {
    const std::int64_t slot = slot_ + i;
    if (sizes.batch == 1) {
      Tensor slots, view;
      TensorShape flat({sizes.slots, shape.num_elements()});
      if (slots.CopyFrom(updated, flat)) {
        slots = slots.Slice(slot, slot + 1);
        // Kernels of TensorFlow's own ask for that.
        if (slots.IsAligned() && view.CopyFrom(slots, shape)) {
          ctx->set_output(1 + i, view);
          return absl::OkStatus();
        }
      }
    }
    void* copy;
    TF_RETURN_IF_ERROR(Output(ctx, {}, 1 + i, shape, &copy));
    const char* from =
        static_cast<const char*>(updated.data()) + slot * sizes.slot();
    for (std::int64_t b = 0; b < sizes.batch; ++b) {
      Copy(ctx, from + b * sizes.sequence(),
           static_cast<char*>(copy) + b * sizes.slot(), sizes.slot());
    }
    return absl::OkStatus();
  }

  std::int64_t slot_;
};

#define TFO_REGISTER_UPDATE_CACHE(T)                          \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>UpdateCache")      \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          UpdateCacheOp)

TFO_REGISTER_UPDATE_CACHE(Eigen::half);
TFO_REGISTER_UPDATE_CACHE(tensorflow::bfloat16);
TFO_REGISTER_UPDATE_CACHE(float);
TFO_REGISTER_UPDATE_CACHE(double);

}  // namespace
}  // namespace tf_fused_ops
