"""A leaky relu with a learned slope as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, reference


def prelu(x, alpha, name=None):
    """Computes x where x > 0, otherwise alpha * x, in one pass (He et al., arXiv:1502.01852).

    Stock TensorFlow runs five ops, each of which reads and writes memory, and keeps several of
    their results for the gradient. This op reads x and writes y; its gradient reads dy and x, and
    is zero by x where x is zero, as in stock code. On the CPU alone.

    Args:
        x: Tensor of any shape; float16, bfloat16, float32 or float64.
        alpha: Tensor of x's dtype: of x's last dimensions, with ones in front of them or nothing;
            [channels] is a slope for each channel.
        name: A name for the operation.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    x = _arguments.tensor("x", x)
    alpha = _arguments.tensor_like("alpha", alpha, x.dtype, "x")
    return ops.tf_fused_ops_prelu(x=x, alpha=alpha, name=name)


@tf.RegisterGradient("TfFusedOps>Prelu")
def _prelu_gradient(op, dy):
    x, alpha = op.inputs
    return ops.tf_fused_ops_prelu_grad(dy=dy, x=x, alpha=alpha)


@tf.RegisterGradient("TfFusedOps>PreluGrad")
def _prelu_grad_gradient(op, *gradients):
    return _gradient.differentiate(reference.prelu_grad, op, gradients)
