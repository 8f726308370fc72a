"""Matrix product with weights of 8 bits, bias and activation."""

import tensorflow as tf

from tf_fused_ops.ops.reference.elementwise import bias_act, wide


def quantized_matmul_bias_act(a, b, b_scale, bias, *, transpose_b, epsilon, activation, alpha):
    """activation(round(a a_scale) b / (a_scale b_scale) + bias).

    a_scale = 127 / (max|a| + epsilon) is that of a row.

    Args:
        a: [..., m, k].
        b: int8 [k, n], or [n, k] with transpose_b.
        b_scale: float32 [n].
        bias: [n] or None.
        transpose_b: Whether b's dimensions are swapped.
        epsilon: Added to the largest magnitude of a row.
        activation: A name of `activations.STOCK`.
        alpha: leaky_relu's slope below zero.

    Returns:
        [..., m, n], of a's dtype.
    """
    x = wide(a)
    largest = tf.reduce_max(tf.abs(x), -1, keepdims=True)
    if not a.shape[-1:].is_fully_defined() or a.shape[-1] == 0:
        # Of nothing it is -inf.
        largest = tf.maximum(largest, 0)
    scale = 127 / (largest + epsilon)
    rounded = tf.cast(tf.clip_by_value(tf.round(x * scale), -127, 127), tf.int8)
    product = tf.matmul(rounded, b, transpose_b=transpose_b, output_type=tf.int32)
    z = tf.cast(product, tf.float32) / (scale * b_scale)
    z = bias_act(z, None if bias is None else wide(bias), None, activation, alpha)
    return tf.cast(z, a.dtype)


def dequantized(b, b_scale, transpose_b, dtype):
    """Returns the numbers that 8-bit weights stand for.

    Args:
        b: int8 [k, n], or [n, k] with transpose_b.
        b_scale: float32 [n].
        transpose_b: Whether b's dimensions are swapped.
        dtype: That of the result.

    Returns:
        A tensor of b's shape.
    """
    scale = b_scale[:, tf.newaxis] if transpose_b else b_scale
    return tf.cast(tf.cast(b, tf.float32) / scale, dtype)
