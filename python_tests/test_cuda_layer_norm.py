"""Layer and RMS normalization's GPU kernels: results, gradients, memory, determinism, bad input."""

import numpy as np
import pytest
from cuda_backends import PLANS, device_fixture
from test_core_batch_norm import assert_near

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 2e-6}
EPSILON = 1e-5
# From one element to rows that no block holds in registers, with and without whole vectors.
SHAPES = [(1,), (2, 1), (7, 13), (33, 64), (2, 3, 120), (9, 257), (4, 768), (3, 3001), (2, 16400)]


# One kernel for a tensor is batch norm's alone.
device = device_fixture(list(PLANS)[1:])


class Case:
    """Random operands, and what is expected of them in float64."""

    def __init__(self, shape, dtype, subtract_mean=True, shift=3):
        random = np.random.default_rng(0)
        self.subtract_mean = subtract_mean
        self.x = (random.normal(size=shape) + shift).astype(dtype)
        self.dy = random.normal(size=shape).astype(dtype)
        self.scale, self.offset = random.uniform(0.5, 1.5, (2, shape[-1])).astype(np.float32)

    def forward(self, device, misaligned=False, in_place=False):
        """Returns y, mean and inv_std."""
        x = device.put(self.x, misaligned)
        y = x if in_place else device.poisoned(self.x.shape, self.x.dtype, misaligned)
        statistics = [device.poisoned(self.x.shape[:-1], np.float32) for _ in range(2)]
        device.module.layer_norm_forward(
            *(x, device.put(self.scale), device.put(self.offset), y, *statistics),
            epsilon=EPSILON,
            subtract_mean=self.subtract_mean,
            stream=device.stream,
        )
        return [device.get(array) for array in (y, *statistics)]

    def gradient(self, device, mean, inv_std, misaligned=False, x_grad_is=None):
        """Returns x_grad, scale_grad and offset_grad."""
        arrays = {name: device.put(getattr(self, name), misaligned) for name in ("dy", "x")}
        x_grad = arrays.get(x_grad_is) or device.poisoned(self.x.shape, self.x.dtype, misaligned)
        vectors = [device.poisoned(self.scale.shape, np.float32) for _ in range(2)]
        device.module.layer_norm_gradient(
            *(arrays["dy"], arrays["x"], device.put(self.scale)),
            *(device.put(mean), device.put(inv_std), x_grad, *vectors),
            subtract_mean=self.subtract_mean,
            stream=device.stream,
        )
        return [device.get(array) for array in (x_grad, *vectors)]

    def expected(self):
        """Returns y, mean and inv_std; x_grad, scale_grad and offset_grad."""
        x, dy, scale = (v.astype(np.float64) for v in (self.x, self.dy, self.scale))
        mean = x.mean(-1, keepdims=True) if self.subtract_mean else np.zeros_like(x[..., :1])
        inv_std = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPSILON)
        normal, g = (x - mean) * inv_std, dy * scale
        centred = g - g.mean(-1, keepdims=True) if self.subtract_mean else g
        x_grad = inv_std * (centred - normal * (g * normal).mean(-1, keepdims=True))
        rows = tuple(range(x.ndim - 1))
        return (
            (normal * scale + self.offset, mean[..., 0], inv_std[..., 0]),
            (x_grad, (dy * normal).sum(rows), dy.sum(rows)),
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("subtract_mean", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(device, shape, subtract_mean, dtype):
    case = Case(shape, dtype, subtract_mean)
    outputs, gradients = case.expected()
    # A row of one element is nothing but its mean: what is left is rounding times inv_std.
    tolerance = TOLERANCE[dtype] * (1 if shape[-1] > 1 or not subtract_mean else 4)
    results = []
    for reverse in (False, True):
        if device.plan is not None:
            device.module.set_device(**PLANS[device.plan], reverse=reverse)
        y, mean, inv_std = case.forward(device)
        results.append([y, mean, inv_std, *case.gradient(device, mean, inv_std)])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
    names = ("y", "mean", "inv_std", "x_grad", "scale_grad", "offset_grad")
    for name, value, wide in zip(names, results[0], (*outputs, *gradients), strict=True):
        if value.size:
            assert_near(name, value.astype(np.float64), wide, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [7, 1100])
def test_memory_that_is_not_a_multiple_of_16_bytes_or_taken_over(device, rows, dtype):
    case = Case((rows, 72), dtype)
    forward = case.forward(device)
    gradient = case.gradient(device, *forward[1:])
    others = [
        case.forward(device, misaligned=True) + case.gradient(device, *forward[1:], True),
        case.forward(device, in_place=True) + case.gradient(device, *forward[1:], x_grad_is="dy"),
        case.forward(device) + case.gradient(device, *forward[1:], x_grad_is="x"),
    ]
    for other in others:
        for a, b in zip(forward + gradient, other, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("depth", [96, 5000])
def test_a_mean_far_from_zero(device, depth):
    """The deviations lose what x's own rounding lost, and no more."""
    case = Case((5, depth), "float32", shift=4096)
    y, _, inv_std = case.forward(device)
    (expected, *_), _ = case.expected()
    np.testing.assert_allclose(y, expected, atol=2 * 4096 * np.finfo(np.float32).eps)
    np.testing.assert_allclose(inv_std, case.expected()[0][2], rtol=1e-5)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_row(device, value):
    case = Case((6, 40), "float32")
    case.x[2, 7] = value
    y, mean, inv_std = case.forward(device)
    x_grad, *_ = case.gradient(device, mean, inv_std)
    for result in (y, x_grad):
        assert np.isnan(result[2]).any()
        assert np.isfinite(np.delete(result, 2, 0)).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_empty(device, shape):
    case = Case(shape, "float32")
    y, mean, inv_std = case.forward(device)
    assert y.shape == shape and mean.shape == shape[:-1]
    assert np.isnan(mean).all()
    x_grad, *vectors = case.gradient(device, mean, inv_std)
    assert x_grad.shape == shape and not any(vector.any() for vector in vectors)


def test_wrong_arguments(device):
    def zeros(*shape, dtype=np.float32):
        return device.put(np.zeros(shape, dtype))

    good = {"x": zeros(2, 3), "scale": zeros(3), "offset": zeros(3), "y": zeros(2, 3)}
    good |= {"mean": zeros(2), "inv_std": zeros(2)}
    for wrong in (
        {"x": zeros()},
        {"x": zeros(2, 3, dtype=np.float64)},
        {"scale": zeros(2)},
        {"offset": zeros(3, dtype=np.float16)},
        {"y": zeros(3, 2)},
        {"mean": zeros(3)},
        {"inv_std": None},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
            device.module.layer_norm_forward(**(good | wrong), stream=device.stream)
