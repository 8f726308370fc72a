// Dropout, which is its own gradient, and where its random words begin.
#include "cc/ops/dropout.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

absl::Status DropoutShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRandomShapes(c, 1));
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

absl::Status RandomWordsShape(InferenceContext* c) {
  ShapeHandle shape = c->input(0);
  TF_RETURN_IF_ERROR(RequireRank(c, "shape", 1, 1, &shape));
  c->set_output(0, c->Vector(1));
  c->set_output(1, c->Vector(2));
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

REGISTER_OP("TfFusedOps>RandomWords")
    .Input("shape: Tshape")
    .Output("rng_key: uint64")
    .Output("rng_counter: uint64")
    .Attr("seed: int = 0")
    .Attr("seed2: int = 0")
    .Attr("Tshape: {int32, int64} = DT_INT32")
    .SetIsStateful()
    .SetShapeFn(RandomWordsShape)
    .Doc(R"doc(
Tells where the random words begin that RandomUniform would draw in its place.

shape: of the tensor that RandomUniform would make.
rng_key: [1], as StatelessRandomUniformV2 takes it.
rng_counter: [2], as StatelessRandomUniformV2 takes it.
seed: RandomUniform's seed.
seed2: RandomUniform's seed2.
)doc");

}  // namespace tf_fused_ops
