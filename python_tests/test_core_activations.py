"""Value and slope of every activation over its whole range: alone, in epilogue and prologue."""

import math

import ml_dtypes
import numpy as np
import pytest

from tf_fused_ops import _core

erfc = np.vectorize(math.erfc, otypes=[float])
ALPHA = 0.3
C = math.sqrt(2 / math.pi)
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


def _sigmoid(z):
    return np.exp(-np.logaddexp(0, -z))


def _mish_slope(z):
    t = np.tanh(np.logaddexp(0, z))
    return t + z * (1 - t * t) * _sigmoid(z)


def _gelu_tanh_slope(z):
    u = 2 * C * (z + 0.044715 * z**3)
    return _sigmoid(u) + z * _sigmoid(u) * _sigmoid(-u) * 2 * C * (1 + 3 * 0.044715 * z**2)


# name -> value, slope, in float64
REFERENCE = {
    "none": (lambda z: z, np.ones_like),
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0) * 1.0),
    "relu6": (lambda z: np.clip(z, 0, 6), lambda z: ((z > 0) & (z < 6)) * 1.0),
    "elu": (lambda z: np.where(z < 0, np.expm1(z), z), lambda z: np.exp(np.minimum(z, 0))),
    "selu": (
        lambda z: SELU_SCALE * np.where(z < 0, SELU_ALPHA * np.expm1(z), z),
        lambda z: SELU_SCALE * np.where(z < 0, SELU_ALPHA * np.exp(np.minimum(z, 0)), 1),
    ),
    "leaky_relu": (
        lambda z: np.where(z > 0, z, ALPHA * z),
        lambda z: np.where(z > 0, 1.0, ALPHA),
    ),
    "sigmoid": (_sigmoid, lambda z: _sigmoid(z) * _sigmoid(-z)),
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "softplus": (lambda z: np.logaddexp(0, z), _sigmoid),
    "hard_sigmoid": (
        lambda z: np.clip(z + 3, 0, 6) / 6,
        lambda z: ((z > -3) & (z < 3)) / 6,
    ),
    "silu": (
        lambda z: z * _sigmoid(z),
        lambda z: _sigmoid(z) * (1 + z * _sigmoid(-z)),
    ),
    "hard_swish": (
        lambda z: z * np.clip(z + 3, 0, 6) / 6,
        lambda z: np.where(z <= -3, 0, np.where(z >= 3, 1, (2 * z + 3) / 6)),
    ),
    "mish": (lambda z: z * np.tanh(np.logaddexp(0, z)), _mish_slope),
    "gelu_tanh": (
        lambda z: z * _sigmoid(2 * C * (z + 0.044715 * z**3)),
        _gelu_tanh_slope,
    ),
    "gelu_erf": (
        lambda z: 0.5 * z * erfc(-z / math.sqrt(2)),
        lambda z: 0.5 * erfc(-z / math.sqrt(2)) + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi),
    ),
}


def _arguments(dtype):
    dense = np.linspace(-12, 12, 20001)
    small = np.geomspace(1e-12, 1, 500)
    large = np.geomspace(12, 1e4, 500)
    return np.concatenate([dense, small, -small, large, -large, [0.0, -3, 3, 6]]).astype(dtype)


def _alone(name, z, dtype):
    """Value and slope by the elementwise kernels."""
    y = _core.act_forward(z, activation=name, alpha=ALPHA)
    saved = y if name in SLOPE_FROM_VALUE else z
    return y, _core.act_gradient(np.ones_like(z), saved, activation=name, alpha=ALPHA)


def _around_product(name, z, dtype):
    """Value and slope through a product with one, which leaves z as it is."""
    one = np.ones((1, 1, 1, 1), dtype)
    shape = _core.ConvShape.matmul(1, z.size, 1, 1)
    x = z.reshape(1, 1, -1, 1)
    y, pre = _core.conv_forward(shape, x, one, activation=name, alpha=ALPHA)
    saved = {"none": None}.get(name, y if name in SLOPE_FROM_VALUE else pre)
    dz = _core.conv_gradient(shape, np.ones_like(x), x, one, saved, activation=name, alpha=ALPHA)[3]
    return y.ravel(), dz.ravel()


SLOPE_FROM_VALUE = {"relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh"}


@pytest.fixture(params=[_alone, _around_product])
def apply(request):
    """A function of an activation's name, its argument and their dtype: value and slope."""
    return request.param


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", REFERENCE)
def test_value_and_slope(name, dtype, apply, core_isa):
    z = _arguments(dtype)
    y, slope = apply(name, z, dtype)
    value, derivative = REFERENCE[name]
    z = z.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        expected_y, expected_slope = value(z), derivative(z)
    eps = np.finfo(dtype).eps
    # A few roundings: of the value, and of the terms of order one that it is a difference of.
    np.testing.assert_allclose(y, expected_y, rtol=6 * eps, atol=4 * eps)
    # The slope of an activation that is kept as y carries y's rounding, and gelu's grows with |z|.
    np.testing.assert_allclose(slope, expected_slope, rtol=8 * eps, atol=16 * eps)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", REFERENCE)
def test_every_16_bit_number(name, dtype, apply, core_isa):
    bits, infinity = np.arange(2**16, dtype=np.uint16), np.array(np.inf, dtype).view(np.uint16)
    z = bits[bits & infinity != infinity].view(dtype)
    magnitude = np.abs(z.astype(np.float64))
    z = z[(magnitude == 0) | (magnitude >= ml_dtypes.finfo(dtype).tiny)]
    y, slope = (v.astype(np.float64) for v in apply(name, z, dtype))
    value, derivative = REFERENCE[name]
    z = z.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        expected_y, expected_slope = value(z), derivative(z)
        rounded = expected_y.astype(dtype).astype(np.float64)
    expected_y = np.where(np.isfinite(rounded), expected_y, rounded)
    # Half a unit for the rounding, and what functions of 14 digits add to it.
    half_unit, more = float(ml_dtypes.finfo(dtype).eps) / 2, 2.0**-13
    # e^z is cut off at 1e-38, which as much as 1000 multiplies.
    tiny = max(float(ml_dtypes.finfo(dtype).smallest_subnormal), 2e-35)
    np.testing.assert_allclose(y, expected_y, rtol=half_unit + more, atol=tiny)
    # The slope of an activation that is kept as y carries y's rounding.
    kept = 2 * half_unit if name in SLOPE_FROM_VALUE else 0
    np.testing.assert_allclose(slope, expected_slope, rtol=half_unit + more, atol=kept + 2 * more)


@pytest.mark.parametrize("name", REFERENCE)
def test_nan_and_infinity(name, apply):
    z = np.array([np.nan, np.inf], np.float32)
    y, _ = apply(name, z, np.float32)
    assert np.isnan(y[0])
    assert y[1] == (
        1 if name in ("sigmoid", "tanh", "hard_sigmoid") else 6 if name == "relu6" else np.inf
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "name", ["softplus", "silu", "hard_swish", "mish", "gelu_tanh", "gelu_erf"]
)
def test_huge_arguments(name, dtype, apply, core_isa):
    huge = np.array([1e5, 1e15, 1e30, np.finfo(dtype).max, np.inf], dtype)
    y, slope = apply(name, np.concatenate([huge, -huge]), dtype)
    np.testing.assert_array_equal(y[:5], huge)
    np.testing.assert_array_equal(slope[:5], 1)
    np.testing.assert_allclose([*y[5:], *slope[5:]], 0, atol=1e-30)
