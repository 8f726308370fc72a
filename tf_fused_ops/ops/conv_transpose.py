"""Transposed convolution + bias (+ side input) + activation as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, activations, reference

_ATTRIBUTES = (
    *("strides", "padding", "explicit_paddings", "data_format", "dilations"),
    *("activation", "alpha"),
)
_OPTIONAL = ("num_bias", "num_side_inputs")


def conv2d_transpose_bias_act(
    x,
    filters,
    output_shape,
    bias=None,
    strides=1,
    padding="SAME",
    activation="relu",
    side_input=None,
    data_format="NHWC",
    dilations=1,
    alpha=0.2,
    name=None,
):
    """Computes activation(conv2d_transpose(x, filters) + bias + side_input) in one pass.

    The transposed convolution is that of `tf.nn.conv2d_transpose`. The gradient keeps x, filters
    and y; for activations whose slope cannot be read off y (softplus, hard_sigmoid, silu,
    hard_swish, mish, gelu, leaky_relu with alpha < 0) the pre-activation takes y's place. On the
    CPU alone.

    Args:
        x: Tensor [batch, height, width, in_channels] for "NHWC", [batch, in_channels, height,
            width] for "NCHW"; float16, bfloat16, float32 or float64.
        filters: [filter_height, filter_width, out_channels, in_channels], of x's dtype.
        output_shape: The shape of the output, in the order of data_format: four integers, or a
            vector of them, int32 or int64. A convolution of an image of that size yields one of
            x's; with strides several sizes do.
        bias: [out_channels], of x's dtype, or None.
        strides: An integer, or a list of 1, 2 (height, width) or 4 (in the order of data_format).
        padding: That of the convolution which leads from the output to x: "SAME", "VALID", or four
            pairs [before, after] in the order of data_format.
        activation: "none", "relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh",
            "softplus", "hard_sigmoid", "silu", "hard_swish", "mish", "gelu" or "gelu_erf",
            "gelu_tanh"; None for "none".
        side_input: Tensor of the output's shape and x's dtype, or None.
        data_format: "NHWC" or "NCHW".
        dilations: As strides.
        alpha: leaky_relu's slope below zero.
        name: A name for the operation.

    Returns:
        Tensor of shape output_shape and x's dtype.

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
    keep = not activations.slope_from_value(activation, alpha)
    y, _ = ops.tf_fused_ops_conv2d_transpose_bias_act(
        input=x,
        filters=filters,
        bias=bias,
        side_input=side_input,
        output_shape=_arguments.shape("output_shape", output_shape),
        strides=_arguments.four("strides", strides, data_format),
        padding=padding,
        explicit_paddings=explicit_paddings,
        data_format=data_format,
        dilations=_arguments.four("dilations", dilations, data_format),
        activation=activation,
        alpha=alpha,
        save_pre_activation=keep and _gradient.records(x, filters, *bias, *side_input),
        name=name,
    )
    return y


_gradient_op = _gradient.of_convolution(ops.tf_fused_ops_conv2d_transpose_bias_act_grad)


@tf.RegisterGradient("TfFusedOps>Conv2DTransposeBiasAct")
def _conv2d_transpose_bias_act_gradient(op, dy, dpre_activation):
    def forward(inputs, attributes):
        y, _ = ops.tf_fused_ops_conv2d_transpose_bias_act(*inputs, op.inputs[-1], **attributes)
        return y

    gradients = _gradient.contraction_gradient(
        op, dy, dpre_activation, _ATTRIBUTES, _OPTIONAL, forward, _gradient_op
    )
    return [*gradients, None]


@tf.RegisterGradient("TfFusedOps>Conv2DTransposeBiasActGrad")
def _conv2d_transpose_bias_act_grad_gradient(op, *output_gradients):
    attributes = _gradient.convolution_attributes(op, *_ATTRIBUTES)

    def stock(dy, x, filters, saved=None):
        return reference.conv2d_transpose_bias_act_grad(dy, x, filters, saved, **attributes)

    return _gradient.differentiate(stock, op, output_gradients)
