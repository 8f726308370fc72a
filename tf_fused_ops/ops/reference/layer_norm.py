"""Layer normalization."""

import tensorflow as tf

from tf_fused_ops.ops.reference.elementwise import wide


def layer_norm_statistics(x, epsilon, subtract_mean=True):
    """Mean and inverse standard deviation of x's last dimension, at least in float32."""
    mean, _, variance = _moments(wide(x), subtract_mean)
    return mean[..., 0], tf.math.rsqrt(variance[..., 0] + epsilon)


def _moments(x, subtract_mean):
    """Mean, centred x and variance; tf.nn.moments has no gradient of its gradient."""
    mean = tf.reduce_mean(x, -1, keepdims=True)
    if not subtract_mean:
        mean = tf.zeros_like(mean)
    centred = x - mean
    return mean, centred, tf.reduce_mean(centred * centred, -1, keepdims=True)


def layer_norm(x, scale, offset, epsilon, subtract_mean=True):
    """(x - mean) * inv_std * scale + offset over the last dimension.

    Args:
        x: Rank 1 or more.
        scale: [x.shape[-1]], float64 for float64 x, otherwise float32; so is offset.
        offset: As scale.
        epsilon: Is added to the variance.
        subtract_mean: Whether the mean is that of x; otherwise it is zero, and the variance the
            mean of squares.

    Returns:
        y, mean, inverse standard deviation.
    """
    mean, inv_std = layer_norm_statistics(x, epsilon, subtract_mean)
    normal = (wide(x) - mean[..., tf.newaxis]) * inv_std[..., tf.newaxis]
    return tf.cast(normal * scale + offset, x.dtype), mean, inv_std


def layer_norm_grad(dy, x, scale, inv_std, subtract_mean=True):
    """The gradients of `layer_norm`.

    The statistics are taken as functions of x, so that differentiating the result with respect to x
    is complete.

    Args:
        dy: The gradient of y.
        x: As in the forward function; so is scale.
        scale: As in the forward function.
        inv_std: The forward function's.
        subtract_mean: As in the forward function.

    Returns:
        The gradients of x, scale, offset.
    """
    dtype = x.dtype
    x, dy = wide(x), wide(dy)
    _, centred, variance = _moments(x, subtract_mean)
    inv_std = inv_std[..., tf.newaxis]
    # The value is the saved one, the slope that of the row.
    plus_epsilon = 1 / (inv_std * inv_std) - variance
    inv_std = tf.math.rsqrt(variance + tf.stop_gradient(plus_epsilon))
    normal = centred * inv_std
    g = dy * scale
    centred_g = g - tf.reduce_mean(g, -1, keepdims=True) if subtract_mean else g
    dx = inv_std * (centred_g - normal * tf.reduce_mean(g * normal, -1, keepdims=True))
    rows = tf.range(tf.rank(x) - 1)
    return tf.cast(dx, dtype), tf.reduce_sum(dy * normal, rows), tf.reduce_sum(dy, rows)
