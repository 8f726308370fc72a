"""Softmax with scale and mask."""

import tensorflow as tf

from tf_fused_ops.ops.reference.elementwise import wide


def softmax(x, mask=None, *, scale, masked, zero_masked=False):
    """softmax(x * scale) over the last dimension, with `masked` in place of x * scale where the
    mask is false; zero there if `zero_masked`."""
    z = wide(x) * scale
    if mask is not None:
        z = tf.where(mask, z, tf.constant(masked, z.dtype))
    y = tf.nn.softmax(z)
    if mask is not None and zero_masked:
        y = tf.where(mask, y, tf.zeros_like(y))
    return tf.cast(y, x.dtype)


def softmax_grad(dy, y, mask=None, *, scale, zero_masked=False):
    """The gradient of x.

    Args:
        dy: The gradient of y.
        y: The value of `softmax`.
        mask: As in the forward function.
        scale: As in the forward function.
        zero_masked: As in the forward function: dy does not count where the mask is false.
    """
    wide_dy, wide_y = wide(dy), wide(y)
    if mask is not None and zero_masked:
        wide_dy = tf.where(mask, wide_dy, tf.zeros_like(wide_dy))
    projection = tf.reduce_sum(wide_dy * wide_y, -1, keepdims=True)
    gradient = (wide_dy - projection) * wide_y * scale
    if mask is not None:
        gradient = tf.where(mask, gradient, tf.zeros_like(gradient))
    return tf.cast(gradient, y.dtype)
