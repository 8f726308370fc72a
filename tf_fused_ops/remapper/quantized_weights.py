"""What the ops that make a matrix of weights tell of the integers that it stands for.

Keras 3 turns those of 8 or 4 bits into numbers before it multiplies with them: after
`quantize("int4")`, in models of GPTQ and AWQ, and after `quantize("int8")` where inputs are not
rounded.
"""

import dataclasses
import functools

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util

from tf_fused_ops.remapper import folding
from tf_fused_ops.remapper.emission import reshape

_INTEGERS = (tf.int8, tf.uint8)
# The types of the ops that numbers come from.
_MAKERS = frozenset({"Mul", "RealDiv", "Cast", "Transpose", "Reshape"})


@dataclasses.dataclass(frozen=True)
class Weights:
    """(integers - zero) * scale, divided by `divisor` along the depth.

    Attributes:
        b: int8 or uint8: a matrix, or of the same elements in more dimensions.
        transposed: Whether it is [columns, depth].
        packed_axis: The dimension of b along which a byte has two numbers, None if it has one.
        scale: [groups, columns], or [columns, groups] if `scale_transposed`; without groups what is
            divided by, [columns]; None: ones.
        scale_transposed: See above.
        zero: Of scale's shape, or None.
        group: int32 [depth], or None for one group.
        divisor: [depth], or None.
    """

    b: tf.Tensor
    transposed: bool
    packed_axis: int | None
    scale: tf.Tensor | None = None
    scale_transposed: bool = False
    zero: tf.Tensor | None = None
    group: tf.Tensor | None = None
    divisor: tf.Tensor | None = None

    @property
    def bits(self):
        """Of an integer."""
        return 8 if self.packed_axis is None else 4


def find(w, summed=1):
    """Returns the Weights that numbers stand for, or None.

    Those whose numbers are integers, to be scaled afterwards, have no scale.

    Args:
        w: A tensor that is a matrix [depth, columns] once its first dimensions are one, and the
            others.
        summed: How many are the depth.
    """
    # Most numbers are no integers', and that is told soonest so.
    if w.op.type not in _MAKERS or not w.shape.is_fully_defined() or w.shape.rank <= summed:
        return None
    below = _below_reshapes(w)
    if below.shape != matrix(w, summed):
        integers = _cast_integers(below)
        return None if integers is None else Weights(integers, transposed=False, packed_axis=None)
    w, divisor = below, None
    if w.op.type == "RealDiv" and (column := _column(w.op.inputs[1])) is not None:
        w, divisor = w.op.inputs[0], column
        if w.shape != below.shape:
            return None
    w, transposed = _below_transpose(w)
    if w is None or w.shape.rank != 2:
        return None
    found = _numbers(w, 1 if transposed else 0)
    if found is None:
        return None
    integers, scaling = found
    unpacked = _integers(integers, transposed)
    if unpacked is None:
        return None
    return Weights(*unpacked, divisor=divisor, scale_transposed=transposed, **scaling)


def matrix(w, summed):
    """Returns the sizes [depth, columns] of what `find` takes."""
    return [w.shape[:summed].num_elements(), w.shape[summed:].num_elements()]


def find_groups(w):
    """Returns (the Weights whose groups of rows, or of columns, have scales and zeros of their own
    and whose numbers are a matrix; whether that is [columns, depth]), or None."""
    if w.op.type != "Mul" or all(factor.op.type != "GatherV2" for factor in w.op.inputs):
        return None
    if w.shape.rank != 2 or not w.shape.is_fully_defined():
        return None
    for transposed in (False, True):
        found = _grouped(w.op, 1 if transposed else 0)
        unpacked = None if found is None else _integers(found[0], transposed)
        if unpacked is not None:
            return Weights(*unpacked, scale_transposed=transposed, **found[1]), transposed
    return None


def find_packed(table):
    """Returns the Weights of the integers of 4 bits that a matrix is, or None."""
    known = table.dtype in _INTEGERS and table.shape.rank == 2 and table.shape.is_fully_defined()
    found = _integers(table, transposed=False) if known else None
    return None if found is None or found[2] is None else Weights(*found)


def _numbers(w, depth_axis):
    """Returns the integers that numbers are made of, and their scaling, as Weights has it; None for
    other numbers."""
    op = w.op
    if op.type == "Mul":
        return _grouped(op, depth_axis)
    if op.type == "RealDiv" and depth_axis == 0:
        numbers, scale = op.inputs
        integers = _cast_integers(numbers)
        if integers is None or integers.shape != w.shape or scale.shape != w.shape[1:]:
            return None
        return integers, {"scale": scale}
    integers = _cast_integers(w)
    return None if integers is None else (integers, {})


def _grouped(op, depth_axis):
    """Returns what `_numbers` does for (integers - zero[group]) * scale[group]; zeros may lack."""
    for difference, scales in (op.inputs, op.inputs[::-1]):
        scale, zero = _gathered(scales, depth_axis), None
        if scale is None:
            continue
        numbers = difference
        if difference.op.type == "Sub":
            numbers, zeros = difference.op.inputs
            zero = _gathered(_below_cast(zeros), depth_axis)
            if zero is None or zero[1] is not scale[1] or zero[0].shape != scale[0].shape:
                continue
        integers = _cast_integers(numbers)
        if integers is None or not integers.shape == scales.shape == op.outputs[0].shape:
            continue
        return integers, {"scale": scale[0], "zero": zero and zero[0], "group": scale[1]}
    return None


def _gathered(tensor, depth_axis):
    """Returns a matrix and the vector of int32 by which its rows or columns are taken as numbers of
    groups, negative ones from the last backwards; None if a tensor is not made so."""
    op = tensor.op
    if op.type != "GatherV2" or op.get_attr("batch_dims"):
        return None
    matrix, indices, axis = op.inputs
    axis = tensor_util.constant_value(axis)
    if axis is None or matrix.shape.rank != 2 or int(axis) % 2 != depth_axis:
        return None
    group = _wrapped(indices, matrix.shape[depth_axis])
    if group is None or group.dtype != tf.int32 or group.shape.rank != 1:
        return None
    return matrix, group


def _wrapped(indices, size):
    """Returns the numbers of which negative ones have been replaced by those `size` larger."""
    op = indices.op
    if op.type != "SelectV2" or size is None:
        return None
    negative, larger, group = op.inputs
    if negative.op.type != "Less" or larger.op.type != "AddV2":
        return None
    fits = (
        negative.op.inputs[0] is group
        and larger.op.inputs[0] is group
        and folding.scalar(negative.op.inputs[1]) == 0
        and folding.scalar(larger.op.inputs[1]) == size
    )
    return group if fits else None


def _integers(tensor, transposed):
    """Returns the matrix of bytes that integers are taken from, whether it is [columns, depth], and
    the dimension along which it is packed or None; None for other tensors.

    Args:
        tensor: Of int8 or uint8.
        transposed: Whether it is [columns, depth].
    """
    below, swapped = _below_transpose(tensor)
    packed = None if below is None else _packed(below)
    if packed is None:
        plain = (tensor, transposed) if below is None else (below, transposed ^ swapped)
        return *plain, None
    b, bytes_swapped = _below_transpose(packed)
    if b is None or b.shape.rank != 2:
        return None
    return b, transposed ^ swapped ^ bytes_swapped, 1 if bytes_swapped else 0


def _packed(tensor):
    """Returns the bytes of which integers are the lower and the upper halves in turn, row by row;
    None if they are not."""
    cut = tensor.op
    if cut.type != "StridedSlice" or not _keeps_first_rows(cut):
        return None
    both = cut.inputs[0].op
    if both.type != "Reshape" or both.inputs[0].op.type != "Pack":
        return None
    pack = both.inputs[0].op
    if len(pack.inputs) != 2 or pack.get_attr("axis") != 1:
        return None
    signed = tensor.dtype == tf.int8
    lower, upper = (_half(half, signed) for half in pack.inputs)
    if lower is None or upper is None or upper.op.type != "RightShift":
        return None
    shifted, shift = upper.op.inputs
    rows, columns = lower.shape.as_list() if lower.shape.rank == 2 else (None, None)
    same = lower is shifted or _reads_the_same(lower, shifted)
    if not same or folding.scalar(shift) != 4 or None in (rows, columns):
        return None
    fits = both.outputs[0].shape == [2 * rows, columns]
    return lower if fits and -(-tensor.shape[0] // 2) == rows else None


def _keeps_first_rows(op):
    """Returns whether a StridedSlice takes the first rows of a matrix, all of each."""
    masks = ("new_axis_mask", "shrink_axis_mask")
    begin, _, strides = (tensor_util.constant_value(t) for t in op.inputs[1:])
    shape, result = op.inputs[0].shape, op.outputs[0].shape
    return (
        begin is not None
        and strides is not None
        and not any(op.get_attr(mask) for mask in masks)
        and not np.any(begin)
        and np.all(strides == 1)
        and result.is_fully_defined()
        and shape.rank == result.rank == 2
        and shape[1] == result[1]
    )


def _half(tensor, signed):
    """Returns x of x & 15, with the sign of four bits if asked for; None for other tensors."""
    if signed:
        if tensor.op.type != "Sub":
            return None
        flipped, eight = tensor.op.inputs
        if flipped.op.type != "BitwiseXor" or folding.scalar(eight) != 8:
            return None
        tensor, eight = flipped.op.inputs
        if folding.scalar(eight) != 8:
            return None
    if tensor.op.type != "BitwiseAnd":
        return None
    x, mask = tensor.op.inputs
    return x if folding.scalar(mask) == 15 else None


def _reads_the_same(a, b):
    """Returns whether two tensors are the value of one variable, with nothing between the reads.

    What has to happen between them one of them waits for. In a graph that is being traced it does
    so only later, but there the ops are in the order of the program.
    """
    same = (
        a.op.type == b.op.type == "ReadVariableOp"
        and a.op.inputs[0] is b.op.inputs[0]
        and a.dtype == b.dtype
        and set(a.op.control_inputs) == set(b.op.control_inputs)
    )
    if not same:
        return False
    first, last = sorted(read.op._id for read in (a, b))
    others = [op for op in a.op.inputs[0].consumers() if op.type != "ReadVariableOp"]
    return not any(first < op._id < last or _passes_on(op) for op in others)


def _passes_on(op):
    """Returns whether other ops read a variable from an op."""
    return any(t.dtype == tf.resource and t.consumers() for t in op.outputs)


def _cast_integers(tensor):
    """Returns the integers, of known shape, that numbers were; None for others."""
    below = _below_cast(tensor)
    return below if below.dtype in _INTEGERS and below.shape.is_fully_defined() else None


def _below_cast(tensor):
    return tensor.op.inputs[0] if tensor.op.type == "Cast" else tensor


def _below_reshapes(tensor):
    """Returns the tensor that reshapes begin with."""
    while tensor.op.type == "Reshape":
        tensor = tensor.op.inputs[0]
    return tensor


def _below_transpose(tensor):
    """Returns (the matrix that a tensor is the transpose of, True), or (the tensor, False); None in
    its stead where its dimensions are in an order that is not known."""
    if tensor.op.type != "Transpose":
        return tensor, False
    order = tensor_util.constant_value(tensor.op.inputs[1])
    if order is None or len(order) != 2:
        return None, False
    return tensor.op.inputs[0], list(order) == [1, 0]


def _column(tensor):
    """Returns the vector that a matrix of one column is made of, or None."""
    if tensor.shape.rank != 2 or tensor.shape[1] != 1 or tensor.op.type != "ExpandDims":
        return None
    vector = tensor.op.inputs[0]
    return vector if vector.shape.rank == 1 else None


def inputs(weights, shape, scale=None):
    """Emits what the fused op takes for weights: b, scale, zero and group, lists of the latter two.

    Args:
        weights: Weights.
        shape: [depth, columns].
        scale: What the result is divided by, [columns]; None: nothing.
    """
    transposed = weights.transposed
    b = weights.b if weights.b.shape.rank == 2 else reshape(weights.b, shape)
    zero = [] if weights.zero is None else [_beside(weights, weights.zero)]
    group = [] if weights.group is None else [_below_cast_of_float(weights.group)]
    if weights.group is not None:
        return b, _beside(weights, weights.scale), zero, group
    divisors = [d for d in (weights.scale, scale) if d is not None]
    columns = [reshape(_float32(d), [-1]) for d in divisors]
    factors = [tf.math.reciprocal(column) for column in columns]
    total = functools.reduce(tf.multiply, factors) if factors else tf.ones([shape[1]])
    return b, tf.expand_dims(total, 1 if transposed else 0), zero, group


def _beside(weights, tensor):
    """Returns scales, or zeros, which may be integers, as they lie beside those."""
    if weights.transposed != weights.scale_transposed:
        below, swapped = _below_transpose(tensor)
        tensor = below if swapped else tf.transpose(tensor)
    return tensor if tensor.dtype in _INTEGERS else _float32(tensor)


def _below_cast_of_float(tensor):
    """Returns the float32 numbers that others were, or the tensor."""
    below = _below_cast(tensor)
    return below if below.dtype == tf.float32 else tensor


def _float32(tensor):
    """Returns a tensor as float32, numbers of 16 bits with the digits that they had before."""
    if tensor.dtype in (tf.float16, tf.bfloat16):
        tensor = _below_cast_of_float(tensor)
    return tensor if tensor.dtype == tf.float32 else tf.cast(tensor, tf.float32)
