"""The core's batch normalization on NumPy arrays: numbers, threads, layouts, instruction sets."""

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
from cases import DTYPES

from tf_fused_ops import _core

# Of values around 1: x, y and dx are rounded to the dtype, statistics to float32.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 4e-6, "float64": 1e-11}
EPSILON = 1e-3
SHAPES = [
    ((2, 5, 7, 1), False),
    ((3, 11, 11, 3), False),
    ((2, 7, 7, 17), False),
    ((5, 9, 30), False),
    ((129, 31), False),
    ((2, 3, 3, 3, 33), False),
    ((8, 1, 1, 512), False),
    ((3, 2500), False),
    ((2, 300, 300, 3), False),
    ((6, 30), True),
    ((3, 17, 2, 3), True),
    ((2, 3, 7, 7), True),
    ((2, 31, 4, 4, 5), True),
    ((1, 2, 90, 1000), True),
]


def _column(v):
    return v[None, :, None]


class Case:
    """Random operands, and the same in float64 with the channels in the middle."""

    def __init__(self, shape, channels_first=False, dtype="float32", mean=0.0, seed=0):
        random = np.random.default_rng(seed)
        self.channels_first = channels_first
        channels = shape[1] if channels_first else shape[-1]
        wide = np.float64 if dtype == "float64" else np.float32
        self.x, self.side, self.dy = (
            (random.normal(size=shape) + shift).astype(dtype) for shift in (mean, 0, 0)
        )
        self.scale, self.variance = (
            random.uniform(0.5, 1.5, channels).astype(wide) for _ in range(2)
        )
        self.offset, self.mean = (random.normal(size=channels).astype(wide) for _ in range(2))

    def forward(self, **options):
        return _core.batch_norm_forward(
            *(self.x, self.scale, self.offset, self.mean, self.variance),
            **{"channels_first": self.channels_first, "momentum": 0.9, "epsilon": EPSILON}
            | options,
        )

    def gradient(self, mean, inv_std, **options):
        return _core.batch_norm_gradient(
            *(self.dy, self.x, self.scale, self.offset, mean, inv_std),
            **{"channels_first": self.channels_first} | options,
        )

    def middle(self, array):
        """As float64 [outer, channels, inner]."""
        array = np.asarray(array).astype(np.float64)
        if self.channels_first:
            return array.reshape(*array.shape[:2], -1)
        return array.reshape(-1, array.shape[-1], 1)

    def reference(self, training=True, side=False, relu=False):
        """The outputs of forward and gradient in float64, in [outer, channels, inner]."""
        x, dy = self.middle(self.x), self.middle(self.dy)
        wide = [v.astype(np.float64) for v in (self.scale, self.offset, self.mean, self.variance)]
        scale, offset, mean, variance = wide
        axes, count = (0, 2), x.shape[0] * x.shape[2]
        mu, var = (x.mean(axes), x.var(axes)) if training else (mean, variance)
        inv_std = 1 / np.sqrt(var + EPSILON)
        normal = (x - _column(mu)) * _column(inv_std)
        z = normal * _column(scale) + _column(offset)
        if side:
            z = z + self.middle(self.side)
        dz = dy * (z > 0) if relu else dy
        dx = dz * _column(scale * inv_std)
        if training:
            new_mean = 0.9 * mean + 0.1 * mu
            new_variance = 0.9 * variance + 0.1 * var * count / max(count - 1, 1)
            centred = dz - dz.mean(axes, keepdims=True)
            centred -= normal * (dz * normal).mean(axes, keepdims=True)
            dx = centred * _column(scale * inv_std)
        else:
            new_mean, new_variance = mean, variance
        y = np.maximum(z, 0) if relu else z
        forward = (y, new_mean, new_variance, mu, inv_std)
        return forward, (dx, (dz * normal).sum(axes), dz.sum(axes), dz), z


def assert_near(name, value, reference, tolerance):
    scale = max(1.0, np.abs(reference).max(initial=0.0))
    error = np.abs(np.asarray(value).astype(np.float64) - reference).max(initial=0.0) / scale
    assert error <= tolerance, f"{name}: {error:.3g}"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,channels_first", SHAPES)
def test_numbers(core_isa, shape, channels_first, dtype, training):
    case = Case(shape, channels_first, dtype)
    for side, relu in ((False, False), (False, True), (True, True)):
        expected, gradients, z = case.reference(training, side, relu)
        options = {"training": training, "activation": "relu" if relu else "none"}
        side_input = case.side if side else None
        *outputs, mask = case.forward(side_input=side_input, save_mask=side, **options)
        tolerance = TOLERANCE[dtype]
        vectors = min(tolerance, TOLERANCE["float32"])
        assert_near("y", case.middle(outputs[0]), expected[0], tolerance)
        for i, name in enumerate(("new_mean", "new_variance", "saved_mean", "saved_inv_std"), 1):
            assert_near(name, outputs[i], expected[i], vectors)
        # No gradient arrives next to the kink, where rounding decides the slope.
        if relu and np.abs(z).min() < 1e-5:
            case.dy = case.dy * (np.abs(z) > 1e-5).reshape(case.dy.shape).astype(case.dy.dtype)
            _, gradients, _ = case.reference(training, side, relu)
        *grads, side_grad = case.gradient(
            *outputs[3:5], mask=mask, side_input_gradient=side, **options
        )
        assert_near("x_grad", case.middle(grads[0]), gradients[0], tolerance)
        for i, name in enumerate(("scale_grad", "offset_grad"), 1):
            scale = np.sqrt(case.x.size / case.scale.size)
            assert_near(name, grads[i] / scale, gradients[i] / scale, vectors)
        if side:
            assert_near("side_input_grad", case.middle(side_grad), gradients[3], tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,channels_first", [((2048, 128), False), ((2, 64, 2048), True)])
def test_larger_than_the_caches(core_isa, shape, channels_first, dtype):
    case = Case(shape, channels_first, dtype)
    options = {"activation": "relu", "training": False, "num_threads": 2}

    def results():
        y, _, _, mean, inv_std, mask = case.forward(side_input=case.side, save_mask=True, **options)
        x_grad, _, _, side_grad = case.gradient(
            mean, inv_std, mask=mask, side_input_gradient=True, **options
        )
        # Without a side input's gradient x_grad is stored past the caches instead.
        alone = case.gradient(mean, inv_std, mask=mask, **options)[0]
        return y, x_grad, side_grad, alone, case.forward(**options)[0]

    small = results()
    copies = (18 << 20) // case.x.nbytes
    for name in ("x", "side", "dy"):
        setattr(case, name, np.concatenate([getattr(case, name)] * copies))
    for large, expected in zip(results(), small, strict=True):
        bits = np.ascontiguousarray(large).reshape(copies, -1).view(np.uint8)
        assert (bits == np.ascontiguousarray(expected).reshape(1, -1).view(np.uint8)).all()


@pytest.mark.parametrize("activation", ["silu", "mish", "gelu_erf", "gelu_tanh", "tanh", "elu"])
@pytest.mark.parametrize("shape,channels_first", [((40, 9, 30), False), ((4, 5, 7, 9), True)])
def test_slope_is_the_derivative(core_isa, shape, channels_first, activation):
    case = Case(shape, channels_first, "float64")
    options = {"side_input": case.side, "activation": activation}
    *_, mean, inv_std, _ = case.forward(**options)
    side_grad = case.gradient(mean, inv_std, side_input_gradient=True, **options)[3]
    step = 1e-6
    above, below = (
        case.forward(side_input=case.side + s, activation=activation)[0] for s in (step, -step)
    )
    np.testing.assert_allclose(side_grad, case.dy * (above - below) / (2 * step), atol=1e-8)


@pytest.mark.parametrize("activation", ["relu", "relu6", "silu"])
@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("shape,channels_first", [((37, 21), False), ((3, 5, 6, 7), True)])
def test_x_grad_in_the_memory_of_an_input(core_isa, shape, channels_first, side, activation):
    """Whatever the sums leave where x_grad will be."""
    for dtype in ("float32", "bfloat16"):
        case = Case(shape, channels_first, dtype)
        options = {"activation": activation, "side_input": case.side if side else None}
        mean, inv_std = case.forward(**options)[3:5]
        for side_gradient in (False, True):
            options["side_input_gradient"] = side_gradient
            new, of_dy, of_x = (
                case.gradient(mean, inv_std, x_grad_is=name, **options) for name in ("", "dy", "x")
            )
            for result in (of_dy, of_x):
                for i in range(4 if side_gradient else 3):
                    assert result[i].tobytes() == new[i].tobytes(), (dtype, side_gradient, i)


@pytest.mark.parametrize("shape,channels_first", SHAPES)
def test_any_number_of_threads_gives_the_same_bits(core_isa, shape, channels_first):
    case = Case(shape, channels_first)
    results = []
    for threads in (1, 2, 3, 7):
        options = {"activation": "relu", "num_threads": threads}
        outputs = case.forward(side_input=case.side, save_mask=True, **options)
        gradients = case.gradient(
            *outputs[3:5], mask=outputs[5], side_input_gradient=True, **options
        )
        results.append([np.asarray(v).tobytes() for v in (*outputs, *gradients)])
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("channels_first", [False, True])
def test_statistics_far_from_zero(core_isa, channels_first):
    shape = (16, 3, 60, 70) if channels_first else (16, 60, 70, 3)
    case = Case(shape, channels_first, mean=1e4)
    exact = case.middle(case.x)
    mean, squares = _core.batch_norm_moments(case.x, channels_first=channels_first)
    np.testing.assert_allclose(mean, exact.mean((0, 2)), rtol=1e-9)
    np.testing.assert_allclose(squares / (16 * 60 * 70), exact.var((0, 2)), rtol=2e-6)


@pytest.mark.parametrize("position", [0, 5, 3000])
def test_statistics_with_an_outlier(core_isa, position):
    x = np.random.default_rng(0).normal(size=(20000, 3)).astype(np.float32)
    x[position] = 1e5
    mean, squares = _core.batch_norm_moments(x)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=1e-6)
    np.testing.assert_allclose(squares, x.astype(np.float64).var(0) * len(x), rtol=2e-6)


def test_published_walk_through(core_isa):
    x = np.float32(
        [
            [[[0.16513085, 0.9014813, 0.6309742], [0.4345461, 0.29193902, 0.64250207]]],
            [[[0.9757855, 0.43509948, 0.6601019], [0.60489583, 0.6366315, 0.6144488]]],
        ]
    )
    one, zero = np.ones(3, np.float32), np.zeros(3, np.float32)
    variances = {
        True: [0.5576107, 0.5349634, 0.50018483],
        False: [0.543208, 0.5262226, 0.50013864],
    }
    for unbiased, variance in variances.items():
        _, mean, new_variance, saved_mean, saved_inv_std, _ = _core.batch_norm_forward(
            x, one, zero, one, one, momentum=0.5, epsilon=0.001, unbiased=unbiased
        )
        np.testing.assert_allclose(mean, [0.7725448, 0.7831439, 0.8185034], rtol=3e-7)
        np.testing.assert_allclose(new_variance, variance, rtol=3e-7)
        np.testing.assert_allclose(saved_mean, [0.5450896, 0.5662878, 0.63700676], rtol=3e-7)
        np.testing.assert_allclose(saved_inv_std, [3.3822396, 4.325596, 27.981367], rtol=3e-6)


def test_mask_is_one_bit_an_element(core_isa):
    for shape, channels_first in (((3, 5, 7), False), ((3, 7, 5, 11), True), ((4, 64, 96), False)):
        case = Case(shape, channels_first)
        y, *_, mask = case.forward(side_input=case.side, activation="relu", save_mask=True)
        np.testing.assert_array_equal(mask, np.packbits(y.ravel() > 0, bitorder="little"))


@pytest.mark.parametrize(
    "shape,channels_first",
    [((0, 4, 3), False), ((0, 3, 4, 4), True), ((2, 3, 0, 4), True), ((5, 4, 0), False)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty(core_isa, shape, channels_first, dtype):
    case = Case(shape, channels_first, dtype)
    y, mean, variance, saved_mean, saved_inv_std, mask = case.forward(
        side_input=case.side, activation="relu", save_mask=True
    )
    assert y.shape == shape and mask.size == 0
    np.testing.assert_array_equal(mean, case.mean)
    np.testing.assert_array_equal(variance, case.variance)
    assert np.isfinite(saved_mean).all() and np.isfinite(saved_inv_std).all()
    x_grad, scale_grad, offset_grad, _ = case.gradient(saved_mean, saved_inv_std, mask=mask)
    assert x_grad.shape == shape
    assert not scale_grad.any() and not offset_grad.any()


def test_momentum_zero_does_not_read_the_moving_averages(core_isa):
    case = Case((50, 4))
    case.mean[:] = case.variance[:] = np.nan
    _, mean, variance, saved_mean, _, _ = case.forward(momentum=0.0)
    np.testing.assert_array_equal(mean, saved_mean)
    assert np.isfinite(variance).all()


def test_one_element_a_channel(core_isa):
    case = Case((1, 5))
    _, _, variance, saved_mean, saved_inv_std, _ = case.forward(momentum=0.5)
    np.testing.assert_array_equal(saved_mean, case.x[0])
    np.testing.assert_allclose(saved_inv_std, 1 / np.sqrt(EPSILON), rtol=1e-6)
    np.testing.assert_allclose(variance, case.variance / 2, rtol=1e-6)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": np.zeros(3, np.float32)}, "x must have rank"),
        ({"x": np.zeros((2, 3), np.int32)}, "x has the unsupported dtype"),
        ({"scale": np.zeros(4, np.float32)}, "scale"),
        ({"offset": np.zeros(3)}, "offset"),
        ({"side_input": np.zeros((3, 2), np.float32)}, "side_input"),
        ({"activation": "softmax"}, "activation"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_wrong_arguments(change, message):
    vector = np.ones(3, np.float32)
    good = {"x": np.zeros((2, 3), np.float32), "scale": vector, "offset": vector}
    with pytest.raises(ValueError, match=message):
        _core.batch_norm_forward(**good | {"mean": vector, "variance": vector} | change)
