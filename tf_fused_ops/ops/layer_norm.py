"""Layer and RMS normalization as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _autodiff, _gradient, reference


def layer_norm(x, scale=None, offset=None, epsilon=1e-3, name=None):
    """Computes (x - mu) * r * scale + offset over the last dimension in one op.

    r = 1 / sqrt(sigma**2 + epsilon), where mu and sigma**2 are mean and (biased) variance of x's
    last dimension (Ba, Kiros and Hinton, arXiv:1607.06450). The gradient keeps x, mu and r. On
    GPUs for all dtypes but float64.

    Args:
        x: Tensor of rank 1 or more; float16, bfloat16, float32 or float64.
        scale: [x.shape[-1]], float64 for float64 x, otherwise float32; None for ones.
        offset: As scale; None for zeros.
        epsilon: Is added to the variance.
        name: A name for the operation.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    return _normalize(x, scale, offset, epsilon, True, name)


def rms_norm(x, scale=None, epsilon=1e-6, name=None):
    """Computes x * r * scale over the last dimension in one op.

    r = 1 / sqrt(mean(x**2) + epsilon) (Zhang and Sennrich, arXiv:1910.07467). The gradient keeps x
    and r. On GPUs for all dtypes but float64.

    Args:
        x: Tensor of rank 1 or more; float16, bfloat16, float32 or float64.
        scale: [x.shape[-1]], float64 for float64 x, otherwise float32; None for ones.
        epsilon: Is added to the mean of squares.
        name: A name for the operation.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    return _normalize(x, scale, None, epsilon, False, name)


def _normalize(x, scale, offset, epsilon, subtract_mean, name):
    x = _arguments.tensor("x", x)
    if x.shape.rank == 0:
        raise ValueError("x must have rank 1 or more; got a scalar")
    scale, offset = _arguments.scale_and_offset(scale, offset, x, -1)
    y, _, _ = ops.tf_fused_ops_layer_norm(
        x=x,
        scale=scale,
        offset=offset,
        epsilon=epsilon,
        subtract_mean=subtract_mean,
        name=name,
    )
    return y


@tf.RegisterGradient("TfFusedOps>LayerNorm")
def _layer_norm_gradient(op, dy, *statistics_gradients):
    x, scale, _ = op.inputs
    _, mean, inv_std = op.outputs
    attributes = _gradient.attributes(op, "subtract_mean")
    dx, dscale, doffset = ops.tf_fused_ops_layer_norm_grad(
        dy, x, scale, mean, inv_std, **attributes
    )
    if not all(map(_gradient.is_zero, statistics_gradients)):
        dx += _statistics_gradient(op, statistics_gradients)
    return dx, dscale, doffset


def _statistics_gradient(op, gradients):
    """The gradient of x through mean and inv_std."""
    attributes = _gradient.attributes(op, "epsilon", "subtract_mean")

    def statistics(x):
        return reference.layer_norm_statistics(x, **attributes)

    return _autodiff.pull_back(statistics, op.inputs[:1], gradients)[0]


@tf.RegisterGradient("TfFusedOps>LayerNormGrad")
def _layer_norm_grad_gradient(op, *gradients):
    attributes = _gradient.attributes(op, "subtract_mean")

    def stock(dy, x, scale, _, inv_std):
        return reference.layer_norm_grad(dy, x, scale, inv_std, **attributes)

    return _gradient.differentiate(stock, op, gradients)
