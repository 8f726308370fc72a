"""Convolution (* scale) + bias (+ side input) + activation as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _autodiff, _gradient, activations, reference

_CONV_ATTRIBUTES = ("strides", "padding", "explicit_paddings", "data_format", "dilations")
_REFERENCE_ATTRIBUTES = (*_CONV_ATTRIBUTES, "activation", "alpha")
_ATTRIBUTES = (*_REFERENCE_ATTRIBUTES, "winograd")
_OPTIONAL = ("num_bias", "num_side_inputs", "num_scale")


def _flatten_batch(value):
    """Returns a tensor of rank > 4 with all its leading dimensions made one."""
    return tf.reshape(value, tf.concat([[-1], tf.shape(value)[-3:]], 0))


def conv2d_bias_act(
    x,
    filters,
    bias=None,
    strides=1,
    padding="SAME",
    activation="relu",
    side_input=None,
    data_format="NHWC",
    dilations=1,
    alpha=0.2,
    scale=None,
    winograd=False,
    name=None,
):
    """Computes activation(conv2d(x, filters) * scale + bias + side_input) in one pass.

    The convolution is that of `tf.nn.conv2d`. The gradient keeps x, filters and y; for activations
    whose slope cannot be read off y (softplus, hard_sigmoid, silu, hard_swish, mish, gelu,
    leaky_relu with alpha < 0) the pre-activation takes y's place.

    Args:
        x: Tensor [batch, height, width, in_channels] for "NHWC", [batch, in_channels, height,
            width] for "NCHW"; float16, bfloat16, float32 or float64. More leading dimensions may
            stand for batch.
        filters: [filter_height, filter_width, in_channels / groups, out_channels], of x's dtype;
            the number of groups follows from that, and is 1 on a GPU.
        bias: [out_channels], of x's dtype, or None.
        strides: An integer, or a list of 1, 2 (height, width) or 4 (in the order of data_format).
        padding: "SAME", "VALID", or four pairs [before, after] in the order of data_format.
        activation: "none", "relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh",
            "softplus", "hard_sigmoid", "silu", "hard_swish", "mish", "gelu" or "gelu_erf",
            "gelu_tanh"; None for "none".
        side_input: Tensor of the output's shape and x's dtype, or None.
        data_format: "NHWC" or "NCHW".
        dilations: As strides.
        alpha: leaky_relu's slope below zero.
        scale: [out_channels], of x's dtype, or None: a factor per channel, such as that of batch
            normalization in inference.
        winograd: Whether a convolution of 3x3 filters with stride 1, and its gradients by x and
            filters, may be computed by Winograd's algorithm F(4x4, 3x3): a quarter of the
            multiplications. Its rounding errors are larger, see `docs/winograd.md`; in float16 and
            bfloat16 those of the result hide them. Only on the CPU, and only where it takes less
            time.
        name: A name for the operation.

    Returns:
        Tensor [batch, out_height, out_width, out_channels] for "NHWC", [batch, out_channels,
        out_height, out_width] for "NCHW", of x's dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    activation = activations.canonical_name(activation)
    data_format = _arguments.data_format(data_format)
    padding, explicit_paddings = _arguments.padding(padding)
    x = _arguments.tensor("x", x)
    filters = _arguments.tensor_like("filters", filters, x.dtype, "x")
    bias = _arguments.optional("bias", bias, x.dtype, "x")
    side_input = _arguments.optional("side_input", side_input, x.dtype, "x")
    scale = _arguments.optional("scale", scale, x.dtype, "x")
    batch_shape = None
    if x.shape.rank is not None and x.shape.rank > 4:
        batch_shape, static_batch = tf.shape(x)[:-3], x.shape[:-3]
        x, side_input = _flatten_batch(x), [_flatten_batch(side) for side in side_input]
    keep = not activations.slope_from_value(activation, alpha)
    y, *_ = ops.tf_fused_ops_conv2d_bias_act(
        input=x,
        filters=filters,
        bias=bias,
        side_input=side_input,
        scale=scale,
        strides=_arguments.four("strides", strides, data_format),
        padding=padding,
        explicit_paddings=explicit_paddings,
        data_format=data_format,
        dilations=_arguments.four("dilations", dilations, data_format),
        activation=activation,
        alpha=alpha,
        winograd=bool(winograd),
        save_pre_activation=keep and _gradient.records(x, filters, *bias, *side_input, *scale),
        name=name,
    )
    if batch_shape is not None:
        inner = y.shape[1:]
        y = tf.reshape(y, tf.concat([batch_shape, tf.shape(y)[1:]], 0))
        y.set_shape(static_batch.concatenate(inner))
    return y


_gradient_op = _gradient.of_convolution(ops.tf_fused_ops_conv2d_bias_act_grad)


@tf.RegisterGradient("TfFusedOps>Conv2DBiasAct")
def _conv2d_bias_act_gradient(op, dy, dpre_activation, *dmoments):
    if any(not _gradient.is_zero(gradient) for gradient in dmoments):
        dy += _moments_gradient(op, dmoments)
    return _gradient.contraction_gradient(
        op, dy, dpre_activation, _ATTRIBUTES, _OPTIONAL, _forward, _gradient_op
    )


def _moments_gradient(op, dmoments):
    """The gradient of y through its moments."""
    (data_format,) = _gradient.attributes(op, "data_format").values()

    def moments(y):
        return [reference.batch_norm_moments(y, data_format=data_format)]

    return _autodiff.pull_back(moments, op.outputs[:1], dmoments)[0]


def _forward(inputs, attributes):
    return ops.tf_fused_ops_conv2d_bias_act(*inputs, **attributes)[0]


@tf.RegisterGradient("TfFusedOps>Conv2DBiasActGrad")
def _conv2d_bias_act_grad_gradient(op, *output_gradients):
    attributes = _gradient.convolution_attributes(op, *_REFERENCE_ATTRIBUTES)

    def stock(dy, x, filters, saved=None):
        return reference.conv2d_bias_act_grad(dy, x, filters, saved, **attributes)

    return _gradient.differentiate(stock, op, output_gradients)
