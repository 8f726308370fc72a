"""Rules for batch normalization made of elementary ops, as Keras 3 and `tf.nn.moments` with
`tf.nn.batch_normalization` emit it."""

import abc
import itertools
from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.ops import _decimals
from tf_fused_ops.remapper.batch_norm import AddAct, BatchNorm

_RANKS = (2, 3, 4, 5)
_VECTORS = ("scale", "offset", "mean", "variance")
_HALF = (tf.bfloat16, tf.float16)


class OptionalVectors:
    """What rules for normalizations of elementary ops share.

    Variants, by attribute:
        scaled, centered: Whether there are a scale and an offset.
        reshaped: Whether the vectors are reshaped.
        half: The half precision dtype of x and y, if stock code computes in float32 between them.
    """

    def parameters(self, attrs):
        parameters = {"epsilon": (0, None)}
        return parameters | ({"shape": (1, tf.int32)} if attrs["reshaped"] else {})

    def present(self, attrs):
        missing = {"scale": not attrs["scaled"], "offset": not attrs["centered"]}
        return tuple(name for name in self.operands if not missing.get(name))

    def scale(self, attrs, sizes):
        if not attrs["reshaped"]:
            return attrs
        return attrs | {"shape": [sizes.get(size, size) for size in attrs["shape"]]}

    def check_precision(self, match):
        """Returns why the fused op, which computes in float32 at least, does not fit, or None."""
        x = match.operands["x"]
        if x.dtype in _HALF and not match.attrs["half"]:
            return f"{x.name} is normalized in {x.dtype.name}, not in float32"
        epsilon = match.attrs["epsilon"]
        if x.dtype == tf.float64 and not _decimals.survives(epsilon):
            return f"epsilon {epsilon} has more digits than the fused op's attribute"
        return None


class _Decomposed(OptionalVectors, BatchNorm):
    """x * inv + (offset - mean * inv), where inv = rsqrt(variance + epsilon) * scale.

    Reshaped vectors are [1, .., channels, .., 1].
    """

    anchor = "Rsqrt"

    def variants(self, view, anchor):
        variance = variance_under(view, anchor)
        if variance is None:
            return
        form = {"reshaped": variance.op.type == "Reshape"}
        vector = variance.op.inputs[0] if form["reshaped"] else variance
        origin = self.origin(view, vector)
        if vector.shape.rank != 1 or origin is None:
            return
        forms = itertools.product((True, False), (True, False), halves(view, anchor))
        for scaled, centered, half in forms:
            yield form | origin | {"scaled": scaled, "centered": centered, "half": half}

    @abc.abstractmethod
    def origin(self, view, variance):
        """Returns the attributes of a variant that say where the variance comes from, or None."""

    def operand_dtype(self, name, dtype, attrs):
        return attrs["half"] or dtype if name in ("x", "side_input") else dtype

    def scale_and_shift(self, attrs, x, mean, variance, scale=None, offset=None):
        """The stock normalization with given statistics."""
        vectors = (mean, variance, offset, scale)
        if attrs["reshaped"]:
            vectors = (v if v is None else tf.reshape(v, attrs["shape"]) for v in vectors)
        return tf.nn.batch_normalization(x, *vectors, attrs["epsilon"])

    def widen(self, attrs, x):
        """Returns what stock code computes with: x in float32 if it is half precision."""
        return tf.cast(x, tf.float32) if attrs["half"] else x

    def narrow(self, attrs, y):
        """Undoes `widen`."""
        return tf.cast(y, attrs["half"]) if attrs["half"] else y

    def axis(self, match):
        """Returns the axis of channels, or None if it is not plain."""
        rank = match.operands["x"].shape.rank
        if not match.attrs["reshaped"]:
            return rank - 1
        shape = match.attrs["shape"]
        long = [axis for axis, size in enumerate(shape) if size != 1]
        if len(shape) != rank or len(long) > 1:
            return None
        return long[0] if long else rank - 1

    def check(self, match):
        return self.check_channels(match) or self.check_precision(match)

    def check_channels(self, match):
        x, axis = match.operands["x"], self.axis(match)
        if axis not in (1, x.shape.rank - 1):
            return f"the channels of {x.name} are neither its last dimension nor dimension 1"
        channels = x.shape[axis]
        for name in _VECTORS:
            vector = match.operands.get(name)
            if vector is not None and (channels is None or vector.shape[0] != channels):
                return f"{name} {vector.name} of {vector.shape[0]} elements does not fit {x.name}"
        if channels is None:
            return f"the number of channels of {x.name} is not known"
        return None

    def in_training(self, match):
        return "mean" not in self.operands

    def arguments(self, match):
        x, axis = match.operands["x"], self.axis(match)
        length, dtype = [x.shape[axis]], tf.float64 if x.dtype == tf.float64 else tf.float32
        vectors = [match.operands.get(name) for name in _VECTORS]
        for i, make in enumerate((tf.ones, tf.zeros)):
            vectors[i] = make(length, dtype) if vectors[i] is None else vectors[i]
        if self.in_training(match):
            # With a momentum of zero nothing is read of the moving statistics.
            vectors[2:] = vectors[1], vectors[1]
        last = axis == x.shape.rank - 1
        return vectors, {
            "epsilon": match.attrs["epsilon"],
            "momentum": 0.0,
            "training": self.in_training(match),
            "unbiased": False,
            "data_format": "NHWC" if last else "NCHW",
        }

    def describe(self, match):
        side = match.operands.get("side_input")
        label = f"{self.activation.label} with " if self.activation.label else ""
        return (
            f"{label}decomposed BatchNorm",
            f"activation={match.outputs['y'].op.name if label else '<none>'} "
            f"side_input={'<none>' if side is None else side.op.name} "
            f"rsqrt={match.node(self.anchor).name}",
        )


class MomentsBatchNormAct(_Decomposed):
    """act(batch_normalization(x, *moments(x))): training.

    A variant also says which `axes` are averaged over.
    """

    family = "moments_batch_norm"
    operands: ClassVar = {"x": _RANKS, "scale": (1,), "offset": (1,)}

    def origin(self, view, variance):
        mean = _squeezed_mean(variance)
        axes = None if mean is None else view.constant(mean.inputs[1])
        return None if axes is None else {"axes": axes.ravel().tolist()}

    def normalize(self, attrs, x, **vectors):
        x = self.widen(attrs, x)
        mean, variance = tf.nn.moments(x, attrs["axes"])
        y = self.scale_and_shift(attrs, x, mean, variance, **vectors)
        return {"y": self.narrow(attrs, y), "mean": mean, "variance": variance}

    def axis(self, match):
        rank = match.operands["x"].shape.rank
        kept = set(range(rank)) - {axis % rank for axis in match.attrs["axes"]}
        (axis,) = kept if len(kept) == 1 else (None,)
        if axis is None or (match.attrs["reshaped"] and len(match.attrs["shape"]) != rank):
            return None
        channels = match.operands["x"].shape[axis]
        shape = [1] * axis + [channels] + [1] * (rank - axis - 1)
        plain = shape == list(match.attrs["shape"]) if match.attrs["reshaped"] else axis == rank - 1
        return axis if plain else None

    def statistics(self, fused):
        # With a momentum of zero the moving statistics are those of the batch.
        return {"mean": fused["saved_mean"], "variance": fused["new_variance"]}


class GivenBatchNormAct(_Decomposed):
    """act(batch_normalization(x, mean, variance)): inference."""

    family = "given_batch_norm"
    operands: ClassVar = {
        "x": _RANKS,
        "scale": (1,),
        "offset": (1,),
        "mean": (1,),
        "variance": (1,),
    }

    def origin(self, view, variance):
        return {} if _squeezed_mean(variance) is None else None

    def normalize(self, attrs, x, **vectors):
        y = self.scale_and_shift(attrs, self.widen(attrs, x), **vectors)
        return {"y": self.narrow(attrs, y)}

    def statistics(self, fused):
        return {}


class MomentsBatchNormAddAct(AddAct, MomentsBatchNormAct):
    """act(batch_normalization(x, *moments(x)) + side_input)."""

    family = "moments_batch_norm_add"
    operands: ClassVar = MomentsBatchNormAct.operands | {"side_input": _RANKS}
    differentiable = (*MomentsBatchNormAct.differentiable, "side_input")


class GivenBatchNormAddAct(AddAct, GivenBatchNormAct):
    """act(batch_normalization(x, mean, variance) + side_input)."""

    family = "given_batch_norm_add"
    operands: ClassVar = GivenBatchNormAct.operands | {"side_input": _RANKS}
    differentiable = (*GivenBatchNormAct.differentiable, "side_input")


def halves(view, anchor):
    """Returns the half precision dtypes that stock code may compute in float32 between, and None
    for a computation in the dtype of its input."""
    casts = view.cast_types if anchor.outputs[0].dtype == tf.float32 else ()
    return (*(half for half in _HALF if half in casts), None)


def variance_under(view, root):
    """Returns what a constant is added to under an op that takes a root, or None."""
    total = root.inputs[0].op
    if root.type == "Reciprocal" and total.type == "Sqrt":
        total = total.inputs[0].op
    if total.type != "AddV2":
        return None
    known = [view.constant(tensor) is not None for tensor in total.inputs]
    return total.inputs[known.index(False)] if sorted(known) == [False, True] else None


def _squeezed_mean(tensor):
    """Returns the Mean op of which a tensor is the squeezed value, or None."""
    if tensor.op.type != "Squeeze" or tensor.op.inputs[0].op.type != "Mean":
        return None
    return tensor.op.inputs[0].op
