"""Layer and RMS normalization: numbers and gradients of every order, shapes, errors."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from tolerances import assert_as_exact

from tf_fused_ops import _library, layer_norm, rms_norm
from tf_fused_ops.ops import reference

EPSILON = 1e-5
# Whole vectors, parts of one, several and a part; fewer rows than are computed together, rows that
# are no multiple; one row, one element a row; more rows than a slice has; past the caches.
SHAPES = [
    (2, 3, 64),
    (5, 7),
    (3, 2, 67),
    (1, 1000),
    (9, 1),
    (2, 1, 3, 2, 33),
    (16,),
    (6000, 24),
    (2051, 1057),
    (2048, 1536),
]


def tensors(shape, dtype, seed=0):
    """Returns x, scale, offset and dy as NumPy arrays; x is far from centred."""
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(3, 2, shape), rng.normal(size=shape)
    scale, offset = rng.normal(size=(2, shape[-1]))
    wide = "float64" if dtype == "float64" else "float32"
    dtypes = (dtype, wide, wide, dtype)
    values = zip((x, scale, offset, dy), dtypes, strict=True)
    return [tf.cast(tf.constant(value), name).numpy() for value, name in values]


def fused(x, scale, offset):
    return layer_norm(x, scale, offset, EPSILON)


def stock(x, scale, offset):
    """As people write it; half precision in float32, as Keras has it."""
    wide = tf.cast(x, scale.dtype)
    mean, variance = tf.nn.moments(wide, [-1], keepdims=True)
    y = tf.nn.batch_normalization(wide, mean, variance, offset, scale, EPSILON)
    return tf.cast(y, x.dtype)


def outputs(function, values):
    """Returns y and the gradients of x, scale and offset."""
    *inputs, dy = map(tf.constant, values)
    return [function(*inputs), *gradients_of(function, inputs, dy)]


def centred(x, scale, offset):
    """The reference: large means do not cost digits."""
    return reference.layer_norm(x, scale, offset, EPSILON)[0]


@remembered
def expected(shape, dtype, seed):
    """Returns operands, and what to compare with: outputs of stock and in float64, and scales."""
    values = tensors(shape, dtype, seed)
    x, scale, _, dy = wide = [value.astype(np.float64) for value in values]
    # What is a difference of such terms, and sums over rows, may happen to cancel.
    term = np.abs(dy * scale).max() / np.sqrt(x.var(-1).min() + EPSILON)
    total = np.sqrt(np.prod(shape[:-1]))
    scales = {"y": 0, "x_grad": term, "scale_grad": total, "offset_grad": total}
    return values, outputs(stock, values), outputs(centred, wide), scales


def check(shape, dtype, seed=0):
    values, by_stock, exact, scales = expected(shape, dtype, seed)
    runs = outputs(fused, values), by_stock, exact
    for (name, scale), found, *others in zip(scales.items(), *runs, strict=True):
        like = values[0] if name in ("y", "x_grad") else values[1]
        assert found.dtype == like.dtype
        assert_as_exact(name, found, *others, found.dtype.name, scale)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradient(shape, dtype, isa):
    check(shape, dtype)
    assert _library.isa() == isa


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    dtype=st.sampled_from(cases.DTYPES),
    seed=st.integers(0, 1000),
)
def test_random_shapes(shape, dtype, seed):
    check(tuple(shape), dtype, seed)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_large_mean(dtype, isa):
    """The variance is that of deviations, not the difference of two large numbers."""
    x = tf.cast([[1024.0, 1032, 1040, 1048] * 9], dtype)
    y = layer_norm(x, epsilon=1e-5)
    expected = np.array([[-3, -1, 1, 3] * 9]) / np.sqrt(5)
    np.testing.assert_allclose(tf.cast(y, tf.float64), expected, rtol=0, atol=1e-2)


def test_defaults():
    x = tf.constant(np.random.default_rng(0).normal(size=(3, 5)))
    ones, zeros = tf.ones(5, tf.float64), tf.zeros(5, tf.float64)
    np.testing.assert_array_equal(layer_norm(x), layer_norm(x, ones, zeros, 1e-3))


def test_special_numbers(isa):
    """They stay in their rows, and in their columns of what is summed over rows."""
    x = np.random.default_rng(0).normal(size=(9, 19)).astype(np.float32)
    clean = x.copy()
    x[3, 4], x[5, 18] = np.nan, np.inf
    rows = [row for row in range(9) if row not in (3, 5)]
    y, x_grad, *_ = outputs(fused, [x, *np.ones((2, 19), np.float32), np.ones_like(x)])
    usual, usual_grad, *_ = outputs(fused, [clean, *np.ones((2, 19), np.float32), np.ones_like(x)])
    np.testing.assert_array_equal(y.numpy()[rows], usual.numpy()[rows])
    np.testing.assert_array_equal(x_grad.numpy()[rows], usual_grad.numpy()[rows])
    assert np.isnan(y.numpy()[[3, 5]]).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 4), (2, 0), (0, 0)])
def test_empty(shape):
    vectors = tf.ones([2, shape[-1]])
    y, x_grad, *sums = outputs(fused, [tf.ones(shape), *vectors, tf.ones(shape)])
    assert y.shape == x_grad.shape == shape
    for value in sums:
        np.testing.assert_array_equal(value, np.zeros(shape[-1]))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_rms(shape, dtype, isa):
    values = tensors(shape, dtype)
    del values[2]
    wide = [value.astype(np.float64) for value in values]
    term = np.abs(wide[2] * wide[1]).max() / np.sqrt((wide[0] ** 2).mean(-1).min() + EPSILON)
    scales = {"y": 0, "x_grad": term, "scale_grad": np.sqrt(np.prod(shape[:-1]))}

    def stock(x, scale):
        x, dtype = tf.cast(x, scale.dtype), x.dtype
        mean_square = tf.reduce_mean(tf.square(x), -1, keepdims=True)
        return tf.cast(x * tf.math.rsqrt(mean_square + EPSILON) * scale, dtype)

    runs = (
        outputs(lambda *v: rms_norm(*v, EPSILON), values),
        outputs(stock, values),
        outputs(stock, wide),
    )
    for (name, scale), found, *others in zip(scales.items(), *runs, strict=True):
        assert_as_exact(name, found, *others, found.dtype.name, scale)


def problem():
    values = [tf.constant(v) for v in tensors((3, 2, 5), "float64")]
    return values[:3], values[3]


def test_against_finite_differences():
    inputs, _ = problem()
    theory, numbers = tf.test.compute_gradient(fused, inputs, delta=1e-4)
    for value, other in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(value, other, atol=2e-6, rtol=1e-5)


def test_second_order():
    inputs, dy = problem()
    weights = weights_for(inputs)
    in_function = tf.function(second_order, autograph=False)
    for function, stock in ((fused, centred), (rms, rms_reference)):
        expected = second_order(stock, inputs, dy, weights)
        assert_all_close(second_order(function, inputs, dy, weights), expected)
        assert_all_close(in_function(function, inputs, dy, weights), expected)


def test_second_order_against_finite_differences():
    inputs, dy = problem()
    theory, numbers = tf.test.compute_gradient(
        lambda *v: gradients_of(fused, list(v[:-1]), v[-1])[0], [*inputs, dy], delta=1e-4
    )
    for value, other in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-5, rtol=1e-5)


def raw(x, scale, offset, **options):
    return _library.ops.tf_fused_ops_layer_norm(x, scale, offset, epsilon=EPSILON, **options)


def rms(x, scale, offset):
    return raw(x, scale, offset, subtract_mean=False)[0]


def rms_reference(x, scale, offset):
    return reference.layer_norm(x, scale, offset, EPSILON, subtract_mean=False)[0]


@pytest.mark.parametrize("subtract_mean", [True, False])
def test_reference(subtract_mean):
    """What graphs without the package compute."""
    inputs, dy = problem()
    options = {"subtract_mean": subtract_mean}
    found = reference.layer_norm(*inputs, EPSILON, **options)
    assert_all_close(found, raw(*inputs, **options))
    operands = (dy, *inputs[:2], *found[1:])
    expected = _library.ops.tf_fused_ops_layer_norm_grad(*operands, **options)
    assert_all_close(reference.layer_norm_grad(dy, *inputs[:2], found[2], **options), expected)


def test_statistics_have_gradients():
    (x, scale, offset), _ = problem()

    def loss_gradient(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, mean, inv_std = function()
            loss = tf.reduce_sum(y**2) + tf.reduce_sum(mean**3) + tf.reduce_sum(inv_std**2)
        return [tape.gradient(loss, x)]

    expected = loss_gradient(lambda: reference.layer_norm(x, scale, offset, EPSILON))
    assert_all_close(loss_gradient(lambda: raw(x, scale, offset)), expected)


def test_shapes_in_graphs():
    """What is known of scale is known of x, and the other way round."""
    known = {}

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 3, None]), tf.TensorSpec([7]), tf.TensorSpec(None)
        ]
    )  # fmt: skip
    def traced(x, scale, offset):
        known["outputs"] = raw(x, scale, offset)
        known["gradients"] = _library.ops.tf_fused_ops_layer_norm_grad(
            x, x, scale, *known["outputs"][1:]
        )
        return known["outputs"]

    traced.get_concrete_function()
    assert [t.shape.as_list() for t in known["outputs"]] == [[None, 3, 7], *[[None, 3]] * 2]
    assert [t.shape.as_list() for t in known["gradients"]] == [[None, 3, 7], [7], [7]]
