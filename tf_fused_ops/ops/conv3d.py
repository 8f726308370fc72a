"""3-D convolution + bias (+ side input) + activation as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, activations, reference

_ATTRIBUTES = ("strides", "padding", "dilations", "activation", "alpha")
_OPTIONAL = ("num_bias", "num_side_inputs")


def conv3d_bias_act(
    x,
    filters,
    bias=None,
    strides=1,
    padding="SAME",
    activation="relu",
    side_input=None,
    dilations=1,
    alpha=0.2,
    name=None,
):
    """Computes activation(conv3d(x, filters) + bias + side_input) in one pass.

    The convolution is that of `tf.nn.conv3d`, but that with "SAME" the first window always begins
    at the first pixel or before it, also where windows leave pixels between them. The gradient
    keeps x, filters and y; for activations whose slope cannot be read off y (softplus,
    hard_sigmoid, silu, hard_swish, mish, gelu, leaky_relu with alpha < 0) the pre-activation takes
    y's place. On the CPU alone.

    Args:
        x: Tensor [batch, depth, height, width, in_channels]; float16, bfloat16, float32 or float64.
        filters: [filter_depth, filter_height, filter_width, in_channels, out_channels], of x's
            dtype.
        bias: [out_channels], of x's dtype, or None.
        strides: An integer, or a list of 1, 3 (depth, height, width) or 5 (in the order of x).
        padding: "SAME" or "VALID".
        activation: "none", "relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh",
            "softplus", "hard_sigmoid", "silu", "hard_swish", "mish", "gelu" or "gelu_erf",
            "gelu_tanh"; None for "none".
        side_input: Tensor of the output's shape and x's dtype, or None.
        dilations: As strides.
        alpha: leaky_relu's slope below zero.
        name: A name for the operation.

    Returns:
        Tensor [batch, out_depth, out_height, out_width, out_channels] of x's dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    activation = activations.canonical_name(activation)
    x = _arguments.tensor("x", x)
    filters = _arguments.tensor_like("filters", filters, x.dtype, "x")
    bias = _arguments.optional("bias", bias, x.dtype, "x")
    side_input = _arguments.optional("side_input", side_input, x.dtype, "x")
    keep = not activations.slope_from_value(activation, alpha)
    y, _ = ops.tf_fused_ops_conv3d_bias_act(
        input=x,
        filters=filters,
        bias=bias,
        side_input=side_input,
        strides=_arguments.five("strides", strides),
        padding=_arguments.implicit_padding(padding),
        dilations=_arguments.five("dilations", dilations),
        activation=activation,
        alpha=alpha,
        save_pre_activation=keep and _gradient.records(x, filters, *bias, *side_input),
        name=name,
    )
    return y


_gradient_op = _gradient.of_convolution(ops.tf_fused_ops_conv3d_bias_act_grad)


@tf.RegisterGradient("TfFusedOps>Conv3DBiasAct")
def _conv3d_bias_act_gradient(op, dy, dpre_activation):
    return _gradient.contraction_gradient(
        op, dy, dpre_activation, _ATTRIBUTES, _OPTIONAL, _forward, _gradient_op
    )


def _forward(inputs, attributes):
    return ops.tf_fused_ops_conv3d_bias_act(*inputs, **attributes)[0]


@tf.RegisterGradient("TfFusedOps>Conv3DBiasActGrad")
def _conv3d_bias_act_grad_gradient(op, *output_gradients):
    attributes = _gradient.attributes(op, *_ATTRIBUTES)

    def stock(dy, x, filters, saved=None):
        return reference.conv3d_bias_act_grad(dy, x, filters, saved, **attributes)

    return _gradient.differentiate(stock, op, output_gradients)
