// Where dropout's random words begin, checked alike by shape functions and
// kernels.
#ifndef TFO_CC_OPS_DROPOUT_H_
#define TFO_CC_OPS_DROPOUT_H_

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// What has as many words of 64 bits.
struct RandomInput {
  const char* name;
  int words;
};
inline constexpr RandomInput kRandomInputs[] = {{"rng_key", 1},
                                                {"rng_counter", 2}};

inline absl::Status CheckRandomInput(const RandomInput& input,
                                     std::int64_t size) {
  if (size == input.words) return absl::OkStatus();
  return Invalid(input.name, " must have ", input.words, " elements, got ",
                 size);
}

// Checks inputs `first` and the next one.
inline absl::Status CheckRandomShapes(InferenceContext* c, int first) {
  for (const RandomInput& input : kRandomInputs) {
    ShapeHandle shape = c->input(first++);
    TF_RETURN_IF_ERROR(RequireRank(c, input.name, 1, 1, &shape));
    if (!c->RankKnown(shape) || !c->ValueKnown(c->Dim(shape, 0))) continue;
    TF_RETURN_IF_ERROR(CheckRandomInput(input, c->Value(c->Dim(shape, 0))));
  }
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_DROPOUT_H_
