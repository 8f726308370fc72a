// Max pooling with relu, and its gradient.
#include "cc/ops/max_pool_attrs.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// The shape that windows of an image of shape `x` make.
absl::Status MaxPoolOutputShape(InferenceContext* c, ShapeHandle x,
                                ShapeHandle* y) {
  MaxPoolAttrs attrs;
  TF_RETURN_IF_ERROR(ReadMaxPoolAttrs(c, &attrs));
  *y = x;
  for (int i = 0; i < 2; ++i) {
    const DimensionHandle in = c->Dim(x, 1 + i);
    DimensionHandle out = c->UnknownDim();
    if (c->ValueKnown(in)) {
      std::int64_t size, pad;
      TF_RETURN_IF_ERROR(
          MaxPoolOutputSize(attrs, i, c->Value(in), &size, &pad));
      out = c->MakeDim(size);
    }
    TF_RETURN_IF_ERROR(c->ReplaceDim(*y, 1 + i, out, y));
  }
  return absl::OkStatus();
}

absl::Status MaxPoolShapes(InferenceContext* c) {
  ShapeHandle x = c->input(0), y;
  TF_RETURN_IF_ERROR(RequireRank(c, "x", 4, 4, &x));
  TF_RETURN_IF_ERROR(MaxPoolOutputShape(c, x, &y));
  c->set_output(0, y);
  bool saved;
  TF_RETURN_IF_ERROR(c->GetAttr("save_indices", &saved));
  // A gradient that is built later may switch it on.
  c->set_output(1, saved ? y : c->UnknownShape());
  return absl::OkStatus();
}

absl::Status MaxPoolGradShape(InferenceContext* c) {
  ShapeHandle dy = c->input(0), sizes = c->input(2), x, y;
  TF_RETURN_IF_ERROR(RequireRank(c, "dy", 4, 4, &dy));
  TF_RETURN_IF_ERROR(RequireRank(c, "input_sizes", 1, 1, &sizes));
  DimensionHandle four = c->MakeDim(4);
  TF_RETURN_IF_ERROR(MergeNamed(c, "input_sizes", c->Dim(sizes, 0),
                                "an image's shape", &four));
  TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(2, &x));
  TF_RETURN_IF_ERROR(RequireRank(c, "input_sizes", 4, 4, &x));
  TF_RETURN_IF_ERROR(MaxPoolOutputShape(c, x, &y));
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", dy, "the output", &y));
  TF_RETURN_IF_ERROR(MergeNamed(c, "indices", c->input(1), "dy", &y));
  c->set_output(0, x);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>MaxPoolAct")
    .Input("x: T")
    .Output("y: T")
    .Output("indices: uint8")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("ksize: list(int)")
    .Attr("strides: list(int)")
    .Attr("padding: {'SAME', 'VALID'}")
    .Attr("activation: {'none', 'relu'} = 'none'")
    .Attr("save_indices: bool = false")
    .SetShapeFn(MaxPoolShapes)
    .Doc(R"doc(
Computes y = activation(max_pool(x)), which for relu is max_pool(relu(x)).

x: [batch, height, width, channels].
ksize: the window, [1, height, width, 1]; of at most 255 pixels.
y: [batch, pooled_height, pooled_width, channels].
indices: which pixel of its window, row by row, an output is, 255 where relu stops the gradient; of y's shape where
  save_indices is set, otherwise empty.
)doc");

REGISTER_OP("TfFusedOps>MaxPoolActGrad")
    .Input("dy: T")
    .Input("indices: uint8")
    .Input("input_sizes: int32")
    .Output("x_grad: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("ksize: list(int)")
    .Attr("strides: list(int)")
    .Attr("padding: {'SAME', 'VALID'}")
    .SetShapeFn(MaxPoolGradShape)
    .Doc(R"doc(
Computes the gradient of MaxPoolAct.

dy: the gradient of y.
indices: the forward op's.
input_sizes: the shape of x.
x_grad: the gradient of x.
)doc");

}  // namespace tf_fused_ops
