"""An activation on its own as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, activations, reference

_ATTRIBUTES = ("activation", "alpha")


def act(x, activation="gelu", approximate=False, alpha=0.2, name=None):
    """Computes activation(x) in one pass.

    Stock TensorFlow runs two to eight ops for gelu, silu, hard_sigmoid, hard_swish and mish, each
    of which reads and writes memory, and keeps several of their results for the gradient. This op
    reads x and writes y; its gradient reads dy and x. For activations whose slope can be read off
    the result (relu, relu6, elu, selu, leaky_relu with alpha >= 0, sigmoid, tanh) the gradient
    reads y instead.
    gelu is x * Phi(x) with the standard normal distribution function Phi, or with approximate
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) (Hendrycks and Gimpel,
    arXiv:1606.08415).

    Args:
        x: Tensor of any shape; float16, bfloat16, float32 or float64.
        activation: "none", "relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh",
            "softplus", "hard_sigmoid", "silu", "hard_swish", "mish", "gelu", "gelu_erf",
            "gelu_tanh"; None for "none".
        approximate: Whether "gelu" is the tanh form.
        alpha: leaky_relu's slope below zero.
        name: A name for the operation.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        ValueError: The activation is unknown, or x is no tensor of such a dtype.
    """
    activation = activations.canonical_name(activation, approximate)
    x = _arguments.tensor("x", x)
    return ops.tf_fused_ops_act(x=x, activation=activation, alpha=alpha, name=name)


@tf.RegisterGradient("TfFusedOps>Act")
def _act_gradient(op, dy):
    attributes = _gradient.attributes(op, *_ATTRIBUTES)
    saved = op.outputs[0] if activations.slope_from_value(**attributes) else op.inputs[0]
    return ops.tf_fused_ops_act_grad(dy=dy, saved=saved, **attributes)


@tf.RegisterGradient("TfFusedOps>ActGrad")
def _act_grad_gradient(op, dx_grad):
    attributes = _gradient.attributes(op, *_ATTRIBUTES)

    def stock(dy, saved):
        return [reference.act_grad(dy, saved, **attributes)]

    return _gradient.differentiate(stock, op, [dx_grad])
