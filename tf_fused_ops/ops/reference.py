"""The ops and their gradients in stock TensorFlow ops.

They compute what the fused ops compute, on every device that TensorFlow knows: for comparison, for
gradients of gradients, and for graphs that must run where tf_fused_ops is not installed.
"""

import tensorflow as tf

from tf_fused_ops.ops import _autodiff, activations

# The index of a pooled pixel through which no gradient flows.
NO_INDEX = 255


def _wide(value):
    """float16 and bfloat16 as float32; other types as they are."""
    return tf.cast(value, tf.float32) if value.dtype.size == 2 else value


def _bias_act(z, bias, side_input, activation, alpha):
    if bias is not None:
        z = z + bias
    if side_input is not None:
        z = z + side_input
    return act(z, activation, alpha)


def act(x, activation, alpha):
    """activation(x), for the half precision types computed in float32.

    Args:
        x: A tensor of any shape.
        activation: A name of `activations.STOCK`.
        alpha: leaky_relu's slope below zero.

    Returns:
        A tensor of x's shape and dtype.
    """
    return tf.cast(activations.STOCK[activation](_wide(x), alpha), x.dtype)


def act_grad(dy, saved, activation, alpha):
    """The gradient of `act`.

    Args:
        dy: The gradient of the output.
        saved: The output where its slope can be read off it, otherwise x; None will do for "none".
        activation: As in the forward function; so is alpha.
        alpha: As in the forward function.

    Returns:
        The gradient of x.
    """
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
    x,
    filters,
    bias,
    side_input,
    *,
    strides,
    padding,
    data_format,
    dilations,
    activation,
    alpha,
    scale=None,
):
    """activation(conv2d(x, filters) * scale + bias + side_input).

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
        scale: [out_channels] or None.

    Returns:
        A tensor of x's dtype, laid out as data_format says.
    """
    z = _conv2d(x, filters, strides, padding, data_format, dilations)
    if data_format == "NCHW":
        scale, bias = (v if v is None else tf.reshape(v, [-1, 1, 1]) for v in (scale, bias))
    if scale is not None:
        z = z * tf.cast(scale, z.dtype)
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
    dz = act_grad(dy, saved, activation, alpha)

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
    dz = act_grad(dy, saved, activation, alpha)
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
    batch = _batch_moments(x, data_format, count)
    return _update(mean, variance, count, *batch, epsilon, momentum, unbiased)


def _update(mean, variance, count, batch_mean, batch_variance, epsilon, momentum, unbiased):
    correction = count / tf.maximum(count - 1, 1) if unbiased else tf.ones_like(count)
    # An empty batch says nothing: the moving averages stay.
    kept = tf.where(count > 0, tf.constant(momentum, mean.dtype), tf.ones_like(count))
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
    y = _normalize(x, scale, offset, *statistics[2:], side_input, data_format, activation, alpha)
    return (y, *statistics)


def _normalize(x, scale, offset, mean, inv_std, side_input, data_format, activation, alpha):
    shape = _channel_shape(x, data_format)
    centred = _wide(x) - tf.reshape(mean, shape)
    z = centred * tf.reshape(inv_std * scale, shape) + tf.reshape(offset, shape)
    if side_input is not None:
        z = z + _wide(side_input)
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


def _pre_activation_gradient(
    dy, x, scale, offset, mean, inv_std, side_input, mask, data_format, activation, alpha
):
    """x - mean and the gradient of the pre-activation, both at least float32."""
    x, dy = _wide(x), _wide(dy)
    shape = _channel_shape(x, data_format)
    centred = x - tf.reshape(mean, shape)
    if mask is not None:
        return centred, dy * _unpack_mask(mask, x)
    z = centred * tf.reshape(inv_std * scale, shape) + tf.reshape(offset, shape)
    if side_input is not None:
        z = z + _wide(side_input)
    return centred, activations.gradient_from_argument(activation, dy, z, alpha)


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
    centred, dz = _pre_activation_gradient(
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


def _three_rows(count, first, second):
    """Stacks a number and two vectors of channels, as float64."""
    rows = [count * tf.ones_like(first), first, second]
    return tf.stack([tf.cast(row, tf.float64) for row in rows])


def batch_norm_moments(x, *, data_format):
    """Count, mean and sum of squared deviations of every channel.

    Args:
        x: Rank 2 to 5; channels last for "NHWC", dimension 1 for "NCHW".
        data_format: "NHWC" or "NCHW".

    Returns:
        [3, channels], float64.
    """
    x = _wide(x)
    channels = tf.shape(x)[-1 if data_format == "NHWC" else 1]
    count = _count(x, tf.zeros([channels], x.dtype))
    mean, variance = _batch_moments(x, data_format, count)
    return _three_rows(count, mean, variance * count)


def _combine(moments, dtype):
    """Count, mean and biased variance over replicas, from [num_replicas, 3, channels]."""
    counts, means, squares = tf.unstack(moments, axis=1)
    count = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), count)
    squares = tf.reduce_sum(squares + counts * (means - mean) ** 2, 0)
    return [tf.cast(v, dtype) for v in (count, mean, tf.math.divide_no_nan(squares, count))]


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
    statistics = _update(mean, variance, *batch, epsilon, momentum, unbiased)
    y = _normalize(x, scale, offset, *statistics[2:], side_input, data_format, activation, alpha)
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
    centred, dz = _pre_activation_gradient(
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
    axes = _reduce_axes(x, data_format)
    sum_dz, sum_dz_x = tf.reduce_sum(dz, axes), tf.reduce_sum(dz * centred, axes)
    return _three_rows(_count(x, scale), sum_dz, sum_dz_x), sum_dz_x * saved_inv_std, sum_dz


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
    centred, dz = _pre_activation_gradient(
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
    shape = _channel_shape(x, data_format)
    count, sum_dz, sum_dz_x = (tf.cast(row, scale.dtype) for row in tf.unstack(sums))
    mean_dz = tf.math.divide_no_nan(sum_dz, count)
    slope = tf.math.divide_no_nan(sum_dz_x * saved_inv_std**2, count)
    dx = dz - tf.reshape(mean_dz, shape) - centred * tf.reshape(slope, shape)
    dx *= tf.reshape(scale * saved_inv_std, shape)
    return tf.cast(dx, x.dtype), tf.cast(dz, x.dtype)


def max_pool_act(x, ksize, strides, padding, activation):
    """activation(max_pool(x)), and where in its window each output was found.

    Args:
        x: [batch, height, width, channels].
        ksize: [1, height, width, 1]; so are strides.
        strides: The windows' distances.
        padding: "SAME" or "VALID".
        activation: "none" or "relu".

    Returns:
        (y, indices): the pixel of the window, row by row, as uint8; 255 where relu stops the
        gradient.
    """
    y, found = tf.nn.max_pool_with_argmax(x, ksize, strides, padding, output_dtype=tf.int64)
    starts = _window_starts(tf.shape(x), ksize, strides, padding)
    shape = tf.cast(tf.shape(x), tf.int64)
    pixel = found // shape[3]
    (top, left), width = starts, shape[2]
    indices = (pixel // width - top) * ksize[2] + pixel % width - left
    if activation == "relu":
        indices = tf.where(y > 0, indices, NO_INDEX)
        y = tf.nn.relu(y)
    return y, tf.cast(indices, tf.uint8)


def max_pool_act_grad(dy, indices, input_sizes, ksize, strides, padding):
    """The gradient of `max_pool_act`.

    Args:
        dy: The gradient of y.
        indices: Those of the forward function.
        input_sizes: The shape of x.
        ksize: As in the forward function; so are strides and padding.
        strides: As in the forward function.
        padding: As in the forward function.

    Returns:
        The gradient of x.
    """
    top, left = _window_starts(input_sizes, ksize, strides, padding)
    batch, height, width, channels = tf.unstack(tf.cast(input_sizes, tf.int64))
    index = tf.cast(indices, tf.int64)
    row, column = top + index // ksize[2], left + index % ksize[2]
    image = tf.range(batch)[:, tf.newaxis, tf.newaxis, tf.newaxis]
    flat = ((image * height + row) * width + column) * channels + tf.range(channels)
    # Segments below zero are left out.
    flat = tf.where(index == NO_INDEX, tf.constant(-1, tf.int64), flat)
    size = batch * height * width * channels
    sums = tf.math.unsorted_segment_sum(_wide(dy), flat, size)
    return tf.cast(tf.reshape(sums, input_sizes), dy.dtype)


def _window_starts(input_sizes, ksize, strides, padding):
    """The first row and the first column of every window, which may lie outside the image."""
    starts = []
    for axis in (1, 2):
        size, window, stride = tf.cast(input_sizes[axis], tf.int64), ksize[axis], strides[axis]
        count, before = (size - window) // stride + 1, 0
        if padding == "SAME":
            count = -(-size // stride)
            before = tf.maximum((count - 1) * stride + window - size, 0) // 2
        starts.append(tf.range(count) * stride - before)
    top, left = starts
    return top[:, tf.newaxis, tf.newaxis], left[:, tf.newaxis]
