// Dropout, which is its own gradient.
#include "cc/ops/dropout.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

absl::Status DropoutShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRandomShapes(c, 1));
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>Dropout")
    .Input("x: T")
    .Input("rng_key: uint64")
    .Input("rng_counter: uint64")
    .Output("y: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("rate: float")
    .Attr("scale: float")
    .SetShapeFn(DropoutShape)
    .Doc(R"doc(
Computes y = x * scale where StatelessRandomUniformV2, by Philox and for x's shape and type, has a
number not below `rate`, otherwise zero, in one pass.

x: of any shape.
rng_key: [1], as of StatelessRandomGetKeyCounter.
rng_counter: [2].
y: of x's shape.
rate: rounded to T; as written in decimals: 0.1 is that also where T is double; so is `scale`.
)doc");

}  // namespace tf_fused_ops
