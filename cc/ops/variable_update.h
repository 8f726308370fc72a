// What UpdateVariable takes, checked alike by its shape function and kernel.
#ifndef TFO_CC_OPS_VARIABLE_UPDATE_H_
#define TFO_CC_OPS_VARIABLE_UPDATE_H_

#include <string>

#include "cc/core/variable_update.h"
#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// "formula: {'momentum', ...}", from the one table of formulas.
inline std::string FormulaAttr() {
  std::string spec = "formula: {";
  for (const tfo::FormulaSignature& formula : tfo::kFormulas) {
    absl::StrAppend(&spec, &formula == tfo::kFormulas ? "'" : ", '",
                    formula.name, "'");
  }
  return spec + "}";
}

// Reads `formula`, for which there must be as many states and factors as it
// takes, and at most one vector of indices. `Context` is an InferenceContext
// or an OpKernelConstruction.
template <class Context>
absl::Status ReadFormula(Context* c, tfo::Formula* out) {
  std::string name;
  int num_states, num_factors, num_indices;
  TF_RETURN_IF_ERROR(c->GetAttr("formula", &name));
  TF_RETURN_IF_ERROR(c->GetAttr("num_states", &num_states));
  TF_RETURN_IF_ERROR(c->GetAttr("num_factors", &num_factors));
  TF_RETURN_IF_ERROR(c->GetAttr("num_indices", &num_indices));
  for (int i = 0; i < tfo::kNumFormulas; ++i) {
    const tfo::FormulaSignature& formula = tfo::kFormulas[i];
    if (name != formula.name) continue;
    if (num_states != tfo::CountNames(formula.states)) {
      return Invalid("states must be ", tfo::CountNames(formula.states),
                     " variables for formula '", name, "', got ", num_states);
    }
    if (num_factors != tfo::CountNames(formula.factors)) {
      return Invalid("factors must be ", tfo::CountNames(formula.factors),
                     " numbers for formula '", name, "', got ", num_factors);
    }
    if (num_indices > 1)
      return Invalid("indices must be none or one vector, got ", num_indices);
    *out = static_cast<tfo::Formula>(i);
    return absl::OkStatus();
  }
  return Invalid("formula '", name, "' is not known");
}

// What input `i` of the op is called in errors: the variable, or a state.
inline const char* ValueName(tfo::Formula formula, int i) {
  const auto& signature = tfo::SignatureOf(formula);
  return i == 0 ? "variable" : signature.states[i - 1];
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_VARIABLE_UPDATE_H_
