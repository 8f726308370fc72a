"""Softmax with scale and mask: numbers and gradients of every order, masks, shapes, errors."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import _library, softmax
from tf_fused_ops.ops import reference

# Whole vectors, parts of one, several and a part; one element a row; rows longer than a task's;
# past the caches.
SHAPES = [
    (2, 3, 64),
    (5, 7),
    (3, 2, 67),
    (9, 1),
    (2, 1, 3, 2, 33),
    (16,),
    (2, 5000),
    (6000, 24),
    (2051, 1057),
    (2048, 1536),
]
MASKED = -3e38


def tensors(shape, dtype, seed=0):
    """Returns x and dy as NumPy arrays."""
    rng = np.random.default_rng(seed)
    values = rng.normal(1, 4, shape), rng.normal(size=shape)
    return [tf.cast(tf.constant(value), dtype).numpy() for value in values]


def mask_for(shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape) < 0.7


def stock(mask=None, scale=1.0):
    """As people write it; half precision in float32, as Keras has it."""

    def function(x):
        z = tf.cast(x, tf.float32) if x.dtype.size == 2 else x
        z = z * tf.constant(scale, z.dtype)
        if mask is not None:
            z = tf.where(mask, z, tf.constant(MASKED, z.dtype))
        return tf.cast(tf.nn.softmax(z), x.dtype)

    return function


def outputs(function, x, dy):
    """Returns y and the gradient of x."""
    x, dy = tf.constant(x), tf.constant(dy)
    return [function(x), *gradients_of(function, [x], dy)]


@remembered
def expected(shape, dtype, mask, scale, seed):
    """Returns x and dy, and what to compare with: outputs of stock in the dtype and in float64."""
    x, dy = tensors(shape, dtype, seed)
    wide = [value.astype(np.float64) for value in (x, dy)]
    theirs = stock(mask, scale)
    return x, dy, outputs(theirs, x, dy), outputs(theirs, *wide)


def check(shape, dtype, mask=None, scale=1.0, seed=0):
    x, dy, *others = expected(shape, dtype, mask, scale, seed)
    runs = outputs(lambda x: softmax(x, mask, scale), x, dy), *others
    # A gradient is a difference of terms of this size.
    scales = {"y": 0, "x_grad": abs(scale) * np.abs(dy).max()}
    for (name, size), found, *others in zip(scales.items(), *runs, strict=True):
        assert_as_exact(name, found, *others, dtype, size)
        if mask is not None:
            kept = np.broadcast_to(mask, shape)
            kept = kept | ~kept.any(-1, keepdims=True)
            assert not tf.cast(found, tf.float64).numpy()[~kept].any()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradient(shape, masked, dtype, isa):
    check(shape, dtype, mask_for(shape) if masked else None, 0.125 if masked else 1.0)
    assert _library.isa() == isa


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    kept=st.integers(0, 15),
    dtype=st.sampled_from(cases.DTYPES),
    scale=st.sampled_from([1.0, 0.3, -2.0]),
    seed=st.integers(0, 1000),
)
def test_random_masks(shape, kept, dtype, scale, seed):
    """Some dimensions, and the first ones, are broadcast."""
    rank = kept % 4 + 1
    sizes = [size if kept >> i & 1 else 1 for i, size in enumerate(shape[:-1])] + shape[-1:]
    check(tuple(shape), dtype, mask_for(sizes[-rank:], seed), scale, seed)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_without_anything_kept(dtype):
    """They are even, and no gradient passes."""
    x, dy = tensors((3, 21), dtype)
    mask = np.ones((3, 21), bool)
    mask[1] = False
    y, x_grad = outputs(lambda x: softmax(x, mask), x, dy)
    np.testing.assert_array_equal(y[1], np.full(21, 1 / 21).astype(x.dtype))
    assert not tf.cast(x_grad[1], tf.float32).numpy().any()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", [(5, 9), (3, 2, 64)])
def test_zeros_where_masked(shape, dtype, isa):
    x, dy = tensors(shape, dtype)
    mask = mask_for(shape)
    mask[1] = False
    y, x_grad = outputs(lambda x: softmax(x, mask, zero_masked=True), x, dy)
    usual, usual_grad = outputs(lambda x: softmax(x, mask), x, dy)
    np.testing.assert_array_equal(y, tf.where(mask, usual, tf.zeros_like(usual)))
    assert_close("x_grad", x_grad, usual_grad, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_gradients_where_zeros_are_do_not_count(dtype, isa):
    """Be they NaN, as those of entropy are there."""
    x, dy = tensors((3, 37), dtype)
    mask = mask_for((3, 37))
    dirty = np.where(mask, dy, np.array(np.nan, dy.dtype))
    found, expected = (
        outputs(lambda x: softmax(x, mask, zero_masked=True), x, value)[1] for value in (dirty, dy)
    )
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(outputs(lambda x: softmax(x, mask), x, dirty)[1]).any()


def test_more_digits_than_an_attribute():
    x, _ = tensors((3, 7), "float64")
    np.testing.assert_allclose(softmax(x, scale=10**-0.5), tf.nn.softmax(x * 10**-0.5), rtol=1e-14)
    with pytest.raises(ValueError, match="masked has more digits"):
        softmax(x, mask_for((3, 7)), masked=-1e300)


def test_another_number_where_masked():
    x, dy = tensors((5, 9), "float64")
    mask = mask_for((5, 9))
    y, x_grad = outputs(lambda x: softmax(x, mask, 0.5, masked=-1.0), x, dy)
    expected = outputs(lambda x: tf.nn.softmax(tf.where(mask, 0.5 * x, -1.0)), x, dy)
    assert_all_close([y, x_grad], expected)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_large_numbers(dtype, isa):
    """The largest of a row is subtracted first; what is far below it is zero."""
    x = tf.constant([[1e4, 1e4 - 8, -1e4, 6e4, -6e4] * 5, [-6e4] * 25], dtype)
    y = softmax(x)
    expected = np.zeros((2, 25))
    expected[0, 3::5], expected[1] = 0.2, 0.04
    np.testing.assert_array_equal(y, tf.cast(expected, dtype))


def test_special_numbers(isa):
    """NaN and infinity, of which stock loses some, stay in their rows; minus infinity is zero."""
    x = np.random.default_rng(0).normal(size=(9, 19)).astype(np.float32)
    x[1, 4], x[2, 18], x[3, 5], x[4, :] = np.nan, np.inf, -np.inf, -np.inf
    y, x_grad = (value.numpy() for value in outputs(softmax, x, np.ones_like(x)))
    rows = [0, 3, 5, 6, 7, 8]
    np.testing.assert_allclose(y[rows], tf.nn.softmax(x[rows]), rtol=1e-6)
    assert y[3, 5] == 0 and np.isfinite(x_grad[rows]).all()
    assert np.isnan(y[[1, 2, 4]]).all() and np.isnan(x_grad[[1, 2, 4]]).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 4), (2, 0), (0, 0), (0,)])
@pytest.mark.parametrize("masked", [False, True])
def test_empty(shape, masked):
    mask = tf.ones(shape, tf.bool) if masked else None
    y, x_grad = outputs(lambda x: softmax(x, mask), tf.ones(shape), tf.ones(shape))
    assert y.shape == x_grad.shape == shape


def test_many_dimensions():
    """More than stock can select from."""
    shape = (1, 2, 1, 2, 1, 2, 1, 2, 5)
    (x, dy), mask = tensors(shape, "float32"), mask_for((2, 1, 1, 1, 2, 5))
    found = outputs(lambda x: softmax(x, mask), x, dy)
    rows = [np.broadcast_to(value, shape).reshape(-1, 5) for value in (x, dy, mask)]
    expected = outputs(lambda x: softmax(x, rows[2]), *rows[:2])
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tf.reshape(value, [-1, 5]), other)
    x = tf.ones([1, *shape])
    assert softmax(x).shape == x.shape
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="rank at most 9"):
        softmax(x, tf.ones([5], tf.bool))


def problem():
    return [tf.constant(v) for v in tensors((3, 2, 5), "float64")]


MASK = mask_for((2, 5), 3)


def masked(x, **options):
    return softmax(x, MASK, 0.5, **options)


def zeroed(x):
    return masked(x, zero_masked=True)


def by_reference(**options):
    return lambda x: reference.softmax(x, MASK, scale=0.5, masked=MASKED, **options)


def test_against_finite_differences():
    theory, numbers = tf.test.compute_gradient(masked, problem()[:1], delta=1e-4)
    np.testing.assert_allclose(theory[0], numbers[0], atol=2e-6, rtol=1e-5)


def test_second_order():
    x, dy = problem()
    weights = weights_for([x])
    in_function = tf.function(second_order, autograph=False)
    for function, expected in (
        (masked, by_reference()),
        (zeroed, by_reference(zero_masked=True)),
        (softmax, tf.nn.softmax),
    ):
        expected = second_order(expected, [x], dy, weights)
        assert_all_close(second_order(function, [x], dy, weights), expected)
        assert_all_close(in_function(function, [x], dy, weights), expected)
