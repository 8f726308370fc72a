// Recurrent layers and their gradient.
#include <algorithm>

#include "cc/ops/recurrent_attrs.h"
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op.h"

namespace tf_fused_ops {
namespace {

// The shapes of a recurrent layer's tensors, as far as they are known.
struct Shapes {
  ShapeHandle x;       // [batch, steps, gates]
  ShapeHandle kernel;  // [units, gates]
  ShapeHandle y;       // [batch, steps, units]
  ShapeHandle state;   // [batch, units]
  ShapeHandle saved;   // [batch, steps, a multiple of units]
};

absl::Status MergeGates(InferenceContext* c, const RecurrentAttrs& attrs,
                        DimensionHandle* units, DimensionHandle* gates) {
  if (c->ValueKnown(*units) && c->ValueKnown(*gates))
    return CheckGates(attrs, c->Value(*units), c->Value(*gates));
  if (c->ValueKnown(*units)) return c->Multiply(*units, attrs.gates(), gates);
  if (c->ValueKnown(*gates) && c->Value(*gates) % attrs.gates() == 0)
    *units = c->MakeDim(c->Value(*gates) / attrs.gates());
  return absl::OkStatus();
}

// Of x or y, called `name`, of the kernel, and of what goes with them.
absl::Status MergeInputs(InferenceContext* c, const RecurrentAttrs& attrs,
                         const char* name, Shapes* s) {
  const bool is_x = name[0] == 'x';
  ShapeHandle sequence;
  TF_RETURN_IF_ERROR(SingleInput(c, name, 3, &sequence));
  TF_RETURN_IF_ERROR(SingleInput(c, "kernel", 2, &s->kernel));
  DimensionHandle batch = c->Dim(sequence, 0), steps = c->Dim(sequence, 1);
  DimensionHandle units = c->Dim(s->kernel, 0), gates = c->Dim(s->kernel, 1);
  TF_RETURN_IF_ERROR(MergeNamed(c, name, c->Dim(sequence, 2),
                                is_x ? "kernel's columns" : "kernel's rows",
                                is_x ? &gates : &units));
  TF_RETURN_IF_ERROR(MergeGates(c, attrs, &units, &gates));
  std::vector<ShapeHandle> states, masks;
  TF_RETURN_IF_ERROR(c->input("states", &states));
  TF_RETURN_IF_ERROR(c->input("mask", &masks));
  s->state = c->Matrix(batch, units);
  for (const ShapeHandle& state : states) {
    TF_RETURN_IF_ERROR(
        MergeNamed(c, "states", state, "[batch, units]", &s->state));
  }
  ShapeHandle mask = c->Matrix(c->Dim(s->state, 0), steps);
  for (const ShapeHandle& given : masks)
    TF_RETURN_IF_ERROR(MergeNamed(c, "mask", given, "[batch, steps]", &mask));
  batch = c->Dim(mask, 0);
  steps = c->Dim(mask, 1);
  units = c->Dim(s->state, 1);
  TF_RETURN_IF_ERROR(MergeGates(c, attrs, &units, &gates));
  s->state = c->Matrix(batch, units);
  s->x = c->MakeShape({batch, steps, gates});
  s->kernel = c->Matrix(units, gates);
  s->y = c->MakeShape({batch, steps, units});
  DimensionHandle saved;
  TF_RETURN_IF_ERROR(c->Multiply(units, attrs.saved(), &saved));
  s->saved = c->MakeShape({batch, steps, saved});
  return absl::OkStatus();
}

void SetStates(InferenceContext* c, int first, ShapeHandle state, int count) {
  for (int i = 0; i < count; ++i) c->set_output(first + i, state);
}

absl::Status RecurrentShape(InferenceContext* c) {
  RecurrentAttrs attrs;
  TF_RETURN_IF_ERROR(ReadRecurrentAttrs(c, &attrs));
  int num_bias;
  TF_RETURN_IF_ERROR(ReadOptionalCount(c, "num_bias", &num_bias));
  Shapes s;
  TF_RETURN_IF_ERROR(MergeInputs(c, attrs, "x", &s));
  DimensionHandle gates = c->Dim(s.x, 2);
  TF_RETURN_IF_ERROR(MergeVectors(c, "bias", "kernel's columns", &gates));
  const int num_states = tfo::NumStates(attrs.cell);
  c->set_output(0, s.y);
  SetStates(c, 1, s.state, num_states);
  bool save;
  TF_RETURN_IF_ERROR(c->GetAttr("save", &save));
  // Left open, as a gradient that is built later may switch it on.
  c->set_output(1 + num_states, save ? s.saved : c->UnknownShape());
  return absl::OkStatus();
}

absl::Status RecurrentGradShape(InferenceContext* c) {
  RecurrentAttrs attrs;
  TF_RETURN_IF_ERROR(ReadRecurrentAttrs(c, &attrs));
  Shapes s;
  TF_RETURN_IF_ERROR(MergeInputs(c, attrs, "y", &s));
  ShapeHandle dy, saved;
  TF_RETURN_IF_ERROR(SingleInput(c, "dy", &dy));
  TF_RETURN_IF_ERROR(SingleInput(c, "saved", &saved));
  TF_RETURN_IF_ERROR(MergeNamed(c, "dy", dy, "y", &s.y));
  TF_RETURN_IF_ERROR(
      MergeNamed(c, "saved", saved, "what the forward op saves", &s.saved));
  TF_RETURN_IF_ERROR(MergeShapes(c, "dlast", "[batch, units]", &s.state));
  c->set_output(0, s.x);
  c->set_output(1, attrs.cell == tfo::RecurrentCell::kGru ? s.x : c->Vector(0));
  SetStates(c, 2, s.state, tfo::NumStates(attrs.cell));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfFusedOps>Recurrent")
    .Input("x: T")
    .Input("kernel: T")
    .Input("states: num_states * T")
    .Input("bias: num_bias * T")
    .Input("mask: num_masks * bool")
    .Output("y: T")
    .Output("last: num_states * T")
    .Output("saved: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("cell: {'rnn', 'gru', 'lstm'}")
    .Attr("activation: {'tanh', 'relu'} = 'tanh'")
    .Attr("backwards: bool = false")
    .Attr("save: bool = false")
    .Attr("num_states: int >= 1")
    .Attr("num_bias: int >= 0 = 0")
    .Attr("num_masks: int >= 0 = 0")
    .SetShapeFn(RecurrentShape)
    .Doc(R"doc(
Runs all steps of a recurrent layer in one op.

With p = h kernel + bias, h being the state before a step, and s the logistic
function, these are the cells rnn, gru and lstm in turn.

  h' = activation(x + p)

  z = s(x_z + p_z), r = s(x_r + p_r), n = activation(x_h + r p_h),
  h' = z h + (1 - z) n

  i = s(x_i + p_i), f = s(x_f + p_f), g = activation(x_c + p_c),
  o = s(x_o + p_o), c' = f c + i g, h' = o activation(c')

x: [batch, steps, gates], the inputs times their weights; gates is 1, 3 or 4
  times units, in the order above.
kernel: [units, gates].
states: h and, for lstm, c before the first step; [batch, units].
bias: [gates].
mask: [batch, steps]: where false, the states stay as they are, and y is that
  of the step before, or zero where there is none.
backwards: whether the last step comes first.
save: whether `saved` is asked for.
y: [batch, steps, units], h behind every step.
last: the states behind all steps.
saved: what the gradient reads: z, r, n and p_h, or i, f, g, o and c'; [batch,
  steps, 0, 4 or 5 times units], or empty.
)doc");

REGISTER_OP("TfFusedOps>RecurrentGrad")
    .Input("dy: T")
    .Input("dlast: num_states * T")
    .Input("kernel: T")
    .Input("y: T")
    .Input("saved: T")
    .Input("states: num_states * T")
    .Input("mask: num_masks * bool")
    .Output("x_grad: T")
    .Output("product_grad: T")
    .Output("state_grads: num_states * T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("cell: {'rnn', 'gru', 'lstm'}")
    .Attr("activation: {'tanh', 'relu'} = 'tanh'")
    .Attr("backwards: bool = false")
    .Attr("num_states: int >= 1")
    .Attr("num_masks: int >= 0 = 0")
    .SetShapeFn(RecurrentGradShape)
    .Doc(R"doc(
Computes the gradients of Recurrent that follow from step to step.

Those of kernel and bias are sums over all steps of product_grad.

dy: the gradient of y.
dlast: the gradients of last.
kernel: the forward op's kernel.
y: the forward op's y.
saved: the forward op's saved.
states: the forward op's states.
mask: the forward op's mask.
x_grad: the gradient of x.
product_grad: that of the products p where it is another one, for gru;
  otherwise empty.
state_grads: the gradients of states.
)doc");

}  // namespace tf_fused_ops
