// The attributes of Recurrent and RecurrentGrad, read alike by shape functions
// and kernels.
#ifndef TFO_CC_OPS_RECURRENT_ATTRS_H_
#define TFO_CC_OPS_RECURRENT_ATTRS_H_

#include "cc/core/recurrent.h"
#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

struct RecurrentAttrs {
  tfo::RecurrentCell cell = tfo::RecurrentCell::kRnn;
  bool relu = false;
  bool backwards = false;
  int num_masks = 0;

  int gates() const { return tfo::NumGates(cell); }
  int saved() const { return tfo::NumSaved(cell); }
};

// `Context` is an InferenceContext or an OpKernelConstruction.
template <class Context>
absl::Status ReadRecurrentAttrs(Context* c, RecurrentAttrs* out) {
  std::string cell, activation;
  int num_states;
  TF_RETURN_IF_ERROR(c->GetAttr("cell", &cell));
  TF_RETURN_IF_ERROR(c->GetAttr("activation", &activation));
  TF_RETURN_IF_ERROR(c->GetAttr("backwards", &out->backwards));
  TF_RETURN_IF_ERROR(c->GetAttr("num_states", &num_states));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_masks", &out->num_masks));
  out->relu = activation == "relu";
  for (int i = 0; i < tfo::kNumRecurrentCells; ++i) {
    if (cell == tfo::kRecurrentCellNames[i])
      out->cell = static_cast<tfo::RecurrentCell>(i);
  }
  const int expected = tfo::NumStates(out->cell);
  if (num_states != expected) {
    return Invalid("states must hold ", expected, " tensors for cell '", cell,
                   "', got ", num_states);
  }
  return absl::OkStatus();
}

inline absl::Status CheckGates(const RecurrentAttrs& attrs, std::int64_t units,
                               std::int64_t columns) {
  // Without a product, which may overflow.
  if (columns % attrs.gates() == 0 && columns / attrs.gates() == units)
    return absl::OkStatus();
  return Invalid("kernel must have ", attrs.gates(), " columns for each of ",
                 units, " rows for cell '",
                 tfo::kRecurrentCellNames[static_cast<int>(attrs.cell)],
                 "', got ", columns);
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_RECURRENT_ATTRS_H_
