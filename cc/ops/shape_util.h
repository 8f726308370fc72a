// What the shape functions of all ops share: errors that name the argument, and
// the activation attribute.
#ifndef TFO_CC_OPS_SHAPE_UTIL_H_
#define TFO_CC_OPS_SHAPE_UTIL_H_

#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/activation.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_fused_ops {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr int kAnyRank = std::numeric_limits<int>::max();

template <class... Args>
absl::Status Invalid(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat(args...));
}

// "activation: {'none', 'relu', ...} = 'none'", from the one table of names.
inline std::string ActivationAttr() {
  std::string spec = "activation: {";
  for (const char* name : tfo::kActivationNames) {
    absl::StrAppend(&spec, name == tfo::kActivationNames[0] ? "'" : ", '", name,
                    "'");
  }
  return spec + "} = 'none'";
}

// The attributes `activation` and `alpha`. `Context` is an InferenceContext or
// an OpKernelConstruction.
struct ActivationAttrs {
  tfo::Activation activation = tfo::Activation::kNone;
  float alpha = 0;

  bool SlopeFromValue() const { return tfo::SlopeFromValue(activation, alpha); }
};

template <class Context>
absl::Status ReadActivationAttrs(Context* c, ActivationAttrs* out) {
  std::string name;
  TF_RETURN_IF_ERROR(c->GetAttr("activation", &name));
  TF_RETURN_IF_ERROR(c->GetAttr("alpha", &out->alpha));
  for (int i = 0; i < tfo::kNumActivations; ++i) {
    if (name == tfo::kActivationNames[i]) {
      out->activation = static_cast<tfo::Activation>(i);
      return absl::OkStatus();
    }
  }
  return Invalid("activation '", name, "' is not known");
}

// The attribute `name` that counts the tensors of an optional input: 0 or 1.
template <class Context>
absl::Status ReadOptionalCount(Context* c, const char* name, int* count) {
  TF_RETURN_IF_ERROR(c->GetAttr(name, count));
  if (*count > 1) return Invalid(name, " must be 0 or 1, got ", *count);
  return absl::OkStatus();
}

// How many tensors the gradient of `activation` takes as `saved`.
template <class Context>
absl::Status CheckSavedCount(Context* c, const ActivationAttrs& activation) {
  int num_saved;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_saved", &num_saved));
  const int expected = activation.activation == tfo::Activation::kNone ? 0 : 1;
  if (num_saved != expected) {
    return Invalid(
        "saved must hold ", expected, " tensors for activation '",
        tfo::kActivationNames[static_cast<int>(activation.activation)],
        "', got ", num_saved);
  }
  return absl::OkStatus();
}

// That the type U of statistics and parameters, `name` say, goes with that of
// x, T.
inline absl::Status CheckStatisticsType(InferenceContext* c,
                                        const char* name = "scale",
                                        const char* x = "x") {
  tensorflow::DataType t, u;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &t));
  TF_RETURN_IF_ERROR(c->GetAttr("U", &u));
  const bool wide = t == tensorflow::DT_DOUBLE;
  if (wide == (u == tensorflow::DT_DOUBLE)) return absl::OkStatus();
  return Invalid(name, " must be ", wide ? "double" : "float", " for ", x,
                 " of this type");
}

// That moments are given at most once, and to an op that uses them. `Context`
// is an InferenceContext or an OpKernelConstruction.
template <class Context>
absl::Status CheckMomentsCount(Context* c) {
  int num_moments;
  bool training;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_moments", &num_moments));
  TF_RETURN_IF_ERROR(c->GetAttr("training", &training));
  if (num_moments == 0 || training) return absl::OkStatus();
  return Invalid("moments must not be given unless training is set");
}

inline absl::Status CheckGroups(std::int64_t groups, std::int64_t channels) {
  if (channels % groups == 0) return absl::OkStatus();
  return Invalid("groups must divide the channels of x, got ", groups,
                 " groups of ", channels, " channels");
}

// Asserts that `*shape`, that of argument `name`, has a rank in [min_rank,
// max_rank].
inline absl::Status RequireRank(InferenceContext* c, const char* name,
                                int min_rank, int max_rank,
                                ShapeHandle* shape) {
  ShapeHandle ranked;
  if (c->WithRankAtLeast(*shape, min_rank, &ranked).ok() &&
      c->WithRankAtMost(*shape, max_rank, &ranked).ok()) {
    if (min_rank != max_rank) return absl::OkStatus();
    return c->WithRank(*shape, min_rank, shape);
  }
  const std::string range = min_rank == max_rank ? absl::StrCat(min_rank)
                            : max_rank == kAnyRank
                                ? absl::StrCat("at least ", min_rank)
                                : absl::StrCat(min_rank, " to ", max_rank);
  return Invalid(name, " must have rank ", range, ", got shape ",
                 c->DebugString(*shape));
}

// The only tensor of the argument `name`, of any rank.
inline absl::Status SingleInput(InferenceContext* c, const char* name,
                                ShapeHandle* out) {
  std::vector<ShapeHandle> shapes;
  TF_RETURN_IF_ERROR(c->input(name, &shapes));
  *out = shapes[0];
  return absl::OkStatus();
}

inline absl::Status SingleInput(InferenceContext* c, const char* name, int rank,
                                ShapeHandle* out) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(SingleInput(c, name, &shape));
  TF_RETURN_IF_ERROR(RequireRank(c, name, rank, rank, &shape));
  *out = shape;
  return absl::OkStatus();
}

// Merges `shape`, that of argument `name`, into `*expected`, the shape of
// `what`.
inline absl::Status MergeNamed(InferenceContext* c, const char* name,
                               ShapeHandle shape, const char* what,
                               ShapeHandle* expected) {
  ShapeHandle merged;
  if (c->Merge(*expected, shape, &merged).ok()) {
    *expected = merged;
    return absl::OkStatus();
  }
  return Invalid(name, " must have the shape of ", what, ", ",
                 c->DebugString(*expected), ", got ", c->DebugString(shape));
}

// Merges dimension `dim` of argument `name` into `*expected`, which is `what`.
inline absl::Status MergeNamed(InferenceContext* c, const char* name,
                               DimensionHandle dim, const char* what,
                               DimensionHandle* expected) {
  DimensionHandle merged;
  if (c->Merge(*expected, dim, &merged).ok()) {
    *expected = merged;
    return absl::OkStatus();
  }
  return Invalid(name, " has ", c->DebugString(dim), " where ", what, " has ",
                 c->DebugString(*expected));
}

// Every tensor of the list argument `name` is a vector; its length is merged
// into `*length`, which is `what`.
inline absl::Status MergeVectors(InferenceContext* c, const char* name,
                                 const char* what, DimensionHandle* length) {
  std::vector<ShapeHandle> vectors;
  TF_RETURN_IF_ERROR(c->input(name, &vectors));
  for (ShapeHandle vector : vectors) {
    TF_RETURN_IF_ERROR(RequireRank(c, name, 1, 1, &vector));
    TF_RETURN_IF_ERROR(MergeNamed(c, name, c->Dim(vector, 0), what, length));
  }
  return absl::OkStatus();
}

// Every tensor of the list argument `name` has the shape `*expected`, which is
// that of `what`.
inline absl::Status MergeShapes(InferenceContext* c, const char* name,
                                const char* what, ShapeHandle* expected) {
  std::vector<ShapeHandle> shapes;
  TF_RETURN_IF_ERROR(c->input(name, &shapes));
  for (ShapeHandle shape : shapes) {
    TF_RETURN_IF_ERROR(MergeNamed(c, name, shape, what, expected));
  }
  return absl::OkStatus();
}

// Output `index` has `shape` where the boolean attribute `attr` is set;
// otherwise it is empty.
inline absl::Status SetSwitchedOutput(InferenceContext* c, int index,
                                      const char* attr, ShapeHandle shape) {
  bool on;
  TF_RETURN_IF_ERROR(c->GetAttr(attr, &on));
  c->set_output(index, on ? shape : c->Vector(0));
  return absl::OkStatus();
}

// Output `index` is the pre-activation. Switched off its shape is left open, as
// a gradient that is built later may switch it on.
inline absl::Status SetPreActivationOutput(InferenceContext* c, int index,
                                           ShapeHandle y) {
  bool on;
  TF_RETURN_IF_ERROR(c->GetAttr("save_pre_activation", &on));
  c->set_output(index, on ? y : c->UnknownShape());
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_SHAPE_UTIL_H_
