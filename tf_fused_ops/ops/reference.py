"""The ops and their gradients in stock TensorFlow ops.

They compute what the fused ops compute, on every device that TensorFlow knows: for comparison, for
gradients of gradients, and for graphs that must run where tf_fused_ops is not installed.
"""

import tensorflow as tf

from tf_fused_ops.ops import _autodiff, activations


def _wide(value):
    """float16 and bfloat16 as float32; other types as they are."""
    return tf.cast(value, tf.float32) if value.dtype.size == 2 else value


def _bias_act(z, bias, side_input, activation, alpha):
    if bias is not None:
        z = z + bias
    if side_input is not None:
        z = z + side_input
    return activate(z, activation, alpha)


def activate(z, activation, alpha):
    """activation(z), for the half precision types computed in float32."""
    return tf.cast(activations.STOCK[activation](_wide(z), alpha), z.dtype)


def _activation_gradient(dy, saved, activation, alpha):
    saved = None if saved is None else _wide(saved)
    return tf.cast(activations.gradient(activation, _wide(dy), saved, alpha), dy.dtype)


def _dilated(filters, dilations):
    """The filters with dilation - 1 zeros between their taps."""
    for axis, dilation in enumerate(dilations):
        taps = tf.shape(filters)[axis]
        filters = tf.expand_dims(filters, axis + 1)
        paddings = [[0, 0]] * 5
        paddings[axis + 1] = [0, dilation - 1]
        filters = tf.pad(filters, paddings)
        shape = tf.shape(filters)
        merged = tf.concat([shape[:axis], [taps * dilation], shape[axis + 2 :]], 0)
        filters = tf.reshape(filters, merged)
        filters = tf.gather(filters, tf.range((taps - 1) * dilation + 1), axis=axis)
    return filters


def _conv2d(x, filters, strides, padding, data_format, dilations):
    # TensorFlow's CPU kernels know neither every gradient in NCHW nor that of dilated filters.
    if data_format == "NCHW":
        x = tf.transpose(x, [0, 2, 3, 1])
        strides, dilations = ([v[0], v[2], v[3], v[1]] for v in (strides, dilations))
        if not isinstance(padding, str):
            padding = [padding[0], padding[2], padding[3], padding[1]]
    if any(d > 1 for d in dilations):
        filters = _dilated(filters, dilations[1:3])
    y = tf.nn.conv2d(x, filters, strides, padding)
    return tf.transpose(y, [0, 3, 1, 2]) if data_format == "NCHW" else y


def conv2d_bias_act(
    x, filters, bias, side_input, *, strides, padding, data_format, dilations, activation, alpha
):
    """activation(conv2d(x, filters) + bias + side_input).

    Args:
        x: 4-D, laid out as data_format says.
        filters: [height, width, in_channels, out_channels].
        bias: [out_channels] or None.
        side_input: A tensor of the output's shape or None.
        strides: Four integers, in the order of data_format.
        padding: "SAME", "VALID", or four pairs in the order of data_format.
        data_format: "NHWC" or "NCHW".
        dilations: Four integers, in the order of data_format.
        activation: A name of `activations.STOCK`.
        alpha: leaky_relu's slope below zero.

    Returns:
        A tensor of x's dtype, laid out as data_format says.
    """
    z = _conv2d(x, filters, strides, padding, data_format, dilations)
    if bias is not None and data_format == "NCHW":
        bias = tf.reshape(bias, [-1, 1, 1])
    return _bias_act(z, bias, side_input, activation, alpha)


def conv2d_bias_act_grad(
    dy, x, filters, saved, *, strides, padding, data_format, dilations, activation, alpha
):
    """The gradients of `conv2d_bias_act`.

    Args:
        dy: The gradient of the output.
        x: As in the forward function; so are filters and the keyword arguments.
        saved: The output where its slope can be read off it, otherwise the pre-activation; None for
            "none".

    Returns:
        The gradients of x, filters, bias, side_input.
    """
    dz = _activation_gradient(dy, saved, activation, alpha)

    def conv2d(x, filters):
        return [_conv2d(x, filters, strides, padding, data_format, dilations)]

    dx, dfilters = _autodiff.pull_back(conv2d, [x, filters], [dz])
    axes = [0, 1, 2] if data_format == "NHWC" else [0, 2, 3]
    return dx, dfilters, tf.cast(tf.reduce_sum(_wide(dz), axes), dz.dtype), dz


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
    return _bias_act(_matmul(a, b, transpose_a, transpose_b), bias, side_input, activation, alpha)


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
    dz = _activation_gradient(dy, saved, activation, alpha)
    da, db = _autodiff.pull_back(
        lambda a, b: [_matmul(a, b, transpose_a, transpose_b)], [a, b], [dz]
    )
    shape = tf.shape(dz)
    rows = tf.reshape(_wide(dz), tf.stack([tf.reduce_prod(shape[:-1]), shape[-1]]))
    return da, db, tf.cast(tf.reduce_sum(rows, 0), dz.dtype), dz


def _channel_shape(x, data_format):
    """The shape in which a vector of channels broadcasts against x."""
    if data_format == "NHWC":
        return [-1]
    return tf.concat([[-1], tf.ones([tf.rank(x) - 2], tf.int32)], 0)


def _reduce_axes(x, data_format):
    rank = tf.rank(x)
    return tf.range(rank - 1) if data_format == "NHWC" else tf.concat([[0], tf.range(2, rank)], 0)


def _count(x, channels):
    """The number of elements a channel."""
    size = tf.size(x, tf.int64) // tf.maximum(tf.size(channels, tf.int64), 1)
    return tf.cast(size, channels.dtype)


def _batch_moments(x, data_format, count):
    """Mean and biased variance of every channel of x; zero where there is nothing to average."""
    axes = _reduce_axes(x, data_format)
    mean = tf.math.divide_no_nan(tf.reduce_sum(x, axes), count)
    centred = x - tf.reshape(mean, _channel_shape(x, data_format))
    return mean, tf.math.divide_no_nan(tf.reduce_sum(centred * centred, axes), count)


def batch_norm_statistics(x, mean, variance, *, epsilon, momentum, training, unbiased, data_format):
    """The statistics that `batch_norm_act` returns.

    Returns:
        New moving mean, new moving variance, the mean and the inverse standard deviation used.
    """
    if not training:
        return mean, variance, mean, tf.math.rsqrt(variance + epsilon)
    x = _wide(x)
    count = _count(x, mean)
    batch_mean, batch_variance = _batch_moments(x, data_format, count)
    correction = count / tf.maximum(count - 1, 1) if unbiased else tf.ones_like(count)
    # An empty batch says nothing: the moving averages stay.
    kept = tf.where(count > 0, tf.cast(momentum, mean.dtype), tf.ones_like(count))
    new_mean = mean * kept + batch_mean * (1 - kept)
    new_variance = variance * kept + batch_variance * correction * (1 - kept)
    return new_mean, new_variance, batch_mean, tf.math.rsqrt(batch_variance + epsilon)


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
    shape = _channel_shape(x, data_format)
    centred = _wide(x) - tf.reshape(statistics[2], shape)
    z = centred * tf.reshape(statistics[3] * scale, shape) + tf.reshape(offset, shape)
    if side_input is not None:
        z = z + _wide(side_input)
    return (tf.cast(activations.STOCK[activation](z, alpha), x.dtype), *statistics)


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
    x, dy = _wide(x), _wide(dy)
    shape, axes = _channel_shape(x, data_format), _reduce_axes(x, data_format)
    count = _count(x, scale)
    mean, inv_std = saved_mean, saved_inv_std
    if training:
        mean, variance = _batch_moments(x, data_format, count)
        # The value is the saved one, the slope that of the batch.
        plus_epsilon = 1 / (saved_inv_std * saved_inv_std) - variance
        inv_std = tf.math.rsqrt(variance + tf.stop_gradient(plus_epsilon))
    mean, inv_std, scale = (tf.reshape(v, shape) for v in (mean, inv_std, scale))
    normal = (x - mean) * inv_std
    if mask is not None:
        dz = dy * _unpack_mask(mask, x)
    else:
        z = normal * scale + tf.reshape(offset, shape)
        if side_input is not None:
            z = z + _wide(side_input)
        dz = activations.gradient_from_argument(activation, dy, z, alpha)
    dscale, doffset = tf.reduce_sum(dz * normal, axes), tf.reduce_sum(dz, axes)
    dx = dz
    if training:
        mean_dz = tf.reshape(tf.math.divide_no_nan(doffset, count), shape)
        dx -= mean_dz + normal * tf.reshape(tf.math.divide_no_nan(dscale, count), shape)
    return tf.cast(dx * scale * inv_std, dtype), dscale, doffset, tf.cast(dz, dtype)
