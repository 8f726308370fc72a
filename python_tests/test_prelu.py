"""A leaky relu with a learned slope: numbers and gradients against float64, shapes, errors."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import _library, prelu
from tf_fused_ops.ops import reference

# Shapes of x and alpha. A slope for each channel, for each place, for all; rows shorter than a
# vector and longer than a task; sizes that end within a vector; images past the caches; nothing.
CASES = [
    ((2, 5, 7, 17), (17,)),
    ((3, 9, 8, 64), (1, 1, 64)),
    ((2, 5, 7, 17), (5, 7, 17)),
    ((4, 3, 11), (1, 1, 1)),
    ((4, 3, 11), ()),
    ((1, 1, 1), (1, 1, 1)),
    ((3,), (3,)),
    ((70, 600), (600,)),
    ((5, 9001), (9001,)),
    ((9, 6, 1), (6, 1)),
    ((8, 128, 131, 48), (48,)),
    ((0, 4, 3), (3,)),
    ((2, 4, 0), (0,)),
    ((2, 0, 3), (1, 3)),
]


NAMES = ("y", "x_grad", "alpha_grad")


def numbers(shape, dtype, seed):
    """Some of them zero."""
    rng = np.random.default_rng(seed)
    return tf.constant(rng.normal(size=shape) * (rng.random(shape) > 0.1), dtype)


def exact(dy, x, alpha):
    """y and both gradients in float64."""
    dy, x, alpha = wide((dy, x, alpha))
    y = np.where(x > 0, x, alpha * x)
    slope = np.where(x > 0, 1, np.where(x < 0, alpha, 0))
    terms = dy * np.minimum(x, 0)
    lead = x.ndim - alpha.ndim
    axes = tuple(i for i in range(x.ndim) if i < lead or alpha.shape[i - lead] == 1)
    return y, dy * slope, terms.sum(axes, keepdims=True).reshape(alpha.shape)


def wide(values):
    return [tf.cast(value, tf.float64).numpy() for value in values]


@remembered
def expected(shape, slopes, dtype, seed):
    """Returns x, dy and alpha, and what to compare with: stock and exact, in float64."""
    x, dy = numbers(shape, dtype, seed), numbers(shape, dtype, seed + 1)
    alpha = numbers(slopes, dtype, seed + 2)
    stock = (reference.prelu(x, alpha), *reference.prelu_grad(dy, x, alpha))
    return x, dy, alpha, wide(stock), exact(dy, x, alpha)


def check(shape, slopes, dtype, seed=0):
    x, dy, alpha, *others = expected(shape, slopes, dtype, seed)
    with tf.GradientTape() as tape:
        tape.watch([x, alpha])
        y = prelu(x, alpha)
    found = (y, *tape.gradient(y, [x, alpha], output_gradients=dy))
    terms = x.shape.num_elements() / max(alpha.shape.num_elements(), 1)
    scales = (0.0, 0.0, np.sqrt(terms))
    assert [value.dtype for value in found] == [x.dtype] * 3
    for name, *values, scale in zip(NAMES, wide(found), *others, scales, strict=True):
        assert_as_exact(name, *values, dtype, scale)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients(case, dtype, isa):
    check(*case, dtype)
    assert _library.isa() == isa


@given(
    leading=st.lists(st.integers(1, 6), max_size=3),
    trailing=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    ones=st.integers(0, 3),
    dtype=st.sampled_from(cases.DTYPES),
    seed=st.integers(0, 1000),
)
def test_random_shapes(leading, trailing, ones, dtype, seed):
    alpha = [1] * min(ones, len(leading)) + trailing
    check((*leading, *trailing), tuple(alpha), dtype, seed)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_special_numbers(dtype, isa):
    nan, inf = np.nan, np.inf
    x = tf.constant([[nan, inf, -inf, 0.0, -2.0, -0.0, 3.0]], dtype)
    alpha = tf.constant([0.5], dtype)
    y = prelu(x, alpha)
    np.testing.assert_array_equal(np.float64(y), [[nan, inf, -inf, 0, -1, 0, 3]])
    dx, dalpha = _library.ops.tf_fused_ops_prelu_grad(dy=tf.ones_like(x), x=x, alpha=alpha)
    np.testing.assert_array_equal(np.float64(dx)[0, 1:], [1, 0.5, 0, 0.5, 0, 1])
    np.testing.assert_array_equal(np.float64(dalpha), [-inf])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case):
    """What graphs without the package compute."""
    shape, slopes = case
    x, dy, alpha = (numbers(s, "float64", i) for i, s in enumerate((shape, shape, slopes)))
    found = (reference.prelu(x, alpha), *reference.prelu_grad(dy, x, alpha))
    for name, one, expected in zip(NAMES, found, exact(dy, x, alpha), strict=True):
        assert_close(name, one, expected, "float64", units=1024)


def test_second_order():
    x, alpha = numbers((3, 4, 5), "float64", 0), numbers((5,), "float64", 1)

    def slopes(f):
        with tf.GradientTape() as outer:
            outer.watch([x, alpha])
            with tf.GradientTape() as inner:
                inner.watch([x, alpha])
                y = tf.reduce_sum(tf.sin(f(x, alpha)))
            first = inner.gradient(y, [x, alpha])
            total = sum(tf.reduce_sum(g * g) for g in first)
        return outer.gradient(total, [x, alpha])

    for name, *values in zip(("x", "alpha"), slopes(prelu), slopes(reference.prelu), strict=True):
        assert_close(name, *values, "float64")


BAD = {
    "size": ((2, 3, 4), (3,), "alpha must have size 4 or 1"),
    "rank": ((4,), (1, 4), "alpha must have at most the rank of x"),
    "place": ((2, 3, 4), (3, 1), "alpha must have size 1 in front of the dimensions"),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_bad_shapes(name, traced):
    shape, slopes, message = BAD[name]
    call = tf.function(prelu) if traced else prelu
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        call(tf.ones(shape), tf.ones(slopes))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        _library.ops.tf_fused_ops_prelu_grad(
            dy=tf.ones(shape), x=tf.ones(shape), alpha=tf.ones(slopes)
        )


def test_shapes_that_are_known_late():
    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    def call(x, alpha):
        return prelu(x, alpha)

    y = call(-tf.ones([2, 3]), tf.constant([1.0, 2, 3]))
    np.testing.assert_array_equal(y, [[-1, -2, -3]] * 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="alpha must have size 3 or 1"):
        call(tf.ones([2, 3]), tf.ones([2]))
    with pytest.raises(ValueError, match="alpha must be a float32 tensor to go with x"):
        prelu(tf.ones([2]), tf.ones([2], tf.float64))
