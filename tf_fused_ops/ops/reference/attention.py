"""Attention."""

import tensorflow as tf

from tf_fused_ops.ops.reference.elementwise import wide

# Query and key to scores, scores and value to the output, by whether heads come first.
_EQUATIONS = {
    False: ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
    True: ("...qd,...kd->...qk", "...qk,...kd->...qd"),
}


def attention(query, key, value, mask=None, *, scale, masked, heads_first=False):
    """softmax(query key^T * scale) value, with `masked` in place of what is scaled where the mask
    is false.

    Returns:
        The output; of each row of scores the largest, and 1 / the sum of e^(score - largest).
    """
    to_scores, to_output = _EQUATIONS[heads_first]
    z = tf.einsum(to_scores, wide(query), wide(key)) * scale
    if mask is not None:
        z = tf.where(mask, z, tf.constant(masked, z.dtype))
    weights = tf.nn.softmax(z)
    y = tf.einsum(to_output, weights, wide(value))
    # The weight of the largest is 1 / the sum.
    return [tf.cast(y, query.dtype), tf.reduce_max(z, -1), tf.reduce_max(weights, -1)]


def attention_grad(dy, query, key, value, mask=None, *, scale, masked, heads_first=False):
    """The gradients of query, key and value.

    Args:
        dy: The gradient of the output.
        query: As in the forward function, like the rest.
    """
    to_scores, to_output = _EQUATIONS[heads_first]
    q, k, v, dy = wide(query), wide(key), wide(value), wide(dy)
    z = tf.einsum(to_scores, q, k) * scale
    if mask is not None:
        z = tf.where(mask, z, tf.constant(masked, z.dtype))
    weights = tf.nn.softmax(z)
    dweights = tf.einsum(to_scores, dy, v)
    projection = tf.reduce_sum(dweights * weights, -1, keepdims=True)
    dscores = (dweights - projection) * weights * scale
    if mask is not None:
        dscores = tf.where(mask, dscores, tf.zeros_like(dscores))
    transposed = tf.linalg.matrix_transpose
    gradients = [
        tf.einsum(to_output, dscores, k),
        tf.einsum(to_output, transposed(dscores), q),
        tf.einsum(to_output, transposed(weights), dy),
    ]
    return [tf.cast(gradient, query.dtype) for gradient in gradients]
