"""Batch norm in parts, between which replicas add up their sums."""

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


def batch_norm_moments(x, *, data_format):
    """Count, mean and sum of squared deviations of every channel.

    Args:
        x: Rank 2 to 5; channels last for "NHWC", dimension 1 for "NCHW".
        data_format: "NHWC" or "NCHW".

    Returns:
        [3, channels], float64.
    """
    x = wide(x)
    channels = tf.shape(x)[-1 if data_format == "NHWC" else 1]
    count = elements_per_channel(x, tf.zeros([channels], x.dtype))
    mean, variance = batch_moments(x, data_format, count)
    return _three_rows(count, mean, variance * count)


def batch_norm_apply(
    x,
    scale,
    offset,
    mean,
    variance,
    moments,
    side_input,
    *,
    epsilon,
    momentum,
    unbiased,
    data_format,
    activation,
    alpha,
):
    """`batch_norm_act` in training with the statistics of several replicas.

    Args:
        x: As in `batch_norm_act`; so are the others, but
        moments: [num_replicas, 3, channels], `batch_norm_moments` of every replica.

    Returns:
        y, new moving mean, new moving variance, saved mean, saved inverse standard deviation.
    """
    batch = _combine(moments, mean.dtype)
    statistics = update_averages(mean, variance, *batch, epsilon, momentum, unbiased)
    y = normalize(x, scale, offset, *statistics[2:], side_input, data_format, activation, alpha)
    return (y, *statistics)


def batch_norm_grad_sums(
    dy,
    x,
    scale,
    offset,
    saved_mean,
    saved_inv_std,
    side_input,
    mask,
    *,
    data_format,
    activation,
    alpha,
):
    """What replicas add up for the gradient of `batch_norm_apply`.

    Args:
        dy: As in `batch_norm_act_grad`; so are the others.

    Returns:
        [3, channels], float64: count, sum of dz, sum of dz * (x - saved_mean), where dz is the
        gradient of the pre-activation; the gradients of scale and offset through this y.
    """
    centred, dz = pre_activation_gradient(
        dy,
        x,
        scale,
        offset,
        saved_mean,
        saved_inv_std,
        side_input,
        mask,
        data_format,
        activation,
        alpha,
    )
    axes = reduce_axes(x, data_format)
    sum_dz, sum_dz_x = tf.reduce_sum(dz, axes), tf.reduce_sum(dz * centred, axes)
    return (
        _three_rows(elements_per_channel(x, scale), sum_dz, sum_dz_x),
        sum_dz_x * saved_inv_std,
        sum_dz,
    )


def batch_norm_grad_apply(
    dy,
    x,
    scale,
    offset,
    saved_mean,
    saved_inv_std,
    sums,
    side_input,
    mask,
    *,
    data_format,
    activation,
    alpha,
):
    """The gradients of x and the side input of `batch_norm_apply` through the y of all replicas.

    Args:
        dy: As in `batch_norm_act_grad`; so are the others, but
        sums: [3, channels], `batch_norm_grad_sums` added up over all replicas.

    Returns:
        The gradients of x and side_input.
    """
    centred, dz = pre_activation_gradient(
        dy,
        x,
        scale,
        offset,
        saved_mean,
        saved_inv_std,
        side_input,
        mask,
        data_format,
        activation,
        alpha,
    )
    shape = channel_shape(x, data_format)
    count, sum_dz, sum_dz_x = (tf.cast(row, scale.dtype) for row in tf.unstack(sums))
    mean_dz = tf.math.divide_no_nan(sum_dz, count)
    slope = tf.math.divide_no_nan(sum_dz_x * saved_inv_std**2, count)
    dx = dz - tf.reshape(mean_dz, shape) - centred * tf.reshape(slope, shape)
    dx *= tf.reshape(scale * saved_inv_std, shape)
    return tf.cast(dx, x.dtype), tf.cast(dz, x.dtype)


def _combine(moments, dtype):
    """Count, mean and biased variance over replicas, from [num_replicas, 3, channels]."""
    counts, means, squares = tf.unstack(moments, axis=1)
    count = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), count)
    squares = tf.reduce_sum(squares + counts * (means - mean) ** 2, 0)
    return [tf.cast(v, dtype) for v in (count, mean, tf.math.divide_no_nan(squares, count))]


def _three_rows(count, first, second):
    """Stacks a number and two vectors of channels, as float64."""
    rows = [count * tf.ones_like(first), first, second]
    return tf.stack([tf.cast(row, tf.float64) for row in rows])
