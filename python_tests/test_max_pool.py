"""Max pooling with relu: numbers and gradients bit for bit those of stock, shapes, errors."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered

from tf_fused_ops import _library, max_pool2d_act
from tf_fused_ops.ops import reference

# Image, channels, window, strides, padding. Channels in whole vectors, in parts, fewer than one;
# windows beside each other, overlapping, apart, larger than the image; images past the caches.
CASES = [
    ((2, 8, 6), 64, (2, 2), (2, 2), "VALID"),
    ((2, 9, 7), 67, (2, 2), (2, 2), "VALID"),
    ((1, 11, 9), 5, (3, 3), (2, 2), "SAME"),
    ((3, 7, 7), 33, (3, 3), (1, 1), "SAME"),
    ((1, 10, 8), 3, (2, 3), (3, 4), "VALID"),
    ((1, 10, 9), 16, (1, 1), (3, 2), "SAME"),
    ((1, 4, 5), 19, (7, 6), (1, 2), "SAME"),
    ((1, 16, 16), 4, (15, 17), (1, 1), "SAME"),
    ((1, 3, 5), 4, (3, 5), (1, 1), "VALID"),
    ((0, 4, 4), 3, (2, 2), (2, 2), "VALID"),
    ((2, 0, 4), 3, (2, 2), (2, 2), "SAME"),
    ((1, 5, 4), 0, (2, 2), (2, 2), "VALID"),
    ((4, 131, 129), 37, (2, 2), (2, 2), "SAME"),
    ((4, 131, 129), 48, (2, 2), (2, 2), "SAME"),
]


def pooled(x, pool):
    """Returns y and the gradient of x by one that is different everywhere."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = pool(x)
    dy = tf.cast(tf.reshape(tf.range(tf.size(y)) % 61 - 30, tf.shape(y)), x.dtype)
    return y, tape.gradient(y, x, output_gradients=dy)


def stock_pool(ksize, strides, padding, activation="none"):
    """The stock code; in float64, since 16-bit sums of several windows are rounded differently."""

    def pool(x):
        z = tf.cast(x, tf.float64)
        z = tf.nn.relu(z) if activation == "relu" else z
        return tf.cast(tf.nn.max_pool2d(z, ksize, strides, padding), x.dtype)

    return pool


@remembered
def expected(image, channels, ksize, strides, padding, activation, dtype, seed):
    """Returns x, y in float64 and the gradient of x."""
    # Few values, so that windows have several largest pixels.
    values = np.random.default_rng(seed).integers(-9, 10, (*image, channels)) / 2
    x = tf.constant(values, dtype)
    y, dx = pooled(tf.cast(x, tf.float64), stock_pool(ksize, strides, padding, activation))
    return x, y, tf.cast(dx, dtype)


def check(image, channels, ksize, strides, padding, activation, dtype, seed=0):
    x, wide_y, right_dx = expected(
        image, channels, ksize, strides, padding, activation, dtype, seed
    )
    y, dx = pooled(x, lambda x: max_pool2d_act(x, ksize, strides, padding, activation))
    assert y.dtype == dx.dtype == x.dtype
    np.testing.assert_array_equal(tf.cast(y, tf.float64), wide_y)
    np.testing.assert_array_equal(dx, right_dx)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradient(case, activation, dtype, isa):
    check(*case, activation, dtype)
    assert _library.isa() == isa


@given(
    image=st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(1, 12)),
    channels=st.integers(1, 40),
    ksize=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    strides=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    activation=st.sampled_from(["none", "relu"]),
    dtype=st.sampled_from(cases.DTYPES),
    seed=st.integers(0, 1000),
)
def test_random_shapes(image, channels, ksize, strides, activation, dtype, seed):
    check(image, channels, ksize, strides, "SAME", activation, dtype, seed)


def test_no_windows():
    """Stock leaves the gradient of x as the memory was."""
    y, dx = pooled(tf.ones([2, 1, 4, 3]), max_pool2d_act)
    assert y.shape == (2, 0, 2, 3)
    np.testing.assert_array_equal(dx, np.zeros([2, 1, 4, 3]))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_special_numbers(dtype, isa):
    """A NaN is the largest; so is -inf where there is nothing else."""
    nan, inf = np.nan, np.inf
    rows = [[1, nan, 3, 2], [-inf, -inf, inf, nan], [0.0, -0.0, -1, -2]]
    x = tf.constant(np.reshape(rows, (3, 1, 4, 1)), dtype)
    y, dx = pooled(x, lambda x: max_pool2d_act(x, [1, 2]))
    np.testing.assert_array_equal(np.float64(y)[:, 0, :, 0], [[nan, 3], [-inf, nan], [0, -1]])
    dy = [[-30, -29], [-28, -27], [-26, -25]]
    expected = np.zeros((3, 4))
    for row, (first, second) in enumerate([(1, 2), (0, 3), (0, 2)]):
        expected[row, [first, second]] = dy[row]
    np.testing.assert_array_equal(np.float64(dx)[:, 0, :, 0], expected)
    _, dx = pooled(x, lambda x: max_pool2d_act(x, [1, 2], activation="relu"))
    expected[[0, 1, 1, 2, 2], [1, 0, 3, 0, 2]] = 0
    np.testing.assert_array_equal(np.float64(dx)[:, 0, :, 0], expected)


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_reference(padding, activation):
    """What graphs without the package compute, indices included."""
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 7, 8, 5)))
    attributes = {"ksize": [1, 3, 2, 1], "strides": [1, 2, 1, 1], "padding": padding}
    forward = dict(x=x, activation=activation, **attributes)
    y, indices = _library.ops.tf_fused_ops_max_pool_act(save_indices=True, **forward)
    for found, expected in zip(reference.max_pool_act(**forward), (y, indices), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert np.any(indices == 255) == (activation == "relu")
    backward = dict(dy=y * y, indices=indices, input_sizes=tf.shape(x), **attributes)
    dx = _library.ops.tf_fused_ops_max_pool_act_grad(**backward)
    np.testing.assert_allclose(reference.max_pool_act_grad(**backward), dx, rtol=1e-14)


@pytest.mark.parametrize("decorate", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_second_order(decorate):
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 7, 8, 5)))

    def second(pool):
        @decorate
        def run(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = pool(x)
                    loss = tf.reduce_sum(y * y * y)
                dx = inner.gradient(loss, x)
            return outer.gradient(dx, x, output_gradients=tf.sin(dx))

        return run(x)

    ours = second(lambda x: max_pool2d_act(x, 3, 2, "SAME", "relu"))
    stock = second(lambda x: tf.nn.max_pool2d(tf.nn.relu(x), 3, 2, "SAME"))
    np.testing.assert_allclose(ours, stock, rtol=1e-12)


def test_gradient_of_what_ran_without_indices():
    """A graph built forward first gets them when its gradient is built."""
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 7, 8, 5)))

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float64)])
    def pool(x):
        return max_pool2d_act(x, activation="relu")

    assert not pool.get_concrete_function().graph.get_operations()[1].get_attr("save_indices")
    found, expected = pooled(x, pool), pooled(x, stock_pool(2, 2, "VALID", "relu"))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradient_of_unknown_batch_does_not_keep_x():
    @tf.function(input_signature=[tf.TensorSpec([None, 7, 8, 5])])
    def step(x):
        return pooled(x, lambda x: max_pool2d_act(x, activation="relu"))

    x = tf.constant(np.random.default_rng(0).normal(size=(2, 7, 8, 5)), tf.float32)
    found, expected = step(x), pooled(x, stock_pool(2, 2, "VALID", "relu"))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    (given,) = step.get_concrete_function().inputs
    assert {reader.type for reader in given.consumers()} == {"TfFusedOps>MaxPoolAct"}


def test_indices_are_a_byte_and_computed_on_request():
    x = tf.zeros([2, 6, 4, 3])
    attributes = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    for save in (False, True):
        _, indices = _library.ops.tf_fused_ops_max_pool_act(x=x, save_indices=save, **attributes)
        assert indices.dtype == tf.uint8
        assert indices.shape == ([2, 3, 2, 3] if save else [0])


@pytest.mark.parametrize("indices", [0, 4, 200, 255])
def test_any_index_is_safe(indices):
    """Those of no pixel of the window get nothing."""
    dx = _library.ops.tf_fused_ops_max_pool_act_grad(
        dy=tf.ones([1, 2, 2, 1]),
        indices=tf.fill([1, 2, 2, 1], tf.constant(indices, tf.uint8)),
        input_sizes=[1, 4, 4, 1],
        ksize=[1, 2, 2, 1],
        strides=[1, 2, 2, 1],
        padding="VALID",
    )
    assert float(tf.reduce_sum(dx)) == (4 if indices < 4 else 0)


def test_every_run_gives_the_same_bits():
    x = tf.random.stateless_normal([2, 65, 63, 19], [1, 2])
    first, *others = (
        pooled(x, lambda x: max_pool2d_act(x, 3, 2, "SAME", "relu")) for _ in range(4)
    )
    for found in others:
        for a, b in zip(found, first, strict=True):
            np.testing.assert_array_equal(a, b)


WRONG = [
    ({"x": (4, 4, 3)}, "x"),
    ({"x": ()}, "x"),
    ({"dtype": "int32"}, "x"),
    ({"ksize": 0}, "ksize"),
    ({"ksize": -1}, "ksize"),
    ({"ksize": [2, 2, 2]}, "ksize"),
    ({"ksize": [2, 2, 2, 1]}, "ksize"),
    ({"ksize": [1, 2, 2, 2]}, "ksize"),
    ({"ksize": "two"}, "ksize"),
    ({"ksize": 16, "padding": "SAME"}, "ksize"),
    ({"ksize": 2**31, "padding": "SAME"}, "ksize"),
    ({"ksize": 9}, "ksize"),
    ({"strides": 0}, "strides"),
    ({"strides": [2, 1, 1, 1]}, "strides"),
    ({"padding": "FULL"}, "padding"),
    ({"padding": [[0, 0]] * 4}, "padding"),
    ({"activation": "elu"}, "activation"),
]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("wrong", "name"), WRONG, ids=str)
def test_errors_name_the_argument(wrong, name, graph):
    wrong = dict(wrong)
    x = tf.zeros(wrong.pop("x", (2, 4, 4, 3)), wrong.pop("dtype", "float32"))
    call = tf.function(max_pool2d_act) if graph else max_pool2d_act
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=name):
        call(x, **wrong)


WRONG_GRADIENT = {
    "dy": {"dy": (2, 2, 3, 3)},
    "indices": {"indices": (2, 2, 3, 3)},
    "input_sizes": {"input_sizes": (2, 4, 4)},
    "negative": {"input_sizes": (2, -4, 4, 3)},
    "other": {"input_sizes": (2, 6, 4, 3)},
}


@pytest.mark.parametrize("wrong", WRONG_GRADIENT)
def test_gradient_errors(wrong):
    shapes = {"dy": (2, 2, 2, 3), "indices": (2, 2, 2, 3), "input_sizes": (2, 4, 4, 3)}
    shapes |= WRONG_GRADIENT[wrong]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        _library.ops.tf_fused_ops_max_pool_act_grad(
            dy=tf.zeros(shapes["dy"]),
            indices=tf.zeros(shapes["indices"], tf.uint8),
            input_sizes=shapes["input_sizes"],
            ksize=[1, 2, 2, 1],
            strides=[1, 2, 2, 1],
            padding="VALID",
        )
