"""Arithmetic of optimizers, whose gradients may be of some rows of a variable (`tf.IndexedSlices`).

What is zero in the other rows stays of these rows, and the rest becomes dense, as Keras has it.
Tensors alone make one stock op.
"""

import keras
import tensorflow as tf


def square(x):
    """Of a tensor or of rows."""
    return _each(tf.raw_ops.Square, x)


def absolute(x):
    """Of a tensor or of rows."""
    return _each(tf.raw_ops.Abs, x)


def negative(x):
    """Of a tensor or of rows."""
    return _each(tf.raw_ops.Neg, x)


def mul(x, y):
    """Of tensors, or of rows and a scalar or the whole of what they are rows of."""
    if _are_rows(x):
        return _with_values(x, tf.raw_ops.Mul(x=x.values, y=y))
    if _are_rows(y):
        x = x if x.shape.rank == 0 else tf.gather(_like(y, x), y.indices)
        return _with_values(y, tf.raw_ops.Mul(x=x, y=y.values))
    return tf.raw_ops.Mul(x=x, y=y)


def div(x, y):
    """Of tensors, or of rows by a scalar or by the whole of what they are rows of."""
    if not _are_rows(x):
        return tf.raw_ops.RealDiv(x=x, y=y)
    if y.shape.rank == 0:
        return _with_values(x, tf.raw_ops.RealDiv(x=x.values, y=y))
    # Whether there are other rows, where zero is divided by zero, is for Keras to ask.
    return keras.ops.divide(x, _like(x, y))


def add(x, y):
    """Of a tensor and a tensor or rows."""
    return tf.raw_ops.AddV2(x=x, y=dense(y))


def sub(x, y):
    """Of tensors or rows, of which one is a tensor."""
    return tf.raw_ops.Sub(x=dense(x), y=dense(y))


def dense(x):
    """Returns rows as a tensor, with the sum of those of one index."""
    if not _are_rows(x):
        return x
    return tf.raw_ops.UnsortedSegmentSum(
        data=x.values, segment_ids=x.indices, num_segments=x.dense_shape[0]
    )


def assign_add(handle, x):
    """Adds a tensor or rows to a variable."""
    if _are_rows(x):
        return tf.raw_ops.ResourceScatterAdd(resource=handle, indices=x.indices, updates=x.values)
    return tf.raw_ops.AssignAddVariableOp(resource=handle, value=x)


def assign_sub(handle, x):
    """Subtracts a tensor or rows from a variable."""
    if _are_rows(x):
        return tf.raw_ops.ResourceScatterSub(resource=handle, indices=x.indices, updates=x.values)
    return tf.raw_ops.AssignSubVariableOp(resource=handle, value=x)


def _are_rows(x):
    return isinstance(x, tf.IndexedSlices)


def _each(raw_op, x):
    return _with_values(x, raw_op(x=x.values)) if _are_rows(x) else raw_op(x=x)


def _like(rows, x):
    """Returns a tensor with the rank of what the rows are of."""
    x.set_shape([None] * rows.values.shape.rank)
    return x


def _with_values(rows, values):
    return tf.IndexedSlices(values, rows.indices, rows.dense_shape)
