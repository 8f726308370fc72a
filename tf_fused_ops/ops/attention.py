"""Attention as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, reference

_ATTRIBUTES = (
    *("scale", "masked", "zero_masked", "heads_first"),
    *("dropout_rate", "dropout_scale"),
)


def attention(
    query,
    key,
    value,
    mask=None,
    scale=None,
    masked=-3e38,
    zero_masked=False,
    heads_first=False,
    dropout_rate=0.0,
    seed=None,
    bias=None,
    slot=None,
    name=None,
):
    """Computes dropout(softmax(query key^T * scale + bias)) value in one op, without the scores in
    memory.

    The gradient keeps the arguments, the result, which half precision rounds, and two numbers for
    each query of a head, and computes the scores again, block by block; that of the bias has the
    scores' size, and is float32 at least, before it is summed up to the bias's shape. On CPUs.

    Args:
        query: Tensor [batch, queries, heads, depth]; float16, bfloat16, float32 or float64.
        key: Tensor [batch, keys, key_heads, depth]. Where key_heads is less than heads, which it
            divides, heads that follow one another share one (grouped-query attention).
        value: Tensor [batch, keys, key_heads, value_depth].
        mask: Boolean tensor, of as many keys and otherwise broadcast to the scores, [batch, heads,
            queries, keys]; None for one that is true everywhere. Where it is false for whole blocks
            of queries and keys these are not read, so that NaN in their values does not show.
        scale: A Python number; None for 1 / sqrt(depth), by which the query is scaled and rounded
            once more where the depth is not known before running.
        masked: What takes the place of a scaled score where the mask is false, a Python number, of
            at most float32's range and, for float64, six digits. Where it is as small as by
            default, such a key does not count, and all count alike where the mask is false for all.
        zero_masked: Whether weights, the values of the softmax, are zero where the mask is false,
            also where it is false for all keys.
        heads_first: Whether the tensors are [..., queries, depth], [..., keys, depth] and [...,
            keys, value_depth] instead, and scores [..., queries, keys]; no heads are shared.
        dropout_rate: The probability of a weight to be set to zero, as by `dropout`; a Python
            number from 0 to below 1 and, for float64, of six digits.
        seed: Tensor of two integers, int32 or int64, if the dropout rate is not 0.
        bias: Tensor of the query's dtype that is added to the scaled scores, of as many keys and
            otherwise broadcast to them; None for none.
        slot: If not None, a Python integer: key and value are caches as `update_cache` returns
            them, [batch, slots.., keys, key_heads, depth], as a rule the same one, of which this
            slot of key and the one behind it of value are read where they lie.
        name: A name for the operation.

    Returns:
        Tensor [batch, queries, heads, value_depth], or [..., queries, value_depth], of the query's
        dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    query = _arguments.tensor("query", query)
    key = _arguments.tensor_like("key", key, query.dtype, "query")
    value = _arguments.tensor_like("value", value, query.dtype, "query")
    rank = query.shape.rank
    if rank is not None and not (rank >= 2 if heads_first else rank == 4):
        ranks = "2 or more" if heads_first else "4"
        raise ValueError(f"query must have rank {ranks}; got shape {query.shape}")
    depth = None if rank is None else query.shape[-1]
    if scale is None and depth is None:
        # Of a scalar there is none, which the op tells.
        depth = tf.reduce_prod(tf.shape(query)[-1:])
        wide = tf.float64 if query.dtype == tf.float64 else tf.float32
        scaled = tf.cast(query, wide) * tf.cast(depth, wide) ** -0.5
        query, scale = tf.cast(scaled, query.dtype), 1.0
    elif scale is None:
        # Without depth there is nothing to scale.
        scale = depth**-0.5 if depth else 1.0
    query, scale, masked = _arguments.scaled(query, scale, masked)
    slot = -1 if slot is None else _arguments.slot("slot", slot)
    # The scale of weights is that of the values.
    value, rate, kept_scale = _arguments.dropped("dropout_rate", dropout_rate, value)
    rng_key, rng_counter = [], []
    if rate:
        ((*rng_key,), (*rng_counter,)) = zip(_arguments.random_words("seed", seed), strict=True)
    y, _, _ = ops.tf_fused_ops_attention(
        query=query,
        key=key,
        value=value,
        mask=_arguments.optional("mask", mask, tf.bool, "query"),
        bias=_arguments.optional("bias", bias, query.dtype, "query"),
        U=tf.float64 if query.dtype == tf.float64 else tf.float32,
        rng_key=rng_key,
        rng_counter=rng_counter,
        scale=scale,
        masked=masked,
        zero_masked=bool(zero_masked),
        heads_first=bool(heads_first),
        dropout_rate=rate,
        dropout_scale=kept_scale,
        slot=slot,
        name=name,
    )
    return y


def optional_inputs(op, rest):
    """Returns what the inputs behind those that an op always has are: the mask or None, the bias or
    None, and key and counter of random words if there is a dropout."""
    rest = list(rest)
    mask, bias = (rest.pop(0) if op.get_attr(f"num_{name}") else None for name in ("masks", "bias"))
    return mask, bias, tuple(rest)


@tf.RegisterGradient("TfFusedOps>Attention")
def _attention_gradient(op, dy, dlargest, dinverse_sum):
    attributes, slot = _gradient.attributes(op, *_ATTRIBUTES), op.get_attr("slot")
    of_y_alone = _gradient.is_zero(dlargest) and _gradient.is_zero(dinverse_sum)
    if slot >= 0 or not of_y_alone:

        def stock(query, key, value, *rest):
            optional = optional_inputs(op, rest)
            return reference.attention(query, key, value, *optional, slot=slot, **attributes)

        return _gradient.differentiate(stock, op, [dy, dlargest, dinverse_sum])
    query, key, value, *rest = op.inputs
    mask, bias, random = optional_inputs(op, rest)
    bias_gradient = bias is not None and _gradient.wanted(op)[3 + (mask is not None)]
    operands = key, value
    if not attributes["heads_first"]:
        key, value = (reference.for_each_head(x, query) for x in operands)
    of_query, *of_keys, of_scores = ops.tf_fused_ops_attention_grad(
        dy=dy,
        query=query,
        key=key,
        value=value,
        y=op.outputs[0],
        largest=op.outputs[1],
        inverse_sum=op.outputs[2],
        mask=[] if mask is None else [mask],
        bias=[] if bias is None else [bias],
        rng_key=list(random[:1]),
        rng_counter=list(random[1:]),
        bias_gradient=bias_gradient,
        **attributes,
    )
    if not attributes["heads_first"]:
        of_keys = map(reference.over_shared_heads, of_keys, operands)
    of_bias = [unbroadcast(of_scores, bias) if bias_gradient else None] * (bias is not None)
    return [of_query, *of_keys, *[None] * (mask is not None), *of_bias, *(None for _ in random)]


def unbroadcast(gradient, bias):
    """Returns the gradient of a bias, given that of what it was broadcast to."""
    if gradient.shape.is_fully_defined() and gradient.shape == bias.shape:
        return gradient
    sizes = tf.shape(bias)
    axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=sizes, s1=tf.shape(gradient))
    # In float32, as sums over a batch are long.
    wide = tf.cast(gradient, tf.float32) if gradient.dtype.size == 2 else gradient
    return tf.cast(tf.reshape(tf.reduce_sum(wide, axes), sizes), bias.dtype)


@tf.RegisterGradient("TfFusedOps>AttentionGrad")
def _attention_grad_gradient(op, *gradients):
    attributes = _gradient.attributes(op, *_ATTRIBUTES, "bias_gradient")

    # What the forward op kept follows from its arguments.
    def stock(dy, query, key, value, y, largest, inverse_sum, *rest):
        optional = optional_inputs(op, rest)
        return reference.attention_grad(dy, query, key, value, *optional, **attributes)

    return _gradient.differentiate(stock, op, gradients)
