// What an optimizer does to a variable.
#include "cc/ops/variable_update.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// The shape of the variable, as far as a gradient of some rows tells it.
absl::Status VariableOfRows(InferenceContext* c, ShapeHandle indices,
                            ShapeHandle* gradient) {
  ShapeHandle rest;
  TF_RETURN_IF_ERROR(RequireRank(c, "indices", 1, 1, &indices));
  TF_RETURN_IF_ERROR(RequireRank(c, "gradient", 1, kAnyRank, gradient));
  if (!c->RankKnown(*gradient)) return absl::OkStatus();
  DimensionHandle rows = c->Dim(*gradient, 0);
  TF_RETURN_IF_ERROR(MergeNamed(c, "indices", c->Dim(indices, 0),
                                "the rows of gradient", &rows));
  TF_RETURN_IF_ERROR(c->Subshape(*gradient, 1, &rest));
  return c->Concatenate(c->Vector(c->UnknownDim()), rest, gradient);
}

absl::Status UpdateVariableShape(InferenceContext* c) {
  tfo::Formula formula;
  TF_RETURN_IF_ERROR(ReadFormula(c, &formula));
  const auto& signature = tfo::SignatureOf(formula);
  const int values = 1 + tfo::CountNames(signature.states);
  tensorflow::DataType dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &dtype));
  ShapeHandle shape = c->input(values);
  const int factors = values + 1 + tfo::CountNames(signature.factors);
  const bool of_rows = c->num_inputs() > factors;
  if (of_rows) TF_RETURN_IF_ERROR(VariableOfRows(c, c->input(factors), &shape));
  for (int i = 0; i < values; ++i) {
    const auto* known = c->input_handle_shapes_and_types(i);
    if (known == nullptr || known->size() != 1) continue;
    const char* const name = ValueName(formula, i);
    if ((*known)[0].dtype != dtype) {
      return Invalid(name, " must be a variable of ", DataTypeString(dtype),
                     ", as gradient is, got ",
                     DataTypeString((*known)[0].dtype));
    }
    TF_RETURN_IF_ERROR(MergeNamed(
        c, name, (*known)[0].shape,
        of_rows ? "gradient, but for the rows," : "gradient", &shape));
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
    .Input("indices: num_indices * Tindices")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_states: int >= 1")
    .Attr("num_factors: int >= 1")
    .Attr("num_indices: int >= 0 = 0")
    .Attr("Tindices: {int32, int64} = DT_INT64")
    .Attr(FormulaAttr())
    .SetIsStateful()
    .SetShapeFn(UpdateVariableShape)
    .Doc(R"doc(
Does to a variable, and to what an optimizer keeps of it, what the optimizer's formula says, in one pass.

variable: what is trained.
states: the optimizer's variables of the same shape, in the order of the formula.
gradient: of the variable's shape; with indices, some rows.
factors: scalars, in the order of the formula.
indices: none, or one vector: the rows of the variable that those of the gradient belong to. Where several belong to one, the formula takes their sum, and for their square, or absolute value, the sum of theirs; where none does, zero. Negative ones are left out.
)doc");

}  // namespace tf_fused_ops
