// What the shape functions of batch normalization share.
#ifndef TFO_CC_OPS_BATCH_NORM_SHAPES_H_
#define TFO_CC_OPS_BATCH_NORM_SHAPES_H_

#include "cc/ops/shape_util.h"

namespace tf_fused_ops {

// x of rank 2 to 5 and its channel dimension, which is unset while the rank is
// unknown.
inline absl::Status InputAndChannels(InferenceContext* c, ShapeHandle* x,
                                     DimensionHandle* channels) {
  std::string data_format;
  TF_RETURN_IF_ERROR(c->GetAttr("data_format", &data_format));
  TF_RETURN_IF_ERROR(SingleInput(c, "x", x));
  TF_RETURN_IF_ERROR(RequireRank(c, "x", 2, 5, x));
  *channels = c->Dim(*x, data_format == "NHWC" ? -1 : 1);
  return absl::OkStatus();
}

inline absl::Status MergeChannelVectors(
    InferenceContext* c, std::initializer_list<const char*> names,
    DimensionHandle* channels) {
  for (const char* name : names) {
    TF_RETURN_IF_ERROR(
        MergeVectors(c, name, "the channel dimension of x", channels));
  }
  return absl::OkStatus();
}

// Merges the channels of argument `name`, `rows`, whose last two dimensions are
// [3, channels].
inline absl::Status MergeThreeRows(InferenceContext* c, const char* name,
                                   int rank, ShapeHandle rows,
                                   DimensionHandle* channels) {
  TF_RETURN_IF_ERROR(RequireRank(c, name, rank, rank, &rows));
  DimensionHandle three = c->MakeDim(3);
  TF_RETURN_IF_ERROR(
      MergeNamed(c, name, c->Dim(rows, -2), "the number of its rows", &three));
  return MergeNamed(c, name, c->Dim(rows, -1), "the channel dimension of x",
                    channels);
}

// Puts the merged channels back into the shape.
inline absl::Status WithChannels(InferenceContext* c, DimensionHandle channels,
                                 ShapeHandle* x) {
  if (!c->RankKnown(*x)) return absl::OkStatus();
  std::string data_format;
  TF_RETURN_IF_ERROR(c->GetAttr("data_format", &data_format));
  return c->ReplaceDim(*x, data_format == "NHWC" ? -1 : 1, channels, x);
}

// One bit an element, in whole bytes.
inline absl::Status MaskShape(InferenceContext* c, ShapeHandle y,
                              ShapeHandle* mask) {
  const DimensionHandle elements = c->NumElements(y);
  *mask = c->Vector(
      c->ValueKnown(elements)
          ? c->MakeDim(c->Value(elements) / 8 + (c->Value(elements) % 8 != 0))
          : c->UnknownDim());
  return absl::OkStatus();
}

// The outputs of the forward ops, whose inputs have been merged into y and
// channels.
inline absl::Status SetForwardOutputs(InferenceContext* c, ShapeHandle y,
                                      DimensionHandle channels) {
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  int num_side_inputs;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_side_inputs", &num_side_inputs));
  TF_RETURN_IF_ERROR(WithChannels(c, channels, &y));
  TF_RETURN_IF_ERROR(MergeShapes(c, "side_input", "x", &y));
  c->set_output(0, y);
  for (int i = 1; i < 5; ++i) c->set_output(i, c->Vector(channels));
  // Switched off the mask's length is left open, as a gradient that is built
  // later may switch it on.
  bool save_mask;
  TF_RETURN_IF_ERROR(c->GetAttr("save_mask", &save_mask));
  ShapeHandle mask = c->Vector(0);
  if (activation.activation == tfo::Activation::kRelu && num_side_inputs == 1) {
    if (save_mask) {
      TF_RETURN_IF_ERROR(MaskShape(c, y, &mask));
    } else {
      mask = c->UnknownShapeOfRank(1);
    }
  }
  c->set_output(5, mask);
  return absl::OkStatus();
}

// Merges the inputs of the gradient ops into x and channels.
inline absl::Status MergeGradientInputs(InferenceContext* c, ShapeHandle* x,
                                        DimensionHandle* channels) {
  TF_RETURN_IF_ERROR(CheckStatisticsType(c));
  ActivationAttrs activation;
  TF_RETURN_IF_ERROR(ReadActivationAttrs(c, &activation));
  int num_side_inputs, num_masks;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_side_inputs", &num_side_inputs));
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_masks", &num_masks));
  if (num_masks > 0 && activation.activation != tfo::Activation::kRelu) {
    return Invalid("mask is for the activation relu alone");
  }
  if (num_masks > 0 && num_side_inputs > 0) {
    return Invalid("mask takes the place of side_input: give one of the two");
  }
  TF_RETURN_IF_ERROR(InputAndChannels(c, x, channels));
  TF_RETURN_IF_ERROR(MergeChannelVectors(
      c, {"scale", "offset", "saved_mean", "saved_inv_std"}, channels));
  TF_RETURN_IF_ERROR(WithChannels(c, *channels, x));
  TF_RETURN_IF_ERROR(MergeShapes(c, "dy", "x", x));
  TF_RETURN_IF_ERROR(MergeShapes(c, "side_input", "x", x));
  std::vector<ShapeHandle> masks;
  TF_RETURN_IF_ERROR(c->input("mask", &masks));
  for (ShapeHandle mask : masks) {
    ShapeHandle expected;
    TF_RETURN_IF_ERROR(MaskShape(c, *x, &expected));
    TF_RETURN_IF_ERROR(RequireRank(c, "mask", 1, 1, &mask));
    TF_RETURN_IF_ERROR(
        MergeNamed(c, "mask", mask, "one bit an element of x", &expected));
  }
  return absl::OkStatus();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_OPS_BATCH_NORM_SHAPES_H_
