"""How exact the ops must be: one rule, one table.

The greatest error against a float64 reference is at most twice that of stock TensorFlow in the same
dtype, plus a few units in the last place of the greatest value, for the luck of rounding.
"""

import numpy as np

STOCK_FACTOR = 2
# What Winograd's algorithm adds to that, see docs/winograd.md.
WINOGRAD_FACTOR = 4
UNIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
# float64 is compared with stock TensorFlow's own float64, whose error nobody knows.
FLOOR_UNITS = {"float16": 1, "bfloat16": 1, "float32": 4, "float64": 64}


def error(value, reference):
    """The greatest absolute difference; 0 for an empty reference."""
    if np.size(reference) == 0:
        return 0.0
    return np.abs(np.asarray(value).astype(np.float64) - np.asarray(reference)).max()


def floor(reference, dtype, scale=0.0):
    """The error that is always allowed, for values at least as large as scale."""
    scale = np.abs(np.asarray(reference)).max(initial=scale)
    return FLOOR_UNITS[dtype] * UNIT[dtype] * scale


def assert_as_exact(name, fused, stock, reference, dtype, scale=0.0):
    """Asserts the rule for one output.

    Args:
        name: Names the output in the message.
        fused: The output of the fused op.
        stock: The same from stock TensorFlow in the same dtype.
        reference: The same in float64.
        dtype: The dtype's name.
        scale: How large a sum of such terms is in general, where this one may happen to cancel.
    """
    fused, reference = np.asarray(fused), np.asarray(reference)
    assert fused.shape == reference.shape, f"{name}: shape {fused.shape}, not {reference.shape}"
    allowed = STOCK_FACTOR * error(stock, reference) + floor(reference, dtype, scale)
    found = error(fused, reference)
    assert found <= allowed, f"{name}: error {found:.3g}, allowed {allowed:.3g}"


def assert_close(name, value, reference, dtype, units=16):
    """Asserts that two ways of computing the same in `dtype` agree."""
    allowed = units * UNIT[dtype] * max(1.0, np.abs(np.asarray(reference)).max(initial=0.0))
    found = error(value, np.asarray(reference).astype(np.float64))
    assert found <= allowed, f"{name}: difference {found:.3g}, allowed {allowed:.3g}"
