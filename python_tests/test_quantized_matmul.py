"""Products of quantized rows with 8-bit weights: numbers, on all instructions and threads."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from cases import QuantizedOpCase
from conftest import INTEGER_ISAS
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from tolerances import UNIT, assert_as_exact, assert_close

from tf_fused_ops import _library, quantized_matmul_bias_act
from tf_fused_ops.ops import reference

EPSILON = 1e-7


def tensors(case, seed=0):
    """Returns a, b, b_scale, bias and dy as the op has them."""
    a, b, b_scale, bias, dy = case.inputs(seed)
    bias = None if bias is None else tf.cast(bias, case.dtype)
    return [tf.cast(a, case.dtype), b, b_scale.astype(np.float32), bias, tf.cast(dy, case.dtype)]


def wide(value):
    return tf.cast(value, tf.float64).numpy()


def quantized(a, epsilon):
    """Returns integers and the scales of rows, which are float32's, as float64."""
    a, one = tf.cast(a, tf.float32).numpy(), np.float32(127)
    scale = one / (np.abs(a).max(-1, keepdims=True, initial=0) + np.float32(epsilon))
    return np.rint(a * scale).astype(np.float64), scale.astype(np.float64)


def pre_activation(case, a, b, b_scale, bias):
    """In float64, where sums of integers of 8 bits are exact."""
    q, scale = quantized(a, case.attributes()["epsilon"])
    z = q @ (b.T if case.tb else b).astype(np.float64) / (scale * b_scale)
    return z if bias is None else z + wide(bias)


@remembered
def expected(case, seed):
    """What stock TensorFlow has in the dtype of a case, and float64."""
    *inputs, _ = tensors(case, seed)
    stock = reference.quantized_matmul_bias_act(*inputs, **case.attributes())
    z = tf.constant(pre_activation(case, *inputs))
    exact = reference.act(z, case.act, cases.ALPHA).numpy()
    assert_close("stock", stock, exact, case.dtype)
    return stock, exact


def fused(case, *inputs):
    return quantized_matmul_bias_act(*inputs, **case.attributes())


def check(case, seed=0):
    y = fused(case, *tensors(case, seed)[:4])
    assert y.dtype == case.dtype
    assert_as_exact("y", y, *expected(case, seed), case.dtype)


@pytest.mark.parametrize("case", cases.quantized_matmul_cases(), ids=str)
def test_forward(case, integer_isa):
    check(case)
    assert _library.isa() == integer_isa


@pytest.mark.parametrize("dtype", cases.QUANTIZED_DTYPES)
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, integer_isa):
    check(QuantizedOpCase(act=act, dtype=dtype, m=31, k=17, n=33))


@given(
    case=st.builds(
        QuantizedOpCase,
        lead=st.lists(st.integers(0, 3), max_size=3).map(tuple),
        m=st.integers(0, 70),
        k=st.integers(1, 300),
        n=st.integers(0, 140),
        tb=st.booleans(),
        bias=st.booleans(),
        act=st.sampled_from(cases.ACTIVATIONS),
        dtype=st.sampled_from(cases.QUANTIZED_DTYPES),
    ),
    seed=st.integers(0, 1000),
)
def test_random_shapes(case, seed):
    check(case, seed)


def rows_of_all_sizes(m, k):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(m, k)) * 10 ** rng.uniform(-9, 9, (m, 1))
    return a.astype(np.float32)


def next_to_ties(m, k):
    """Rows of numbers that are just about in the middle between two integers."""
    rng = np.random.default_rng(0)
    largest = rng.uniform(1, 2, (m, 1)) * 10.0 ** rng.integers(-3, 4, (m, 1))
    largest = largest.astype(np.float32)
    scale = quantized(largest, EPSILON)[1]
    middle = ((rng.integers(-127, 127, (m, k)) + 0.5) / scale).astype(np.float32)
    towards = rng.choice(np.array([-np.inf, np.inf], np.float32), (m, k))
    a = np.where(rng.uniform(size=(m, k)) < 0.4, middle, np.nextafter(middle, towards))
    a[:, :1] = largest
    return a


@pytest.mark.parametrize("dtype", cases.QUANTIZED_DTYPES)
@pytest.mark.parametrize("rows", [rows_of_all_sizes, next_to_ties])
def test_integers(rows, dtype, integer_isa):
    """Every one is that of stock TensorFlow: weights of a diagonal show them."""
    a = rows(1003, 37)
    if dtype == "float16":
        # As large as results have to be for as many digits as there are integers.
        a = a[(np.abs(a).max(1) > 0.1) & (np.abs(a).max(1) < 6e4)]
    a = tf.cast(a, dtype)
    q, a_scale = quantized(a, EPSILON)
    y = quantized_matmul_bias_act(a, 16 * np.eye(37, dtype=np.int8), np.full(37, 16.0))
    np.testing.assert_array_equal(np.rint(wide(y) * a_scale), q)
    x = tf.cast(a, tf.float32)
    theirs = tf.round(x * (127 / (tf.reduce_max(tf.abs(x), -1, keepdims=True) + EPSILON)))
    np.testing.assert_array_equal(theirs, q)
    assert np.abs(q).max() == 127 and len(np.unique(q)) > 250


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize(
    "shape",
    # Up to 16 rows have a way of their own.
    [
        *((1, 515, 700), (2, 258, 130), (3, 3001, 331), (5, 1, 257), (16, 31, 64)),
        *((17, 1023, 129), (29, 63, 15), (64, 257, 65)),
    ],
    ids=str,
)
def test_as_the_reference_in_units(shape, tb, integer_isa):
    """Each number alone, the sums being the same: a few operations of float32 follow."""
    m, k, n = shape
    case = QuantizedOpCase(m=m, k=k, n=n, tb=tb, bias=False)
    *inputs, _ = tensors(case)
    inputs[0] = tf.constant(rows_of_all_sizes(m, k))
    stock = reference.quantized_matmul_bias_act(*inputs, **case.attributes())
    np.testing.assert_allclose(fused(case, *inputs), stock, rtol=4 * UNIT["float32"], atol=0)


def exact_problem(m, k, n, dtype):
    """Rows and scales with which nothing but sums beyond 2^24 and the result is rounded; and it."""
    rng = np.random.default_rng(0)
    row_size, b_scale = 2.0 ** rng.integers(-3, 8, (m, 1)), 2.0 ** rng.integers(9, 14, n)
    # Ties are among the multiples of 1/2.
    x = rng.integers(-252, 253, (m, k)) / 2
    x[np.arange(m), rng.integers(0, k, m)] = 127 * rng.choice([-1, 1], m)
    b = rng.integers(-128, 128, (k, n))
    sums = np.rint(x) @ b.astype(np.float64)
    y = sums.astype(np.float32) * (row_size / b_scale).astype(np.float32)
    return tf.cast(x * row_size, dtype), b, b_scale, tf.cast(y, dtype)


@pytest.mark.parametrize("dtype", cases.QUANTIZED_DTYPES)
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (14, 130, 33), (30, 65, 300), (600, 127, 65), (3, 3001, 1101), (2, 9001, 70)],
    ids=str,
)
def test_exact(shape, tb, dtype, integer_isa):
    a, b, b_scale, y = exact_problem(*shape, dtype)
    found = quantized_matmul_bias_act(
        a, (b.T if tb else b).astype(np.int8), b_scale, transpose_b=tb
    )
    np.testing.assert_array_equal(found, y)


@pytest.mark.parametrize("dtype", cases.QUANTIZED_DTYPES)
def test_ties_go_to_the_even_integer(dtype, integer_isa):
    row = [0.5, 1.5, 2.5, 3.5, 62.5, 63.5, 125.5, 126.5, 127]
    even = [0, 2, 2, 4, 62, 64, 126, 126, 127]
    a = tf.constant([row, [-x for x in row]], dtype)
    y = quantized_matmul_bias_act(a, np.eye(9, dtype=np.int8), np.ones(9))
    np.testing.assert_array_equal(y, tf.constant([even, [-x for x in even]], dtype))


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize(("sign", "weight"), [(1, -128), (-1, -128), (1, 127), (-1, 127)])
def test_largest_sums(sign, weight, tb, integer_isa):
    """As many and as large as the op takes: they just fit into 32 bits."""
    depth = 2**17
    a = sign * np.full((3, depth), 127.0, np.float32)
    b = np.full((5, depth) if tb else (depth, 5), weight, np.int8)
    y = quantized_matmul_bias_act(a, b, np.full(5, 128.0), transpose_b=tb)
    np.testing.assert_array_equal(y, np.full((3, 5), sign * 127 * weight * 2.0**10, np.float32))


def test_sums_that_might_not_fit():
    a, b = np.ones((1, 2**17 + 1), np.float32), np.ones((2**17 + 1, 2), np.int8)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a must have an inner dimension"):
        quantized_matmul_bias_act(a, b, np.ones(2))


PROGRAM = """
import hashlib
import sys
import numpy as np
from tf_fused_ops import _library, quantized_matmul_bias_act

rng = np.random.default_rng(0)
shapes = (3, 3001, 1101), (28, 1027, 4200), (70, 605, 333), (600, 130, 65), (2051, 5, 1536)
for rows, depth, columns in shapes:
    a = rng.normal(size=(rows, depth)).astype(np.float32)
    b = rng.integers(-128, 128, (depth, columns), np.int8)
    scale = rng.uniform(50, 200, columns).astype(np.float32)
    for transpose in (False, True):
        weights = np.ascontiguousarray(b.T) if transpose else b
        for isa in sys.argv[1:]:
            _library.set_isa(isa)
            y = quantized_matmul_bias_act(a, weights, scale, transpose_b=transpose)
            assert _library.isa() == isa
            print(hashlib.sha256(np.asarray(y).tobytes()).hexdigest(), end=" ")
    print()
"""


def test_bitwise_equal_for_any_number_of_threads_and_instructions(run_python):
    first, *others = (run_python(PROGRAM, *INTEGER_ISAS, threads=threads) for threads in (1, 2, 3))
    lines = [line.split() for line in first.splitlines()]
    assert [len(line) for line in lines] == [2 * len(INTEGER_ISAS)] * 5
    assert all(len(set(line)) == 1 for line in lines), first
    assert len(set(first.split())) == 5
    for other in others:
        assert other == first


@pytest.mark.parametrize("dtype", cases.QUANTIZED_DTYPES)
def test_special_rows(dtype, integer_isa):
    """Of zeros, and with numbers that make the others nothing; none changes the rows around."""
    case = QuantizedOpCase(m=17, k=37, n=35, dtype=dtype)
    a, *inputs, _ = tensors(case)
    clean, a = wide(fused(case, a, *inputs)), wide(a)
    a[2], a[5, 3], a[8, 36] = 0, -3e4, 6e4
    a[8, 0] = -6e4
    y, stock = (
        wide(function(tf.cast(a, dtype), *inputs, **case.attributes()))
        for function in (quantized_matmul_bias_act, reference.quantized_matmul_bias_act)
    )
    rows = np.setdiff1d(np.arange(17), [2, 5, 8])
    np.testing.assert_array_equal(y[rows], clean[rows])
    np.testing.assert_array_equal(y[2], wide(inputs[2]))
    np.testing.assert_allclose(y, stock, rtol=4 * UNIT[dtype], atol=1e-4)
    single = wide(tf.cast(a[5, 3], dtype)) * wide(inputs[0])[3] / inputs[1] + wide(inputs[2])
    np.testing.assert_allclose(y[5], single, rtol=4 * UNIT[dtype], atol=4 * UNIT[dtype])


@pytest.mark.parametrize("act", ["none", "relu"])
@pytest.mark.parametrize("dtype", cases.QUANTIZED_DTYPES)
def test_rows_that_are_not_finite(dtype, act, integer_isa):
    """Their results are NaN, also where relu follows; those of other rows are as they were."""
    case = QuantizedOpCase(m=31, k=37, n=35, dtype=dtype, act=act)
    a, *inputs, _ = tensors(case)
    clean, a = wide(fused(case, a, *inputs)), wide(a)
    a[1, 3], a[4, 36], a[13, 0], a[22, 1:3], a[30, :] = np.nan, np.inf, -np.inf, np.inf, np.inf
    a[17, 5:7] = np.nan, -np.inf
    y = wide(fused(case, tf.cast(a, dtype), *inputs))
    wrong = [1, 4, 13, 17, 22, 30]
    rows = np.setdiff1d(np.arange(31), wrong)
    np.testing.assert_array_equal(y[rows], clean[rows])
    assert [row for row in wrong if not np.isnan(y[row]).all()] == []


def test_largest_numbers(integer_isa):
    """Results that float32 has are finite, as in the reference."""
    case = QuantizedOpCase(m=3, k=5, n=35, bias=False)
    a, *inputs, _ = tensors(case)
    a = a.numpy() * np.array([[1], [1e37], [1e-30]], np.float32)
    y = fused(case, a, *inputs)
    stock = reference.quantized_matmul_bias_act(tf.constant(a), *inputs, **case.attributes())
    assert np.isfinite(stock).all()
    np.testing.assert_allclose(y, stock, rtol=4 * UNIT["float32"])
