"""Caches of keys and values, and what their update makes of them."""

import numpy as np
import pytest
import tensorflow as tf

# Batch, slots, length and what is inside: slots that begin where vectors may, and anywhere.
ALIGNED, ODD, TWO = (1, (3, 2), 8, (2, 16)), (1, (3, 2), 7, (3, 5)), (2, (3, 2), 8, (2, 16))
OF_KINDS = pytest.mark.parametrize("shape", [ALIGNED, ODD, TWO], ids=["aligned", "odd", "two"])
IN_GRAPH = pytest.mark.parametrize("graph", [False, True])


def bits(shape, dtype, seed=0):
    """Any bits, numbers or not."""
    dtype = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    size = dtype.itemsize * int(np.prod(shape))
    return np.frombuffer(np.random.default_rng(seed).bytes(size), dtype).reshape(shape)


def by_numpy(cache, key, value, index, slot=0):
    """What the op returns, as arrays."""
    axis, rows = cache.ndim - key.ndim + 1, key.shape[1]
    shape = [cache.shape[0], int(np.prod(cache.shape[1:axis])), *cache.shape[axis:]]
    apart = cache.copy().reshape(shape)
    index = min(max(int(index), 0), shape[2] - rows)
    for i, part in enumerate((key, value)):
        apart[:, slot + i, index : index + rows] = part
    return apart.reshape(cache.shape), apart[:, slot].copy(), apart[:, slot + 1].copy()


def assert_bits(found, expected):
    """Asserts that tensors are arrays, bit for bit."""
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        a = np.asarray(a)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def inputs(batch, slots, length, inner, rows, dtype="float32"):
    """Arrays of a cache, keys and values."""
    part = (batch, rows, *inner)
    shapes = (batch, *slots, length, *inner), part, part
    return [bits(shape, dtype, seed) for seed, shape in enumerate(shapes)]


def plain(cache, key, value, index, slot=0):
    """The op in stock TensorFlow, for known shapes and an index that is a number."""
    axis, rows = cache.shape.rank - key.shape.rank + 1, key.shape[1]
    slots = int(np.prod(cache.shape[1:axis]))
    apart = tf.reshape(cache, [cache.shape[0], slots, *cache.shape[axis:]])
    parts = tf.unstack(apart, axis=1)
    index = min(max(index, 0), apart.shape[2] - rows)
    for i, part in enumerate((key, value)):
        before = parts[slot + i]
        parts[slot + i] = tf.concat([before[:, :index], part, before[:, index + rows :]], 1)
    return tf.reshape(tf.stack(parts, 1), cache.shape), parts[slot], parts[slot + 1]


def normal(batch):
    """Normally distributed cache, keys and values in float64."""
    rng = np.random.default_rng(0)
    shapes = (batch, 2, 2, 6, 3), (batch, 2, 3), (batch, 2, 3)
    return [tf.constant(rng.normal(size=shape)) for shape in shapes]
