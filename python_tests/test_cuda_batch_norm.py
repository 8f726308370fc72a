"""Batch normalisation's GPU kernels against float64: on a GPU, and emulated where there is none."""

import numpy as np
import pytest
from cuda_backends import PLANS, device_fixture
from test_core_activations import ALPHA, REFERENCE
from test_core_batch_norm import EPSILON, SHAPES, Case, assert_near

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 4e-6}
MORE_SHAPES = [
    ((3, 8, 8, 9), True),  # planes of whole vectors
    ((2, 3, 16, 32), True),
    ((700, 40), False),
    ((1, 1), False),
]
TOO_WIDE = {(1, 2, 90, 1000)}  # more columns than the emulated device has blocks
VARIANTS = [  # side input, mask, activation
    (False, False, "none"),
    (False, False, "relu"),
    (True, True, "relu"),
]


class Runner:
    """Calls the launchers with poisoned outputs."""

    def __init__(self, backend, case, misaligned=False):
        self.backend, self.module, self.case = backend, backend.module, case
        self.misaligned = misaligned
        self.vectors = [backend.put(v) for v in (case.scale, case.offset, case.mean, case.variance)]
        self.x, self.side, self.dy = (
            backend.put(v, misaligned) for v in (case.x, case.side, case.dy)
        )

    def options(self, **options):
        return {"channels_first": self.case.channels_first, "stream": self.backend.stream} | options

    def new(self, like=None):
        if like is not None:
            return self.backend.poisoned(like.shape, like.dtype, self.misaligned)
        return self.backend.poisoned(self.case.scale.shape, np.float32)

    def forward(self, side=False, mask=False, y=None, **options):
        y = y or self.new(self.case.x)
        statistics = [self.new() for _ in range(4)]
        bits = self.backend.poisoned(((self.case.x.size + 7) // 8,), np.uint8) if mask else None
        self.module.batch_norm_forward(
            *(self.x, *self.vectors, y, *statistics),
            side_input=self.side if side else None,
            mask=bits,
            **self.options(epsilon=EPSILON, momentum=0.9, **options),
        )
        return y, *statistics, bits

    def gradient(self, saved, side=False, mask=None, side_grad=False, x_grad=None, **options):
        x_grad = x_grad or self.new(self.case.x)
        scale_grad, offset_grad = self.new(), self.new()
        side_input_grad = self.new(self.case.x) if side_grad else None
        self.module.batch_norm_gradient(
            *(self.dy, self.x, *self.vectors[:2], *saved, x_grad, scale_grad, offset_grad),
            side_input=self.side if side else None,
            mask=mask,
            side_input_grad=side_input_grad,
            **self.options(**options),
        )
        return x_grad, scale_grad, offset_grad, side_input_grad

    def get(self, arrays):
        return [None if array is None else self.backend.get(array) for array in arrays]


device = device_fixture()


def again(device):
    """The next run is to give the same bits with the threads in the opposite order."""
    if device.plan is not None:
        device.module.set_device(**PLANS[device.plan], reverse=True)


def same_bits(first, second):
    return all(a is b or a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape,channels_first", SHAPES + MORE_SHAPES)
def test_numbers(device, shape, channels_first, dtype):
    case = Case(shape, channels_first, dtype)
    for side, mask, activation in VARIANTS:
        # No gradient arrives next to the kink, where rounding decides the slope.
        _, _, z = case.reference(True, side, activation == "relu")
        case.dy = case.dy * (np.abs(z) > 1e-5).reshape(case.dy.shape).astype(case.dy.dtype)
        expected, gradients, _ = case.reference(True, side, activation == "relu")
        results = []
        for _ in range(2):
            runner = Runner(device, case)
            before = _cooperative_launches(device)
            outputs = runner.forward(side, mask, activation=activation)
            grads = runner.gradient(
                outputs[3:5], mask=outputs[5], side_grad=side, activation=activation
            )
            if device.plan is not None:
                fused = device.plan == "fused" and shape not in TOO_WIDE
                assert _cooperative_launches(device) - before == (2 if fused else 0)
            results.append(runner.get((*outputs, *grads)))
            again(device)
        assert same_bits(*results)
        *outputs, bits, x_grad, scale_grad, offset_grad, side_grad = results[0]
        tolerance, vectors = TOLERANCE[dtype], TOLERANCE["float32"]
        assert_near("y", case.middle(outputs[0]), expected[0], tolerance)
        for i, name in enumerate(("new_mean", "new_variance", "saved_mean", "saved_inv_std"), 1):
            assert_near(name, outputs[i], expected[i], vectors)
        assert_near("x_grad", case.middle(x_grad), gradients[0], tolerance)
        scale = np.sqrt(case.x.size / case.scale.size)
        assert_near("scale_grad", scale_grad / scale, gradients[1] / scale, vectors)
        assert_near("offset_grad", offset_grad / scale, gradients[2] / scale, vectors)
        if side:
            assert_near("side_input_grad", case.middle(side_grad), gradients[3], tolerance)
            positive = np.asarray(outputs[0], np.float32).ravel() > 0
            near = np.abs(z.ravel()) < 1e-5 if not channels_first else None
            unpacked = np.unpackbits(bits, bitorder="little")
            assert not unpacked[positive.size :].any()
            if near is None or not near.any():
                np.testing.assert_array_equal(unpacked[: positive.size], positive)


def _cooperative_launches(device):
    return device.module.cooperative_launches() if device.plan is not None else None


@pytest.mark.parametrize("shape,channels_first", [((5, 9, 30), False), ((3, 17, 2, 3), True)])
def test_inference(device, shape, channels_first):
    case = Case(shape, channels_first)
    expected, gradients, z = case.reference(False, True, True)
    assert np.abs(z).min() > 1e-6
    runner = Runner(device, case)
    outputs = runner.forward(True, True, training=False, activation="relu")
    grads = runner.gradient(
        outputs[3:5], mask=outputs[5], side_grad=True, training=False, activation="relu"
    )
    outputs, grads = runner.get(outputs), runner.get(grads)
    for i, name in enumerate(("y", "new_mean", "new_variance", "saved_mean", "saved_inv_std")):
        value = case.middle(outputs[0]) if i == 0 else outputs[i]
        assert_near(name, value, expected[i], 4e-6)
    assert_near("x_grad", case.middle(grads[0]), gradients[0], 4e-6)
    assert_near("scale_grad", grads[1], gradients[1], 2e-5)
    assert_near("offset_grad", grads[2], gradients[2], 2e-5)
    assert_near("side_input_grad", case.middle(grads[3]), gradients[3], 4e-6)


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("activation", REFERENCE)
def test_activations(device, activation, side):
    case = Case((40, 9, 30))
    _, _, z = case.reference(True, side)
    value, slope = (f(z.reshape(case.x.shape)) for f in REFERENCE[activation])
    kinks = np.abs(z.reshape(case.x.shape)[..., None] - [0, 6, -3, 3]).min(-1)
    case.dy *= kinks > 1e-5
    dz = case.dy.astype(np.float64) * slope
    runner = Runner(device, case)
    options = {"activation": activation, "alpha": ALPHA}
    y, *_, mean, inv_std, _ = runner.forward(side, **options)
    needs_side = side and activation != "none"
    grads = runner.gradient((mean, inv_std), side=needs_side, side_grad=True, **options)
    x_grad, _, offset_grad, side_grad = runner.get(grads)
    assert_near("y", device.get(y), value, 4e-6)
    assert_near("side_input_grad", side_grad, dz, 8e-6)
    assert_near("offset_grad", offset_grad, dz.sum((0, 1)), 2e-5)
    case.dy = dz
    assert_near("x_grad", case.middle(x_grad), case.reference(True)[1][0], 2e-5)


def test_leaky_relu_with_negative_alpha(device):
    case = Case((20, 6))
    runner = Runner(device, case)
    options = {"activation": "leaky_relu", "alpha": -0.5}
    y, *_, mean, inv_std, _ = runner.forward(**options)
    _, _, z = case.reference(True)
    z = z.reshape(case.x.shape)
    assert_near("y", device.get(y), np.where(z > 0, z, -0.5 * z), 4e-6)
    *_, side_grad = runner.get(runner.gradient((mean, inv_std), side_grad=True, **options))
    np.testing.assert_allclose(side_grad, case.dy * np.where(z > 0, 1, -0.5), rtol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape,channels_first", [((33, 6), False), ((6, 3, 8, 48), True), ((8, 5, 3, 3), True)]
)
def test_two_replicas_and_an_empty_one(device, shape, channels_first, dtype):
    case = Case(shape, channels_first, dtype)
    expected, gradients, _ = case.reference(True)
    runner = Runner(device, case)
    channels = case.scale.size
    cut = shape[0] // 3
    parts = []
    for rows in (slice(0, cut), slice(cut, None), slice(0, 0)):
        part = Case(shape, channels_first, dtype)
        for name in ("x", "side", "dy"):
            setattr(part, name, getattr(case, name)[rows])
        parts.append(Runner(device, part))
    moments = []
    for part in parts:
        own = device.poisoned((3, channels), np.float64)
        runner.module.batch_norm_local_moments(part.x, own, **part.options())
        moments.append(device.get(own))
        assert (moments[-1][0] == part.case.x.size / channels).all()
    moments = device.put(np.stack(moments))
    tolerance, sums, y, dx, vectors = TOLERANCE[dtype], 0, [], [], 0
    for part in parts:
        part_y, *statistics = part.new(part.case.x), *(part.new() for _ in range(4))
        part.module.batch_norm_forward_from_moments(
            *(part.x, *part.vectors, moments, part_y, *statistics),
            **part.options(momentum=0.9, epsilon=EPSILON),
        )
        y.append(device.get(part_y))
        for name, value, exact in zip(
            ("new_mean", "new_variance", "saved_mean", "saved_inv_std"),
            part.get(statistics),
            expected[1:],
            strict=True,
        ):
            assert_near(name, value, exact, 4e-6)
        own, part.saved = device.poisoned((3, channels), np.float64), statistics[2:]
        grads = part.new(), part.new()
        part.module.batch_norm_local_sums(
            *(part.dy, part.x, *part.vectors[:2], *part.saved, own, *grads), **part.options()
        )
        sums, vectors = sums + device.get(own), vectors + np.stack(part.get(grads))
    assert_near("y", case.middle(np.concatenate(y)), expected[0], tolerance)
    assert_near("scale_grad", vectors[0], gradients[1], 2e-5)
    assert_near("offset_grad", vectors[1], gradients[2], 2e-5)
    for part in parts:
        dx.append(part.new(part.case.x))
        part.module.batch_norm_gradient_from_sums(
            *(part.dy, part.x, *part.vectors[:2], *part.saved, device.put(sums), dx[-1]),
            **part.options(),
        )
    dx = np.concatenate([device.get(value) for value in dx])
    assert_near("x_grad", case.middle(dx), gradients[0], tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape,channels_first", [((9, 5, 7), False), ((2, 3, 8, 32), True)])
def test_memory_that_is_not_a_multiple_of_16_bytes(device, shape, channels_first, dtype):
    case = Case(shape, channels_first, dtype)
    results = []
    for misaligned in (False, True):
        runner = Runner(device, case, misaligned)
        outputs = runner.forward(True, True, activation="relu")
        grads = runner.gradient(outputs[3:5], mask=outputs[5], side_grad=True, activation="relu")
        results.append(runner.get((*outputs, *grads)))
    assert same_bits(*results)


@pytest.mark.parametrize("shape,channels_first", [((3000, 64), False), ((40, 3, 8, 512), True)])
def test_alignment_changes_but_the_order_of_sums(device, shape, channels_first):
    case, results = Case(shape, channels_first), []
    for misaligned in (False, True):
        runner = Runner(device, case, misaligned)
        outputs = runner.forward(True, activation="silu")
        grads = runner.gradient(outputs[3:5], True, side_grad=True, activation="silu")
        results.append(runner.get((*outputs[:5], *grads)))
    for i, (aligned, other) in enumerate(zip(*results, strict=True)):
        assert_near(f"output {i}", aligned, other, TOLERANCE["float32"])


@pytest.mark.parametrize("shape,channels_first", [((9, 5, 7), False), ((2, 3, 8, 32), True)])
def test_outputs_in_the_place_of_inputs(device, shape, channels_first):
    case = Case(shape, channels_first)
    expected = Runner(device, case)
    outputs = expected.forward(True, True, activation="relu")
    grads = expected.gradient(outputs[3:5], mask=outputs[5], activation="relu")
    for name in ("x", "side"):
        runner = Runner(device, case)
        found = runner.forward(True, True, y=getattr(runner, name), activation="relu")
        assert same_bits(expected.get(outputs), runner.get(found))
    for name in ("dy", "x"):
        runner = Runner(device, case)
        found = runner.gradient(
            outputs[3:5], mask=outputs[5], x_grad=getattr(runner, name), activation="relu"
        )
        assert same_bits(expected.get(grads), runner.get(found))


def moments(runner):
    result = runner.backend.poisoned((3, runner.case.scale.size), np.float64)
    runner.module.batch_norm_local_moments(runner.x, result, **runner.options())
    return runner.backend.get(result)


@pytest.mark.parametrize("channels_first", [False, True])
def test_statistics_far_from_zero(device, channels_first):
    shape = (16, 3, 20, 24) if channels_first else (16, 20, 24, 3)
    case = Case(shape, channels_first, mean=1e4)
    runner = Runner(device, case)
    count, mean, squares = moments(runner)
    assert (count == case.x.size / case.scale.size).all()
    exact = case.middle(case.x)
    np.testing.assert_allclose(mean, exact.mean((0, 2)), rtol=2e-7)
    np.testing.assert_allclose(squares / count, exact.var((0, 2)), rtol=1e-3)


@pytest.mark.parametrize("position", [0, 5, 1999])
def test_statistics_with_an_outlier(device, position):
    case = Case((2000, 3))
    case.x[position] = 1e5
    runner = Runner(device, case)
    count, mean, squares = moments(runner)
    assert (count == case.x.size / case.scale.size).all()
    exact = case.x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(squares, exact.var(0) * 2000, rtol=4e-6)


@pytest.mark.parametrize(
    "shape,channels_first",
    [((0, 4, 3), False), ((0, 3, 4, 4), True), ((2, 3, 0, 4), True), ((5, 4, 0), False)],
)
def test_empty(device, shape, channels_first):
    case = Case(shape, channels_first)
    runner = Runner(device, case)
    outputs = runner.forward(True, True, activation="relu")
    _, mean, variance, saved_mean, saved_inv_std, mask = runner.get(outputs)
    assert mask.size == 0
    np.testing.assert_array_equal(mean, case.mean)
    np.testing.assert_array_equal(variance, case.variance)
    assert np.isfinite(saved_mean).all() and np.isfinite(saved_inv_std).all()
    grads = runner.get(runner.gradient(outputs[3:5], mask=outputs[5], activation="relu"))
    assert not grads[1].any() and not grads[2].any()


@pytest.mark.parametrize("unbiased", [False, True])
def test_moving_averages(device, unbiased):
    case = Case((7, 3))
    count, variance = 7, case.x.astype(np.float64).var(0)
    expected = 0.9 * case.variance + 0.1 * variance * (count / (count - 1) if unbiased else 1)
    new_variance = Runner(device, case).forward(unbiased=unbiased)[2]
    np.testing.assert_allclose(device.get(new_variance), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": np.zeros(3, np.float32)}, "x must have rank"),
        ({"x": np.zeros((2, 3), np.uint8)}, "x must be float16"),
        ({"scale": np.zeros(4, np.float32)}, "scale"),
        ({"side_input": np.zeros((3, 2), np.float32)}, "side_input"),
        ({"mask": np.zeros(2, np.uint8)}, "mask"),
        ({"y": None}, "y must be given"),
        ({"activation": "softmax"}, "activation"),
    ],
)
def test_wrong_arguments(device, change, message):
    names = ("scale", "offset", "mean", "variance")
    results = ("new_mean", "new_variance", "saved_mean", "saved_inv_std")
    arrays = {name: np.ones(3, np.float32) for name in names + results}
    arrays |= {"x": np.zeros((2, 3), np.float32), "y": np.zeros((2, 3), np.float32)} | change
    arguments = {
        name: device.put(value) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }
    with pytest.raises(ValueError, match=message):
        device.module.batch_norm_forward(**arguments, stream=device.stream)
