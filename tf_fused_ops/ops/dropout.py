"""Dropout as one op, which is its own gradient."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient


def dropout(x, rate, seed, name=None):
    """Sets elements of x to zero at random, and scales the others by 1 / (1 - rate), in one op.

    The elements are those that `tf.nn.experimental.stateless_dropout` sets to zero for the same
    seed. Neither random numbers nor a mask are in memory: the gradient, of every order, draws the
    same numbers again. On GPUs for all dtypes but float64.

    Args:
        x: Tensor of any shape; float16, bfloat16, float32 or float64.
        rate: The probability of an element to be set to zero, a Python number from 0 to below 1
            and, for float64, of six digits.
        seed: Tensor of two integers, int32 or int64.
        name: A name for the operation.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    x = _arguments.tensor("x", x)
    x, rate, scale = _arguments.dropped("rate", rate, x)
    key, counter = _arguments.random_words("seed", seed)
    return ops.tf_fused_ops_dropout(
        x=x, rng_key=key, rng_counter=counter, rate=rate, scale=scale, name=name
    )


@tf.RegisterGradient("TfFusedOps>Dropout")
def _dropout_gradient(op, dy):
    _, key, counter = op.inputs
    attributes = _gradient.attributes(op, "rate", "scale")
    x_grad = ops.tf_fused_ops_dropout(x=dy, rng_key=key, rng_counter=counter, **attributes)
    return x_grad, None, None
