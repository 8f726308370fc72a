"""Group and instance normalization: numbers and gradients of every order, shapes, errors."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from tolerances import assert_as_exact

from tf_fused_ops import _library, group_norm_act
from tf_fused_ops.ops import activations, reference

EPSILON = 1e-5
# (x as [images, pixels.., channels], groups): a channel a group, one group; channels that are no
# multiple of a vector, or fewer; images that threads share, or that they do together; past the
# caches; one pixel, no dimension for pixels.
SHAPES = [
    ((2, 5, 7, 64), 8),
    ((3, 4, 9), 9),
    ((2, 3, 5, 2, 15), 5),
    ((5, 11, 66), 6),
    ((1, 17, 19, 3), 1),
    ((4, 30), 10),
    ((3, 1, 1, 32), 32),
    ((16, 8, 8, 320), 32),
    ((3, 40, 40, 48), 4),
    ((1, 48, 48, 1072), 67),
    ((2, 160, 160, 96), 32),
]
FORMATS = ["NHWC", "NCHW"]


def tensors(shape, dtype, data_format="NHWC", seed=0):
    """Returns x, scale, offset and dy as NumPy arrays; x is far from centred."""
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(3, 2, shape), rng.normal(size=shape)
    scale, offset = rng.normal(size=(2, shape[-1]))
    if data_format == "NCHW":
        x, dy = (np.moveaxis(value, -1, 1) for value in (x, dy))
    wide = "float64" if dtype == "float64" else "float32"
    dtypes = (dtype, wide, wide, dtype)
    values = zip((x, scale, offset, dy), dtypes, strict=True)
    return [tf.cast(tf.constant(value), name).numpy() for value, name in values]


def stock(x, scale, offset, groups, activation, data_format):
    """As people write it; half precision in float32, as Keras has it."""
    wide = tf.cast(x, scale.dtype)
    if data_format == "NCHW":
        rows, parameters = [x.shape[0], groups, -1], [1, -1] + [1] * (len(x.shape) - 2)
        axes = [2]
    else:
        rows, parameters = [x.shape[0], -1, groups, x.shape[-1] // groups], [-1]
        axes = [1, 3]
    grouped = tf.reshape(wide, rows)
    mean, variance = tf.nn.moments(grouped, axes, keepdims=True)
    normal = tf.nn.batch_normalization(grouped, mean, variance, None, None, EPSILON)
    z = tf.reshape(normal, x.shape) * tf.reshape(scale, parameters)
    z += tf.reshape(offset, parameters)
    return tf.cast(activations.STOCK[activation](z, cases.ALPHA), x.dtype)


def outputs(function, values):
    """Returns y and the gradients of x, scale and offset."""
    *inputs, dy = map(tf.constant, values)
    return [function(*inputs), *gradients_of(function, inputs, dy)]


@remembered
def expected(shape, groups, dtype, data_format, activation, seed):
    """Returns operands, and what to compare with: outputs of stock and in float64, and scales."""
    attributes = {"groups": groups, "activation": activation, "data_format": data_format}

    def by_stock(x, scale, offset):
        return stock(x, scale, offset, **attributes)

    def centred(x, scale, offset):
        """The reference: large means do not cost digits."""
        form = {"epsilon": EPSILON, "alpha": cases.ALPHA, **attributes}
        return reference.group_norm_act(x, scale, offset, **form)[0]

    values = tensors(shape, dtype, data_format, seed)
    _, scale, _, dy = wide = [value.astype(np.float64) for value in values]
    _, inv_std = reference.group_norm_statistics(
        tf.constant(wide[0]), groups=groups, epsilon=EPSILON, data_format=data_format
    )
    # What is a difference of such terms, and sums over pixels, may happen to cancel.
    term = np.abs(dy).max() * np.abs(scale).max() * np.max(inv_std)
    total = np.sqrt(np.prod(shape[:-1]))
    scales = {"y": 0, "x_grad": term, "scale_grad": total, "offset_grad": total}
    return values, outputs(by_stock, values), outputs(centred, wide), scales


def check(shape, groups, dtype, data_format="NHWC", activation="none", seed=0):
    attributes = {"groups": groups, "activation": activation, "data_format": data_format}
    values, by_stock, exact, scales = expected(shape, dtype=dtype, seed=seed, **attributes)

    def fused(x, scale, offset):
        return group_norm_act(x, scale, offset, epsilon=EPSILON, alpha=cases.ALPHA, **attributes)

    runs = outputs(fused, values), by_stock, exact
    for (name, scale), found, *others in zip(scales.items(), *runs, strict=True):
        like = values[0] if name in ("y", "x_grad") else values[1]
        assert found.dtype == like.dtype
        assert_as_exact(name, found, *others, found.dtype.name, scale)


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_forward_and_gradient(shape, groups, dtype, data_format, isa):
    check(shape, groups, dtype, data_format)
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("activation", [name for name in activations.STOCK if name != "none"])
def test_activations(activation, dtype, isa):
    # The slope of relu6 at its kinks is not to be met by what rounding makes of z.
    check((3, 6, 5, 24), 4, dtype, "NHWC", activation, seed=1)


@given(
    pixels=st.lists(st.integers(1, 9), max_size=3),
    images=st.integers(1, 6),
    groups=st.integers(1, 7),
    of_group=st.integers(1, 9),
    data_format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 1000),
)
def test_random_shapes(pixels, images, groups, of_group, data_format, dtype, seed):
    check((images, *pixels, groups * of_group), groups, dtype, data_format, seed=seed)


@pytest.mark.parametrize("data_format", FORMATS)
def test_large_mean(data_format, isa):
    """The variance is that of deviations, not the difference of two large numbers."""
    x = np.tile([4096.0, 4097, 4098, 4099], 36).reshape(1, 6, 6, 4).astype(np.float32)
    x = np.concatenate([x, -x], -1)
    expected = np.tile([-3.0, -1, 1, 3, 3, 1, -1, -3], 36).reshape(1, 6, 6, 8) / np.sqrt(5)
    if data_format == "NCHW":
        x, expected = (np.moveaxis(value, -1, 1) for value in (x, expected))
    y = group_norm_act(x, groups=2, epsilon=1e-7, data_format=data_format)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-3)


def test_one_group_a_channel_is_instance_norm():
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 5, 6, 7)))
    mean, variance = tf.nn.moments(x, [1, 2], keepdims=True)
    y = group_norm_act(x, groups=7)
    np.testing.assert_allclose(y, (x - mean) / tf.sqrt(variance + 1e-3), rtol=1e-12)


def test_defaults():
    x = tf.constant(np.random.default_rng(0).normal(size=(3, 5, 64)))
    ones, zeros = tf.ones(64, tf.float64), tf.zeros(64, tf.float64)
    expected = group_norm_act(x, ones, zeros, 32, "none", 1e-3, "NHWC")
    np.testing.assert_array_equal(group_norm_act(x), expected)


def test_special_numbers(isa):
    """They stay in their groups, and in their channels of what is summed over images."""
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 12)).astype(np.float32)
    clean = x.copy()
    x[1, 2, 3, 4], x[2, 0, 0, 11] = np.nan, np.inf
    vectors = np.ones((2, 12), np.float32)

    def fused(x, scale, offset):
        return group_norm_act(x, scale, offset, groups=3)

    y, x_grad, *_ = outputs(fused, [x, *vectors, np.ones_like(x)])
    usual, usual_grad, *_ = outputs(fused, [clean, *vectors, np.ones_like(x)])
    touched = np.zeros(x.shape, bool)
    touched[1, ..., 4:8] = touched[2, ..., 8:] = True
    np.testing.assert_array_equal(y.numpy()[~touched], usual.numpy()[~touched])
    np.testing.assert_array_equal(x_grad.numpy()[~touched], usual_grad.numpy()[~touched])
    assert np.isnan(y.numpy()[touched]).all()


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 0, 4), (2, 3, 0), (0, 0)])
def test_empty(shape, data_format):
    axis = 1 if data_format == "NCHW" else -1

    def fused(x, scale, offset):
        return group_norm_act(x, scale, offset, groups=2, data_format=data_format)

    x = tf.ones(np.moveaxis(np.empty(shape), -1, axis).shape)
    y, x_grad, *sums = outputs(fused, [x, *tf.ones([2, shape[-1]]), x])
    assert y.shape == x_grad.shape == x.shape
    for value in sums:
        np.testing.assert_array_equal(value, np.zeros(shape[-1]))


@pytest.mark.parametrize("images", [3, 8])
def test_images_are_alone(images, isa):
    """The same bits whether threads share the images or do one after the other together."""
    values = tensors((images, 33, 31, 40), "float32")

    def fused(x, scale, offset):
        return group_norm_act(x, scale, offset, groups=8, activation="silu")

    together = outputs(fused, values)
    for i in range(images):
        x, scale, offset, dy = values
        y, x_grad, *_ = outputs(fused, [x[i : i + 1], scale, offset, dy[i : i + 1]])
        np.testing.assert_array_equal(together[0][i : i + 1], y)
        np.testing.assert_array_equal(together[1][i : i + 1], x_grad)


def problem(data_format="NHWC"):
    values = [tf.constant(v) for v in tensors((2, 3, 2, 6), "float64", data_format)]
    return values[:3], values[3]


def form(data_format="NHWC", activation="silu", **options):
    return {"groups": 3, "activation": activation, "data_format": data_format, **options}


@pytest.mark.parametrize("data_format", FORMATS)
def test_against_finite_differences(data_format):
    inputs, _ = problem(data_format)
    theory, numbers = tf.test.compute_gradient(
        lambda *v: group_norm_act(*v, **form(data_format)), inputs, delta=1e-4
    )
    for value, other in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(value, other, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("activation", ["none", "silu", "tanh"])
def test_second_order(data_format, activation):
    inputs, dy = problem(data_format)
    weights = weights_for(inputs)
    options = form(data_format, activation, epsilon=EPSILON)

    def fused(*values):
        return group_norm_act(*values, **options)

    def centred(*values):
        return reference.group_norm_act(*values, alpha=0.2, **options)[0]

    expected = second_order(centred, inputs, dy, weights)
    assert_all_close(second_order(fused, inputs, dy, weights), expected)
    in_function = tf.function(second_order, autograph=False)
    assert_all_close(in_function(fused, inputs, dy, weights), expected)


def raw(*inputs, **options):
    return _library.ops.tf_fused_ops_group_norm_act(*inputs, epsilon=EPSILON, **options)


@pytest.mark.parametrize("data_format", FORMATS)
def test_reference(data_format):
    """What graphs without the package compute."""
    inputs, dy = problem(data_format)
    options = form(data_format, alpha=0.2)
    found = reference.group_norm_act(*inputs, epsilon=EPSILON, **options)
    assert_all_close(found, raw(*inputs, **options))
    expected = _library.ops.tf_fused_ops_group_norm_act_grad(dy, *inputs, *found[1:], **options)
    assert_all_close(reference.group_norm_act_grad(dy, *inputs, found[2], **options), expected)


def test_statistics_have_gradients():
    (x, scale, offset), _ = problem()
    options = form(alpha=0.2)

    def loss_gradient(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, mean, inv_std = function()
            loss = tf.reduce_sum(y**2) + tf.reduce_sum(mean**3) + tf.reduce_sum(inv_std**2)
        return [tape.gradient(loss, x)]

    expected = loss_gradient(
        lambda: reference.group_norm_act(x, scale, offset, epsilon=EPSILON, **options)
    )
    assert_all_close(loss_gradient(lambda: raw(x, scale, offset, **options)), expected)


def test_shapes_in_graphs():
    """What is known of scale is known of x, and the other way round."""
    known = {}

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 3, None]), tf.TensorSpec([8]), tf.TensorSpec(None)
        ]
    )  # fmt: skip
    def traced(x, scale, offset):
        known["outputs"] = raw(x, scale, offset, groups=4)
        known["gradients"] = _library.ops.tf_fused_ops_group_norm_act_grad(
            x, x, scale, offset, *known["outputs"][1:], groups=4
        )
        return known["outputs"]

    traced.get_concrete_function()
    assert [t.shape.as_list() for t in known["outputs"]] == [[None, 3, 8], *[[None, 4]] * 2]
    assert [t.shape.as_list() for t in known["gradients"]] == [[None, 3, 8], [8], [8]]
