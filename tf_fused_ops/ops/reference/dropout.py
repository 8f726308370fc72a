"""Dropout."""

import tensorflow as tf

# As TensorFlow numbers its generators.
_PHILOX = 1


def dropout(x, rng_key, rng_counter, *, rate, scale, dtype=None):
    """x * scale where a uniform number of x's dtype, or of another one, is not below the rate, zero
    elsewhere."""
    dtype = dtype or x.dtype
    uniform = tf.raw_ops.StatelessRandomUniformV2(
        shape=tf.shape(x), key=rng_key, counter=rng_counter, alg=_PHILOX, dtype=dtype
    )
    kept = uniform >= tf.constant(rate, dtype)
    return tf.where(kept, x * tf.constant(scale, x.dtype), tf.zeros([], x.dtype))
