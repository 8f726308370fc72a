"""Convolutions by Winograd's algorithm: numbers, and where it runs."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from cases import DTYPES, PAIRED_ISAS
from memo import remembered
from remapping import values
from test_core_conv import TOLERANCE as DIRECT
from test_core_conv import Case
from tolerances import WINOGRAD_FACTOR, assert_close

import tf_fused_ops as tfo
from tf_fused_ops import _core
from tf_fused_ops._library import ops

TOLERANCE = {name: WINOGRAD_FACTOR * tolerance for name, tolerance in DIRECT.items()}
# batch, in_size, in_c, out_c, pads (top, left, bottom, right): few and many tiles, parts of tiles
# at the edges, vectors and panels, several groups of panels, filters that are transformed late,
# filter gradients of several slices of the tiles, and of several bands in one.
CASES = [
    (4, (17, 18), 20, 33, (1, 1, 1, 1)),
    (2, (30, 9), 64, 70, (1, 1, 1, 1)),
    (1, (40, 52), 33, 161, (0, 0, 0, 0)),
    (3, (23, 25), 48, 16, (2, 0, 3, 5)),
    (2, (21, 21), 200, 168, (1, 1, 1, 1)),
    (40, (5, 7), 64, 48, (0, 1, 1, 0)),
    (2, (100, 4), 64, 64, (1, 1, 1, 1)),
    (3, (60, 61), 16, 24, (1, 1, 1, 1)),
    (1, (48, 47), 256, 264, (1, 1, 1, 1)),
]
ACTIVATIONS = ("relu", "gelu_tanh")


@remembered
def core_case(parameters, dtype="float32", kernel=(3, 3), strides=(1, 1), dilations=(1, 1)):
    *sizes, pads = parameters
    return Case((*sizes, kernel, strides, dilations, pads), dtype)


def close(actual, expected, tolerance):
    error = np.abs(np.asarray(actual, np.float64) - expected).max()
    assert error <= tolerance * max(1, np.abs(expected).max()), error


def gradients(case, winograd=True, saved=None, **options):
    """The gradients of input, filters and bias; that of a side input would be the direct way's."""
    operands = case.shape(), case.dy, case.input, case.filters, saved
    options |= {"winograd": winograd, "side_input_gradient": False}
    return _core.conv_gradient(*operands, **options)[:3]


def runs(case):
    """Whether y and the gradients of input and filters take other sums than the direct ones."""
    direct, found = (
        [
            _core.conv_forward(case.shape(), case.input, case.filters, winograd=winograd)[0],
            *gradients(case, winograd)[:2],
        ]
        for winograd in (False, True)
    )
    return tuple(not np.array_equal(a, b) for a, b in zip(direct, found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_matches_float64(parameters, dtype, core_isa):
    case = core_case(parameters, dtype)
    # Pairs of bfloat16 have an instruction of their own.
    assert runs(case) == (not (core_isa in PAIRED_ISAS and dtype == "bfloat16"),) * 3
    z, expected_gradients = case.reference
    bias, side, factors = (v.astype(np.float64) for v in (case.bias, case.side, case.scale))
    expected = z * factors + bias + side
    for pack_first, save in itertools.product([False, True], repeat=2):
        y, pre = _core.conv_forward(
            *(case.shape(), case.input, case.filters, case.bias, case.side),
            scale=case.scale,
            activation="relu",
            pack_first=pack_first,
            save_pre_activation=save,
            winograd=True,
        )
        if save:
            close(pre, expected, TOLERANCE[dtype])
        close(y, np.maximum(expected, 0), TOLERANCE[dtype])
    with_side = _core.conv_gradient(case.shape(), case.dy, case.input, case.filters, winograd=True)
    for a, e in zip(with_side, expected_gradients, strict=True):
        close(a, e, TOLERANCE[dtype])
    for a, e in zip(gradients(case), expected_gradients[:3], strict=True):
        close(a, e, TOLERANCE[dtype])


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_layouts_agree(parameters, core_isa):
    case = core_case(parameters)
    shape = case.shape(
        input_channels_first=True, output_channels_first=True, filters_transposed=True
    )
    x, side, dy = (np.moveaxis(v, -1, 1).copy() for v in (case.input, case.side, case.dy))
    filters = case.filters.swapaxes(2, 3).copy()
    for activation in ACTIVATIONS:
        options = {"activation": activation, "winograd": True}
        y, pre = _core.conv_forward(
            case.shape(), case.input, case.filters, case.bias, case.side, **options
        )
        other, _ = _core.conv_forward(shape, x, filters, case.bias, side, **options)
        close(np.moveaxis(other, 1, -1), y.astype(np.float64), TOLERANCE["float32"])
        dx, dw, db = gradients(case, saved=pre, activation=activation)
        saved = np.moveaxis(pre, -1, 1).copy()
        options |= {"side_input_gradient": False}
        others = _core.conv_gradient(shape, dy, x, filters, saved, **options)
        close(np.moveaxis(others[0], 1, -1), dx.astype(np.float64), TOLERANCE["float32"])
        close(others[1].swapaxes(2, 3), dw.astype(np.float64), TOLERANCE["float32"])
        close(others[2], db.astype(np.float64), TOLERANCE["float32"])


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_threads_do_not_change_a_bit(parameters, core_isa):
    case = core_case(parameters)

    def results(num_threads):
        options = {"activation": "gelu_tanh", "num_threads": num_threads}
        operands = case.shape(), case.input, case.filters, case.bias
        y, pre = _core.conv_forward(*operands, winograd=True, **options)
        return y, pre, *gradients(case, saved=pre, **options)

    first = results(1)
    for num_threads in (2, 5):
        for a, b in zip(first, results(num_threads), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("parameters", "window"),
    [
        ((2, (30, 9), 64, 70, (1, 1, 1, 1)), {"strides": (2, 1)}),
        ((2, (30, 29), 64, 70, (1, 1, 1, 1)), {"dilations": (2, 2)}),
        ((2, (30, 29), 64, 70, (2, 2, 2, 2)), {"kernel": (5, 5)}),
        ((2, (30, 29), 64, 70, (0, 1, 0, 1)), {"kernel": (1, 3)}),
        # Nine taps of a larger filter: in a phase of its input gradient, or that meet the image.
        ((2, (40, 40), 64, 64, (2, 2, 2, 2)), {"kernel": (5, 5), "strides": (2, 2)}),
        ((2, (3, 3), 32, 64, (0, 0, 50, 50)), {"kernel": (5, 5)}),
        ((2, (3, 40), 64, 64, (0, 1, 50, 1)), {"kernel": (5, 3)}),
        # Taps that meet no pixel; tiles, channels and pixels that are too few for it to pay.
        ((60, (1, 30), 64, 64, (1, 1, 1, 1)), {}),
        ((1, (7, 7), 256, 256, (1, 1, 1, 1)), {}),
        ((2, (28, 28), 3, 3, (1, 1, 1, 1)), {}),
        ((9, (1, 1), 64, 64, (1, 1, 1, 1)), {}),
        ((0, (28, 28), 64, 64, (1, 1, 1, 1)), {}),
        ((2, (28, 28), 0, 64, (1, 1, 1, 1)), {}),
    ],
    ids=str,
)
def test_others_are_computed_as_without_it(parameters, window, core_isa):
    assert runs(core_case(parameters, **window)) == (False,) * 3


@pytest.mark.parametrize("in_c", [1, 16, 100, 700])
def test_scratch_is_bounded(in_c, core_isa):
    """As docs/winograd.md states."""
    case = core_case((2, (40, 41), in_c, 200, (1, 1, 1, 1)))
    direct, winograd = (
        _core.conv_scratch_bytes(case.shape(), 2, winograd) for winograd in (False, True)
    )
    mib, out_c = 1 << 20, case.sizes["out_c"]
    forward = 13 * mib + 12288 * in_c
    assert winograd[0] <= direct[0] + 4 * mib + 2 * forward
    # Input and filter gradient come one after the other, and hold their memory to the end.
    backward = 13 * mib + 12288 * out_c + 17 * mib + 19456 * in_c
    assert winograd[1] <= direct[1] + (4 + 16) * mib + 2 * backward


# What TensorFlow runs.


OPERANDS = [(2, 28, 27, 32), (3, 3, 32, 40), (40,)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_op_is_close_to_the_direct_one(dtype, data_format, isa):
    x, w, b = (tf.cast(v / 4, dtype) for v in values(*OPERANDS))
    if data_format == "NCHW":
        x = tf.transpose(x, [0, 3, 1, 2])

    def results(winograd):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = tfo.conv2d_bias_act(
                x, w, b, activation="silu", data_format=data_format, winograd=winograd
            )
        return y, *tape.gradient(y, [x, w, b], tf.sin(y))

    pairs = list(zip(results(True), results(False), strict=True))
    for name, (a, b) in zip(["y", "dx", "dw", "db"], pairs, strict=True):
        assert_close(name, a, b, dtype, units=16 * WINOGRAD_FACTOR)
    ran = not (isa in PAIRED_ISAS and dtype == "bfloat16")
    assert np.array_equal(*pairs[0]) == (not ran)


def test_second_gradients_are_those_of_the_convolution():
    x, w, b = (tf.cast(v / 8, "float64") for v in values((1, 16, 16, 32), *OPERANDS[1:]))

    def curvature(convolve):
        with tf.GradientTape() as outer:
            outer.watch([x, w])
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(convolve(x, w, b) ** 2)
            slope = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(slope, [x, w])

    def fused(*operands):
        return tfo.conv2d_bias_act(*operands, activation="sigmoid", winograd=True)

    def stock(x, w, b):
        return tf.sigmoid(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))

    for name, a, e in zip("xw", curvature(fused), curvature(stock), strict=True):
        assert_close(name, a, e, "float64", units=512)


def test_kept_filters_serve_images_of_any_size(isa):
    """Large images take the filters in another order than small ones."""
    images = values((4, 24, 24, 64), (1, 4, 4, 64), (1, 1, 1, 64))
    (w,) = values((3, 3, 64, 64))

    def conv(x, constant, winograd=True):
        options = {"strides": [1] * 4, "padding": "SAME", "activation": "none"}
        return ops.tf_fused_ops_conv2d_bias_act(
            x, w, [], [], [], constant_filters=constant, winograd=winograd, **options
        ).y

    ran = [not np.array_equal(conv(x, False), conv(x, False, winograd=False)) for x in images]
    assert ran == [True, False, False]
    for i in (0, 1, 0, 2, 1, 0, 0):
        assert_close("y", conv(images[i], True), conv(images[i], False), "float32", units=16)
