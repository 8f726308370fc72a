"""Which instruction set an op takes where AMX has to cut numbers into parts first."""

import launchers
import numpy as np
import pytest
import tensorflow as tf
from cases import ConvCase

import tf_fused_ops as tfo
from tf_fused_ops import _core, _library

pytestmark = pytest.mark.skipif(
    _library.isa() != "amx",
    reason="no AMX, or TF_FUSED_OPS_ISA names another",
)

# in_c, out_c, kernel, strides: whether output, filter gradient and input gradient are computed with
# AMX; None: neither instruction set cuts anything for it.
CHOICES = [
    ((64, 128, 1, 1), (True, False, False)),
    ((64, 256, 1, 1), (True, True, True)),
    ((128, 512, 1, 1), (True, True, True)),
    ((256, 64, 1, 1), (False, True, True)),
    ((64, 32, 1, 1), (False, False, False)),
    ((32, 32, 3, 1), (True, True, True)),
    ((32, 16, 3, 2), (False, False, False)),
    ((4, 64, 7, 1), (True, False, None)),
    ((3, 64, 7, 2), (True, False, True)),
    ((2, 64, 3, 2), (True, False, False)),
    ((64, 128, 3, 2), (True, False, True)),
]


def _computed(case, x, filters, dy, isa):
    best = _core.isa()
    _core.set_isa(isa)
    shape = launchers.conv_problem(_core, case).shape
    y, _ = _core.conv_forward(shape, x, filters, save_pre_activation=False)
    dx, dw, *_ = _core.conv_gradient(shape, dy, x, filters)
    _core.set_isa(best)
    return y, dw, dx


@pytest.mark.parametrize(("sizes", "expected"), CHOICES, ids=str)
def test_numbers_that_meet_few_others_are_not_cut(sizes, expected):
    in_c, out_c, kernel, stride = sizes
    case = ConvCase(2, (12, 10), in_c, out_c, (kernel, kernel), (stride, stride))
    random = np.random.default_rng(0)
    x, filters, dy = (
        random.normal(size=size).astype("float32")
        for size in (
            (2, 12, 10, in_c),
            (kernel, kernel, in_c, out_c),
            (2, *case.output_image(), out_c),
        )
    )
    image, w = tf.constant(x), tf.constant(filters)
    with tf.GradientTape() as tape:
        tape.watch([w, image])
        y = tfo.conv2d_bias_act(image, w, np.zeros(out_c, "float32"), stride, activation="none")
    actual = y, *tape.gradient(y, [w, image], dy)
    by_isa = {isa: _computed(case, x, filters, dy, isa) for isa in ("amx", "avx512")}
    for i, with_amx in enumerate(expected):
        if with_amx is None:
            np.testing.assert_array_equal(actual[i], by_isa["amx"][i])
            np.testing.assert_array_equal(actual[i], by_isa["avx512"][i])
            continue
        assert np.array_equal(actual[i], by_isa["amx"][i]) == with_amx
        assert np.array_equal(actual[i], by_isa["avx512"][i]) != with_amx
