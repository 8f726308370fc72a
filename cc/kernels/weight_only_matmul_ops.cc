// The kernel of WeightOnlyMatMulBiasAct on the CPU.
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

// The group of each of `depth` rows, from 0 up. Null: parts of equal size.
absl::Status Groups(const Tensor* group, std::int64_t depth,
                    std::int64_t groups, std::vector<std::int32_t>* out) {
  out->resize(depth);
  if (group == nullptr) {
    const std::int64_t size = groups > 0 ? (depth + groups - 1) / groups : 0;
    for (std::int64_t k = 0; k < depth; ++k)
      (*out)[k] = static_cast<std::int32_t>(k / size);
    return absl::OkStatus();
  }
  const auto* const given = static_cast<const std::int32_t*>(group->data());
  for (std::int64_t k = 0; k < depth; ++k) {
    if (given[k] < -groups || given[k] >= groups) {
      return Invalid("group must be at least ", -groups, " and less than ",
                     groups, ", got ", given[k], " at ", k);
    }
    (*out)[k] =
        static_cast<std::int32_t>(given[k] + (given[k] < 0 ? groups : 0));
  }
  return absl::OkStatus();
}

template <class T, class Tb>
class WeightOnlyMatMulOp : public tensorflow::OpKernel {
 public:
  explicit WeightOnlyMatMulOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadWeightOnlyMatMulAttrs(ctx, &attrs_));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  absl::Status Run(OpKernelContext* ctx) const {
    const Tensor &a = ctx->input(0), &b = ctx->input(1), &scale = ctx->input(2);
    const Tensor *zero, *group, *bias;
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "zero", &zero));
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "group", &group));
    TF_RETURN_IF_ERROR(OptionalInput(ctx, "bias", &bias));
    if (a.dims() < 2) {
      return Invalid("a must have rank 2 or more, got shape ",
                     a.shape().DebugString());
    }
    for (const auto& [name, tensor] : {std::pair{"b", &b}, {"scale", &scale}}) {
      if (tensor->dims() != 2) {
        return Invalid(name, " must have rank 2, got shape ",
                       tensor->shape().DebugString());
      }
    }
    const int last = a.dims() - 1, depth_axis = attrs_.transpose_b ? 1 : 0;
    const std::int64_t depth = a.dim_size(last);
    const std::int64_t groups = scale.dim_size(depth_axis);
    const std::int64_t columns = scale.dim_size(1 - depth_axis);
    TensorShape bytes({depth, columns});
    if (attrs_.transpose_b) bytes = TensorShape({columns, depth});
    if (const int packed = attrs_.PackedAxis(); packed >= 0)
      bytes.set_dim(packed, (bytes.dim_size(packed) + 1) / 2);
    TF_RETURN_IF_ERROR(
        CheckShape("b", b, "the bytes that a and scale tell", bytes));
    if (depth > 0 && groups == 0) {
      return Invalid("scale must have a group, got shape ",
                     scale.shape().DebugString());
    }
    if (zero != nullptr)
      TF_RETURN_IF_ERROR(CheckShape("zero", *zero, "scale", scale.shape()));
    if (group != nullptr) {
      TF_RETURN_IF_ERROR(CheckShape("group", *group, "the inner dimension of a",
                                    TensorShape({depth})));
    }
    if (bias != nullptr) {
      TF_RETURN_IF_ERROR(CheckShape("bias", *bias,
                                    "the output's last dimension",
                                    TensorShape({columns})));
    }
    std::vector<std::int32_t> group_of;
    TF_RETURN_IF_ERROR(Groups(group, depth, groups, &group_of));
    TensorShape shape = a.shape();
    TF_RETURN_IF_ERROR(shape.SetDimWithStatus(last, columns));
    std::int64_t rows = 1;
    for (int i = 0; i < last; ++i) rows *= a.dim_size(i);
    tfo::WeightOnlyMatMulArgs args{
        kDType<T>,
        rows,
        {depth, columns, groups, attrs_.transpose_b,
         std::is_same_v<Tb, std::int8_t>, PackingOf(attrs_.PackedAxis()),
         static_cast<const std::uint8_t*>(b.data()),
         static_cast<const float*>(scale.data()),
         static_cast<const float*>(DataOrNull(zero)), group_of.data()},
        attrs_.activation.activation,
        attrs_.activation.alpha,
        a.data(),
        DataOrNull(bias),
        nullptr};
    TF_RETURN_IF_ERROR(Output(ctx, {}, 0, shape, &args.y));
    ScratchOwner scratch(ctx);
    return tfo::ActiveKernels().weight_only_matmul(args, ParallelOf(ctx),
                                                   scratch.scratch())
               ? absl::OkStatus()
               : OutOfScratch();
  }

  static tfo::Packing PackingOf(int axis) {
    return axis == 0   ? tfo::Packing::kAcrossRows
           : axis == 1 ? tfo::Packing::kAlongRows
                       : tfo::Packing::kNone;
  }

  WeightOnlyMatMulAttrs attrs_;
};

#define TFO_REGISTER_WEIGHT_ONLY_MATMUL(T, Tb)                       \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>WeightOnlyMatMulBiasAct") \
                              .Device(tensorflow::DEVICE_CPU)        \
                              .TypeConstraint<T>("T")                \
                              .TypeConstraint<Tb>("Tb"),             \
                          WeightOnlyMatMulOp<T, Tb>)
#define TFO_REGISTER_WEIGHT_ONLY_MATMULS(T)        \
  TFO_REGISTER_WEIGHT_ONLY_MATMUL(T, std::int8_t); \
  TFO_REGISTER_WEIGHT_ONLY_MATMUL(T, std::uint8_t)

TFO_REGISTER_WEIGHT_ONLY_MATMULS(Eigen::half);
TFO_REGISTER_WEIGHT_ONLY_MATMULS(tensorflow::bfloat16);
TFO_REGISTER_WEIGHT_ONLY_MATMULS(float);

}  // namespace
}  // namespace tf_fused_ops
