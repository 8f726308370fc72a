"""Products of numbers of any size, and of infinite ones, with every instruction set."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from tf_fused_ops import _core

# Sums of this many products, which are cut into parts, and a little more.
ROWS, DEPTH, COLUMNS = 70, 1100, 45
# The root mean square error of a sum of products, in those of its terms: a float32 is rounded to
# 2^-24 or better, and the terms' sum grows as their square root does.
FLOAT32 = 2.0**-24


def product(a, b, dtype="float32", **options):
    """a @ b as a dense layer, a 1x1 convolution."""
    shape = _core.ConvShape.matmul(1, *a.shape, b.shape[1])
    y, _ = _core.conv_forward(shape, *_operands(a, b, dtype), save_pre_activation=False, **options)
    return y.reshape(a.shape[0], -1)


def gradients(a, b, dz, dtype="float32"):
    shape = _core.ConvShape.matmul(1, *a.shape, b.shape[1])
    x, filters = _operands(a, b, dtype)
    dz = dz.astype(dtype).reshape(1, 1, *dz.shape)
    da, db, *_ = _core.conv_gradient(shape, dz, x, filters)
    return da.reshape(a.shape), db.reshape(b.shape)


def _operands(a, b, dtype):
    return (v.astype(dtype).reshape(1, 1, *v.shape) for v in (a, b))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def relative_error(actual, a, b):
    """The root mean square of what rounding adds to a @ b, beside that of its terms."""
    a, b = a.astype("float64"), b.astype("float64")
    terms = np.sqrt((a * a) @ (b * b))
    return np.sqrt(np.mean(((actual - a @ b) / terms) ** 2))


def test_sums_are_as_exact_as_those_of_multiply_adds(core_isa):
    a, b = normal(ROWS, DEPTH), normal(DEPTH, COLUMNS, seed=1)
    dz = normal(ROWS, COLUMNS, seed=2)
    da, db = gradients(a, b, dz)
    assert relative_error(product(a, b), a, b) < 6 * FLOAT32
    assert relative_error(da, dz, b.T) < 3 * FLOAT32
    assert relative_error(db, a.T, dz) < 3 * FLOAT32


def test_sums_of_one_sign_have_no_bias(core_isa):
    """A sum is rounded in every step, but all to one side it is not."""
    a, b = np.abs(normal(ROWS, DEPTH)), np.abs(normal(DEPTH, COLUMNS, seed=1))
    exact = a.astype("float64") @ b.astype("float64")
    error = (product(a, b) - exact) / exact
    assert np.abs(error).max() < 40 * FLOAT32
    assert abs(error.mean()) < 2 * FLOAT32


@pytest.mark.parametrize("exponent", [-90, -30, 30, 90, 127])
def test_numbers_may_be_of_any_size(exponent, core_isa):
    a, b = normal(ROWS, DEPTH), normal(DEPTH, COLUMNS, seed=1)
    largest = np.abs(a).max()
    a, b = (np.ldexp(a / largest, exponent), np.ldexp(b, -min(exponent, 96)))
    assert np.isfinite(a).all()
    assert relative_error(product(a, b), a, b) < 6 * FLOAT32


def test_the_largest_number_is_finite(core_isa):
    a, b = normal(ROWS, DEPTH), np.ldexp(normal(DEPTH, COLUMNS, seed=1), -100)
    a[5, 7] = np.finfo("float32").max
    a[6, 8] = -np.finfo("float32").max
    np.testing.assert_allclose(
        product(a, b)[5:7], a[5:7].astype("float64") @ b.astype("float64"), rtol=1e-4
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_infinite_numbers_and_none_reach_what_they_are_multiplied_with(dtype, core_isa):
    a, b = normal(ROWS, DEPTH), normal(DEPTH, COLUMNS, seed=1)
    dz = normal(ROWS, COLUMNS, seed=2)
    a[3, 5], a[7, 0], a[7, 33], a[9, DEPTH - 1] = np.inf, -np.inf, -np.inf, np.nan
    a[20, 11], b[11, 2], b[DEPTH - 1, 44] = 0, np.inf, -np.inf
    dz[40, 30], dz[69, 44] = np.inf, np.nan
    for actual, left, right in zip(
        (product(a, b, dtype), *gradients(a, b, dz, dtype)),
        (a, dz, a.T),
        (b, b.T, dz),
        strict=True,
    ):
        with np.errstate(invalid="ignore"):
            expected = left.astype(dtype).astype("float64") @ right.astype(dtype).astype("float64")
        actual = actual.astype("float64")
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        infinite = np.isinf(expected)
        np.testing.assert_array_equal(actual[infinite], expected[infinite])
        finite = np.isfinite(expected)
        tolerance = 1e-4 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(
            actual[finite], expected[finite], rtol=tolerance, atol=60 * tolerance
        )


def test_what_is_beside_infinite_numbers_stays_the_same(core_isa):
    """To the bit: other rows and columns are computed as ever."""
    a, b = normal(ROWS, DEPTH), normal(DEPTH, COLUMNS, seed=1)
    before = product(a, b)
    a[3, 5] = np.inf
    after = product(a, b)
    assert not np.isfinite(after[3]).any()
    np.testing.assert_array_equal(np.delete(after, 3, 0), np.delete(before, 3, 0))


@pytest.mark.parametrize("width", [16, 40])
@pytest.mark.parametrize("channels", [17, 48])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_infinite_numbers_stay_with_their_tap(dtype, channels, width, core_isa):
    """Rows of taps that fill no whole steps of a tile: what follows them adds nothing."""
    x = normal(1, 9, width, channels)
    filters = normal(3, 3, channels, 40, seed=1)
    # What follows the first and the second row of taps, and the last one.
    filters[1, 0, 1, 7], filters[2, 0, 0, 30] = np.inf, np.nan
    x[0, 3, 13, 0], x[0, 5, width - 7, 1] = -np.inf, np.nan
    x, filters = x.astype(dtype), filters.astype(dtype)
    shape = _core.ConvShape(
        batch=1,
        in_size=(9, width),
        in_c=channels,
        out_size=(7, width - 2),
        out_c=40,
        kernel=(3, 3),
    )
    y, _ = _core.conv_forward(shape, x, filters, save_pre_activation=False)
    windows = sliding_window_view(x.astype("float64"), (3, 3), axis=(1, 2))
    with np.errstate(invalid="ignore"):
        expected = np.einsum("nijcrs,rsck->nijk", windows, filters.astype("float64"))
    assert 0 < np.isfinite(expected).sum() < expected.size
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(y.astype("float64")), np.isinf(expected))
    finite = np.isfinite(expected)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(
        y[finite].astype("float64"), expected[finite], rtol=tolerance, atol=60 * tolerance
    )
