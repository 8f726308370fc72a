"""Activations, and what is added before them."""

import tensorflow as tf

from tf_fused_ops.ops import activations


def wide(value):
    """float16 and bfloat16 as float32; other types as they are."""
    return tf.cast(value, tf.float32) if value.dtype.size == 2 else value


def bias_act(z, bias, side_input, activation, alpha):
    """activation(z + bias + side_input), as far as these are not None."""
    if bias is not None:
        z = z + bias
    if side_input is not None:
        z = z + side_input
    return act(z, activation, alpha)


def act(x, activation, alpha):
    """activation(x), for the half precision types computed in float32.

    Args:
        x: A tensor of any shape.
        activation: A name of `activations.STOCK`.
        alpha: leaky_relu's slope below zero.

    Returns:
        A tensor of x's shape and dtype.
    """
    return tf.cast(activations.STOCK[activation](wide(x), alpha), x.dtype)


def act_grad(dy, saved, activation, alpha):
    """The gradient of `act`.

    Args:
        dy: The gradient of the output.
        saved: The output where its slope can be read off it, otherwise x; None will do for "none".
        activation: As in the forward function; so is alpha.
        alpha: As in the forward function.

    Returns:
        The gradient of x.
    """
    saved = None if saved is None else wide(saved)
    return tf.cast(activations.gradient(activation, wide(dy), saved, alpha), dy.dtype)
