"""The GPU kernels around contractions: bias, side input and activation behind, dz and db before."""

import ml_dtypes
import numpy as np
import pytest
from cuda_backends import PLANS, backend, device_fixture
from test_core_activations import ALPHA, REFERENCE, SLOPE_FROM_VALUE
from test_core_batch_norm import assert_near

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 2e-6}
SHAPES = [
    ((1, 1), False),
    ((7, 13), False),
    ((33, 64), False),
    ((5, 9, 30), False),
    ((700, 8), False),
    ((2, 1030), False),
    ((3, 17, 2, 3), True),
    ((2, 5, 16, 24), True),
    ((2, 3, 7, 7), True),
    # An activation alone, whatever its shape.
    ((4099, 1), False),
]


device = device_fixture()


class Case:
    """Random operands; `wide` gives them in float64 as [outer, channels, inner]."""

    def __init__(self, shape, channels_first, dtype):
        random = np.random.default_rng(0)
        self.channels_first = channels_first
        self.channels = shape[1] if channels_first else shape[-1]
        self.x, self.side, self.dy = (random.normal(size=shape).astype(dtype) for _ in range(3))
        self.bias, self.scale = random.normal(size=(2, self.channels)).astype(dtype)

    def wide(self, array):
        array = np.asarray(array).astype(np.float64)
        if self.channels_first:
            return array.reshape(*array.shape[:2], -1)
        return array.reshape(-1, self.channels, 1)


def forward(
    device,
    case,
    activation,
    side=True,
    bias=True,
    scale=True,
    pre_activation=True,
    misaligned=False,
):
    x, side_input = (device.put(v, misaligned) for v in (case.x, case.side))
    y, pre = (device.poisoned(case.x.shape, case.x.dtype, misaligned) for _ in range(2))
    device.module.bias_act_forward(
        *(x, y),
        scale=device.put(case.scale) if scale else None,
        bias=device.put(case.bias) if bias else None,
        side_input=side_input if side else None,
        pre_activation=pre if pre_activation else None,
        channels_first=case.channels_first,
        activation=activation,
        alpha=ALPHA,
        stream=device.stream,
    )
    return device.get(y), device.get(pre)


def gradient(device, case, activation, saved, in_place=False):
    dy = device.put(case.dy)
    dz = dy if in_place else device.poisoned(case.dy.shape, case.dy.dtype)
    bias_grad = device.poisoned((case.channels,), case.dy.dtype)
    device.module.bias_act_gradient(
        dy,
        saved=None if saved is None else device.put(saved),
        dz=dz,
        bias_grad=bias_grad,
        channels_first=case.channels_first,
        activation=activation,
        alpha=ALPHA,
        stream=device.stream,
    )
    return device.get(dz), device.get(bias_grad)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape,channels_first", SHAPES)
def test_shapes(device, shape, channels_first, dtype):
    case = Case(shape, channels_first, dtype)
    for side, bias, scale in ((1, 1, 0), (1, 1, 1), (0, 1, 1), (1, 0, 0)):
        z = case.wide(case.x) * (case.scale.astype(np.float64)[None, :, None] if scale else 1)
        z += case.wide(case.side) if side else 0
        z += case.bias.astype(np.float64)[None, :, None] if bias else 0
        y, pre = forward(device, case, "relu", side, bias, scale)
        assert_near("y", case.wide(y), np.maximum(z, 0), TOLERANCE[dtype])
        assert_near("pre_activation", case.wide(pre), z, TOLERANCE[dtype])
    dz = case.wide(case.dy) * (case.wide(y) > 0)
    results = []
    for reverse in (False, True):
        if device.plan is not None:
            device.module.set_device(**PLANS[device.plan], reverse=reverse)
        results.append(gradient(device, case, "relu", y))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
    np.testing.assert_array_equal(case.wide(results[0][0]), dz)
    assert_near("bias_grad", results[0][1], dz.sum((0, 2)), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("activation", REFERENCE)
def test_activations(device, activation, dtype):
    case = Case((12, 21), False, dtype)
    y, pre = forward(device, case, activation)
    value, slope = REFERENCE[activation]
    pre_wide = pre.astype(np.float64)
    assert_near("y", y, value(pre_wide), TOLERANCE[dtype])
    saved = {"none": None}.get(activation, y if activation in SLOPE_FROM_VALUE else pre)
    dz, bias_grad = gradient(device, case, activation, saved)
    expected = case.dy.astype(np.float64) * slope(pre_wide)
    assert_near("dz", dz, expected, 2 * TOLERANCE[dtype])
    assert_near("bias_grad", bias_grad, expected.sum(0), 4 * TOLERANCE[dtype])
    in_place = gradient(device, case, activation, saved, in_place=True)
    assert in_place[0].tobytes() == dz.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", REFERENCE)
def test_value_over_the_whole_range(device, activation, dtype):
    """From the smallest arguments to the largest."""
    small, large = np.geomspace(1e-12, 1, 300), np.geomspace(1, 3e38, 600)
    case = Case((1, 1804), False, dtype)
    case.x = np.concatenate([[0, 3, -3, 6], small, -small, large, -large])[None].astype(dtype)
    value, slope = REFERENCE[activation]
    y, pre = forward(device, case, activation, side=False, bias=False, scale=False)
    with np.errstate(over="ignore", under="ignore"):
        expected_y, expected = value(case.x.astype(np.float64)), slope(case.x.astype(np.float64))
    eps = float(ml_dtypes.finfo(dtype).eps)
    ulps = 8 if dtype == "float32" else 1
    wide = y.astype(np.float64)
    np.testing.assert_allclose(wide, expected_y, rtol=ulps * eps, atol=ulps * eps / 2)
    case.dy = np.ones_like(case.x)
    saved = {"none": None}.get(activation, y if activation in SLOPE_FROM_VALUE else pre)
    dz, _ = gradient(device, case, activation, saved)
    dz = dz.astype(np.float64)
    np.testing.assert_allclose(dz, expected, rtol=ulps * eps, atol=2 * ulps * eps)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [7, 1100])
def test_memory_that_is_not_a_multiple_of_16_bytes(device, rows, dtype):
    case = Case((rows, 24), False, dtype)
    aligned, other = (forward(device, case, "silu", misaligned=m) for m in (False, True))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(aligned, other, strict=True))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty(device, shape):
    case = Case(shape, False, "float32")
    y, _ = forward(device, case, "relu")
    assert y.shape == shape
    dz, bias_grad = gradient(device, case, "relu", y)
    assert dz.shape == shape and not bias_grad.any()


@pytest.mark.parametrize(("producer", "waits"), [(None, 0), (1, 1), (77, 1)])
def test_what_another_stream_computes_is_waited_for(producer, waits):
    device = backend("emulated")
    x = device.put(np.ones((3, 5), "float32"))
    y = device.poisoned((3, 5), "float32")
    x.__cuda_array_interface__["stream"] = producer
    before = device.module.waits()
    device.module.bias_act_forward(x, y, stream=0)
    assert device.module.waits() - before == waits
    np.testing.assert_array_equal(device.get(y), np.ones((3, 5)))


class OnAnotherDevice:
    def __dlpack_device__(self):
        return (2, 1)

    def __dlpack__(self, stream):
        raise AssertionError("asked for what cannot be taken")


def test_arrays_of_another_device_are_refused():
    device = backend("emulated")
    x = device.put(np.ones((3, 5), "float32"))
    with pytest.raises(ValueError, match="y must be in the memory of the current device, 0"):
        device.module.bias_act_forward(x, OnAnotherDevice(), stream=0)


def test_wrong_arguments(device):
    x = device.put(np.zeros((2, 3), np.float32))
    for arguments, message in (
        ({"y": device.put(np.zeros((3, 2), np.float32))}, "y must have"),
        ({"y": x, "bias": device.put(np.zeros(2, np.float32))}, "bias must have"),
        ({"y": x, "scale": device.put(np.zeros(2, np.float32))}, "scale must have"),
        ({"y": x, "activation": "softmax"}, "activation 'softmax'"),
        ({"y": np.zeros((2, 3), np.float32)}, "y must be"),
        ({"y": None}, "y must be given"),
    ):
        with pytest.raises(ValueError, match=message):
            device.module.bias_act_forward(x, **arguments, stream=device.stream)
