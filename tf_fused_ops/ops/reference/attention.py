"""Attention."""

import tensorflow as tf

from tf_fused_ops.ops.reference.cache import slot_of
from tf_fused_ops.ops.reference.dropout import dropout
from tf_fused_ops.ops.reference.elementwise import wide

# Query and key to scores, scores and value to the output, by whether heads come first.
_EQUATIONS = {
    False: ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
    True: ("...qd,...kd->...qk", "...qk,...kd->...qd"),
}


def attention(
    query,
    key,
    value,
    mask=None,
    bias=None,
    random=(),
    *,
    scale,
    masked,
    zero_masked=False,
    heads_first=False,
    dropout_rate=0.0,
    dropout_scale=1.0,
    slot=-1,
):
    """dropout(softmax(query key^T * scale + bias)) value, with `masked` in place of the sum where
    the mask is false.

    Args:
        query: [batch, queries, heads, depth], or heads in front.
        key: [batch, keys, key_heads, depth]; heads that follow one another share one of them.
        value: [batch, keys, key_heads, value_depth].
        mask: Of the scores, or None.
        bias: Of the scores, or None.
        random: Key and counter of the random words of a dropout; empty for none.
        scale: The factor of the scores.
        masked: What takes their place.
        zero_masked: Whether weights are zero where the mask is false.
        heads_first: Whether heads are a dimension of the batch.
        dropout_rate: Which weights are set to zero.
        dropout_scale: The factor of the others.
        slot: If not negative, key and value are caches, of which this slot of key and the one
            behind it of value are meant.

    Returns:
        The output; of each row of scores the largest, and 1 / the sum of e^(score - largest).
    """
    to_scores, to_output = _EQUATIONS[heads_first]
    if slot >= 0:
        key, value = slot_of(key, slot), slot_of(value, slot + 1)
    if not heads_first:
        key, value = (for_each_head(x, query) for x in (key, value))
    z = _scores(to_scores, query, key, mask, bias, scale, masked)
    weights = tf.nn.softmax(z)
    left = _leaving(mask if zero_masked else None, random, dropout_rate, dropout_scale, query.dtype)
    y = tf.einsum(to_output, left(weights), wide(value))
    # The weight of the largest is 1 / the sum.
    return [tf.cast(y, query.dtype), tf.reduce_max(z, -1), tf.reduce_max(weights, -1)]


def attention_grad(
    dy,
    query,
    key,
    value,
    mask=None,
    bias=None,
    random=(),
    *,
    scale,
    masked,
    zero_masked=False,
    heads_first=False,
    dropout_rate=0.0,
    dropout_scale=1.0,
    bias_gradient=False,
):
    """The gradients of query, key, value and, if asked for, a bias of all scores.

    Args:
        dy: The gradient of the output.
        query: As in the forward function, like the rest, but for keys of as many heads.
        bias_gradient: Whether the last one is asked for; otherwise it is empty.
    """
    to_scores, to_output = _EQUATIONS[heads_first]
    q, k, v, dy = wide(query), wide(key), wide(value), wide(dy)
    weights = tf.nn.softmax(_scores(to_scores, query, key, mask, bias, scale, masked))
    left = _leaving(mask if zero_masked else None, random, dropout_rate, dropout_scale, query.dtype)
    dweights = left(tf.einsum(to_scores, dy, v))
    projection = tf.reduce_sum(dweights * weights, -1, keepdims=True)
    dz = (dweights - projection) * weights
    if mask is not None:
        dz = tf.where(mask, dz, tf.zeros_like(dz))
    dscores = dz * scale
    transposed = tf.linalg.matrix_transpose
    gradients = [
        tf.einsum(to_output, dscores, k),
        tf.einsum(to_output, transposed(dscores), q),
        tf.einsum(to_output, transposed(left(weights)), dy),
        dz if bias_gradient else tf.zeros([0], dz.dtype),
    ]
    return [tf.cast(gradient, query.dtype) for gradient in gradients]


def for_each_head(x, query):
    """Returns keys or values [batch, keys, key_heads, depth] for each head of a query."""
    if x.shape.rank == query.shape.rank == 4 and None is not x.shape[2] == query.shape[2]:
        return x
    heads, key_heads = tf.shape(query)[2], tf.shape(x)[2]
    return tf.repeat(x, heads // tf.maximum(key_heads, 1), axis=2)


def over_shared_heads(gradient, x):
    """Returns the gradient of keys or values x, given that of what `for_each_head` made of them."""
    if gradient.shape.rank == 4 and None is not gradient.shape[2] == x.shape[2]:
        return gradient
    batch, keys, key_heads, depth = tf.unstack(tf.shape(x), 4)
    shared = tf.shape(gradient)[2] // tf.maximum(key_heads, 1)
    parts = tf.reshape(wide(gradient), [batch, keys, key_heads, shared, depth])
    return tf.cast(tf.reduce_sum(parts, 3), x.dtype)


def _scores(to_scores, query, key, mask, bias, scale, masked):
    z = tf.einsum(to_scores, wide(query), wide(key)) * scale
    z = z if bias is None else z + wide(bias)
    return z if mask is None else tf.where(mask, z, tf.constant(masked, z.dtype))


def _leaving(mask, random, rate, scale, dtype):
    """Returns the function that leaves of weights what a mask keeps, if there is one, and then a
    dropout by numbers of a dtype."""

    def left(weights):
        if mask is not None:
            weights = tf.where(mask, weights, tf.zeros_like(weights))
        if not random:
            return weights
        return dropout(weights, *random, rate=rate, scale=scale, dtype=dtype)

    return left
