"""Dropout: the bits of stock, gradients of every order, where random words begin, errors."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from gradient_problems import gradients_of
from hypothesis import given
from hypothesis import strategies as st

from tf_fused_ops import _library, dropout

# Parts of a block of four words, of a vector and of a task; tasks; past the caches.
SHAPES = [(), (1,), (3,), (0, 5), (7, 5, 3), (4096,), (513, 33), (4097, 601)]
SEED = (3, 2**31 - 5)


def assert_bits(found, expected):
    """Asserts that two tensors are bitwise the same."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(*(np.atleast_1d(v.numpy()).view("u1") for v in (found, expected)))


def stock(x, rate, seed=SEED):
    # For a rate of zero it returns x, which must not be -0 + 0 either.
    return tf.nn.experimental.stateless_dropout(x, rate, seed=seed)


def tensor(shape, dtype, seed=0):
    return tf.cast(tf.constant(np.random.default_rng(seed).normal(size=shape)), dtype)


def check(shape, dtype, rate, seed=SEED):
    x, dy = tensor(shape, dtype), tensor(shape, dtype, 1)
    results = [
        [function(x), *gradients_of(function, [x], dy)]
        for function in (lambda x: dropout(x, rate, seed), lambda x: stock(x, rate, seed))
    ]
    for found, expected in zip(*results, strict=True):
        assert_bits(found, expected)


# One by one minus it has the digits of float32.
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.9375])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stock_bit_for_bit(shape, dtype, rate, isa):
    check(shape, dtype, rate)
    assert _library.isa() == isa


@given(
    shape=st.lists(st.integers(0, 60), max_size=3),
    dtype=st.sampled_from([dtype for dtype in cases.DTYPES if dtype != "float64"]),
    rate=st.floats(0, 1, exclude_max=True, width=32).filter(lambda rate: rate < 0.999),
    seed=st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 2),
)
def test_random_rates(shape, dtype, rate, seed):
    check(shape, dtype, rate, seed)


def test_digits_of_double():
    """A scale of more digits than an attribute has is one of x; a rate is refused."""
    x = tensor((33, 7), "float64")
    np.testing.assert_allclose(dropout(x, 0.1, SEED), stock(x, 0.1), rtol=1e-15)
    with pytest.raises(ValueError, match="rate has more digits"):
        dropout(x, 1 / 3, SEED)


@pytest.mark.parametrize("seed_dtype", ["int32", "int64"])
def test_in_a_function_of_unknown_shapes(seed_dtype):
    signature = [tf.TensorSpec(None), tf.TensorSpec(None, seed_dtype)]
    compiled = tf.function(lambda x, seed: dropout(x, 0.3, seed), input_signature=signature)
    x, seed = tensor((5, 21), "float32"), tf.constant([5, 6], seed_dtype)
    assert_bits(compiled(x, seed), stock(x, 0.3, seed))


@pytest.mark.parametrize(
    "counter",
    [(2**32 - 3, 0), (2**64 - 3, 7), (2**64 - 1, 2**64 - 1), (0, 2**32 - 1)],
    ids=str,
)
def test_counters_that_carry(counter, isa):
    x, key = tf.ones([997]), tf.constant([2**63 + 12345], tf.uint64)
    counter = tf.constant(counter, tf.uint64)
    uniform = tf.raw_ops.StatelessRandomUniformV2(shape=[997], key=key, counter=counter, alg=1)
    found = _library.ops.tf_fused_ops_dropout(
        x=x, rng_key=key, rng_counter=counter, rate=0.5, scale=3.0
    )
    np.testing.assert_array_equal(found, np.where(uniform >= 0.5, 3, 0))


@pytest.mark.parametrize("rate", [-1.0, 1.0, float("nan"), float("inf")])
def test_rates_that_no_number_is_below_or_that_all_are(rate, isa):
    """Of the op; the function refuses them."""
    words = tf.raw_ops.StatelessRandomGetKeyCounter(seed=SEED)
    for dtype in cases.DTYPES:
        x = tf.ones([37], dtype)
        found = _library.ops.tf_fused_ops_dropout(
            x=x, rng_key=words.key, rng_counter=words.counter, rate=rate, scale=2.0
        )
        np.testing.assert_array_equal(found, tf.fill([37], tf.cast(2 * (rate < 0), dtype)))


def test_special_numbers(isa):
    """What is dropped out is zero, be it no number."""
    x = tf.constant([np.nan, np.inf, -np.inf, -0.0] * 50)
    assert_bits(dropout(x, 0.5, SEED), stock(x, 0.5))


def test_gradients_of_gradients():
    x = tensor((9, 5), "float64")
    kept = stock(tf.ones_like(x), 0.5)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(dropout(x, 0.5, SEED) ** 3)
        first = inner.gradient(y, x)
    np.testing.assert_allclose(first, 3 * x**2 * kept**3, rtol=1e-14)
    np.testing.assert_allclose(outer.gradient(first, x), 6 * x * kept**3, rtol=1e-14)
