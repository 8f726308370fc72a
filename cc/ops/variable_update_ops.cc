// What an optimizer does to a variable.
#include "cc/ops/variable_update.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

absl::Status UpdateVariableShape(InferenceContext* c) {
  tfo::Formula formula;
  TF_RETURN_IF_ERROR(ReadFormula(c, &formula));
  const auto& signature = tfo::SignatureOf(formula);
  const int values = 1 + tfo::CountNames(signature.states);
  tensorflow::DataType dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &dtype));
  ShapeHandle shape = c->input(values);
  for (int i = 0; i < values; ++i) {
    const auto* known = c->input_handle_shapes_and_types(i);
    if (known == nullptr || known->size() != 1) continue;
    const char* const name = ValueName(formula, i);
    if ((*known)[0].dtype != dtype) {
      return Invalid(name, " must be a variable of ", DataTypeString(dtype),
                     ", as gradient is, got ",
                     DataTypeString((*known)[0].dtype));
    }
    TF_RETURN_IF_ERROR(
        MergeNamed(c, name, (*known)[0].shape, "gradient", &shape));
  }
  for (int i = 0; i < tfo::CountNames(signature.factors); ++i) {
    ShapeHandle factor = c->input(values + 1 + i);
    TF_RETURN_IF_ERROR(RequireRank(c, signature.factors[i], 0, 0, &factor));
  }
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>UpdateVariable")
    .Input("variable: resource")
    .Input("states: num_states * resource")
    .Input("gradient: T")
    .Input("factors: num_factors * T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_states: int >= 1")
    .Attr("num_factors: int >= 1")
    .Attr(FormulaAttr())
    .SetIsStateful()
    .SetShapeFn(UpdateVariableShape)
    .Doc(R"doc(
Does to a variable, and to what an optimizer keeps of it, what the optimizer's formula says, in one pass.

variable: what is trained.
states: the optimizer's variables of the same shape, in the order of the formula.
gradient: of the variable's shape.
factors: scalars, in the order of the formula.
)doc");

}  // namespace tf_fused_ops
