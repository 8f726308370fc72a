"""Batch norm with side input and activation."""

import tensorflow as tf

from tf_fused_ops.ops.reference.channels import (
    batch_moments,
    channel_shape,
    elements_per_channel,
    normalize,
    pre_activation_gradient,
    reduce_axes,
    update_averages,
)
from tf_fused_ops.ops.reference.elementwise import wide


def batch_norm_statistics(x, mean, variance, *, epsilon, momentum, training, unbiased, data_format):
    """The statistics that `batch_norm_act` returns.

    Returns:
        New moving mean, new moving variance, the mean and the inverse standard deviation used.
    """
    if not training:
        return mean, variance, mean, tf.math.rsqrt(variance + epsilon)
    x = wide(x)
    count = elements_per_channel(x, mean)
    batch = batch_moments(x, data_format, count)
    return update_averages(mean, variance, count, *batch, epsilon, momentum, unbiased)


def batch_norm_act(
    x,
    scale,
    offset,
    mean,
    variance,
    side_input,
    *,
    epsilon,
    momentum,
    training,
    unbiased,
    data_format,
    activation,
    alpha,
):
    """activation((x - mean) * inverse standard deviation * scale + offset + side_input).

    Args:
        x: Rank 2 to 5; channels last for "NHWC", dimension 1 for "NCHW".
        scale: [channels], float64 for float64 x, otherwise float32; so are offset, mean, variance.
        offset: As scale.
        mean: The moving mean.
        variance: The moving variance.
        side_input: A tensor of x's shape or None.
        epsilon: Is added to the variance.
        momentum: new = old * momentum + batch * (1 - momentum).
        training: Whether to normalise with the statistics of the batch.
        unbiased: Whether Bessel's correction applies to the batch variance in the moving variance.
        data_format: "NHWC" or "NCHW".
        activation: A name of `activations.STOCK`.
        alpha: leaky_relu's slope below zero.

    Returns:
        y, new moving mean, new moving variance, saved mean, saved inverse standard deviation.
    """
    statistics = batch_norm_statistics(
        x,
        mean,
        variance,
        epsilon=epsilon,
        momentum=momentum,
        training=training,
        unbiased=unbiased,
        data_format=data_format,
    )
    y = normalize(x, scale, offset, *statistics[2:], side_input, data_format, activation, alpha)
    return (y, *statistics)


def batch_norm_act_grad(
    dy,
    x,
    scale,
    offset,
    saved_mean,
    saved_inv_std,
    side_input,
    mask,
    *,
    training,
    data_format,
    activation,
    alpha,
):
    """The gradients of `batch_norm_act`.

    In training the saved statistics are taken as functions of x, so that differentiating the result
    with respect to x is complete.

    Args:
        dy: The gradient of y.
        x: As in the forward function; so are scale, offset and the keyword arguments.
        saved_mean: The forward function's; so is saved_inv_std.
        side_input: The forward function's where it is needed to recompute the pre-activation, or
            None.
        mask: One bit an element, in place of the pre-activation, or None.

    Returns:
        The gradients of x, scale, offset, side_input.
    """
    dtype = x.dtype
    x, dy = wide(x), wide(dy)
    shape, axes = channel_shape(x, data_format), reduce_axes(x, data_format)
    count = elements_per_channel(x, scale)
    mean, inv_std = saved_mean, saved_inv_std
    if training:
        mean, variance = batch_moments(x, data_format, count)
        # The value is the saved one, the slope that of the batch.
        plus_epsilon = 1 / (saved_inv_std * saved_inv_std) - variance
        inv_std = tf.math.rsqrt(variance + tf.stop_gradient(plus_epsilon))
    centred, dz = pre_activation_gradient(
        dy, x, scale, offset, mean, inv_std, side_input, mask, data_format, activation, alpha
    )
    inv_std, scale = tf.reshape(inv_std, shape), tf.reshape(scale, shape)
    normal = centred * inv_std
    dscale, doffset = tf.reduce_sum(dz * normal, axes), tf.reduce_sum(dz, axes)
    dx = dz
    if training:
        mean_dz = tf.reshape(tf.math.divide_no_nan(doffset, count), shape)
        dx -= mean_dz + normal * tf.reshape(tf.math.divide_no_nan(dscale, count), shape)
    return tf.cast(dx * scale * inv_std, dtype), dscale, doffset, tf.cast(dz, dtype)
