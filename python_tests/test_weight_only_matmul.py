"""Products with weights of 4 and 8 bits: numbers, on all instructions and threads; shapes."""

import itertools

import cases
import numpy as np
import pytest
import tensorflow as tf
from cases import WeightOnlyOpCase
from conftest import ISAS
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from tolerances import UNIT, assert_as_exact, assert_close

from tf_fused_ops import _library, weight_only_matmul_bias_act
from tf_fused_ops.ops import reference

DTYPES = cases.QUANTIZED_DTYPES
# Rows that read the integers themselves, and rows that meet the numbers that they stand for.
ROWS = (1, 2, 3, 5, 16, 17, 40, 100)


def tensors(case, seed=0):
    """Returns a, b, scale, zero, group, bias and dy as the op has them."""
    a, b, scale, zero, group, bias, dy = case.inputs(seed)
    wide = [None if v is None else v.astype(np.float32) for v in (scale, zero)]
    bias = None if bias is None else tf.cast(bias, case.dtype)
    return [tf.cast(a, case.dtype), b, *wide, group, bias, tf.cast(dy, case.dtype)]


def wide(value):
    return tf.cast(value, tf.float64).numpy()


def integers(case, b):
    """Returns what bytes hold, as int64 of the shape of the weights."""
    bits, axis = b.view(np.uint8).astype(np.int64), case.packed_axis
    if case.bits == 4:
        sizes = [case.n, case.k] if case.tb else [case.k, case.n]
        every = np.arange(sizes[axis])
        shift = (4 * (every % 2)).reshape((-1, 1) if axis == 0 else (1, -1))
        bits = bits.take(every // 2, axis) >> shift & 15
    half = 2 ** (case.bits - 1)
    return np.where(case.signed & (bits >= half), bits - 2 * half, bits)


def rows_of(case, value, group):
    """Returns scales or zeros, as float64 [k, n]: NumPy, too, counts backwards below zero."""
    value = value.astype(np.float64).T if case.tb else value.astype(np.float64)
    if group is None:
        group = np.arange(case.k) // max(1, -(-case.k // max(1, len(value))))
    return value[group]


def weights(case, b, scale, zero, group):
    """The numbers [k, n] in float64."""
    q = integers(case, b)
    q = q.T if case.tb else q
    return (q - (0 if zero is None else rows_of(case, zero, group))) * rows_of(case, scale, group)


def pre_activation(case, a, b, scale, zero, group, bias):
    z = wide(a) @ weights(case, b, scale, zero, group)
    return z if bias is None else z + wide(bias)


@remembered
def expected(case, seed):
    """What stock TensorFlow has in the dtype of a case, and float64."""
    *inputs, _ = tensors(case, seed)
    stock = reference.weight_only_matmul_bias_act(*inputs, **case.attributes())
    exact = reference.act(tf.constant(pre_activation(case, *inputs)), case.act, cases.ALPHA)
    assert_close("stock", stock, exact, case.dtype)
    return stock, exact.numpy()


def fused(case, *inputs):
    return weight_only_matmul_bias_act(*inputs, **case.attributes())


def check(case, seed=0):
    y = fused(case, *tensors(case, seed)[:-1])
    assert y.dtype == case.dtype
    stock, exact = expected(case, seed)
    assert_as_exact("y", y, stock, exact, case.dtype)
    assert_close("y", y, exact, case.dtype)


@pytest.mark.parametrize("case", cases.weight_only_cases(), ids=str)
def test_forward(case, isa):
    check(case)
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, isa):
    for m in (3, 31):
        check(WeightOnlyOpCase(m=m, k=17, n=33, act=act, dtype=dtype))


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("packed_axis", [0, 1])
@pytest.mark.parametrize("tb", [False, True])
def test_rows(tb, packed_axis, m, isa):
    """On both sides of where many begin, next to half a byte, with and without whole vectors."""
    for part, group in ((0, "none"), (16, "parts"), (7, "parts"), (16, "any")):
        check(WeightOnlyOpCase((), m, 49, 35, 4, packed_axis, True, tb, True, part, group))


@given(
    case=st.builds(
        WeightOnlyOpCase,
        lead=st.lists(st.integers(0, 3), max_size=2).map(tuple),
        m=st.integers(0, 40),
        k=st.integers(0, 150),
        n=st.integers(0, 140),
        bits=st.sampled_from([4, 8]),
        packed_axis=st.integers(0, 1),
        signed=st.booleans(),
        tb=st.booleans(),
        zero=st.booleans(),
        part=st.one_of(st.integers(0, 40), st.sampled_from([16, 32, 64])),
        group=st.sampled_from(["none", "parts", "any"]),
        bias=st.booleans(),
        act=st.sampled_from(cases.ACTIVATIONS),
        dtype=st.sampled_from(DTYPES),
    ),
    seed=st.integers(0, 1000),
)
def test_random_shapes(case, seed):
    check(case, seed)


@pytest.mark.parametrize("m", [1, 17])
@pytest.mark.parametrize("packed_axis", [0, 1])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_integer(bits, signed, tb, packed_axis, m, isa):
    """Exactly: rows of the unit matrix show them, scales and zeros being powers of two."""
    case = WeightOnlyOpCase((), 256, 256, 3, bits, packed_axis, signed, tb, part=32, bias=False)
    _, b, scale, _, group, *_ = tensors(case)
    scale = np.exp2(np.rint(np.log2(scale)))
    zero = np.random.default_rng(0).integers(-8, 8, scale.shape).astype(np.float32)
    w = weights(case, b, scale, zero, group)
    for i in range(0, 256, m):
        y = fused(case, np.eye(256, dtype=np.float32)[i : i + m], b, scale, zero, group, None)
        np.testing.assert_array_equal(y, w[i : i + m])
    low = -(2 ** (bits - 1)) if signed else 0
    assert set(integers(case, b).flat) == set(range(low, low + 2**bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tb", [False, True])
def test_exact_sums(tb, bits, dtype, isa):
    """Of integers that no dtype rounds: not one is left out, nor what is next to the last."""
    rng = np.random.default_rng(0)
    for m, packed_axis in itertools.product(ROWS, (0, 1)):
        case = WeightOnlyOpCase((), m, 37, 67, bits, packed_axis, True, tb, part=16, group="parts")
        _, b, scale, zero, group, *_ = tensors(case)
        a = np.eye(37)[rng.integers(0, 37, m)] + 2 * np.eye(37)[rng.integers(0, 37, m)]
        scale, zero = np.ones_like(scale), np.rint(zero)
        inputs = [tf.cast(a, dtype), b, scale, zero, group, tf.ones(67, dtype)]
        np.testing.assert_array_equal(
            wide(fused(case, *inputs)), wide(tf.cast(pre_activation(case, *inputs), dtype))
        )


@pytest.mark.parametrize("packed_axis", [0, 1])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("m", [2, 17])
def test_what_the_unused_half_of_a_byte_has(m, tb, packed_axis, isa):
    """Changes nothing."""
    case = WeightOnlyOpCase(m=m, k=33, n=35, tb=tb, packed_axis=packed_axis)
    a, b, *rest, _ = tensors(case)
    found = []
    for upper in (0x00, 0x70, 0xF0):
        last = (slice(None),) * packed_axis + (-1,)
        bits = b.copy().view(np.uint8)
        bits[last] = bits[last] & 15 | upper
        found.append(fused(case, a, bits.view(np.int8), *rest).numpy())
    np.testing.assert_array_equal(found[1:], found[:1] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("m", [3, 17])
def test_scale_as_a_vector(m, tb, dtype, isa):
    case = WeightOnlyOpCase(m=m, k=37, n=35, tb=tb, dtype=dtype)
    a, b, scale, zero, _, bias, _ = tensors(case)
    vectors = [v.reshape(-1) for v in (scale, zero)]
    y = fused(case, a, b, scale, zero, None, bias)
    np.testing.assert_array_equal(fused(case, a, b, *vectors, None, bias), y)
    np.testing.assert_array_equal(fused(case, a, b, *vectors, np.zeros(37, int), bias), y)


@pytest.mark.parametrize("axes", [(0, -2), (1, -1)], ids=str)
def test_axes_count_backwards(axes):
    case = WeightOnlyOpCase(k=6, n=6, packed_axis=axes[0])
    *inputs, _ = tensors(case)
    backwards = case.attributes() | {"packed_axis": axes[1]}
    y = weight_only_matmul_bias_act(*inputs, **backwards)
    np.testing.assert_array_equal(y, fused(case, *inputs))


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("m", [3, 17])
def test_more_groups_than_rows(m, tb, isa):
    """Of which some are not used, and may have any numbers."""
    case = WeightOnlyOpCase(m=m, k=3, n=5, part=1, tb=tb)
    a, b, scale, zero, _, bias, _ = tensors(case)
    spare = ((0, 0), (0, 2)) if tb else ((0, 2), (0, 0))
    more = [np.pad(v, spare, constant_values=np.nan) for v in (scale, zero)]
    y = fused(case, a, b, scale, zero, None, bias)
    np.testing.assert_array_equal(fused(case, a, b, *more, None, bias), y)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0, 0, 0), (2, 0, 4), (20, 0, 4)], ids=str)
@pytest.mark.parametrize("lead", [(), (0,), (2,)], ids=str)
@pytest.mark.parametrize("tb", [False, True])
def test_empty(tb, lead, shape, isa):
    """Sums of nothing are zero, also where there is no group."""
    m, k, n = shape
    case = WeightOnlyOpCase(lead, m, k, n, tb=tb, part=2, act="silu")
    check(case)
    if k > 0:
        return
    a, b, _, _, _, bias, _ = tensors(case)
    none = np.zeros((n, 0) if tb else (0, n), np.float32)
    for group in (None, np.zeros(0, np.int32)):
        y = fused(case, a, b, none, none, group, bias)
        assert_as_exact("y", y, *expected(case, 0), case.dtype)


@pytest.mark.parametrize("shape", [(2**40, 0), (2**33, 0, 0), (0, 2**20, 0)], ids=str)
def test_huge_but_empty(shape):
    b, scale = np.zeros((0, 0), np.int8), np.zeros((1, 0))
    assert weight_only_matmul_bias_act(tf.zeros(shape), b, scale).shape == shape


PROGRAM = """
import hashlib
import sys
import numpy as np
import tensorflow as tf
from tf_fused_ops import _library, weight_only_matmul_bias_act

rng = np.random.default_rng(0)
shapes = (1, 3001, 555), (16, 605, 333), (17, 1027, 1100), (70, 131, 333), (1030, 67, 301)
for rows, depth, columns in shapes:
    for i in range(8):
        transpose, bits, axis = bool(i & 1), 4 << (i >> 1 & 1), i >> 2
        sizes = [columns, depth] if transpose else [depth, columns]
        if bits == 4:
            sizes[axis] = (sizes[axis] + 1) // 2
        b = rng.integers(-128, 128, sizes, np.int8)
        group = np.arange(depth, dtype=np.int32) // 32
        groups = group[-1] + 1
        numbers = rng.uniform(0.01, 0.02, (2, columns, groups)).astype(np.float32)
        scale, zero = numbers if transpose else numbers.swapaxes(1, 2)
        a = rng.normal(size=(rows, depth))
        for isa in sys.argv[1:]:
            _library.set_isa(isa)
            for dtype in ("float32", "bfloat16") if i % 3 == 0 else ("float32",):
                found = set()
                for _ in range(2):
                    y = weight_only_matmul_bias_act(
                        tf.cast(a, dtype), b, scale, zero, group, None, "gelu",
                        transpose_b=transpose, bits=bits, packed_axis=axis,
                    )
                    found.add(hashlib.sha256(np.asarray(y).tobytes()).hexdigest())
                print(_library.isa(), *found)
"""


def test_bitwise_equal_for_any_number_of_threads_and_from_run_to_run(run_python):
    first, *others = (run_python(PROGRAM, *ISAS, threads=threads) for threads in (1, 2, 3))
    lines = [line.split() for line in first.splitlines()]
    assert len(lines) == len(ISAS) * (8 + 3) * 5 and {line[0] for line in lines} == set(ISAS)
    assert all(len(line) == 2 for line in lines), first
    for other in others:
        assert other == first


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [16, 31])
def test_rows_that_are_not_finite(m, dtype, tb, zero, isa):
    """Nor are their results; those of other rows are as they were."""
    case = WeightOnlyOpCase(m=m, k=37, n=35, dtype=dtype, tb=tb, zero=zero)
    a, *inputs, _ = tensors(case)
    clean, a = wide(fused(case, a, *inputs)), wide(a)
    a[1, 3], a[4, 36], a[13, 0], a[15, :] = np.nan, np.inf, -np.inf, np.inf
    a[9, 5:7] = np.nan, -np.inf
    y = wide(fused(case, tf.cast(a, dtype), *inputs))
    wrong = [1, 4, 9, 13, 15]
    rows = np.setdiff1d(np.arange(m), wrong)
    np.testing.assert_array_equal(y[rows], clean[rows])
    assert [row for row in wrong if np.isfinite(y[row]).any()] == []
    assert np.isnan(y[[1, 9]]).all()


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("m", [3, 31])
def test_an_infinite_number(m, tb, isa):
    """Has the results of the stock ops, where nothing is taken from the integers."""
    case = WeightOnlyOpCase(m=m, k=37, n=35, tb=tb, zero=False)
    a, *inputs, _ = tensors(case)
    a = a.numpy()
    a[0, 5], a[2, 36] = np.inf, -np.inf
    stock = reference.weight_only_matmul_bias_act(tf.constant(a), *inputs, **case.attributes())
    y = fused(case, a, *inputs).numpy()
    np.testing.assert_array_equal(y[[0, 2]], stock.numpy()[[0, 2]])
    assert np.isinf(y[0]).any()


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("name", ["scale", "zero", "bias"])
@pytest.mark.parametrize("m", [3, 31])
def test_columns_that_are_not_finite(m, name, tb, isa):
    """Change no others."""
    case = WeightOnlyOpCase(m=m, k=37, n=67, tb=tb, part=16, group="parts")
    inputs = dict(zip(("a", "b", "scale", "zero", "group", "bias"), tensors(case), strict=False))
    clean = fused(case, *inputs.values()).numpy()
    values = inputs[name] = np.array(inputs[name])
    (values.T if tb else values)[..., [0, 34, 66]] = np.nan
    y = fused(case, *inputs.values()).numpy()
    others = np.setdiff1d(np.arange(67), [0, 34, 66])
    np.testing.assert_array_equal(y[:, others], clean[:, others])
    assert np.isnan(y[:, [0, 34, 66]]).all()


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("m", [3, 31])
def test_large_numbers(m, tb, zero, isa):
    """Results that float32 has are finite, as in the reference."""
    case = WeightOnlyOpCase(m=m, k=5, n=35, tb=tb, zero=zero, bits=8, bias=False)
    a, *inputs, _ = tensors(case)
    a = a.numpy() * np.resize([1, 1e33, 1e-30], (m, 1)).astype(np.float32)
    y = fused(case, a, *inputs)
    stock = reference.weight_only_matmul_bias_act(tf.constant(a), *inputs, **case.attributes())
    assert np.isfinite(stock).all()
    size = np.abs(stock).max(1, keepdims=True)
    np.testing.assert_allclose(y / size, stock / size, rtol=0, atol=16 * UNIT["float32"])
