"""Rules for activations on their own."""

import functools
from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper import spellings
from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import LAST, Fused, Rule


class Act(Rule):
    """act(x), whatever x is."""

    family = "act"
    operands: ClassVar = {"x": ()}
    differentiable = ("x",)
    fused_ops = ("TfFusedOps>Act", "TfFusedOps>ActGrad")
    backward_alone = True
    turn = LAST

    @property
    def anchors(self):
        return self.activation.ops

    @functools.cached_property
    def anchor(self):
        """The op type at which matching begins; graphs have few of them beside activations."""
        first, *others = self.activation.ops
        if not others:
            return first
        types = spellings.traced(self.activation, self.spelling, tf.float32).op_types
        return next(name for name in (first, *others) if name in types)

    def scalable(self, attrs, shapes):
        return True

    def stock(self, attrs, x):
        return {"y": self.activate(x, attrs)}

    def fuse(self, match, training):
        outputs = emit(
            self.fused_ops[0],
            match.operands["x"],
            activation=self.activation.name,
            name=match.fused_name(),
        )
        return Fused(outputs)

    def stock_forward(self, match, kept):
        return Fused(match.outputs)

    def fuse_gradient(self, match, fused, dy, wanted):
        outputs = emit(
            self.fused_ops[1],
            dy,
            match.operands["x"],
            activation=self.activation.name,
            name=match.fused_name("_grad"),
        )
        return {"x": outputs["x_grad"]}

    def describe(self, match):
        y, x = match.outputs["y"].op.name, match.operands["x"].op.name
        return self.activation.label, f"activation={y} input={x}"
