"""Scalars that are as good as constants: computed from such and from sizes that are known."""

import numpy as np
from tensorflow.python.framework import tensor_util

_ARITHMETIC = {"Mul": np.multiply, "RealDiv": np.divide, "Sqrt": np.sqrt}
_TYPES = frozenset({"Cast", "StridedSlice", *_ARITHMETIC})


def scalar(tensor):
    """Returns the value of a scalar as an array, or None if it is not known before running.

    TensorFlow rounds the same, so that the value is the same.
    """
    op = tensor.op
    if op.type == "Const":
        return tensor_util.constant_value(tensor)
    if op.type not in _TYPES or tensor.shape.rank != 0:
        return None
    if op.type == "StridedSlice":
        return _size(op, tensor.dtype)
    inputs = list(map(scalar, op.inputs))
    if any(value is None for value in inputs):
        return None
    with np.errstate(all="ignore"):
        value = inputs[0] if op.type == "Cast" else _ARITHMETIC[op.type](*inputs)
        return np.asarray(value, tensor.dtype.as_numpy_dtype)


def _size(op, dtype):
    """Returns an element of a shape if it is known."""
    shape, begin = op.inputs[0].op, tensor_util.constant_value(op.inputs[1])
    if begin is None or begin.size != 1:
        return None
    if shape.type == "Const":
        sizes = tensor_util.constant_value(op.inputs[0])
    elif shape.type == "Shape" and shape.inputs[0].shape.rank is not None:
        sizes = shape.inputs[0].shape
    else:
        return None
    size = sizes[int(begin[0])]
    return None if size is None else np.asarray(size, dtype.as_numpy_dtype)
