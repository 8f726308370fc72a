"""Softmax with scale and mask as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, reference

_ATTRIBUTES = ("scale", "zero_masked")


def softmax(x, mask=None, scale=1.0, masked=-3e38, zero_masked=False, name=None):
    """Computes the softmax of x * scale over the last dimension in one op, as attention takes it.

    The gradient keeps y and the mask. On GPUs for all dtypes but float64.

    Args:
        x: Tensor of rank 1 or more; float16, bfloat16, float32 or float64.
        mask: Boolean tensor, of x's last dimension and otherwise broadcast to x's shape; None for
            one that is true everywhere.
        scale: A Python number.
        masked: What takes the place of x * scale where the mask is false, a Python number, of at
            most float32's range and, for float64 x, six digits. Where it is as small as by default,
            y is zero there, and one by the size of the last dimension where the mask is false for
            all of it.
        zero_masked: Whether the result is zero where the mask is false, also where it is false for
            all of the last dimension.
        name: A name for the operation.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    x = _arguments.tensor("x", x)
    if x.shape.rank == 0:
        raise ValueError("x must have rank 1 or more; got a scalar")
    x, scale, masked = _arguments.scaled(x, scale, masked)
    return ops.tf_fused_ops_softmax(
        x=x,
        mask=_arguments.optional("mask", mask, tf.bool, "x"),
        scale=scale,
        masked=masked,
        zero_masked=bool(zero_masked),
        name=name,
    )


@tf.RegisterGradient("TfFusedOps>Softmax")
def _softmax_gradient(op, dy):
    mask = op.inputs[1:]
    x_grad = ops.tf_fused_ops_softmax_grad(
        dy=dy, y=op.outputs[0], mask=list(mask), **_gradient.attributes(op, *_ATTRIBUTES)
    )
    return [x_grad, *(None for _ in mask)]


@tf.RegisterGradient("TfFusedOps>SoftmaxGrad")
def _softmax_grad_gradient(op, gradient):
    attributes = _gradient.attributes(op, *_ATTRIBUTES)

    def stock(dy, y, *mask):
        return [reference.softmax_grad(dy, y, *mask, **attributes)]

    return _gradient.differentiate(stock, op, [gradient])
