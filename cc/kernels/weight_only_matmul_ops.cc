// The kernels of WeightOnlyMatMulBiasAct and DequantizedWeights on the CPU.
#include <utility>
#include <vector>

#include "cc/core/dispatch.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/weight_only_matmul_attrs.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

tfo::Packing PackingOf(const WeightLayout& layout) {
  const int axis = layout.PackedAxis();
  return axis == 0   ? tfo::Packing::kAcrossRows
         : axis == 1 ? tfo::Packing::kAlongRows
                     : tfo::Packing::kNone;
}

// Copies the groups of rows, from 0 up.
template <class Tg>
absl::Status CopyGroups(const Tensor& group, std::int64_t groups,
                        std::vector<std::int32_t>* out) {
  const auto* const given = static_cast<const Tg*>(group.data());
  out->resize(group.NumElements());
  for (std::size_t k = 0; k < out->size(); ++k) {
    const double number = given[k];
    // What is no number is in no group.
    if (!(number > -groups - 1.0 && number < groups)) {
      return Invalid("group must be at least ", -groups, " and less than ",
                     groups, ", got ", given[k], " at ", k);
    }
    const auto g = static_cast<std::int64_t>(number);
    (*out)[k] = static_cast<std::int32_t>(g < 0 ? g + groups : g);
  }
  return absl::OkStatus();
}

// The group of each row of weights. Null: parts of equal size.
absl::Status Groups(const Tensor* group, const tfo::QuantizedWeights& weights,
                    std::vector<std::int32_t>* out) {
  const std::int64_t groups = weights.groups;
  if (group == nullptr) {
    // Of nothing there may be more rows than memory has room for.
    if (weights.columns == 0 || weights.depth == 0) return absl::OkStatus();
    const std::int64_t size = (weights.depth + groups - 1) / groups;
    out->resize(weights.depth);
    for (std::int64_t k = 0; k < weights.depth; ++k)
      (*out)[k] = static_cast<std::int32_t>(k / size);
    return absl::OkStatus();
  }
  return group->dtype() == tensorflow::DT_FLOAT
             ? CopyGroups<float>(*group, groups, out)
             : CopyGroups<std::int32_t>(*group, groups, out);
}

// Zeros as numbers, in memory of `scratch` if they are not yet; null where it
// ran out.
const float* Zeros(const Tensor& zero, const tfo::Scratch& scratch) {
  if (zero.dtype() == tensorflow::DT_FLOAT)
    return static_cast<const float*>(zero.data());
  const std::int64_t n = zero.NumElements();
  auto* const numbers = scratch.Allocate<float>(n);
  if (numbers == nullptr) return nullptr;
  if (zero.dtype() == tensorflow::DT_INT8) {
    const auto* const from = static_cast<const std::int8_t*>(zero.data());
    for (std::int64_t i = 0; i < n; ++i) numbers[i] = from[i];
  } else {
    const auto* const from = static_cast<const std::uint8_t*>(zero.data());
    for (std::int64_t i = 0; i < n; ++i) numbers[i] = from[i];
  }
  return numbers;
}

// What the inputs b, scale, zero and group say, the latter kept in `group_of`.
absl::Status ReadWeights(OpKernelContext* ctx, const WeightLayout& layout,
                         bool is_signed, std::int64_t depth, const Tensor& b,
                         const Tensor& scale, const Tensor* group,
                         const tfo::Scratch& scratch,
                         std::vector<std::int32_t>* group_of,
                         tfo::QuantizedWeights* out) {
  const Tensor* zero;
  TF_RETURN_IF_ERROR(OptionalInput(ctx, "zero", &zero));
  for (const auto& [name, tensor] : {std::pair{"b", &b}, {"scale", &scale}}) {
    if (tensor->dims() != 2) {
      return Invalid(name, " must have rank 2, got shape ",
                     tensor->shape().DebugString());
    }
  }
  const int depth_axis = layout.transpose_b ? 1 : 0;
  const std::int64_t groups = scale.dim_size(depth_axis);
  const std::int64_t columns = scale.dim_size(1 - depth_axis);
  for (int axis = 0; axis < 2; ++axis) {
    const std::int64_t size = axis == depth_axis ? depth : columns;
    const bool packed = axis == layout.PackedAxis();
    const std::int64_t bytes = packed ? size / 2 + size % 2 : size;
    if (b.dim_size(axis) == bytes) continue;
    return Invalid("b must have ", bytes, " bytes along dimension ", axis,
                   ", as ", axis == depth_axis ? "depth" : "scale",
                   " tells, got shape ", b.shape().DebugString());
  }
  if (depth > 0 && groups == 0) {
    return Invalid("scale must have a group, got shape ",
                   scale.shape().DebugString());
  }
  if (zero != nullptr)
    TF_RETURN_IF_ERROR(CheckShape("zero", *zero, "scale", scale.shape()));
  const float* const zeros = zero == nullptr ? nullptr : Zeros(*zero, scratch);
  if (zero != nullptr && zero->NumElements() > 0 && zeros == nullptr)
    return OutOfScratch();
  *out = {depth,
          columns,
          groups,
          layout.transpose_b,
          is_signed,
          PackingOf(layout),
          static_cast<const std::uint8_t*>(b.data()),
          static_cast<const float*>(scale.data()),
          zeros,
          nullptr};
  TF_RETURN_IF_ERROR(Groups(group, *out, group_of));
  out->group = group_of->data();
  return absl::OkStatus();
}

template <class Tb>
constexpr bool kIsSigned = std::is_same_v<Tb, std::int8_t>;

template <class T, class Tb>
class WeightOnlyMatMulOp : public tensorflow::OpKernel {
 public:
  explicit WeightOnlyMatMulOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadWeightOnlyMatMulAttrs(ctx, &attrs_));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  absl::Status Run(OpKernelContext* ctx) const {
    const Tensor& a = ctx->input(0);
    const Tensor *group, *bias;
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "group", &group));
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "bias", &bias));
    if (a.dims() < 2) {
      return Invalid("a must have rank 2 or more, got shape ",
                     a.shape().DebugString());
    }
    const int last = a.dims() - 1;
    const std::int64_t depth = a.dim_size(last);
    if (group != nullptr) {
      TF_RETURN_IF_ERROR(CheckShape("group", *group, "the inner dimension of a",
                                    TensorShape({depth})));
    }
    ScratchOwner scratch(ctx);
    std::vector<std::int32_t> group_of;
    tfo::QuantizedWeights weights;
    TF_RETURN_IF_ERROR(ReadWeights(ctx, attrs_.layout, kIsSigned<Tb>, depth,
                                   ctx->input(1), ctx->input(2), group,
                                   scratch.scratch(), &group_of, &weights));
    if (bias != nullptr) {
      TF_RETURN_IF_ERROR(CheckShape("bias", *bias,
                                    "the output's last dimension",
                                    TensorShape({weights.columns})));
    }
    TensorShape shape = a.shape();
    TF_RETURN_IF_ERROR(shape.SetDimWithStatus(last, weights.columns));
    std::int64_t rows = 1;
    for (int i = 0; i < last; ++i) rows *= a.dim_size(i);
    tfo::WeightOnlyMatMulArgs args{kDType<T>,
                                   rows,
                                   weights,
                                   attrs_.activation.activation,
                                   attrs_.activation.alpha,
                                   a.data(),
                                   DataOrNull(bias),
                                   nullptr};
    TF_RETURN_IF_ERROR(Output(ctx, {}, 0, shape, &args.y));
    return tfo::ActiveKernels().weight_only_matmul(args, ParallelOf(ctx),
                                                   scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  WeightOnlyMatMulAttrs attrs_;
};

template <class T, class Tb>
class DequantizedWeightsOp : public tensorflow::OpKernel {
 public:
  explicit DequantizedWeightsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadWeightLayout(ctx, &layout_));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  absl::Status Run(OpKernelContext* ctx) const {
    const Tensor& group = ctx->input(ctx->num_inputs() - 1);
    if (group.dims() != 1) {
      return Invalid("group must have rank 1, got shape ",
                     group.shape().DebugString());
    }
    ScratchOwner scratch(ctx);
    std::vector<std::int32_t> group_of;
    tfo::QuantizedWeights weights;
    TF_RETURN_IF_ERROR(ReadWeights(
        ctx, layout_, kIsSigned<Tb>, group.dim_size(0), ctx->input(0),
        ctx->input(1), &group, scratch.scratch(), &group_of, &weights));
    const TensorShape shape =
        weights.transposed ? TensorShape({weights.columns, weights.depth})
                           : TensorShape({weights.depth, weights.columns});
    void* to;
    TF_RETURN_IF_ERROR(Output(ctx, {}, 0, shape, &to));
    if (shape.num_elements() == 0) return absl::OkStatus();
    return tfo::ActiveKernels().dequantize(kDType<T>, weights, to,
                                           ParallelOf(ctx), scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  WeightLayout layout_;
};

#define TFO_REGISTER_WEIGHTS(T, Tb)                                  \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>WeightOnlyMatMulBiasAct") \
                              .Device(tensorflow::DEVICE_CPU)        \
                              .TypeConstraint<T>("T")                \
                              .TypeConstraint<Tb>("Tb"),             \
                          WeightOnlyMatMulOp<T, Tb>);                \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>DequantizedWeights")      \
                              .Device(tensorflow::DEVICE_CPU)        \
                              .TypeConstraint<T>("T")                \
                              .TypeConstraint<Tb>("Tb"),             \
                          DequantizedWeightsOp<T, Tb>)

TFO_REGISTER_WEIGHTS(Eigen::half, std::int8_t);
TFO_REGISTER_WEIGHTS(Eigen::half, std::uint8_t);
TFO_REGISTER_WEIGHTS(tensorflow::bfloat16, std::int8_t);
TFO_REGISTER_WEIGHTS(tensorflow::bfloat16, std::uint8_t);
TFO_REGISTER_WEIGHTS(float, std::int8_t);
TFO_REGISTER_WEIGHTS(float, std::uint8_t);

}  // namespace
}  // namespace tf_fused_ops
