"""Convolution with bias, side input and activation."""

import tensorflow as tf

from tf_fused_ops.ops import _autodiff
from tf_fused_ops.ops.reference.elementwise import act_grad, bias_act, wide


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
        filters: [height, width, in_channels / groups, out_channels].
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
    return bias_act(z, bias, side_input, activation, alpha)


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
    in_channels = x.shape[-1 if data_format == "NHWC" else 1]

    def conv2d(x, filters):
        # TensorFlow's CPU kernels know the gradients of no more than one group.
        filters = ungrouped(filters, in_channels)
        return [_conv2d(x, filters, strides, padding, data_format, dilations)]

    dx, dfilters = _autodiff.pull_back(conv2d, [x, filters], [dz])
    axes = [0, 1, 2] if data_format == "NHWC" else [0, 2, 3]
    return dx, dfilters, tf.cast(tf.reduce_sum(wide(dz), axes), dz.dtype), dz


def _conv2d(x, filters, strides, padding, data_format, dilations):
    return as_known(tf.nn.conv2d, x, filters, strides, padding, data_format, dilations)


def as_known(convolution, x, filters, strides, padding, data_format, dilations):
    """A convolution in a form of which TensorFlow's CPU kernels know every gradient.

    Args:
        convolution: Takes x in NHWC, filters, strides and padding, without dilations.
        x: As in `conv2d_bias_act`; so are strides, padding, data_format and dilations.
        filters: [height, width, ..., ...].
        strides: As in `conv2d_bias_act`.
        padding: As in `conv2d_bias_act`.
        data_format: As in `conv2d_bias_act`.
        dilations: As in `conv2d_bias_act`.

    Returns:
        A tensor, laid out as data_format says.
    """
    if data_format == "NCHW":
        x = tf.transpose(x, [0, 2, 3, 1])
        strides, dilations = ([v[0], v[2], v[3], v[1]] for v in (strides, dilations))
        if not isinstance(padding, str):
            padding = [padding[0], padding[2], padding[3], padding[1]]
    if any(d > 1 for d in dilations):
        filters = dilated(filters, dilations[1:3])
    y = convolution(x, filters, strides, padding)
    return tf.transpose(y, [0, 3, 1, 2]) if data_format == "NCHW" else y


def ungrouped(filters, in_channels):
    """The filters of the same convolution in one group: zeros between channels of different ones.

    Args:
        filters: [height, width, in_channels / groups, out_channels].
        in_channels: Those of the input. If they or those of the filters are not known before
            running, there is one group.

    Returns:
        A tensor [height, width, in_channels, out_channels].
    """
    *_, depth, out_channels = filters.shape
    if None in (in_channels, depth, out_channels) or in_channels == depth:
        return filters
    groups = in_channels // depth
    window = tf.shape(filters)[:2]
    apart = tf.reshape(filters, tf.concat([window, [1, depth, groups, -1]], 0))
    same = tf.reshape(tf.eye(groups, dtype=tf.bool), [groups, 1, groups, 1])
    together = tf.where(same, apart, tf.zeros([], filters.dtype))
    return tf.reshape(together, tf.concat([window, [in_channels, out_channels]], 0))


def dilated(filters, dilations):
    """The filters with dilation - 1 zeros between their taps.

    Args:
        filters: [taps, ..., in_channels, out_channels], with as many axes of taps as dilations.
        dilations: Integers.

    Returns:
        A tensor with (taps - 1) * dilation + 1 in place of taps.
    """
    for axis, dilation in enumerate(dilations):
        taps = tf.shape(filters)[axis]
        filters = tf.expand_dims(filters, axis + 1)
        paddings = [[0, 0]] * (len(dilations) + 3)
        paddings[axis + 1] = [0, dilation - 1]
        filters = tf.pad(filters, paddings)
        shape = tf.shape(filters)
        merged = tf.concat([shape[:axis], [taps * dilation], shape[axis + 2 :]], 0)
        filters = tf.reshape(filters, merged)
        filters = tf.gather(filters, tf.range((taps - 1) * dilation + 1), axis=axis)
    return filters
