"""Batch normalization + activation: numbers, statistics, and what the wrapper accepts."""

from pathlib import Path

import cases
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from test_conv import cast
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import _library
from tf_fused_ops.ops import _gradient, batch_norm_act, reference

NAMES = ("y", "new_mean", "new_variance", "saved_mean", "saved_inv_std")
GRADIENTS = ("dx", "dscale", "doffset", "dside")


def operands(case, seed=0):
    """x, scale, offset, mean, variance, side, dy in the case's dtypes; then all in float64."""
    x, *vectors, side, dy = case.inputs(seed)
    wide_type = "float64" if case.dtype == "float64" else "float32"
    x, side, dy = cast([x, side, dy], case.dtype)
    values = [x, *cast(vectors, wide_type), side, dy]
    return values, cast(values, "float64")


def fused(x, scale, offset, mean, variance, side, **attributes):
    return batch_norm_act(x, scale, offset, mean, variance, side, **attributes)


def stock_gradients(function, values, dy):
    """The gradients of y with respect to x, scale, offset and the side input."""
    watched = [values[i] for i in (0, 1, 2, 5) if values[i] is not None]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        y = function(*values)[0]
    return tape.gradient(y, watched, output_gradients=dy)


def pre_activation(case, wide):
    attributes = {**case.attributes(), "activation": "none"}
    return reference.batch_norm_act(*wide[:6], **attributes)[0]


@remembered
def problem(case, seed):
    """Returns operands and dy; outputs and gradients, each of stock code in the dtype and in
    float64; and how large the sums are of which dx may be a small one."""
    values, wide = operands(case, seed)

    def stock(*operands):
        return reference.batch_norm_act(*operands, **case.attributes())

    outputs = stock(*values[:6]), stock(*wide[:6])
    # No gradient arrives next to a kink, where rounding decides the slope.
    z = pre_activation(case, wide)
    near = np.zeros(z.shape, bool)
    for kink in cases.KINKS.get(case.act, ()):
        near |= np.abs(z - kink) < 0.05
    dy, wide_dy = (tf.where(near, tf.zeros_like(d), d) for d in (values[6], wide[6]))
    gradients = stock_gradients(stock, values[:6], dy), stock_gradients(stock, wide[:6], wide_dy)
    # One element a channel: dx is 0, the difference of terms of this size.
    scale = np.abs(wide_dy).max(initial=0) * np.abs(wide[1] * outputs[1][4]).max(initial=0)
    return values[:6], dy, outputs, gradients, scale


def check(case, seed=0, fused=fused):
    values, dy, outputs, gradients, scale = problem(case, seed)

    def ours(*operands):
        return fused(*operands, **case.attributes())

    statistics = "float64" if case.dtype == "float64" else "float32"
    for i, (name, found, *others) in enumerate(zip(NAMES, ours(*values), *outputs, strict=True)):
        dtype = statistics if i else case.dtype
        assert found.dtype == dtype
        assert_as_exact(name, found, *others, dtype)
    found = stock_gradients(ours, values, dy)
    names = GRADIENTS[: len(found)]
    for i, (name, *compared) in enumerate(zip(names, found, *gradients, strict=True)):
        dtype = statistics if i in (1, 2) else case.dtype
        assert_as_exact(name, *compared, dtype, 0.0 if i else scale)


@pytest.mark.parametrize("case", cases.batch_norm_cases(), ids=str)
def test_forward_and_gradients(case, isa):
    check(case)
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations_with_side_input(act, dtype, isa):
    check(cases.BatchNormCase(act=act, dtype=dtype, channels=17, side=True))


WALK_THROUGH = np.array(
    [
        [[[0.16513085, 0.9014813, 0.6309742], [0.4345461, 0.29193902, 0.64250207]]],
        [[[0.9757855, 0.43509948, 0.6601019], [0.60489583, 0.6366315, 0.6144488]]],
    ],
    np.float32,
)
MOVING_VARIANCE = {
    True: [0.5576107, 0.5349634, 0.50018483],
    False: [0.543208, 0.5262226, 0.50013864],
}


@pytest.mark.parametrize("unbiased", [True, False])
def test_published_walk_through(unbiased, isa):
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    _, new_mean, new_variance, saved_mean, saved_inv_std = batch_norm_act(
        WALK_THROUGH,
        ones,
        zeros,
        ones,
        ones,
        activation="none",
        epsilon=0.001,
        momentum=0.5,
        unbiased=unbiased,
    )
    expected = {
        "new_mean": (new_mean, [0.7725448, 0.7831439, 0.8185034]),
        "new_variance": (new_variance, MOVING_VARIANCE[unbiased]),
        "saved_mean": (saved_mean, [0.5450896, 0.5662878, 0.63700676]),
        "saved_inv_std": (saved_inv_std, [3.3822396, 4.325596, 27.981367]),
    }
    for name, (value, published) in expected.items():
        np.testing.assert_allclose(value, published, rtol=3e-7, err_msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_digits_of_epsilon_and_momentum(training, isa):
    """Attributes have the digits of float; 0.001 and 0.99 are these numbers all the same."""
    x, ones = np.linspace(-0.1, 0.1, 24).reshape(8, 3), np.ones(3)
    operands = (x, ones, ones, ones, ones * 1e-3)
    options = {"epsilon": 1e-3, "momentum": 0.99, "training": training, "unbiased": False}
    found = batch_norm_act(*operands, activation="none", **options)
    expected = reference.batch_norm_act(
        *map(tf.constant, operands),
        None,
        activation="none",
        alpha=0.2,
        data_format="NHWC",
        **options,
    )
    for value, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("channels", [3, 33, 64])
def test_against_the_stock_fused_op(channels, dtype, training, isa):
    case = cases.BatchNormCase(
        sizes=(4, 9, 7), channels=channels, dtype=dtype, training=training, act="none"
    )
    values, wide = operands(case)
    attributes = case.attributes()
    dy = values[6]

    def stock(x, scale, offset, mean, variance, _):
        return tf.compat.v1.nn.fused_batch_norm(
            x,
            scale,
            offset,
            mean,
            variance,
            epsilon=attributes["epsilon"],
            is_training=training,
            exponential_avg_factor=1 - attributes["momentum"],
        )

    expected = reference.batch_norm_act(*wide[:6], **attributes)
    outputs, others = fused(*values[:6], **attributes), stock(*values[:6])
    for i in range(3):
        kind = "float32" if i else dtype
        assert_as_exact(NAMES[i], outputs[i], others[i], expected[i], kind)
    exact = stock_gradients(
        lambda *v: reference.batch_norm_act(*v, **attributes), wide[:6], wide[6]
    )
    gradients = stock_gradients(lambda *v: fused(*v, **attributes), values[:6], dy)
    others = stock_gradients(stock, values[:6], dy)
    for i, name in enumerate(("dx", "dscale", "doffset")):
        kind = "float32" if i else dtype
        assert_as_exact(name, gradients[i], others[i], exact[i], kind)


@given(data=st.data())
def test_random_shapes(data):
    draw = data.draw
    case = cases.BatchNormCase(
        sizes=tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))),
        channels=draw(st.integers(0, 70)),
        layout=draw(st.sampled_from(cases.LAYOUTS)),
        training=draw(st.booleans()),
        unbiased=draw(st.booleans()),
        side=draw(st.booleans()),
        act=draw(st.sampled_from(cases.ACTIVATIONS)),
        dtype=draw(st.sampled_from(["float32", "float64"])),
    )
    check(case, seed=draw(st.integers(0, 1000)))


@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_mean_far_from_zero(offset, isa):
    x = np.random.default_rng(0).normal(size=(8, 7, 7, 5)) + offset
    x = tf.constant(x, tf.float32)
    ones, zeros = tf.ones(5), tf.zeros(5)
    y, *_, saved_mean, saved_inv_std = batch_norm_act(x, ones, zeros, zeros, ones)
    wide = np.asarray(x, np.float64)
    mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    np.testing.assert_allclose(saved_mean, mean, rtol=1e-6)
    np.testing.assert_allclose(saved_inv_std, 1 / np.sqrt(variance + 1e-3), rtol=1e-2)
    assert np.isfinite(y).all()


@pytest.mark.parametrize("training", [True, False])
def test_empty_batch(training, isa):
    mean, variance = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])
    x = tf.zeros((0, 4, 2))
    y, new_mean, new_variance, *saved = batch_norm_act(
        x, None, None, mean, variance, training=training
    )
    assert y.shape == (0, 4, 2)
    np.testing.assert_array_equal(new_mean, mean)
    np.testing.assert_array_equal(new_variance, variance)
    assert all(np.isfinite(value).all() for value in saved)


def test_scale_and_offset_may_be_none():
    x = tf.random.normal((4, 5, 3))
    ones, zeros = tf.ones(3), tf.zeros(3)
    expected = batch_norm_act(x, ones, zeros, zeros, ones)
    value = batch_norm_act(x, None, None, zeros, ones)
    for a, b in zip(value, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_mask_bits(isa):
    case = cases.BatchNormCase(sizes=(3, 5), channels=7, side=True)
    values, _ = operands(case)
    attributes = {**case.attributes(), "save_mask": True}
    x, *vectors, side, _ = values
    y, *_, mask = _library.ops.tf_fused_ops_batch_norm_act(x, *vectors, [side], [], **attributes)
    bits = np.unpackbits(mask.numpy(), bitorder="little")
    assert mask.shape == ((y.shape.num_elements() + 7) // 8,)
    np.testing.assert_array_equal(bits[: 3 * 5 * 7], np.ravel(y) > 0)
    assert not bits[3 * 5 * 7 :].any()
    assert _gradient.is_zero(tf.zeros(3)) and not _gradient.is_zero(y)


def test_side_input_gradient_is_that_of_the_pre_activation(isa):
    case = cases.BatchNormCase(side=True, dtype="float64")
    values, _ = operands(case)
    x, scale, offset, mean, variance, side, dy = values
    with tf.GradientTape() as tape:
        tape.watch(side)
        y = fused(x, scale, offset, mean, variance, side, **case.attributes())[0]
    assert_close("dside", tape.gradient(y, side, dy), np.where(y > 0, dy, 0), "float64", 0)


def mapping_flags(address):
    """What the kernel knows of the memory at an address, two letters each."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)
def test_large_outputs_ask_for_huge_pages():
    x = tf.ones([48 * 1024, 256])
    vector = tf.ones([256])
    with tf.device("CPU"):
        y = batch_norm_act(x, vector, vector, vector, vector)[0]
    values = np.asarray(memoryview(y))
    assert "hg" in mapping_flags(values.ctypes.data + values.nbytes // 2)
