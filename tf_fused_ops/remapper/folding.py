"""Scalars that are as good as constants: computed from such and from sizes that are known."""

import numpy as np
from tensorflow.python.framework import tensor_util

_ARITHMETIC = {"Mul": np.multiply, "RealDiv": np.divide, "Sqrt": np.sqrt, "Sub": np.subtract}
_TYPES = frozenset({"Cast", "StridedSlice", *_ARITHMETIC})
# Of the ops that are looked through: code that scales by a constant has but a few.
_MAX_DEPTH = 6


def scalar(tensor, depth=_MAX_DEPTH):
    """Returns the value of a scalar as an array, or None if it is not known before running.

    TensorFlow rounds the same, so that the value is the same.
    """
    op = tensor.op
    if op.type == "Const":
        return tensor_util.constant_value(tensor)
    if op.type not in _TYPES or tensor.shape.rank != 0 or not depth:
        return None
    if op.type == "StridedSlice":
        return _size(op, tensor.dtype)
    values = []
    for other in op.inputs:
        value = scalar(other, depth - 1)
        if value is None:
            return None
        values.append(value)
    with np.errstate(all="ignore"):
        value = values[0] if op.type == "Cast" else _ARITHMETIC[op.type](*values)
        return np.asarray(value, tensor.dtype.as_numpy_dtype)


def element(op):
    """Returns of which op's output, a vector, an op takes one element, and which; or None."""
    if op.type != "StridedSlice" or op.outputs[0].shape.rank != 0:
        return None
    begin = tensor_util.constant_value(op.inputs[1])
    # With more than one, there is an ellipsis.
    return None if begin is None or begin.size != 1 else (op.inputs[0].op, int(begin[0]))


def _size(op, dtype):
    """Returns an element of a shape if it is known."""
    found = element(op)
    if found is None:
        return None
    shape, index = found
    if shape.type == "Const":
        sizes = tensor_util.constant_value(shape.outputs[0])
    elif shape.type == "Shape" and shape.inputs[0].shape.rank is not None:
        sizes = shape.inputs[0].shape
    else:
        return None
    return None if sizes[index] is None else np.asarray(sizes[index], dtype.as_numpy_dtype)
