"""Dropout."""

import tensorflow as tf

# Philox, as TensorFlow numbers its generators.
PHILOX = 1


def dropout(x, rng_key, rng_counter, *, rate, scale):
    """x * scale where a uniform number is not below the rate, zero elsewhere."""
    uniform = tf.raw_ops.StatelessRandomUniformV2(
        shape=tf.shape(x), key=rng_key, counter=rng_counter, alg=PHILOX, dtype=x.dtype
    )
    kept = uniform >= tf.constant(rate, x.dtype)
    return tf.where(kept, x * tf.constant(scale, x.dtype), tf.zeros([], x.dtype))
