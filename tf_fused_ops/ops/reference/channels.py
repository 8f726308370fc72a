"""What the forms of batch norm share: sums over all axes but the channels, and their use."""

import tensorflow as tf

from tf_fused_ops.ops import activations
from tf_fused_ops.ops.reference.elementwise import wide


def channel_shape(x, data_format):
    """The shape in which a vector of channels broadcasts against x."""
    if data_format == "NHWC":
        return [-1]
    return tf.concat([[-1], tf.ones([tf.rank(x) - 2], tf.int32)], 0)


def reduce_axes(x, data_format):
    """The axes of x but that of the channels."""
    rank = tf.rank(x)
    return tf.range(rank - 1) if data_format == "NHWC" else tf.concat([[0], tf.range(2, rank)], 0)


def elements_per_channel(x, channels):
    """The number of elements a channel."""
    size = tf.size(x, tf.int64) // tf.maximum(tf.size(channels, tf.int64), 1)
    return tf.cast(size, channels.dtype)


def batch_moments(x, data_format, count):
    """Mean and biased variance of every channel of x; zero where there is nothing to average."""
    axes = reduce_axes(x, data_format)
    mean = tf.math.divide_no_nan(tf.reduce_sum(x, axes), count)
    centred = x - tf.reshape(mean, channel_shape(x, data_format))
    return mean, tf.math.divide_no_nan(tf.reduce_sum(centred * centred, axes), count)


def update_averages(mean, variance, count, batch_mean, batch_variance, epsilon, momentum, unbiased):
    """The moving averages after a batch, then its mean and inverse standard deviation."""
    correction = count / tf.maximum(count - 1, 1) if unbiased else tf.ones_like(count)
    # An empty batch says nothing: the moving averages stay.
    kept = tf.where(count > 0, tf.constant(momentum, mean.dtype), tf.ones_like(count))
    new_mean = mean * kept + batch_mean * (1 - kept)
    new_variance = variance * kept + batch_variance * correction * (1 - kept)
    return new_mean, new_variance, batch_mean, tf.math.rsqrt(batch_variance + epsilon)


def normalize(x, scale, offset, mean, inv_std, side_input, data_format, activation, alpha):
    """activation((x - mean) * inv_std * scale + offset + side_input)."""
    shape = channel_shape(x, data_format)
    centred = wide(x) - tf.reshape(mean, shape)
    z = centred * tf.reshape(inv_std * scale, shape) + tf.reshape(offset, shape)
    if side_input is not None:
        z = z + wide(side_input)
    return tf.cast(activations.STOCK[activation](z, alpha), x.dtype)


def pack_mask(bits):
    """The elements of a boolean tensor as bits of uint8, least significant first."""
    flat = tf.cast(tf.reshape(bits, [-1]), tf.uint8)
    flat = tf.reshape(tf.pad(flat, [[0, -tf.size(flat) % 8]]), [-1, 8])
    return tf.reduce_sum(tf.bitwise.left_shift(flat, tf.constant([*range(8)], tf.uint8)), -1)


def _unpack_mask(mask, x):
    """The bits of a mask, least significant first, in x's shape and as x's dtype."""
    bits = tf.bitwise.right_shift(mask[:, tf.newaxis], tf.constant([*range(8)], tf.uint8))
    bits = tf.reshape(tf.bitwise.bitwise_and(bits, tf.constant(1, tf.uint8)), [-1])
    return tf.cast(tf.reshape(bits[: tf.size(x)], tf.shape(x)), x.dtype)


def pre_activation_gradient(
    dy, x, scale, offset, mean, inv_std, side_input, mask, data_format, activation, alpha
):
    """x - mean and the gradient of the pre-activation, both at least float32."""
    x, dy = wide(x), wide(dy)
    shape = channel_shape(x, data_format)
    centred = x - tf.reshape(mean, shape)
    if mask is not None:
        return centred, dy * _unpack_mask(mask, x)
    z = centred * tf.reshape(inv_std * scale, shape) + tf.reshape(offset, shape)
    if side_input is not None:
        z = z + wide(side_input)
    return centred, activations.gradient_from_argument(activation, dy, z, alpha)
