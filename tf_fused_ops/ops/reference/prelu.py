"""A leaky relu with a learned slope."""

import tensorflow as tf

from tf_fused_ops.ops.reference.elementwise import wide


def prelu(x, alpha):
    """x where x > 0, otherwise alpha * x."""
    z = wide(x)
    return tf.cast(tf.nn.relu(z) - wide(alpha) * tf.nn.relu(-z), x.dtype)


def prelu_grad(dy, x, alpha):
    """The gradients of x, zero where that is, and of alpha.

    Args:
        dy: The gradient of `prelu`'s value.
        x: As in the forward function.
        alpha: As in the forward function.
    """
    wide_dy, z = wide(dy), wide(x)
    zero, one = tf.zeros_like(z), tf.ones_like(z)
    slope = tf.where(z > 0, one, tf.where(z < 0, wide(alpha) * one, zero))
    axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(alpha), s1=tf.shape(x)).r0
    below = -tf.reduce_sum(wide_dy * tf.nn.relu(-z), axes)
    alpha_grad = tf.reshape(below, tf.shape(alpha))
    return [tf.cast(wide_dy * slope, x.dtype), tf.cast(alpha_grad, alpha.dtype)]
