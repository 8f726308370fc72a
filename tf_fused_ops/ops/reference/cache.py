"""The cache of keys and values that decoders keep."""

import tensorflow as tf


def update_cache(cache, key, value, index, *, slot):
    """The cache [batch, slots.., length, ...] with key and value, [batch, positions, ...], written
    into `slot` and the one behind it, the first position at `index`; and these two slots."""
    sizes, rows, inner = tf.shape(cache), tf.shape(key)[1], tf.shape(key)[2:]
    length = sizes[-1 - tf.size(inner)]
    slots = tf.reduce_prod(sizes[1 : -1 - tf.size(inner)])
    apart = tf.reshape(cache, tf.concat([sizes[:1], [slots, length], inner], 0))
    room = tf.cast(length - rows, index.dtype)
    index = tf.cast(tf.clip_by_value(index, 0, room), tf.int32)

    def written(number, update):
        before = apart[:, number]
        return tf.concat([before[:, :index], update, before[:, index + rows :]], 1)

    keys, values = written(slot, key), written(slot + 1, value)
    pair = tf.stack([keys, values], 1)
    updated = tf.concat([apart[:, :slot], pair, apart[:, slot + 2 :]], 1)
    return tf.reshape(updated, sizes), keys, values


def slot_of(cache, slot):
    """Keys or values [batch, keys, heads, depth] in a slot of a cache [batch, slots.., keys, heads,
    depth]."""
    sizes = tf.shape(cache)
    slots = tf.reduce_prod(sizes[1:-3])
    return tf.reshape(cache, tf.concat([sizes[:1], [slots], sizes[-3:]], 0))[:, slot]
