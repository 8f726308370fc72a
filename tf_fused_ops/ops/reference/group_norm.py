"""Group normalization with activation.

Everything is computed on [images, pixels, groups, channels] for "NHWC", on [images, groups,
channels, pixels] for "NCHW".
"""

import tensorflow as tf

from tf_fused_ops.ops import activations
from tf_fused_ops.ops.reference.elementwise import wide

# The axes that a group's statistics are of, and those that a channel's sums are.
_OF_GROUP = {"NHWC": (1, 3), "NCHW": (2, 3)}
_OF_CHANNEL = {"NHWC": (0, 1), "NCHW": (0, 3)}


def group_norm_statistics(x, *, groups, epsilon, data_format):
    """Mean and inverse standard deviation of every image's groups of channels."""
    mean, _, variance = _moments(_grouped(wide(x), groups, data_format), data_format)
    shape = [-1, groups]
    return tf.reshape(mean, shape), tf.math.rsqrt(tf.reshape(variance, shape) + epsilon)


def group_norm_act(x, scale, offset, *, groups, epsilon, data_format, activation, alpha):
    """activation((x - mean) * inverse standard deviation * scale + offset).

    Args:
        x: Rank 2 to 5; channels last for "NHWC", dimension 1 for "NCHW".
        scale: [channels], float64 for float64 x, otherwise float32; so is offset.
        offset: As scale.
        groups: Number of groups, which divides the channels.
        epsilon: Is added to the variance.
        data_format: "NHWC" or "NCHW".
        activation: A name of `activations.STOCK`.
        alpha: leaky_relu's slope below zero.

    Returns:
        y, mean, inverse standard deviation.
    """
    form = {"groups": groups, "data_format": data_format}
    mean, inv_std = group_norm_statistics(x, epsilon=epsilon, **form)
    normal = _grouped(wide(x), **form) - _statistic(mean, data_format)
    normal *= _statistic(inv_std, data_format)
    z = normal * _vector(scale, **form) + _vector(offset, **form)
    y = activations.STOCK[activation](z, alpha)
    return tf.cast(tf.reshape(y, tf.shape(x)), x.dtype), mean, inv_std


def group_norm_act_grad(dy, x, scale, offset, inv_std, *, groups, data_format, activation, alpha):
    """The gradients of `group_norm_act`.

    The statistics are taken as functions of x, so that differentiating the result with respect to x
    is complete.

    Args:
        dy: The gradient of y.
        x: As in the forward function; so are scale, offset and the keyword arguments.
        inv_std: The forward function's.

    Returns:
        The gradients of x, scale, offset.
    """
    form = {"groups": groups, "data_format": data_format}
    of_group, of_channel = _OF_GROUP[data_format], _OF_CHANNEL[data_format]
    dy = _grouped(wide(dy), **form)
    _, centred, variance = _moments(_grouped(wide(x), **form), data_format)
    # The value is the saved one, the slope that of the group.
    saved = _statistic(inv_std, data_format)
    inv_std = tf.math.rsqrt(variance + tf.stop_gradient(1 / (saved * saved) - variance))
    normal = centred * inv_std
    factor = _vector(scale, **form)
    z = normal * factor + _vector(offset, **form)
    dz = activations.gradient_from_argument(activation, dy, z, alpha)
    g = dz * factor
    mean_g, mean_gn = (tf.reduce_mean(v, of_group, keepdims=True) for v in (g, g * normal))
    dx = inv_std * (g - mean_g - normal * mean_gn)
    sums = (tf.reduce_sum(v, of_channel) for v in (dz * normal, dz))
    dscale, doffset = (tf.reshape(total, tf.shape(scale)) for total in sums)
    return tf.cast(tf.reshape(dx, tf.shape(x)), x.dtype), dscale, doffset


def _grouped(x, groups, data_format):
    shape = tf.shape(x)
    if data_format == "NHWC":
        images, pixels, channels = shape[0], tf.reduce_prod(shape[1:-1]), shape[-1]
        return tf.reshape(x, [images, pixels, groups, channels // groups])
    images, channels, pixels = shape[0], shape[1], tf.reduce_prod(shape[2:])
    return tf.reshape(x, [images, groups, channels // groups, pixels])


def _vector(channels, groups, data_format):
    shape = [groups, tf.size(channels) // groups]
    return tf.reshape(channels, shape if data_format == "NHWC" else [*shape, 1])


def _statistic(groups, data_format):
    last = groups[..., tf.newaxis]
    return last[:, tf.newaxis] if data_format == "NHWC" else last[..., tf.newaxis]


def _moments(x, data_format):
    """Mean, centred x and variance; tf.nn.moments has no gradient of its gradient."""
    axes = _OF_GROUP[data_format]
    mean = tf.reduce_mean(x, axes, keepdims=True)
    centred = x - mean
    return mean, centred, tf.reduce_mean(centred * centred, axes, keepdims=True)
