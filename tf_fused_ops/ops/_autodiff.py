"""Differentiation of stock code inside gradient functions."""

import tensorflow as tf


def pull_back(function, inputs, output_gradients):
    """Returns the gradients of a function's inputs.

    Works wherever a gradient function may be called, also where tapes have stopped recording (as
    in the functions that forward-mode differentiation makes of a graph).

    Args:
        function: Takes the inputs and returns a list of tensors.
        inputs: Floating-point tensors; they may live in an outer graph.
        output_gradients: One gradient an output.

    Returns:
        A list, one gradient an input, None where no output depends on it.
    """
    inputs = [tf.identity(value) for value in inputs]
    if not tf.executing_eagerly():
        outputs = function(*inputs)
        return tf.gradients(outputs, inputs, grad_ys=output_gradients)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = function(*inputs)
    return tape.gradient(outputs, inputs, output_gradients=output_gradients)
