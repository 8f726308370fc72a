"""Cross entropy's GPU kernels: results, gradients, labels, memory, determinism, bad input."""

import numpy as np
import pytest
from cuda_backends import PLANS, device_fixture
from test_core_batch_norm import assert_near

TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6}
NAMES = ("loss", "largest", "inverse_sum", "x_grad")
# One class, parts of a vector, rows that begin anywhere in a vector, and rows of several parts.
SHAPES = [(5, 1), (7, 3), (2, 3, 17), (67,), (19, 120), (4, 1001), (3, 5003), (2, 16400), (0, 4)]

# One kernel for a tensor is batch norm's alone.
device = device_fixture(list(PLANS)[1:])


class Case:
    """Random operands, and what is expected of them in float64."""

    def __init__(self, shape, dtype, labels="int64"):
        random = np.random.default_rng(0)
        self.x = random.normal(1, 4, size=shape).astype(dtype)
        self.dloss = random.normal(size=shape[:-1]).astype(dtype)
        self.labels = random.integers(0, shape[-1], shape[:-1]).astype(labels)

    def run(self, device, misaligned=False, in_place=False):
        """Returns loss, largest, inverse_sum and x_grad."""
        x, labels, dloss = (
            device.put(value, misaligned) for value in (self.x, self.labels, self.dloss)
        )
        rows = self.dloss.shape
        loss, largest, inverse_sum, x_grad = (
            device.poisoned(shape, dtype, misaligned)
            for shape, dtype in (
                (rows, self.x.dtype),
                *[(rows, "float32")] * 2,
                (self.x.shape, self.x.dtype),
            )
        )
        if in_place:
            x_grad = x
        kept = (largest, inverse_sum)
        device.module.cross_entropy_forward(x, labels, loss, *kept, stream=device.stream)
        device.module.cross_entropy_gradient(
            *(dloss, x, labels), *kept, x_grad, stream=device.stream
        )
        return [device.get(array) for array in (loss, *kept, x_grad)]

    def expected(self):
        x, dloss = (value.astype(np.float64) for value in (self.x, self.dloss))
        labels = self.labels[..., None]
        with np.errstate(invalid="ignore", divide="ignore"):
            largest = x.max(-1, keepdims=True)
            e = np.exp(x - largest)
            total = e.sum(-1, keepdims=True)
            loss = np.log(total) + (largest - np.take_along_axis(x, labels, -1))
            x_grad = (e / total - (np.arange(x.shape[-1]) == labels)) * dloss[..., None]
            return [*(value[..., 0] for value in (loss, largest, 1 / total)), x_grad]


def assert_same_bits(results, others):
    assert all(a.tobytes() == b.tobytes() for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(device, shape, dtype):
    case = Case(shape, dtype)
    results = []
    for reverse in (False, True):
        if device.plan is not None:
            device.module.set_device(**PLANS[device.plan], reverse=reverse)
        results.append(case.run(device))
    assert_same_bits(*results)
    for name, value, wide in zip(NAMES, results[0], case.expected(), strict=True):
        assert value.shape == wide.shape
        assert_near(name, value.astype(np.float64), wide, TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(5, 9), (3, 5003)])
def test_labels_of_both_types(device, shape):
    runs = [Case(shape, "float32", labels).run(device) for labels in ("int32", "int64")]
    assert_same_bits(*runs)


@pytest.mark.parametrize("label", [-1, 40, 2**31 - 1, -(2**31), 2**40, -(2**63)])
def test_labels_that_are_no_classes(device, label):
    """Make NaN of their rows, without being read."""
    case = Case((6, 40), "float32", "int64" if abs(label) > 2**31 else "int32")
    usual = case.run(device)
    case.labels[[1, 4]] = label
    case.dloss[4] = 0
    loss, *kept, x_grad = case.run(device)
    assert np.isnan(loss[[1, 4]]).all() and np.isnan(x_grad[[1, 4]]).all()
    assert_same_bits(kept, usual[1:3])
    others = [0, 2, 3, 5]
    assert_same_bits((loss[others], x_grad[others]), (usual[0][others], usual[3][others]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(7, 72), (7, 73)])
def test_memory_that_is_not_a_multiple_of_16_bytes_or_taken_over(device, shape, dtype):
    case = Case(shape, dtype)
    usual = case.run(device)
    for options in ({"misaligned": True}, {"in_place": True}):
        assert_same_bits(usual, case.run(device, **options))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_large_logits(device, dtype):
    """The largest is subtracted first, also where it comes in a later part."""
    case = Case((2, 17000), dtype)
    case.x[...], case.x[:, 16990], case.labels[:] = -3e4, 3e4, [16990, 3]
    for name, value, wide in zip(NAMES, case.run(device), case.expected(), strict=True):
        assert_near(name, value.astype(np.float64), wide, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_losses_near_zero(device, dtype):
    """Are never less, and have the digits of the sum."""
    case = Case((5, 2), dtype)
    case.x[:, 0], case.x[:, 1], case.labels[:] = [6, 9, 12, 20, 60], 0, 0
    loss = case.run(device)[0].astype(np.float64)
    assert (loss >= 0).all()
    np.testing.assert_allclose(loss, case.expected()[0], rtol=TOLERANCE[dtype], atol=2e-7)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 5000])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_special_numbers(device, dtype, special, place):
    """Stay in their rows; minus infinity is a class that is ruled out."""
    case = Case((3, 5003), dtype)
    case.x[1, place], case.labels[:] = special, [2, 1, 4]
    loss, *_, x_grad = (value.astype(np.float64) for value in case.run(device))
    wide_loss, *_, wide_x_grad = case.expected()
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(loss, wide_loss, rtol=max(1e-5, tolerance))
    np.testing.assert_allclose(x_grad, wide_x_grad, rtol=max(1e-4, tolerance), atol=1e-6)


@pytest.mark.parametrize("depth", [9, 9000])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nothing_but_minus_infinity(device, dtype, depth):
    case = Case((2, depth), dtype)
    case.x[1] = -np.inf
    for result in (value.astype(np.float32) for value in case.run(device)[::3]):
        assert np.isnan(result[1]).all() and np.isfinite(result[0]).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_parts_of_nothing_but_minus_infinity(device, dtype):
    case = Case((2, 13000), dtype)
    case.x[0, :9000], case.x[1, 4000:] = -np.inf, -np.inf
    case.labels[:] = [12000, 3]
    for name, value, wide in zip(NAMES, case.run(device), case.expected(), strict=True):
        assert_near(name, value.astype(np.float64), wide, TOLERANCE[dtype])


def test_wrong_arguments(device):
    def zeros(*shape, dtype=np.float32):
        return device.put(np.zeros(shape, dtype))

    good = {
        "x": zeros(2, 3),
        "labels": zeros(2, dtype=np.int32),
        **{name: zeros(2) for name in ("loss", "largest", "inverse_sum")},
    }
    gradient = {name: good[name] for name in good if name != "loss"}
    gradient |= {"dloss": zeros(2), "x_grad": zeros(2, 3)}
    module = device.module
    for launch, arguments, wrongs in (
        (
            module.cross_entropy_forward,
            good,
            (
                *({"x": x} for x in (None, zeros(), zeros(2, 0), zeros(2, 3, dtype=np.float64))),
                *({"labels": zeros(*shape, dtype=np.int64)} for shape in ((), (3,), (2, 1))),
                *({"labels": labels} for labels in (None, zeros(2))),
                *({name: zeros(3)} for name in ("loss", "largest", "inverse_sum")),
                {"largest": zeros(2, dtype=np.float16)},
            ),
        ),
        (
            module.cross_entropy_gradient,
            gradient,
            ({"dloss": zeros(2, 1)}, {"x_grad": zeros(3, 2)}, {"labels": zeros(2)}),
        ),
    ):
        for wrong in wrongs:
            with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
                launch(**(arguments | wrong), stream=device.stream)
