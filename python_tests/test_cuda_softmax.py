"""Softmax's GPU kernels: results, gradients, masks, memory, determinism, bad input."""

import numpy as np
import pytest
from cuda_backends import PLANS, device_fixture
from test_core_batch_norm import assert_near

TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6}
SCALE = 0.3
# Shapes of x, and of masks beside them. From one element to rows that no block holds in registers.
SHAPES = [
    ((1, 1), (1,)),
    ((7, 13), (7, 13)),
    ((2, 3, 5, 120), (2, 1, 1, 120)),
    ((2, 3, 5, 64), (5, 64)),
    ((2, 3, 5, 7, 33), (3, 1, 7, 33)),
    ((4, 768), (768,)),
    ((3, 3001), (3, 3001)),
    ((2, 16400), (1, 16400)),
]

# One kernel for a tensor is batch norm's alone.
device = device_fixture(list(PLANS)[1:])


class Case:
    """Random operands, and what is expected of them in float64."""

    def __init__(self, shape, dtype, mask_shape=None, zero_masked=False):
        random = np.random.default_rng(0)
        self.x, self.dy = (random.normal(size=shape).astype(dtype) for _ in range(2))
        self.zero_masked = zero_masked
        self.mask = None
        if mask_shape is not None:
            self.mask = (random.uniform(size=mask_shape) < 0.7).astype(np.uint8)
            self.mask[..., 0] = 1

    def options(self, device):
        mask = None if self.mask is None else device.put(self.mask)
        return {"mask": mask, "scale": SCALE, "stream": device.stream}

    def run(self, device, misaligned=False, in_place=False):
        """Returns y and x_grad."""
        x, dy = (device.put(v, misaligned) for v in (self.x, self.dy))
        like = (self.x.shape, self.x.dtype, misaligned)
        y = x if in_place else device.poisoned(*like)
        device.module.softmax_forward(*(x, y), zero_masked=self.zero_masked, **self.options(device))
        value = device.get(y)
        x_grad = y if in_place else device.poisoned(*like)
        device.module.softmax_gradient(
            *(dy, y, x_grad), zero_masked=self.zero_masked, **self.options(device)
        )
        return value, device.get(x_grad)

    def expected(self):
        x, dy = (v.astype(np.float64) for v in (self.x, self.dy))
        kept = np.ones(x.shape, bool) if self.mask is None else self.mask.astype(bool)
        z = np.where(kept, x * SCALE, -3e38)
        e = np.exp(z - z.max(-1, keepdims=True))
        y = e / e.sum(-1, keepdims=True)
        if self.zero_masked:
            y = np.where(kept, y, 0)
        return y, np.where(kept, (dy - (dy * y).sum(-1, keepdims=True)) * y * SCALE, 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape,mask_shape", SHAPES)
def test_shapes(device, shape, mask_shape, masked, dtype):
    case = Case(shape, dtype, mask_shape if masked else None)
    results = []
    for reverse in (False, True):
        if device.plan is not None:
            device.module.set_device(**PLANS[device.plan], reverse=reverse)
        results.append(case.run(device))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
    for name, value, wide in zip(("y", "x_grad"), results[0], case.expected(), strict=True):
        assert_near(name, value.astype(np.float64), wide, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("zero_masked", [False, True])
def test_rows_without_anything_kept(device, zero_masked, dtype):
    case = Case((3, 20), dtype, (3, 20), zero_masked)
    case.mask[1] = 0
    y, x_grad = case.run(device)
    np.testing.assert_array_equal(y[1], np.asarray(0 if zero_masked else 1 / 20, dtype))
    assert not x_grad[1].any()
    assert_near("y", y.astype(np.float64), case.expected()[0], TOLERANCE[dtype])


def test_gradients_where_zeros_are_do_not_count(device):
    case = Case((3, 37), "float32", (3, 37), zero_masked=True)
    _, expected = case.run(device)
    case.dy[case.mask == 0] = np.nan
    np.testing.assert_array_equal(case.run(device)[1], expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_memory_that_is_not_a_multiple_of_16_bytes_or_taken_over(device, dtype):
    case = Case((7, 72), dtype, (72,))
    usual = case.run(device)
    for options in ({"misaligned": True}, {"in_place": True}):
        for a, b in zip(usual, case.run(device, **options), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_special_numbers(device, dtype):
    """What is far below the largest is zero; what is not finite stays in its row."""
    case, large = Case((6, 40), dtype), 3e4 if dtype == "float16" else 1e30
    case.x[1], case.x[1, 3] = -large, large
    case.x[2, 5], case.x[3, 6], case.x[4, 7], case.x[5] = np.nan, np.inf, -np.inf, -np.inf
    y, x_grad = (value.astype(np.float32) for value in case.run(device))
    np.testing.assert_array_equal(y[1], np.arange(40) == 3)
    assert y[4, 7] == 0
    for result in (y, x_grad):
        assert np.isnan(result[[2, 3, 5]]).all() and np.isfinite(result[[0, 1, 4]]).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_empty(device, shape):
    assert all(result.shape == shape for result in Case(shape, "float32").run(device))


def test_wrong_arguments(device):
    def zeros(*shape, dtype=np.float32):
        return device.put(np.zeros(shape, dtype))

    def byte(*shape):
        return zeros(*shape, dtype=np.uint8)

    good = {"x": zeros(2, 3), "y": zeros(2, 3)}
    for wrong in (
        {"x": zeros()},
        {"x": zeros(2, 3, dtype=np.float64)},
        {"y": zeros(3, 2)},
        {"y": None},
        *({"mask": mask} for mask in (zeros(3), byte(), byte(1), byte(2, 1), byte(3, 3))),
        {"mask": byte(1, 2, 3)},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
            device.module.softmax_forward(**(good | wrong), stream=device.stream)
