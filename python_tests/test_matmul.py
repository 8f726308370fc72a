"""Matrix product + bias + activation: numbers, shapes, and what the wrapper accepts."""

import math

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
from tf_fused_ops.ops import activations, matmul, matmul_bias_act, reference

NAMES = ("y", "da", "db", "dbias", "dside")


def fused(case, a, b, bias, side):
    return matmul_bias_act(a, b, bias, side_input=side, **case.attributes())


def fused_gradients(case, dy, a, b, saved):
    saved = [] if saved is None else [saved]
    return matmul._gradient_op(dy, a, b, saved, (True,) * 4, case.attributes())


@remembered
def problem(case, seed):
    """Returns the operands of a case, dy, what is saved; y and its gradients of stock code in the
    dtype and in float64; and how large the sums are of which each may be a small one."""
    *operands, dy = cast(case.inputs(seed), case.dtype)
    wide = cast(operands, "float64")
    attributes = case.attributes()
    right = reference.matmul_bias_act(*wide, **attributes)
    stock = reference.matmul_bias_act(*operands, **attributes)
    # The same saved tensor for all: next to a kink rounding decides the slope.
    saved = right
    if not activations.slope_from_value(case.act, cases.ALPHA):
        saved = reference.matmul_bias_act(*wide, **{**attributes, "activation": "none"})
    saved = None if case.act == "none" else tf.cast(saved, case.dtype)
    wide_dy, wide_saved = cast([dy, saved], "float64")
    others = [stock, *reference.matmul_bias_act_grad(dy, *operands[:2], saved, **attributes)]
    exact = [right]
    exact += reference.matmul_bias_act_grad(wide_dy, *wide[:2], wide_saved, **attributes)
    sums = [0, 0, 0, np.linalg.norm(wide_dy) / np.sqrt(max(1, case.n)), 0]
    return operands, dy, saved, others, exact, sums


def check(case, seed=0, forward=fused, gradients=fused_gradients):
    """Asserts that two functions of a case and its tensors are as exact as stock TensorFlow."""
    operands, dy, saved, *others = problem(case, seed)
    values = [forward(case, *operands), *gradients(case, dy, *operands[:2], saved)]
    for name, *compared, scale in zip(NAMES, values, *others, strict=True):
        assert_as_exact(name, *compared, case.dtype, scale)


@pytest.mark.parametrize("case", cases.matmul_cases(), ids=str)
def test_forward_and_gradients(case, isa):
    check(case)
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, isa):
    check(cases.MatMulCase(act=act, dtype=dtype, m=31, k=17, n=33, side=True))


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(64, 5000, 40), (16, 5000, 40), (1, 20000, 33), (5000, 33, 40), (40, 33, 5000)],
)
def test_long_sums(m, k, n, tb, isa):
    check(cases.MatMulCase(m=m, k=k, n=n, tb=tb, act="none"))


@st.composite
def random_cases(draw, dtypes):
    return cases.MatMulCase(
        lead=tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
        m=draw(st.integers(0, 70)),
        k=draw(st.integers(0, 300)),
        n=draw(st.integers(0, 140)),
        ta=draw(st.booleans()),
        tb=draw(st.booleans()),
        bias=draw(st.booleans()),
        side=draw(st.booleans()),
        act=draw(st.sampled_from(cases.ACTIVATIONS)),
        dtype=draw(st.sampled_from(dtypes)),
    )


@given(case=random_cases(["float32", "float64"]), seed=st.integers(0, 1000))
def test_random_shapes(case, seed):
    check(case, seed)


@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_forms(approximate, isa):
    z = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0]])
    y = matmul_bias_act(z[:, None], np.ones((1, 1)), approximate=approximate)[:, 0]
    if approximate:
        expected = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    else:
        expected = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in z]
    assert_close("y", y, expected, "float64")


@pytest.mark.parametrize("layout", ["last", "first"])
def test_unknown_rank(layout):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(5, 6))
    transpose = layout == "first"

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float64)])
    def run(a):
        with tf.GradientTape() as tape:
            tape.watch(a)
            y = matmul_bias_act(a, b, activation="tanh", transpose_a=transpose)
        return y, tape.gradient(y, a)

    given_a = np.swapaxes(a, -1, -2).copy() if transpose else a
    y, da = run(given_a)
    expected = np.tanh(a @ b)
    assert_close("y", y, expected, "float64")
    expected = (1 - expected**2) @ b.T
    assert_close("da", np.swapaxes(da, -1, -2) if transpose else da, expected, "float64")
