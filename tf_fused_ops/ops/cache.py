"""The update of a cache of keys and values as one op, and its gradient."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, reference


def update_cache(cache, key, value, index, slot=0, name=None):
    """Writes keys and values of some positions into a cache of those of all, as decoders keep one.

    In place where nothing else needs the old cache: as a variable of a `tf.while_loop`, in which
    all but this gives up its memory in every step. On CPUs.

        cache, _, _ = tfo.update_cache(cache, key, value, position, slot=2 * layer)
        context = tfo.attention(query, cache, cache, mask, slot=2 * layer)

    Args:
        cache: Tensor [batch, slots.., length, ...]; float16, bfloat16, float32 or float64. Its
            slots, for instance [layers, 2], are the dimensions that it has more than key.
        key: Tensor [batch, positions, ...], of at most `length` positions.
        value: Tensor of key's shape.
        index: Scalar int32 or int64, the first position; moved into the range in which all have
            room, as by XLA's dynamic update slice.
        slot: The slot that key goes into, counted through all dimensions of slots, the last one
            first; value goes into the one behind it. A Python integer.
        name: A name for the operation.

    Returns:
        Three tensors: the updated cache, and of it the slots of keys and values, [batch, length,
        ...]. If batch is 1, these share its memory, and the next update is in place once they are
        not needed any more.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    cache = _arguments.tensor("cache", cache)
    updated = ops.tf_fused_ops_update_cache(
        cache=cache,
        key=_arguments.tensor_like("key", key, cache.dtype, "cache"),
        value=_arguments.tensor_like("value", value, cache.dtype, "cache"),
        index=_arguments.integers("index", index),
        slot=_arguments.slot("slot", slot),
        name=name,
    )
    return tuple(updated)


def stock(op, inputs):
    """Computes what the op does with stock ops; returns its outputs."""
    return reference.update_cache(*inputs, slot=op.get_attr("slot"))


@tf.RegisterGradient("TfFusedOps>UpdateCache")
def _update_cache_gradient(op, *gradients):
    return _gradient.differentiate(lambda *inputs: stock(op, inputs), op, gradients)
