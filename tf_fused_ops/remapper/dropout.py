"""The rules for dropout."""

from typing import ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util

from tf_fused_ops.ops import _decimals
from tf_fused_ops.remapper import emission, shapes
from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import LAST, Fused, Rule

# Where random words begin: operand -> how many of 64 bits.
RANDOM = {"rng_key": 1, "rng_counter": 2}
# The operands that are no data.
APART = ("shape", *RANDOM)
# Of the stock code.
PARAMETERS = dict.fromkeys(("rate", "kept_scale"), (0, None))
# The ops that draw: with random words that the graph tells, and with a generator of their own.
STATELESS, STATEFUL = "StatelessRandomUniformV2", "RandomUniform"
# Attributes of the latter.
SEEDS = {STATEFUL: {"seed": 0, "seed2": 0}}
# What CPUs and GPUs take for Philox: its number, and that of the choice by device.
_PHILOX = (1, 3)


class Dropout(Rule):
    """where(uniform >= rate, x * scale, 0), the uniform numbers being drawn by Philox.

    The anchor is the op that draws.

    Variants, by attribute, see `draws`:
        draw: The type of that op.
        alg: The generator's number; None for that of TensorFlow's stateful ops.
        ranged: Whether the numbers are scaled to the range from 0 to 1 that they have.
        shape_type: The dtype of their shape.
    """

    family = "dropout"
    captured: ClassVar = SEEDS
    operands: ClassVar = {"x": (), **dict.fromkeys(APART, (1,))}
    differentiable = ("x",)
    unscaled = APART
    fused_ops = ("TfFusedOps>Dropout",)
    # What has dropout inside comes first.
    turn = LAST

    def __init__(self, *chain, anchor=STATELESS):
        super().__init__(*chain)
        self.anchor = anchor

    def present(self, attrs):
        return ("x", "shape", *given(attrs))

    def variants(self, view, anchor):
        return draws(view, anchor)

    def parameters(self, attrs):
        return PARAMETERS

    def operand_dtype(self, name, dtype, attrs):
        return dtype if name == "x" else random_dtype(name, attrs)

    def scalable(self, attrs, shapes):
        return True

    def stock(self, attrs, x, shape, **random):
        return {"y": drop(attrs, x, shape, **random)}

    def check(self, match):
        x, shape = match.operands["x"], match.operands["shape"]
        asked = shape.op.type == "Shape" and shape.op.inputs[0] is x
        known = x.shape.rank is not None and is_shape(shape, shapes.dimensions(x))
        if not asked and not known:
            return f"random numbers of shape {shape.name} may be broadcast to {x.name}"
        return objection(match, x.dtype)

    def fuse(self, match, training):
        random = words(match, lambda: match.operands["shape"])
        return Fused({"y": self._emit(match, match.operands["x"], random, "")}, random)

    def fuse_gradient(self, match, fused, dy, wanted):
        if not shapes.same_shape(dy, match.operands["x"]):
            # The op itself would draw for any shape.
            dy = emission.reshape(dy, match.operands["shape"])
        return {"x": self._emit(match, dy, fused.saved, "_grad")}

    def describe(self, match):
        y, x = match.outputs["y"].op.name, match.operands["x"].op.name
        return "Dropout", f"dropout={y} input={x}"

    def _emit(self, match, x, random, suffix):
        rate, scale = numbers(match.attrs)
        name = match.fused_name(suffix)
        return emit(self.fused_ops[0], x, *random, rate=rate, scale=scale, name=name)["y"]


def over(view, tensor):
    """Yields (the output, the op that draws) of the dropouts of a tensor."""
    for scaled in view.users(tensor):
        selects = view.users(scaled.outputs[0]) if view.types[scaled] == "Mul" else ()
        for select in (op for op in selects if view.types[op] == "SelectV2"):
            # From the comparison up, through what gives the numbers their range.
            op = select.inputs[0].op
            while view.types[op] in ("GreaterEqual", "AddV2", "Mul"):
                op = op.inputs[0].op
            if view.types[op] in (STATELESS, STATEFUL):
                yield select.outputs[0], op


def draws(view, anchor):
    """Yields the forms that uniform numbers may have at the op that draws them, as {attribute:
    value}."""
    alg = None
    if view.types[anchor] == STATELESS:
        number = view.constant(anchor.inputs[3])
        if number is None or number.ndim or number not in _PHILOX:
            return
        alg = int(number)
    types = {view.types[op] for op in view.users(anchor.outputs[0])}
    form = {"alg": alg, "ranged": "Mul" in types, "shape_type": anchor.inputs[0].dtype}
    yield form | {"draw": view.types[anchor]}


def given(attrs):
    """Returns the operands, of RANDOM, that say where random words begin."""
    return tuple(RANDOM) if attrs["draw"] == STATELESS else ()


def random_dtype(name, attrs):
    """Returns the dtype of an operand that says which numbers are drawn."""
    return attrs["shape_type"] if name == "shape" else tf.uint64


def drop(attrs, x, shape, rng_key=None, rng_counter=None):
    """The stock code."""
    if attrs["draw"] == STATELESS:
        uniform = tf.raw_ops.StatelessRandomUniformV2(
            shape=shape, key=rng_key, counter=rng_counter, alg=attrs["alg"], dtype=x.dtype
        )
    else:
        uniform = tf.raw_ops.RandomUniform(shape=shape, dtype=x.dtype)
    # What the gradient depends on is known only of a shape that is a constant.
    uniform.set_shape(x.shape)
    if attrs["ranged"]:
        low, high = tf.constant(0, x.dtype), tf.constant(1, x.dtype)
        uniform = uniform * (high - low) + low
    return tf.where(uniform >= attrs["rate"], x * attrs["kept_scale"], tf.constant(0, x.dtype))


def words(match, make_shape):
    """Returns key and counter of the random words that a match draws for a shape, given as a
    function that returns it as a tensor."""
    if match.attrs["draw"] == STATELESS:
        return tuple(match.operands[name] for name in RANDOM)
    seeds = {name: match.attrs[name] for name in SEEDS[STATEFUL]}
    shape, name = make_shape(), match.fused_name("_words")
    outputs = emit("TfFusedOps>RandomWords", shape, name=name, Tshape=shape.dtype, **seeds)
    return tuple(outputs[name] for name in RANDOM)


def numbers(attrs):
    """Returns the rate and the scale of what is kept."""
    return float(attrs["rate"]), float(attrs["kept_scale"])


def objection(match, dtype):
    """Returns why the fused op would not draw, or not scale, as stock code does, or None."""
    for name in given(match.attrs):
        size = RANDOM[name]
        if match.operands[name].shape != (size,):
            return f"{match.operands[name].name} is not known to have {size} elements"
    for number in numbers(match.attrs):
        # Neither is NaN a number for the attribute.
        if not abs(number) <= float(np.finfo(np.float32).max):
            return f"the rate or the scale is {number}"
        if dtype == tf.float64 and not _decimals.survives(number):
            return f"{number} has more digits than an attribute of the fused op"
    return None


def is_shape(shape, sizes):
    """Returns whether a vector is known to be the shape that has sizes, named as by `shapes`."""
    if shape.op.type == "Shape" and shape.op.inputs[0].shape.rank is not None:
        return shapes.dimensions(shape.op.inputs[0]) == sizes
    found = tensor_util.constant_value(shape)
    return found is not None and found.tolist() == sizes
