"""Matrix product + bias (+ side input) + activation as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, activations, reference

_ATTRIBUTES = ("transpose_a", "transpose_b", "activation", "alpha")
_OPTIONAL = ("num_bias", "num_side_inputs")


def matmul_bias_act(
    a,
    b,
    bias=None,
    activation="gelu",
    approximate=False,
    transpose_a=False,
    transpose_b=False,
    side_input=None,
    alpha=0.2,
    name=None,
):
    """Computes activation(a b + bias + side_input) in one pass.

    The gradient keeps a, b and the pre-activation; for activations whose slope can be read off the
    result (relu, relu6, elu, selu, leaky_relu with alpha >= 0, sigmoid, tanh) the result takes its
    place. gelu is z * Phi(z) with the standard normal distribution function Phi, or with
    approximate 0.5 * z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z**3))) (Hendrycks and Gimpel,
    arXiv:1606.08415).

    Args:
        a: Tensor [..., m, k], or [..., k, m] with transpose_a; float16, bfloat16, float32 or
            float64.
        b: [k, n], or [n, k] with transpose_b, of a's dtype.
        bias: [n], of a's dtype, or None.
        activation: "none", "relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh",
            "softplus", "hard_sigmoid", "silu", "hard_swish", "mish", "gelu", "gelu_erf",
            "gelu_tanh"; None for "none".
        approximate: Whether "gelu" is the tanh form.
        transpose_a: Whether to swap a's last two dimensions.
        transpose_b: Whether to swap b's dimensions.
        side_input: Tensor of the output's shape and a's dtype, or None.
        alpha: leaky_relu's slope below zero.
        name: A name for the operation.

    Returns:
        Tensor [..., m, n], of a's dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    activation = activations.canonical_name(activation, approximate)
    a = _arguments.tensor("a", a)
    b = _arguments.tensor_like("b", b, a.dtype, "a")
    bias = _arguments.optional("bias", bias, a.dtype, "a")
    side_input = _arguments.optional("side_input", side_input, a.dtype, "a")
    keep = not activations.slope_from_value(activation, alpha)
    y, _ = ops.tf_fused_ops_mat_mul_bias_act(
        a=a,
        b=b,
        bias=bias,
        side_input=side_input,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        activation=activation,
        alpha=alpha,
        save_pre_activation=keep and _gradient.records(a, b, *bias, *side_input),
        name=name,
    )
    return y


def _gradient_op(dy, a, b, saved, switches, attributes):
    return ops.tf_fused_ops_mat_mul_bias_act_grad(
        dy=dy,
        a=a,
        b=b,
        saved=saved,
        a_gradient=switches[0],
        b_gradient=switches[1],
        bias_gradient=switches[2],
        side_input_gradient=switches[3],
        **attributes,
    )


def _forward(inputs, attributes):
    return ops.tf_fused_ops_mat_mul_bias_act(*inputs, **attributes)[0]


@tf.RegisterGradient("TfFusedOps>MatMulBiasAct")
def _matmul_bias_act_gradient(op, dy, dpre_activation):
    return _gradient.contraction_gradient(
        op, dy, dpre_activation, _ATTRIBUTES, _OPTIONAL, _forward, _gradient_op
    )


@tf.RegisterGradient("TfFusedOps>MatMulBiasActGrad")
def _matmul_bias_act_grad_gradient(op, *output_gradients):
    attributes = _gradient.attributes(op, *_ATTRIBUTES)

    def stock(dy, a, b, saved=None):
        return reference.matmul_bias_act_grad(dy, a, b, saved, **attributes)

    return _gradient.differentiate(stock, op, output_gradients)
