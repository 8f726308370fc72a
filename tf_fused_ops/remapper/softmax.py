"""The rule for softmax, with what attention does before it."""

import itertools
import math
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tf_fused_ops.ops import _decimals
from tf_fused_ops.remapper import moments, shapes
from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import Fused, Rule

# By the type of the op that scales: the stock code, and the factor.
_SCALES = {
    "Mul": (lambda x, scale: x * scale, lambda scale: scale),
    "RealDiv": (lambda x, scale: x / scale, lambda scale: 1 / scale if scale else math.inf),
}
# Of what the fused op takes a mask for.
_MAX_RANK = 9


class Softmax(Rule):
    """softmax(where(mask, x * scale, masked)) over the last dimension.

    Variants, by attribute:
        scaled: The type of the op that scales by a constant, or None.
        masked: Whether a mask chooses between that and a constant.
        zeroed: Whether the same mask chooses between the result and zero, as Keras's layer has it.
        half: The half precision dtype of x and y, if stock code computes in float32 between them.
    """

    family = "softmax"
    anchor = "Softmax"
    operands: ClassVar = {"x": (), "mask": ()}
    differentiable = ("x",)
    optional = ("scaled", "masked", "zeroed", "half")
    fused_ops = ("TfFusedOps>Softmax", "TfFusedOps>SoftmaxGrad")

    def variants(self, view, anchor):
        source = _below_cast(anchor.inputs[0].op)
        masks = [(False, False)]
        if source.type == "SelectV2":
            users = {view.types[op] for op in view.users(anchor.outputs[0])}
            masks = [(True, True)] * ("SelectV2" in users) + [(True, False), *masks]
        for (masked, zeroed), half in itertools.product(masks, moments.halves(view, anchor)):
            scaled = _below_cast(source.inputs[1].op if masked else source)
            scales = (scaled.type, None) if scaled.type in _SCALES else (None,)
            for scale in scales:
                yield {"scaled": scale, "masked": masked, "zeroed": zeroed, "half": half}

    def present(self, attrs):
        return ("x", "mask") if attrs["masked"] else ("x",)

    def parameters(self, attrs):
        switches = {"scale": attrs["scaled"], "masked_value": attrs["masked"]}
        return {name: (0, None) for name, present in switches.items() if present}

    def operand_dtype(self, name, dtype, attrs):
        return tf.bool if name == "mask" else attrs["half"] or dtype

    def scalable(self, attrs, shapes):
        # An integer might be taken for a size.
        return not attrs["scaled"] or not float(attrs["scale"]).is_integer()

    def stock(self, attrs, x, mask=None):
        half = attrs["half"]
        z = tf.cast(x, tf.float32) if half else x
        if attrs["scaled"]:
            z = _SCALES[attrs["scaled"]][0](z, attrs["scale"])
        if attrs["masked"]:
            z = tf.where(mask, z, attrs["masked_value"])
        y = tf.nn.softmax(z)
        if attrs["zeroed"]:
            y = tf.where(mask, y, 0.0)
        return {"y": tf.cast(y, half) if half else y}

    def check(self, match):
        x, attrs = match.operands["x"], match.attrs
        if attrs["masked"]:
            reason = _mask_objection(match.operands["mask"], x)
            if reason:
                return reason
        scale = self._scale(attrs)
        # Neither is NaN a number for the attribute.
        if not abs(scale) <= float(np.finfo(np.float32).max):
            return f"{x.name} is scaled by {scale}"
        numbers = [scale, *([attrs["masked_value"]] if attrs["masked"] else [])]
        for number in numbers if x.dtype == tf.float64 else ():
            if not _decimals.survives(number):
                return f"{number} has more digits than an attribute of the fused op"
        return None

    def fuse(self, match, training):
        attrs = match.attrs
        masked = {}
        if attrs["masked"]:
            masked = {"masked": attrs["masked_value"], "zero_masked": attrs["zeroed"]}
        outputs = emit(
            self.fused_ops[0],
            match.operands["x"],
            self._mask(match),
            scale=self._scale(attrs),
            name=match.fused_name(),
            **masked,
        )
        return Fused(outputs, (outputs["y"],))

    def fuse_gradient(self, match, fused, dy, wanted):
        outputs = emit(
            self.fused_ops[1],
            dy,
            *fused.saved,
            self._mask(match),
            scale=self._scale(match.attrs),
            zero_masked=match.attrs["zeroed"],
            name=match.fused_name("_grad"),
        )
        return {"x": outputs["x_grad"]}

    def describe(self, match):
        parts = [match.attrs["scaled"], "SelectV2" if match.attrs["masked"] else None, "Softmax"]
        x = match.operands["x"].op.name
        return " + ".join(filter(None, parts)), f"softmax={match.node('Softmax').name} input={x}"

    def _mask(self, match):
        return [match.operands["mask"]] if match.attrs["masked"] else []

    def _scale(self, attrs):
        """The factor of x."""
        return _SCALES[attrs["scaled"]][1](float(attrs["scale"])) if attrs["scaled"] else 1.0


def _below_cast(op):
    return op.inputs[0].op if op.type == "Cast" else op


def _mask_objection(mask, x):
    """Returns why a mask may not be broadcast to x, or x to the mask, or None."""
    if x.shape.rank is None or x.shape.rank > _MAX_RANK:
        return f"{x.name} is not known to have at most {_MAX_RANK} dimensions"
    if mask.shape.rank is None or not 0 < mask.shape.rank <= x.shape.rank:
        return f"the rank of mask {mask.name} does not fit {x.name}"
    first = x.shape.rank - mask.shape.rank
    for axis in range(mask.shape.rank):
        last = axis == mask.shape.rank - 1
        if mask.shape[axis] == 1 and not last:
            continue
        if shapes.dimension(mask, axis) != shapes.dimension(x, first + axis):
            return (
                f"mask {mask.name} of shape {mask.shape} may not be that of {x.name} of shape "
                f"{x.shape}"
            )
    return None
