"""The numbers that float attributes of ops, which have the digits of float32, stand for.

Ops on float64 need more. The kernels read `epsilon` and `momentum` in the same way.
"""

import numpy as np


def as_written(value):
    """Returns the number that a float attribute was written as.

    Args:
        value: The attribute, 0.0010000000474974513 say.

    Returns:
        The number of six digits that rounds to it, 0.001 say, or the value where there is none.
    """
    written = float(f"{value:.6g}")
    return written if np.float32(written) == np.float32(value) else value


def survives(value):
    """Returns whether a number that becomes a float attribute is read as the same number."""
    with np.errstate(over="ignore"):
        return as_written(float(np.float32(value))) == value
