"""3-D convolution with bias, side input and activation."""

import tensorflow as tf

from tf_fused_ops.ops import _autodiff
from tf_fused_ops.ops.reference.conv import dilated
from tf_fused_ops.ops.reference.elementwise import act_grad, bias_act, wide


def conv3d_bias_act(
    x, filters, bias, side_input, *, strides, padding, dilations, activation, alpha
):
    """activation(conv3d(x, filters) + bias + side_input).

    Args:
        x: [batch, depth, height, width, in_channels].
        filters: [filter_depth, filter_height, filter_width, in_channels, out_channels].
        bias: [out_channels] or None.
        side_input: A tensor of the output's shape or None.
        strides: Five integers, in the order of x.
        padding: "SAME" or "VALID".
        dilations: Five integers, in the order of x.
        activation: A name of `activations.STOCK`.
        alpha: leaky_relu's slope below zero.

    Returns:
        A tensor of x's dtype.
    """
    z = _conv3d(x, filters, strides, padding, dilations)
    return bias_act(z, bias, side_input, activation, alpha)


def conv3d_bias_act_grad(dy, x, filters, saved, *, strides, padding, dilations, activation, alpha):
    """The gradients of `conv3d_bias_act`.

    Args:
        dy: The gradient of the output.
        x: As in the forward function; so are filters and the keyword arguments.
        saved: The output where its slope can be read off it, otherwise the pre-activation; None for
            "none".

    Returns:
        The gradients of x, filters, bias, side_input.
    """
    dz = act_grad(dy, saved, activation, alpha)

    def conv3d(x, filters):
        return [_conv3d(x, filters, strides, padding, dilations)]

    dx, dfilters = _autodiff.pull_back(conv3d, [x, filters], [dz])
    return dx, dfilters, tf.cast(tf.reduce_sum(wide(dz), [0, 1, 2, 3]), dz.dtype), dz


def _conv3d(x, filters, strides, padding, dilations):
    # TensorFlow's CPU kernels know no gradient of dilated convolutions.
    if any(d > 1 for d in dilations):
        filters = dilated(filters, dilations[1:4])
    # Where windows leave pixels between them, they begin behind the first pixel in TensorFlow's.
    if padding == "SAME" and max(strides) > 2:
        x, padding = _padded(x, tf.shape(filters)[:3], strides[1:4]), "VALID"
    return tf.nn.conv3d(x, filters, strides, padding)


def _padded(x, window, strides):
    size = tf.shape(x)[1:4]
    last = (size - 1) // strides * strides
    amount = tf.maximum(last + window - size, 0)
    before = amount // 2
    return tf.pad(x, tf.pad(tf.stack([before, amount - before], 1), [[1, 1], [0, 0]]))
