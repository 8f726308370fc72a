"""Matrix product with bias, side input and activation."""

import tensorflow as tf

from tf_fused_ops.ops import _autodiff
from tf_fused_ops.ops.reference.elementwise import act_grad, bias_act, wide


def matmul_bias_act(a, b, bias, side_input, *, transpose_a, transpose_b, activation, alpha):
    """activation(a b + bias + side_input).

    Args:
        a: [..., m, k], or [..., k, m] with transpose_a.
        b: [k, n], or [n, k] with transpose_b.
        bias: [n] or None.
        side_input: A tensor of the output's shape or None.
        transpose_a: Whether a's last two dimensions are swapped.
        transpose_b: Whether b's dimensions are swapped.
        activation: A name of `activations.STOCK`.
        alpha: leaky_relu's slope below zero.

    Returns:
        [..., m, n], of a's dtype.
    """
    return bias_act(_matmul(a, b, transpose_a, transpose_b), bias, side_input, activation, alpha)


def matmul_bias_act_grad(dy, a, b, saved, *, transpose_a, transpose_b, activation, alpha):
    """The gradients of `matmul_bias_act`.

    Args:
        dy: The gradient of the output.
        a: As in the forward function; so are b and the keyword arguments.
        saved: The output where its slope can be read off it, otherwise the pre-activation; None for
            "none".

    Returns:
        The gradients of a, b, bias, side_input.
    """
    dz = act_grad(dy, saved, activation, alpha)
    da, db = _autodiff.pull_back(
        lambda a, b: [_matmul(a, b, transpose_a, transpose_b)], [a, b], [dz]
    )
    shape = tf.shape(dz)
    rows = tf.reshape(wide(dz), tf.stack([tf.reduce_prod(shape[:-1]), shape[-1]]))
    return da, db, tf.cast(tf.reduce_sum(rows, 0), dz.dtype), dz


def _matmul(a, b, transpose_a, transpose_b):
    a = tf.convert_to_tensor(a)
    if a.shape.rank == 2:
        return tf.matmul(a, b, transpose_a, transpose_b)
    if transpose_a:
        a = tf.linalg.matrix_transpose(a)
    # One product of matrices: a batched one would keep a copy of b's gradient for every element of
    # the batch.
    shape = tf.shape(a)
    rows = tf.reshape(a, tf.stack([tf.reduce_prod(shape[:-1]), shape[-1]]))
    y = tf.matmul(rows, b, transpose_b=transpose_b)
    y = tf.reshape(y, tf.concat([shape[:-1], [tf.shape(y)[-1]]], 0))
    y.set_shape(a.shape[:-1].concatenate([b.shape[0 if transpose_b else 1]]))
    return y
