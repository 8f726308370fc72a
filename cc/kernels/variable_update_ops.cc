// UpdateVariable on the CPU: the core on the op's own threads, in the
// variables' own memory where nothing else reads that.
#include <algorithm>
#include <array>
#include <vector>

#include "cc/core/dispatch.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/variable_update.h"
#include "tensorflow/core/framework/bounds_check.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace tf_fused_ops {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

constexpr int kMostValues = 1 + tfo::kMostStates;

template <class T>
class UpdateVariableOp : public tensorflow::OpKernel {
 public:
  explicit UpdateVariableOp(tensorflow::OpKernelConstruction* ctx)
      : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadFormula(ctx, &formula_));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  using Variables = std::array<tensorflow::core::RefCountPtr<Var>, kMostValues>;

  int values() const { return 1 + tfo::CountNames(signature().states); }
  const tfo::FormulaSignature& signature() const {
    return tfo::SignatureOf(formula_);
  }

  absl::Status Run(OpKernelContext* ctx) const {
    Variables variables;
    for (int i = 0; i < values(); ++i) {
      TF_RETURN_IF_ERROR(LookupResource(
          ctx, tensorflow::HandleFromInput(ctx, i), &variables[i]));
    }
    std::vector<tensorflow::mutex_lock> locks;
    TF_RETURN_IF_ERROR(Lock(variables, &locks));

    const Tensor& gradient = ctx->input(values());
    tensorflow::TensorShape shape = gradient.shape();
    tfo::VariableUpdateArgs args{};
    args.dtype = kDType<T>;
    args.formula = formula_;
    args.gradient = gradient.data();
    TF_RETURN_IF_ERROR(ReadFactors(ctx, &args));
    const int factors = tfo::CountNames(signature().factors);
    const bool of_rows = ctx->num_inputs() > values() + 1 + factors;
    if (of_rows && gradient.dims() == 0)
      return Invalid("gradient must have rank at least 1, got shape []");
    if (of_rows && variables[0]->is_initialized) {
      const Tensor& variable = *variables[0]->tensor();
      // With more elements than can be counted it is not the variable's.
      if (variable.dims() > 0 &&
          !shape.SetDimWithStatus(0, variable.dim_size(0)).ok()) {
        shape = gradient.shape();
      }
    }
    args.size = shape.num_elements();
    for (int i = 0; i < values(); ++i) {
      TF_RETURN_IF_ERROR(Check(ValueName(formula_, i), *variables[i],
                               gradient.dtype(), of_rows, shape));
    }
    std::array<Tensor, 2> lists;
    if (of_rows) {
      const Tensor& indices = ctx->input(values() + 1 + factors);
      TF_RETURN_IF_ERROR(
          indices.dtype() == tensorflow::DT_INT32
              ? ListRows<std::int32_t>(ctx, gradient, shape, indices, &lists)
              : ListRows<std::int64_t>(ctx, gradient, shape, indices, &lists));
      if (args.size == 0) return absl::OkStatus();
      args.rows = {args.size / shape.dim_size(0),
                   static_cast<const std::int64_t*>(lists[0].data()),
                   static_cast<const std::int64_t*>(lists[1].data())};
    }
    std::array<Tensor, kMostValues> after;
    for (int i = 0; i < values(); ++i) {
      const Tensor& before = *variables[i]->tensor();
      void* data = before.data();
      args.before[i] = data;
      // Who has read a variable may hold its memory for longer.
      if (!before.RefCountIsOne()) {
        TF_RETURN_IF_ERROR(
            ctx->allocate_temp(before.dtype(), before.shape(), &after[i]));
        data = after[i].data();
        AdviseHugePages(data, after[i].TotalBytes());
      }
      args.after[i] = data;
    }
    tfo::ActiveKernels().variable_update(args, ParallelOf(ctx));
    for (int i = 0; i < values(); ++i) {
      if (args.after[i] != args.before[i]) *variables[i]->tensor() = after[i];
    }
    return absl::OkStatus();
  }

  // Locks all of them, by address as TensorFlow's ops do it.
  absl::Status Lock(const Variables& variables,
                    std::vector<tensorflow::mutex_lock>* locks) const {
    std::vector<Var*> order;
    for (int i = 0; i < values(); ++i) order.push_back(variables[i].get());
    std::sort(order.begin(), order.end(),
              [](Var* a, Var* b) { return a->mu() < b->mu(); });
    if (std::adjacent_find(order.begin(), order.end()) != order.end()) {
      return Invalid("variable and states must be different variables");
    }
    locks->reserve(order.size());
    for (Var* variable : order) locks->emplace_back(*variable->mu());
    return absl::OkStatus();
  }

  absl::Status ReadFactors(OpKernelContext* ctx,
                           tfo::VariableUpdateArgs* args) const {
    for (int i = 0; i < tfo::CountNames(signature().factors); ++i) {
      const Tensor& factor = ctx->input(values() + 1 + i);
      if (factor.dims() != 0) {
        return Invalid(signature().factors[i], " must be a scalar, got shape ",
                       factor.shape().DebugString());
      }
      args->factors[i] = static_cast<double>(factor.scalar<T>()());
    }
    return absl::OkStatus();
  }

  // Makes the lists of `GradientRows` for a variable of a shape; without
  // elements, it may have more rows than there is memory for.
  template <class Index>
  static absl::Status ListRows(OpKernelContext* ctx, const Tensor& gradient,
                               const tensorflow::TensorShape& shape,
                               const Tensor& indices,
                               std::array<Tensor, 2>* lists) {
    using tensorflow::TensorShape;
    const std::int64_t rows = gradient.dim_size(0);
    const std::int64_t rows_of_variable = shape.dim_size(0);
    TF_RETURN_IF_ERROR(CheckShape("indices", indices, "the rows of gradient",
                                  TensorShape({rows})));
    const std::int64_t listed = shape.num_elements() > 0 ? rows_of_variable : 0;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64,
                                          TensorShape({listed}), &(*lists)[0]));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64,
                                          TensorShape({rows}), &(*lists)[1]));
    const auto first = (*lists)[0].flat<std::int64_t>();
    const auto next = (*lists)[1].flat<std::int64_t>();
    std::fill_n(first.data(), listed, -1);
    for (std::int64_t i = rows - 1; i >= 0; --i) {
      // Read once: memory of others may change.
      const std::int64_t row =
          tensorflow::internal::SubtleMustCopy(indices.flat<Index>()(i));
      if (row >= rows_of_variable) {
        return Invalid("indices must be less than ", rows_of_variable,
                       ", the rows of variable, got ", row);
      }
      if (row < 0 || listed == 0) continue;
      next(i) = first(row);
      first(row) = i;
    }
    return absl::OkStatus();
  }

  // Of a gradient of some rows, variables must have the shape but for those.
  static absl::Status Check(const char* name, Var& variable,
                            tensorflow::DataType dtype, bool of_rows,
                            const tensorflow::TensorShape& shape) {
    if (!variable.is_initialized) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, " is not initialized"));
    }
    const Tensor& value = *variable.tensor();
    if (value.dtype() != dtype) {
      return Invalid(name, " must be a variable of ", DataTypeString(dtype),
                     ", as gradient is, got ", DataTypeString(value.dtype()));
    }
    const char* const what =
        of_rows ? "gradient, but for the rows," : "gradient";
    return CheckShape(name, value, what, shape);
  }

  tfo::Formula formula_;
};

#define TFO_REGISTER_UPDATE_VARIABLE(T)                       \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>UpdateVariable")   \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          UpdateVariableOp<T>)

TFO_REGISTER_UPDATE_VARIABLE(Eigen::half);
TFO_REGISTER_UPDATE_VARIABLE(tensorflow::bfloat16);
TFO_REGISTER_UPDATE_VARIABLE(float);
TFO_REGISTER_UPDATE_VARIABLE(double);

}  // namespace
}  // namespace tf_fused_ops
