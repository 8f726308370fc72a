"""Stores past the caches, of outputs larger than those: not a bit is another."""

import numpy as np
import pytest
from test_core_conv import DTYPES, Case

from tf_fused_ops import _core


@pytest.fixture
def streamed():
    """All outputs are stored past the caches, where they are aligned."""
    yield lambda: _core.set_streamed_bytes(1)
    _core.set_streamed_bytes(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_c", [64, 128, 216])
def test_images(out_c, dtype, core_isa, streamed):
    case = Case((2, (9, 7), 20, out_c, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)), dtype)
    operands = (case.shape(), case.input, case.filters, case.bias)

    def results():
        for activation in ("none", "relu", "gelu_tanh"):
            yield from _core.conv_forward(*operands, case.side, activation=activation)
            yield from _core.conv_moments(*operands, activation=activation)

    cached = list(results())
    streamed()
    for a, b in zip(cached, results(), strict=True):
        assert b.ndim == 2 or b.ctypes.data % 64 == 0, "an image that could not be streamed"
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_group", [24, 40])
def test_groups(of_group, dtype, core_isa, streamed):
    """Of which some begin at a line, and none ends at one."""
    case = Case((2, (9, 20), 120, 6 * of_group, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 6), dtype)
    operands = (case.shape(), case.input, case.filters, case.bias)
    options = {"activation": "relu", "num_threads": 2}
    cached = _core.conv_forward(*operands, **options)[0]
    streamed()
    y = _core.conv_forward(*operands, **options)[0]
    assert y.ctypes.data % 64 == 0, "an image that could not be streamed"
    np.testing.assert_array_equal(y, cached)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [24, 40, 64])
@pytest.mark.parametrize(("size", "depthwise"), [((9, 20), True), ((9, 21), False)])
def test_every_other_pixel(size, depthwise, channels, dtype, core_isa, streamed):
    """Which input gradients with strides are written to, and of which not each begins a line."""
    groups = channels if depthwise else 1
    case = Case((2, size, channels, channels, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), groups), dtype)
    operands = (case.shape(), case.input, case.filters)

    def results():
        yield _core.conv_forward(*operands, case.bias, activation="relu")[0]
        yield _core.conv_gradient(case.shape(), case.dy, case.input, case.filters)[0]

    cached = list(results())
    streamed()
    for a, b in zip(cached, results(), strict=True):
        assert b.ctypes.data % 64 == 0, "an image that could not be streamed"
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_c", [736, 800])
def test_filter_gradient(in_c, dtype, core_isa, streamed):
    case = Case((1, (1, 20), in_c, 736, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)), dtype)
    operands = (case.shape(), case.dy, case.input, case.filters)
    cached = _core.conv_gradient(*operands)[1]
    streamed()
    gradient = _core.conv_gradient(*operands)[1]
    assert gradient.ctypes.data % 64 == 0, "an array that could not be streamed"
    np.testing.assert_array_equal(gradient, cached)
