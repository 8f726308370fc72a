"""Inputs on which all peers must agree, whatever the order of their sums.

All values are multiples of a power of two, few enough for float32 to add their products exactly,
and no pre-activation is zero: a rectifier lets the same elements pass for every peer. All but a
bias of batch norm's are exact in bfloat16.
"""

import functools

import numpy as np

from tf_fused_ops.bench.cases import (
    BatchNormCase,
    DecoderCase,
    QuantizedCase,
    RecurrentCase,
    RuleCase,
    WeightOnlyCase,
)

_VALUES = 2.0**-3
_FILTERS = 2.0**-8
_BIAS = 2.0**-12


def _round(values, step):
    return np.round(values / step) * step


def _odd(values):
    """Small odd multiples of half a product's unit, so that no sum with products is zero."""
    return (2 * np.clip(np.round(values * 32), -63, 63) + 1) * _BIAS


@functools.lru_cache(maxsize=1)
def inputs(case):
    """The inputs of a case, in the order of `case.inputs`, without those that it lacks.

    Args:
        case: A `ConvCase`, `MatMulCase` or `BatchNormCase`; the inputs of a `RuleCase`,
            `RecurrentCase` or `DecoderCase` are taken as they are. Rows to quantize are of zeros
            and ones, which every way to do so keeps.

    Returns:
        A list of float64 arrays, the output's gradient dy last.
    """
    if isinstance(case, (RuleCase, RecurrentCase, DecoderCase)):
        return list(case.inputs())
    if isinstance(case, QuantizedCase):
        a, *others = case.inputs()
        return [np.where(a > 0, 1.0, 0.0), *others]
    if isinstance(case, WeightOnlyCase):
        a, *others = case.inputs()
        return [_round(a, _VALUES), *others]
    if isinstance(case, BatchNormCase):
        x, scale, offset, _, _, side, dy = case.inputs()
        steps = [(x, _VALUES), (scale, _VALUES), (offset, _VALUES), (side, _VALUES), (dy, _VALUES)]
        return [_round(value, step) for value, step in steps if value is not None]
    x, filters, bias, side, dy = case.inputs()
    values = [_round(x, _VALUES), _round(filters, _FILTERS)]
    if bias is not None:
        values.append(_odd(bias))
    if side is not None:
        values.append(_round(side, _VALUES))
    return [*values, _round(dy, _VALUES)]


def dtypes(case):
    """The dtype of each of the inputs: batch norm's vectors are float32 where x has 16 bits."""
    if isinstance(case, QuantizedCase):
        return [case.dtype, "int8", "float32", *[case.dtype] * case.bias, case.dtype]
    if isinstance(case, WeightOnlyCase):
        groups = ["int8", "int32"] * (case.bits == 4)
        return [case.dtype, "int8", "float32", *groups, *[case.dtype] * case.bias, case.dtype]
    count = len(inputs(case))
    if isinstance(case, BatchNormCase) and case.dtype in ("float16", "bfloat16"):
        return [case.dtype, "float32", "float32", *[case.dtype] * (count - 3)]
    return [case.dtype] * count
