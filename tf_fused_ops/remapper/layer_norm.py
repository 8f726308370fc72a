"""Rules for layer and RMS normalization, made of elementary ops as people write them."""

import itertools
import math
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tf_fused_ops.remapper import moments
from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import Fused, Rule

_VECTORS = ("scale", "offset")


def _keras(x, axes, scale, offset, epsilon):
    """As keras.ops.layer_normalization has it."""
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    inv_std = tf.math.rsqrt(variance + epsilon)
    inv_std = inv_std if scale is None else inv_std * scale
    shift = -mean * inv_std
    return x * inv_std + (shift if offset is None else shift + offset)


def _batch_normalization(x, axes, scale, offset, epsilon):
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, epsilon)


# Stock functions that do all of it.
WHOLE = {"keras": _keras, "batch_normalization": _batch_normalization}


def _moments(x, axes):
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return x - mean, variance


def _squares(x, axes):
    centred = x - tf.reduce_mean(x, axes, keepdims=True)
    return centred, tf.reduce_mean(tf.square(centred), axes, keepdims=True)


def _squares_anew(x, axes):
    mean = tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean(tf.square(x - mean), axes, keepdims=True)
    return x - mean, variance


def _reduce_variance(x, axes):
    mean = tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.math.reduce_variance(x, axes, keepdims=True)
    return x - mean, variance


# The deviations from the mean, and their mean square.
_DEVIATIONS = {
    "moments": _moments,
    "squares": _squares,
    "squares_anew": _squares_anew,
    "reduce_variance": _reduce_variance,
}


def _rms(square):
    """Returns a function for x and its mean square, given one of the ways to write a square."""
    return lambda x, axes: (x, tf.reduce_mean(square(x), axes, keepdims=True))


# By the type of the op that squares.
_RMS = {
    "Square": _rms(tf.square),
    "Pow": _rms(lambda x: tf.pow(x, 2)),
    "Mul": _rms(lambda x: x * x),
}

_SQUARES = ("SquaredDifference", *_RMS)

# By the type of the op that takes the root, or its reciprocal.
ROOTS = {
    "Rsqrt": lambda x, square: x * tf.math.rsqrt(square),
    "Sqrt": lambda x, square: x / tf.sqrt(square),
    "Reciprocal": lambda x, square: x * tf.math.reciprocal(tf.sqrt(square)),
}


class LayerNorm(moments.OptionalVectors, Rule):
    """(x - mean) * rsqrt(variance + epsilon) * scale + offset over the last dimension.

    The anchor is the op that takes the root: "Rsqrt", or "Sqrt" for (x - mean) / sqrt(variance +
    epsilon), or "Reciprocal" for (x - mean) * reciprocal(sqrt(variance + epsilon)).

    Variants, by attribute:
        form: How it is written, a name of `WHOLE` or `_deviations`.
        axes: The dimension that is averaged over, or a list of it.
        scaled_first: Whether the scale is a factor of what the root divides.

    Reshaped vectors are [1, .., 1, depth].
    """

    family = "layer_norm"
    operands: ClassVar = {"x": (2, 3, 4, 5), "scale": (1,), "offset": (1,)}
    differentiable = ("x", "scale", "offset")
    fused_ops = ("TfFusedOps>LayerNorm", "TfFusedOps>LayerNormGrad")
    title = "LayerNorm"
    subtract_mean = True
    _deviations = _DEVIATIONS

    def __init__(self, *chain, anchor="Rsqrt"):
        super().__init__(*chain)
        self.anchor = anchor

    def _forms(self, factors, variance):
        """Returns the names of the forms that a normalization may have.

        Args:
            factors: What the root divides or is multiplied by, and the factors of that.
            variance: What the root is taken of, but for epsilon.
        """
        centred = [tensor for tensor in factors if tensor.op.type == "Sub"]
        squared = variance.op.inputs[0].op
        if squared.type == "SquaredDifference":
            whole = tuple(WHOLE) if self.anchor == "Rsqrt" else ()
            return ("moments",) if centred else whole
        if squared.type != "Square" or not centred:
            return ()
        if squared.inputs[0] is centred[0]:
            return ("squares",)
        means = [
            difference.op.inputs[1]
            for difference in (centred[0], squared.inputs[0])
            if difference.op.type == "Sub"
        ]
        return ("squares_anew",) if means[0] is means[-1] else ("reduce_variance",)

    def variants(self, view, anchor):
        found = self.found(view, anchor)
        if found:
            variance, axes = found
            for spelling in self.spellings(view, anchor, variance):
                yield {"axes": axes} | spelling

    def found(self, view, anchor):
        """Returns what epsilon is added to, but for that, and the dimensions that are averaged
        over; None if it is no variance."""
        variance = moments.variance_under(view, anchor)
        if variance is None or variance.op.type != "Mean":
            return None
        if variance.op.inputs[0].op.type not in _SQUARES:
            return None
        axes = view.constant(variance.op.inputs[1])
        if axes is None or not variance.op.get_attr("keep_dims"):
            return None
        return variance, axes.tolist()

    def spellings(self, view, anchor, variance):
        """Yields the attributes of the variants but for `axes`."""
        factors = [tensor for op in view.users(anchor.outputs[0]) for tensor in op.inputs]
        of_factors = [t for factor in factors if factor.op.type == "Mul" for t in factor.op.inputs]
        orders = (False, True) if of_factors else (False,)
        # Keras reshapes both vectors.
        shapes = (True, False) if view.has(["Reshape"]) else (False,)
        for form, scaled, scaled_first, centered, reshaped, half in itertools.product(
            self._forms([*factors, *of_factors], variance),
            (True, False),
            orders,
            (True, False),
            shapes,
            moments.halves(view, anchor),
        ):
            no_order = scaled_first and (form in WHOLE or not scaled)
            if not no_order and (scaled or centered or not reshaped):
                vectors = {"scaled": scaled, "centered": centered, "reshaped": reshaped}
                yield vectors | {"form": form, "scaled_first": scaled_first, "half": half}

    def operand_dtype(self, name, dtype, attrs):
        return attrs["half"] or dtype if name == "x" else dtype

    def scalable(self, attrs, shapes):
        return True

    def stock(self, attrs, x, **vectors):
        half = attrs["half"]
        wide = tf.cast(x, tf.float32) if half else x
        scale, offset = (self.broadcast(attrs, vectors.get(name)) for name in _VECTORS)
        y = self._normalized(attrs, wide, scale, offset)
        return {"y": tf.cast(y, half) if half else y}

    def _normalized(self, attrs, x, scale, offset):
        form, axes, epsilon = (attrs[name] for name in ("form", "axes", "epsilon"))
        if form in WHOLE:
            return WHOLE[form](x, axes, scale, offset, epsilon)
        y, square = self._deviations[form](x, axes)
        y = y * scale if attrs["scaled_first"] else y
        y = ROOTS[self.anchor](y, square + epsilon)
        y = y if scale is None or attrs["scaled_first"] else y * scale
        return y if offset is None else y + offset

    def broadcast(self, attrs, vector):
        """Returns a vector, or None, as the stock code combines it with x."""
        if vector is None or not attrs["reshaped"]:
            return vector
        return tf.reshape(vector, attrs["shape"])

    def check(self, match):
        x, attrs = match.operands["x"], match.attrs
        rank, depth = x.shape.rank, x.shape[-1]
        axes = np.atleast_1d(attrs["axes"]).tolist()
        if [axis % rank for axis in axes] != [rank - 1]:
            return f"{x.name} is normalized over dimensions {axes}, not the last one alone"
        if depth is None:
            return f"the last dimension of {x.name} is not known"
        for name in _VECTORS:
            vector = match.operands.get(name)
            if vector is not None and vector.shape[0] != depth:
                return f"{name} {vector.name} of {vector.shape[0]} elements does not fit {x.name}"
        shape = self.vector_shape(match, depth)
        # One of more dimensions gives y more, too.
        if len(shape) > rank or shape != [1] * (len(shape) - 1) + [depth]:
            return f"scale and offset are reshaped to {shape}"
        return self.check_precision(match)

    def vector_shape(self, match, length):
        """Returns the shape in which vectors of a length are combined with x."""
        shape = list(match.attrs["shape"]) if match.attrs["reshaped"] else [length]
        rest = -math.prod(shape)
        return [length // rest if size == -1 and rest > 0 else size for size in shape]

    def fuse(self, match, training):
        x = match.operands["x"]
        dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
        scale, offset = (
            match.operands[name] if name in match.operands else make(x.shape[-1:], dtype)
            for name, make in zip(_VECTORS, (tf.ones, tf.zeros), strict=True)
        )
        fused = emit(
            self.fused_ops[0],
            x,
            scale,
            offset,
            epsilon=match.attrs["epsilon"],
            subtract_mean=self.subtract_mean,
            name=match.fused_name(),
        )
        return Fused({"y": fused["y"]}, (scale, fused["mean"], fused["inv_std"]))

    def fuse_gradient(self, match, fused, dy, wanted):
        gradients = emit(
            self.fused_ops[1],
            dy,
            match.operands["x"],
            *fused.saved,
            subtract_mean=self.subtract_mean,
            name=match.fused_name("_grad"),
        )
        return {name: gradients[f"{name}_grad"] for name in wanted}

    def describe(self, match):
        root = f"{self.anchor.lower()}={match.node(self.anchor).name}"
        return self.title, f"y={match.outputs['y'].op.name} {root}"


class RmsNorm(LayerNorm):
    """x * rsqrt(mean(x^2) + epsilon) * scale + offset over the last dimension.

    Anchors and variants are those of layer normalization.
    """

    family = "rms_norm"
    # What is multiplied by or added to it may be anything.
    optional = ("scaled", "centered")
    title = "RMSNorm"
    subtract_mean = False
    _deviations = _RMS

    def _forms(self, factors, variance):
        squared = variance.op.inputs[0].op
        if squared.type not in _RMS:
            return ()
        x = squared.inputs[0].op
        # That of deviations from a mean is layer normalization.
        centred = x.type == "Sub" and x.inputs[1].op.type == "Mean"
        return () if centred else (squared.type,)
