"""Activations on their own: numbers, shapes, buffers."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from test_conv import cast
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import _library
from tf_fused_ops.ops import act, activations, reference


def check(case, seed=0):
    """Asserts that the op and its gradient are as exact as stock TensorFlow."""
    x, dy = cast(case.inputs(seed), case.dtype)
    attributes = case.attributes()
    expected = reference.act(tf.cast(x, tf.float64), **attributes)
    stock = reference.act(x, **attributes)
    assert_as_exact("y", act(x, **attributes), stock, expected, case.dtype)

    # The same saved tensor for all: next to a kink rounding decides the slope.
    saved = tf.cast(expected, case.dtype)
    if not activations.slope_from_value(case.act, cases.ALPHA):
        saved = x
    value = _library.ops.tf_fused_ops_act_grad(dy=dy, saved=saved, **attributes)
    stock = reference.act_grad(dy, saved, **attributes)
    expected = reference.act_grad(*cast([dy, saved], "float64"), **attributes)
    assert_as_exact("dx", value, stock, expected, case.dtype)


@pytest.mark.parametrize("case", cases.act_cases(), ids=str)
def test_forward_and_gradient(case, isa):
    check(case)
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, isa):
    check(cases.ActCase(act=act, dtype=dtype, shape=(67, 129)))


# Huge pages from 4 MiB on, stores past the caches from 8 MiB on.
@pytest.mark.parametrize("shape", [(1031, 1033), (2053, 4, 519)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_large(dtype, shape, isa):
    check(cases.ActCase(act="silu", dtype=dtype, shape=shape))


@given(
    shape=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    name=st.sampled_from(cases.ACTIVATIONS),
    dtype=st.sampled_from(cases.DTYPES),
    seed=st.integers(0, 1000),
)
def test_random_shapes(shape, name, dtype, seed):
    check(cases.ActCase(act=name, dtype=dtype, shape=tuple(shape)), seed)


@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_scalars(act):
    check(cases.ActCase(act=act, shape=()))


@pytest.mark.parametrize("name", ["gelu", "swish", "hard_silu", None])
def test_names(name):
    x = tf.constant([-1.0, 0.5, 2.0])
    stock = {
        "gelu": tf.nn.gelu,
        "swish": tf.nn.silu,
        "hard_silu": lambda x: x * tf.nn.relu6(x + 3) / 6,
    }
    assert_close("y", act(x, name), stock.get(name, tf.identity)(x), "float32")
    assert_close("y", act(x, "gelu", True), tf.nn.gelu(x, approximate=True), "float32")


@pytest.mark.parametrize("tail", [(), (4,), (4, 5)])
def test_unknown_rank(tail):
    x = tf.constant(np.random.default_rng(0).normal(size=(3, *tail)))

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float64)])
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = act(x, "mish")
        return y, tape.gradient(y, x)

    y, dx = run(x)
    assert_close("y", y, reference.act(x, "mish", 0), "float64")
    assert_close("dx", dx, reference.act_grad(tf.ones_like(x), x, "mish", 0), "float64")


@pytest.mark.parametrize("shape", [(3, 5), (2053, 1031)])
def test_inputs_that_others_read_are_left_alone(shape):
    """The op takes over its input's buffer only where nothing else needs that."""
    x = tf.constant(np.random.default_rng(0).normal(size=shape), tf.float32)

    @tf.function
    def run(x):
        shared, own = x + 1.0, x + 2.0
        return act(shared, "silu"), shared, act(own, "silu")

    for name, value, expected in zip(
        ("shared", "read", "own"),
        run(x),
        (tf.nn.silu(x + 1.0), x + 1.0, tf.nn.silu(x + 2.0)),
        strict=True,
    ):
        assert_close(name, value, expected, "float32")
    assert_close("x", x, np.random.default_rng(0).normal(size=shape).astype(np.float32), "float32")
