"""Transposed convolution with bias, side input and activation."""

import tensorflow as tf

from tf_fused_ops.ops import _autodiff
from tf_fused_ops.ops.reference.conv import as_known
from tf_fused_ops.ops.reference.elementwise import act_grad, bias_act, wide


def conv2d_transpose_bias_act(
    x,
    filters,
    output_shape,
    bias,
    side_input,
    *,
    strides,
    padding,
    data_format,
    dilations,
    activation,
    alpha,
):
    """activation(conv2d_transpose(x, filters, output_shape) + bias + side_input).

    Args:
        x: 4-D, laid out as data_format says.
        filters: [height, width, out_channels, in_channels].
        output_shape: Four integers, in the order of data_format.
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
    z = _conv2d_transpose(x, filters, output_shape, strides, padding, data_format, dilations)
    if data_format == "NCHW" and bias is not None:
        bias = tf.reshape(bias, [-1, 1, 1])
    return bias_act(z, bias, side_input, activation, alpha)


def conv2d_transpose_bias_act_grad(
    dy, x, filters, saved, *, strides, padding, data_format, dilations, activation, alpha
):
    """The gradients of `conv2d_transpose_bias_act`.

    Args:
        dy: The gradient of the output.
        x: As in the forward function; so are filters and the keyword arguments.
        saved: The output where its slope can be read off it, otherwise the pre-activation; None for
            "none".

    Returns:
        The gradients of x, filters, bias, side_input.
    """
    dz = act_grad(dy, saved, activation, alpha)
    shape = tf.shape(dz)

    def transposed(x, filters):
        return [_conv2d_transpose(x, filters, shape, strides, padding, data_format, dilations)]

    dx, dfilters = _autodiff.pull_back(transposed, [x, filters], [dz])
    axes = [0, 1, 2] if data_format == "NHWC" else [0, 2, 3]
    return dx, dfilters, tf.cast(tf.reduce_sum(wide(dz), axes), dz.dtype), dz


def _conv2d_transpose(x, filters, output_shape, strides, padding, data_format, dilations):
    if data_format == "NCHW":
        output_shape = tf.gather(output_shape, [0, 2, 3, 1])

    def transposed(x, filters, strides, padding):
        return tf.nn.conv2d_transpose(x, filters, output_shape, strides, padding)

    return as_known(transposed, x, filters, strides, padding, data_format, dilations)
