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
SCALES = {
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
        filled: Whether that mask is first combined with one that is true everywhere.
        zeroed: Whether the same mask chooses between the result and zero, as Keras's layer has it.
        half: The half precision dtype of x and y, if stock code computes in float32 between them.
        late: Whether it does from the mask on, and scales in half precision.
    """

    family = "softmax"
    anchor = "Softmax"
    operands: ClassVar = {"x": (), "mask": ()}
    differentiable = ("x",)
    optional = ("scaled", "masked", "filled", "zeroed", "half")
    fused_ops = ("TfFusedOps>Softmax", "TfFusedOps>SoftmaxGrad")

    def variants(self, view, anchor):
        source = below_cast(anchor.inputs[0].op)
        # masked, filled, zeroed
        masks = [(False, False, False)]
        if source.type == "SelectV2":
            filled = (True, False) if _is_filled(source.inputs[0].op) else (False,)
            users = {view.types[op] for op in view.users(anchor.outputs[0])}
            zeroed = (True, False) if "SelectV2" in users else (False,)
            masks = [*((True, *form) for form in itertools.product(filled, zeroed)), *masks]
        for mask, half in itertools.product(masks, moments.halves(view, anchor)):
            attrs = dict(zip(("masked", "filled", "zeroed"), mask, strict=True)) | {"half": half}
            scaled = scaled_op(source, attrs)
            scales = (scaled.type, None) if scaled.type in SCALES else (None,)
            for scale in scales:
                for late in (False, True) if half and scale else (False,):
                    yield attrs | {"scaled": scale, "late": late}

    def present(self, attrs):
        return ("x", "mask") if attrs["masked"] else ("x",)

    def parameters(self, attrs):
        scale = {"scale": (0, attrs["half"] if attrs["late"] else None)} if attrs["scaled"] else {}
        return scale | ({"masked_value": (0, None)} if attrs["masked"] else {})

    def operand_dtype(self, name, dtype, attrs):
        return tf.bool if name == "mask" else attrs["half"] or dtype

    def scalable(self, attrs, shapes):
        # An integer might be taken for a size.
        return not attrs["scaled"] or not float(attrs["scale"]).is_integer()

    def stock(self, attrs, x, mask=None, **summands):
        half = attrs["half"]
        z = tf.cast(x, tf.float32) if half and not attrs["late"] else x
        if attrs["scaled"]:
            z = SCALES[attrs["scaled"]][0](z, attrs["scale"])
        z = self.shifted(attrs, z, **summands)
        z = tf.cast(z, tf.float32) if attrs["late"] else z
        if attrs["filled"]:
            mask = tf.logical_and(tf.ones_like(z, tf.bool), mask)
        if attrs["masked"]:
            z = tf.where(mask, z, attrs["masked_value"])
        y = tf.nn.softmax(z)
        if attrs["zeroed"]:
            y = tf.where(mask, y, 0.0)
        return {"y": tf.cast(y, half) if half else y}

    def shifted(self, attrs, z):
        """The stock code between the scale and the mask."""
        return z

    def has_inner_shape(self, match, tensor):
        # Besides scores there are shapes, masks, and keys that are transposed.
        return tensor.dtype.is_floating and tensor.op.type != "Transpose"

    def inner_shape(self, match, dtype):
        return tf.shape(match.operands["x"], dtype)

    def check(self, match):
        x, attrs = match.operands["x"], match.attrs
        if attrs["masked"]:
            sizes = None if x.shape.rank is None else shapes.dimensions(x)
            reason = self.broadcast_objection("mask", match.operands["mask"], sizes, x.name)
            if reason:
                return reason
        return self.number_objection(attrs, x)

    def broadcast_objection(self, name, tensor, sizes, x):
        """Returns why an operand may not be broadcast to sizes, those of what is called `x`, or
        these to the operand, or None."""
        if sizes is None or len(sizes) > _MAX_RANK:
            return f"{x} is not known to have at most {_MAX_RANK} dimensions"
        rank = tensor.shape.rank
        if rank is None or not 0 < rank <= len(sizes):
            return f"the rank of {name} {tensor.name} does not fit {x}"
        for axis, size in enumerate(sizes[len(sizes) - rank :]):
            if tensor.shape[axis] == 1 and axis < rank - 1:
                continue
            if shapes.dimension(tensor, axis) != size:
                return f"{name} {tensor.name} of shape {tensor.shape} may not be broadcast to {x}"
        return None

    def number_objection(self, attrs, x):
        """Returns why attributes of the fused op on x are not stock code's numbers, or None."""
        scale = self.scale_of(attrs)
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
        outputs = emit(
            self.fused_ops[0],
            match.operands["x"],
            self.mask_of(match),
            scale=self.scale_of(attrs),
            zero_masked=attrs["zeroed"],
            name=match.fused_name(),
            **self.masked_of(attrs),
        )
        return Fused(outputs, (outputs["y"],))

    def fuse_gradient(self, match, fused, dy, wanted):
        outputs = emit(
            self.fused_ops[1],
            dy,
            *fused.saved,
            self.mask_of(match),
            scale=self.scale_of(match.attrs),
            zero_masked=match.attrs["zeroed"],
            name=match.fused_name("_grad"),
        )
        return {"x": outputs["x_grad"]}

    def describe(self, match):
        parts = [match.attrs["scaled"], "SelectV2" if match.attrs["masked"] else None, "Softmax"]
        x = match.operands["x"].op.name
        return " + ".join(filter(None, parts)), f"softmax={match.node('Softmax').name} input={x}"

    def mask_of(self, match):
        return [match.operands["mask"]] if match.attrs["masked"] else []

    def masked_of(self, attrs):
        """The attribute that says what is in the place of masked scores, if there are any."""
        return {"masked": attrs["masked_value"]} if attrs["masked"] else {}

    def scale_of(self, attrs):
        """The factor of x."""
        return SCALES[attrs["scaled"]][1](float(attrs["scale"])) if attrs["scaled"] else 1.0


def below_cast(op):
    return op.inputs[0].op if op.type == "Cast" else op


def _is_filled(mask):
    return mask.type == "LogicalAnd" and any(t.op.type == "Fill" for t in mask.inputs)


def scaled_op(source, attrs):
    """Returns the op that may scale, under a mask if there is one."""
    return below_cast(source.inputs[1].op if attrs["masked"] else source)
