"""Rules for group and instance normalization, made of elementary ops, with activation."""

import dataclasses
import itertools
import math
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tf_fused_ops.remapper import shapes
from tf_fused_ops.remapper.emission import emit, reshape
from tf_fused_ops.remapper.layer_norm import WHOLE, LayerNorm
from tf_fused_ops.remapper.rule import Fused

_VECTORS = ("scale", "offset")
_MAX_RANK = 5
# (Whether the result is reshaped, whether the vectors come last), the longest code first.
_ENDS = ((True, True), (True, False), (False, True), (False, False))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the fused op sees what is normalized.

    Attributes:
        data_format: "NHWC" or "NCHW".
        groups: The number of groups.
        channels: The number of channels.
        vector: The shape in which a vector of channels broadcasts.
    """

    data_format: str
    groups: int
    channels: int
    vector: list


class GroupNormAct(LayerNorm):
    """act((x - mean) * rsqrt(variance + epsilon) * scale + offset) a group of an image's channels.

    x is [images, pixels.., groups, channels] or [images, groups, channels, pixels..], or has one
    channel a group and no dimension for it. Anchors are those of layer normalization.

    Variants, besides those of layer normalization, by attribute:
        flat: Whether the result is reshaped, to whatever `y_shape` says.
        after: Whether scale and offset come last, not as part of the normalization.
    """

    family = "group_norm"
    operands: ClassVar = {"x": (3, 4, 5, 6), "scale": (1,), "offset": (1,), "y_shape": (1,)}
    # What is multiplied by or added to it may be anything.
    optional = ("scaled", "centered")
    fused_ops = ("TfFusedOps>GroupNormAct", "TfFusedOps>GroupNormActGrad")
    title = "GroupNorm"

    def variants(self, view, anchor):
        found = self.found(view, anchor)
        if found is None:
            return
        variance, axes = found
        x = _normalized(variance)
        if x.shape.rank is None or _channel_axis(axes, x.shape.rank) is None:
            return
        source = x.op.inputs[0].op if x.op.type == "Cast" else x.op
        # Layer normalization has a rule of its own.
        of_rows = _channel_axis(axes, x.shape.rank) == x.shape.rank - 2 == 1
        ends = [end for end in _ENDS if (source.type == "Reshape" if end[0] else not of_rows)]
        for (flat, after), known in itertools.product(ends, self.spellings(view, anchor, variance)):
            vectors = known["scaled"] or known["centered"]
            # Without a reshape in between, the vectors of other forms come last anyway.
            alike = after and not flat and known["form"] not in WHOLE
            if (after and (not vectors or known["half"] or known["scaled_first"])) or alike:
                continue
            yield known | {"axes": axes, "flat": flat, "after": after}

    def present(self, attrs):
        return tuple(n for n in super().present(attrs) if n != "y_shape" or attrs["flat"])

    def operand_dtype(self, name, dtype, attrs):
        return tf.int32 if name == "y_shape" else super().operand_dtype(name, dtype, attrs)

    def scalable(self, attrs, sizes):
        # The number of dimensions is no size.
        return not attrs["flat"]

    def stock(self, attrs, x, y_shape=None, **vectors):
        inside = {} if attrs["after"] else vectors
        y = super().stock(attrs, x, **inside)["y"]
        if attrs["flat"]:
            y = tf.reshape(y, y_shape)
            y.set_shape(attrs.get("static_shape"))
        if attrs["after"]:
            scale, offset = (self.broadcast(attrs, vectors.get(name)) for name in _VECTORS)
            y = y if scale is None else y * scale
            y = y if offset is None else y + offset
        return {"y": self.activate(y, attrs)}

    def observed(self, nodes, operands, attrs):
        found = super().observed(nodes, operands, attrs)
        if not attrs["flat"]:
            return found
        end = next(
            op for op in nodes if op.type == "Reshape" and op.inputs[1] is operands["y_shape"]
        )
        shape = end.outputs[0].shape
        return found | {"static_shape": None if shape.rank is None else shape.as_list()}

    def check(self, match):
        layout = self._layout(match)
        if isinstance(layout, str):
            return layout
        for name in _VECTORS:
            vector = match.operands.get(name)
            if vector is None:
                continue
            if vector.shape[0] != layout.channels:
                return (
                    f"{name} {vector.name} of {vector.shape[0]} elements does not fit "
                    f"{layout.channels} channels"
                )
            shape = self.vector_shape(match, layout.channels)
            if [1] * (len(layout.vector) - len(shape)) + shape != layout.vector:
                return f"{name} {vector.name} in shape {shape} is not a value a channel"
        return self.check_precision(match)

    def _layout(self, match):
        """Returns the _Layout of a match, or in words why there is none."""
        x, attrs = match.operands["x"], match.attrs
        sizes, axis = x.shape.as_list(), _channel_axis(attrs["axes"], x.shape.rank)
        result = attrs["static_shape"] if attrs["flat"] and attrs["after"] else sizes
        if result is None:
            return f"the rank of what {x.name} is reshaped to is not known"
        last = axis == len(sizes) - 1 or axis == len(sizes) - 2 > 1
        if not last and axis != 1:
            return f"the channels of {x.name} are neither its last dimensions nor dimension 1"
        inner = sizes[axis + 1 :] if last else []
        if not last and self._has_values_within_groups(match):
            inner = sizes[2:3]
        elif not last and result is not sizes:
            inner = _channels_of_group(sizes, result)
        if None in (sizes[axis], *inner):
            return f"the channels of {x.name} are not known"
        channels = math.prod([sizes[axis], *inner])
        vector = [channels] if attrs["after"] else [sizes[axis], *inner]
        before = len(result) - len(vector) if last else 1
        if attrs["after"] and result[before] != channels:
            return f"{x.name} is not reshaped to {channels} channels"
        vector = [1] * before + vector + [1] * (len(result) - len(vector) - before)
        return _Layout("NHWC" if last else "NCHW", sizes[axis], channels, vector)

    def _has_values_within_groups(self, match):
        """Whether vectors have a value for each of a group's channels, which are dimension 2."""
        attrs, rank = match.attrs, match.operands["x"].shape.rank
        shape = attrs["shape"] if attrs["reshaped"] and not attrs["after"] else []
        return len(shape) > rank - 3 and shape[2 - rank] != 1

    def fuse(self, match, training):
        layout = self._layout(match)
        x = self._images(match, layout)
        dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
        vectors = [
            match.operands[name] if name in match.operands else make([layout.channels], dtype)
            for name, make in zip(_VECTORS, (tf.ones, tf.zeros), strict=True)
        ]
        attrs = {
            "groups": layout.groups,
            "data_format": layout.data_format,
            "activation": self.activation.name,
        }
        if "alpha" in match.attrs:
            attrs["alpha"] = match.attrs["alpha"]
        fused = emit(
            self.fused_ops[0],
            x,
            *vectors,
            epsilon=match.attrs["epsilon"],
            name=match.fused_name(),
            **attrs,
        )
        whole = (
            match.operands["y_shape"] if match.attrs["flat"] else shapes.sizes(match.operands["x"])
        )
        y = reshape(fused["y"], whole)
        return Fused({"y": y}, ([x, *vectors, fused["mean"], fused["inv_std"]], attrs))

    def fuse_gradient(self, match, fused, dy, wanted):
        (x, *rest), attrs = fused.saved
        gradients = emit(
            self.fused_ops[1],
            reshape(dy, shapes.sizes(x)),
            x,
            *rest,
            name=match.fused_name("_grad"),
            **attrs,
        )
        gradients["x_grad"] = reshape(gradients["x_grad"], shapes.sizes(match.operands["x"]))
        return {name: gradients[f"{name}_grad"] for name in wanted}

    def _images(self, match, layout):
        """Returns x as the fused op takes it: images, pixels and channels in the layout's order."""
        x = match.operands["x"]
        axis = _channel_axis(match.attrs["axes"], x.shape.rank)
        direct = axis == (x.shape.rank - 1 if layout.data_format == "NHWC" else 1)
        if direct and layout.groups == layout.channels and x.shape.rank <= _MAX_RANK:
            return x
        pixels = slice(1, axis) if layout.data_format == "NHWC" else slice(2, None)
        of_group = layout.channels // layout.groups if layout.data_format == "NCHW" else 1
        size = _product(x.shape[pixels])
        if size:
            images, size = -1 if x.shape[0] is None else x.shape[0], size // of_group
        else:
            shape = tf.shape(x)
            images, size = shape[0], tf.reduce_prod(shape[pixels]) // of_group
        sizes = [images, size, layout.channels]
        if layout.data_format == "NCHW":
            sizes = [images, layout.channels, size]
        return reshape(x, sizes if isinstance(images, int) else tf.stack(sizes))

    def describe(self, match):
        label, nodes = super().describe(match)
        return (f"{self.activation.label} with {label}" if self.activation.label else label), nodes


def _product(sizes):
    sizes = list(sizes)
    return None if None in sizes else math.prod(sizes)


def _channel_axis(axes, rank):
    """Returns the axis besides that of the images that is not averaged over; None if there is not
    one alone."""
    kept = set(range(rank)) - {axis % rank for axis in np.atleast_1d(axes).tolist()}
    return max(kept) if len(kept) == 2 and 0 in kept else None


def _channels_of_group(sizes, result):
    """Returns [channels of a group], given the sizes of [images, groups, ..] and what these are
    reshaped to, [images, channels, ..]; [None] if they are not known to be the same images."""
    of_group, pixels = _product(sizes[2:]), _product(result[2:])
    if not of_group or not pixels or of_group % pixels:
        return [None]
    return [of_group // pixels]


def _normalized(variance):
    """Returns what is normalized, given its variance."""
    squared = variance.op.inputs[0].op
    deviation = squared.inputs[0]
    if squared.type == "SquaredDifference" or deviation.op.type != "Sub":
        return deviation
    return deviation.op.inputs[0]
