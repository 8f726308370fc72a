// Filters that do not change, packed once and kept from call to call.
#ifndef TFO_CC_KERNELS_KEPT_FILTERS_H_
#define TFO_CC_KERNELS_KEPT_FILTERS_H_

#include "cc/core/dispatch.h"
#include "cc/kernels/kernel_util.h"

namespace tf_fused_ops {

class KeptFilters {
 public:
  struct Packed {
    const tfo::Kernels* kernels;
    // As long as this is held, TensorFlow neither hands its memory to another
    // tensor nor lets a resource variable that shares it change it in place.
    tensorflow::Tensor filters;
    tensorflow::Tensor packed;

    bool IsOf(const tfo::Kernels& k, const tensorflow::Tensor& f) const {
      return kernels == &k && filters.data() == f.data() &&
             filters.shape() == f.shape();
    }
  };

  // Packs `filters`, unless that was done for the last call; null if they are
  // not read packed for these sizes. Concurrent first calls pack each their
  // own; the last of them are kept.
  absl::Status Get(tensorflow::OpKernelContext* ctx,
                   const tfo::Kernels& kernels,
                   const tfo::ConvForwardArgs& args,
                   const tensorflow::Tensor& filters,
                   std::shared_ptr<const Packed>* out) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      *out = kept_;
    }
    const bool same = *out != nullptr && (*out)->IsOf(kernels, filters);
    // There is one order, but for Winograd's algorithm and for windows side by
    // side, which not all sizes have.
    const bool one_order =
        !args.winograd && (args.shape.kernel_w == 1 ||
                           args.shape.kernel_w != args.shape.stride_w);
    if (same && one_order) return absl::OkStatus();
    ScratchOwner scratch(ctx);
    const std::int64_t bytes =
        kernels.conv_packed_bytes(args, scratch.scratch());
    if (same && (*out)->packed.NumElements() == bytes) return absl::OkStatus();
    out->reset();
    if (bytes == 0) return absl::OkStatus();
    Packed made{&kernels, filters, {}};
    TF_RETURN_IF_ERROR(
        ctx->allocate_temp(tensorflow::DT_UINT8, {bytes}, &made.packed));
    AdviseHugePages(made.packed.data(), bytes);
    if (!kernels.conv_pack_filters(args, ParallelOf(ctx), scratch.scratch(),
                                   made.packed.data())) {
      return OutOfScratch();
    }
    *out = std::make_shared<const Packed>(std::move(made));
    std::lock_guard<std::mutex> lock(mutex_);
    kept_ = *out;
    return absl::OkStatus();
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<const Packed> kept_;
};

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_KEPT_FILTERS_H_
