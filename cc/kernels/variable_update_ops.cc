// UpdateVariable on the CPU: the core on the op's own threads, in the
// variables' own memory where nothing else reads that.
#include <algorithm>
#include <array>
#include <vector>

#include "cc/core/dispatch.h"
#include "cc/kernels/kernel_util.h"
#include "cc/ops/variable_update.h"
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
    tfo::VariableUpdateArgs args{};
    args.dtype = kDType<T>;
    args.formula = formula_;
    args.size = gradient.NumElements();
    args.gradient = gradient.data();
    TF_RETURN_IF_ERROR(ReadFactors(ctx, &args));
    for (int i = 0; i < values(); ++i) {
      TF_RETURN_IF_ERROR(
          Check(ValueName(formula_, i), *variables[i], gradient));
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

  static absl::Status Check(const char* name, Var& variable,
                            const Tensor& gradient) {
    if (!variable.is_initialized) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, " is not initialized"));
    }
    const Tensor& value = *variable.tensor();
    if (value.dtype() != gradient.dtype()) {
      return Invalid(name, " must be a variable of ",
                     DataTypeString(gradient.dtype()), ", as gradient is, got ",
                     DataTypeString(value.dtype()));
    }
    return CheckShape(name, value, "gradient", gradient.shape());
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
