"""Convolution + bias + activation on the GPU: on one, and emulated where there is none.

Emulated, the kernels run on the processor, and stand-ins for cuDNN and cuBLASLt that follow their
documentation compute the convolutions and record the calls.
"""

import cases
import numpy as np
import pytest
import tensorflow as tf
import test_conv
from cuda_backends import backend
from hypothesis import given
from hypothesis import strategies as st
from launchers import GRADIENTS, Launchers
from test_cuda_tensorflow import why_not

CASES = [case for case in cases.conv_cases() if case.dtype != "float64"]
BACKENDS = pytest.mark.parametrize("name", ["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])


def exact(run):
    """With products of float32 that are not rounded to TF32."""
    return lambda *args: run(*args, allow_tf32=False)


def arrays(case, with_dy=False):
    *operands, dy = (None if v is None else v.astype(case.dtype) for v in case.inputs())
    return (*operands, dy) if with_dy else operands


@BACKENDS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients(case, name):
    run = Launchers(backend(name))
    test_conv.check(case, forward=exact(run.forward), gradients=exact(run.gradients))
    assert name == "gpu" or not run.refusals


@BACKENDS
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, name):
    run = Launchers(backend(name))
    case = cases.ConvCase(act=act, dtype=dtype, cin=17, cout=33, side=True)
    test_conv.check(case, forward=exact(run.forward), gradients=exact(run.gradients))


@BACKENDS
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
@pytest.mark.parametrize("act", ["none", "relu", "silu"])
def test_scale(act, kernel, layout, name):
    run = Launchers(backend(name))
    for dtype in ("float32", "float16", "bfloat16"):
        case = cases.ConvCase(
            act=act, kernel=kernel, layout=layout, dtype=dtype, cout=9, side=True, scale=True
        )
        test_conv.check_forward(case, forward=exact(run.forward))


@given(case=test_conv.random_cases(["float32"], groups=[1]), seed=st.integers(0, 1000))
def test_random_shapes(case, seed):
    run = Launchers(backend("emulated"))
    if min(case.output_image()) > 0:
        test_conv.check(case, seed, run.forward, run.gradients)


@BACKENDS
def test_groups_are_refused(name):
    run, case = Launchers(backend(name)), cases.ConvCase(cin=4, cout=6, groups=2)
    x, filters, bias, _, dy = arrays(case, with_dy=True)
    with pytest.raises(RuntimeError, match="groups are not computed on the GPU"):
        run.forward(case, x, filters, bias, None)
    with pytest.raises(RuntimeError, match="groups are not computed on the GPU"):
        run.gradients(case, dy, x, filters, dy)


@BACKENDS
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("act", ["none", "relu", "silu"])
def test_pre_activation(act, layout, name):
    case, plain = (cases.ConvCase(act=a, layout=layout, cout=9, side=True) for a in (act, "none"))
    run = Launchers(backend(name))
    operands = arrays(case)
    y, pre_activation = run.forward(case, *operands, save=True, allow_tf32=False)
    z = run.forward(plain, *operands, allow_tf32=False)
    np.testing.assert_allclose(pre_activation, z, rtol=2e-6, atol=2e-6)
    other = run.forward(case, *operands, allow_tf32=False)
    np.testing.assert_allclose(y, other, rtol=2e-6, atol=2e-6)


@BACKENDS
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_same_bits_twice(dtype, layout, name):
    case = cases.ConvCase(
        batch=3, image=(17, 15), cin=24, cout=40, layout=layout, dtype=dtype, side=True
    )
    run = Launchers(backend(name))
    *operands, dy = arrays(case, with_dy=True)
    first, second = (run.forward(case, *operands) for _ in range(2))
    assert first.tobytes() == second.tobytes()
    first, second = (run.gradients(case, dy, *operands[:2], dy) for _ in range(2))
    assert [v.tobytes() for v in first] == [v.tobytes() for v in second]


@BACKENDS
@pytest.mark.parametrize("act", ["none", "relu"])
@pytest.mark.parametrize("wanted", GRADIENTS)
def test_one_gradient_alone(wanted, act, name):
    case = cases.ConvCase(act=act)
    run = Launchers(backend(name))
    x, filters, _, _, dy = arrays(case, with_dy=True)
    saved = None if act == "none" else dy
    every = run.gradients(case, dy, x, filters, saved, allow_tf32=False)
    alone = run.gradients(case, dy, x, filters, saved, wanted=(wanted,), allow_tf32=False)
    for gradient, value, other in zip(GRADIENTS, alone, every, strict=True):
        if gradient == wanted:
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5)
        else:
            assert value is None


@BACKENDS
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_image_without_pixels(layout, name):
    """All windows lie in the padding: y is the bias, and the filters' gradient is zero."""
    case = cases.ConvCase(image=(0, 0), padding=((2, 2), (3, 1)), layout=layout, act="relu")
    run = Launchers(backend(name))
    *operands, dy = arrays(case, with_dy=True)
    test_conv.check(case, forward=run.forward, gradients=run.gradients)
    assert not run.gradients(case, dy, *operands[:2], dy)[1].any()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_threads_backwards(layout):
    """What a barrier orders does not depend on which thread comes first."""
    emulated = backend("emulated")
    run = Launchers(emulated)
    case = cases.ConvCase(image=(7, 8), cin=33, cout=35, strides=(2, 2), layout=layout)
    emulated.module.set_device(reverse=True)
    try:
        test_conv.check(case, forward=run.forward, gradients=run.gradients)
    finally:
        emulated.module.set_device()


class Recorded:
    """Emulated launchers whose stand-ins tell what they were asked."""

    def __init__(self):
        self.backend = backend("emulated")
        self.run = Launchers(self.backend)
        self.library = self.backend.libraries["cudnn"]
        self.lines()

    def lines(self):
        """cuDNN's calls since the last time: convolutions, also refused ones, and questions for an
        algorithm."""
        return self.library.emulation_record().decode().splitlines()

    def convolutions(self):
        return [v for v in self.lines() if not v.startswith(("heuristic", "refusal"))]

    def check(self, case):
        test_conv.check(case, forward=self.run.forward, gradients=self.run.gradients)

    def refuse(self, what):
        self.library.emulation_refuse(what.encode())


@pytest.fixture
def recorded():
    recorded = Recorded()
    yield recorded
    recorded.refuse("")
    recorded.library.emulation_fail(b"")


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize(
    ("act", "bias", "side", "entry"),
    [
        ("relu", True, True, "relu"),
        ("relu", False, False, "relu"),
        ("none", True, False, "identity"),
        ("gelu_erf", True, True, None),
    ],
)
def test_what_the_library_computes(act, bias, side, entry, layout, recorded):
    case = cases.ConvCase(act=act, bias=bias, side=side, layout=layout)
    recorded.check(case)
    forward, *gradients = recorded.convolutions()
    assert forward.startswith("fused" if entry else "forward")
    assert f"format={layout}" in forward
    assert entry is None or f" {entry} " in forward
    starts = ["input gradient", "filters gradient"]
    assert [line[: len(start)] for line, start in zip(gradients, starts, strict=True)] == starts


def test_falls_through(recorded):
    # Of sizes that no other test has: answers are kept.
    case = cases.ConvCase(cin=5, cout=11, side=True)
    recorded.refuse("fused x=2x5x5x6 w=11x5x3x3")
    recorded.check(case)
    fused, forward, *_ = recorded.convolutions()
    assert fused.startswith("fused")
    assert forward.startswith("forward")
    (refusal,) = recorded.run.refusals
    assert "fused convolution of images 2 x 5 x 6 x 5 with filters 3 x 3 x 11" in refusal

    # No second attempt for the same shape.
    recorded.run.forward(case, *arrays(case))
    (line,) = recorded.lines()
    assert line.startswith("forward")

    case = cases.ConvCase(cin=5, cout=12)
    recorded.refuse("x=2x5x5x6 w=12x5x3x3")
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        recorded.run.forward(case, *arrays(case))


@pytest.mark.parametrize(
    ("dtype", "allow", "math"),
    [("float32", True, 1), ("float32", False, 3), ("float16", False, 1), ("bfloat16", False, 1)],
)
def test_tf32(dtype, allow, math, recorded):
    case = cases.ConvCase(dtype=dtype)
    recorded.run.forward(case, *arrays(case), allow_tf32=allow)
    assert recorded.convolutions()[0].endswith(f"math={math}")


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize(
    ("padding", "strides", "expected"),
    [
        # Image 6 x 5, filter 3 x 3.
        ("SAME", (1, 1), "x=2x3x6x5 w=4x3x3x3 pad=1x1"),
        ("VALID", (2, 2), "x=2x3x6x5 w=4x3x3x3 pad=0x0"),
        ("SAME", (2, 2), "x=2x3x7x5 w=4x3x3x3 pad=0x1"),
        (((2, 0), (1, 1)), (1, 1), "x=2x3x8x5 w=4x3x3x3 pad=0x1"),
        (((0, 1), (2, 2)), (1, 2), "x=2x3x7x5 w=4x3x3x3 pad=0x2"),
        (((5, 5), (0, 0)), (1, 1), "x=2x3x16x5 w=4x3x3x3 pad=0x0"),
    ],
)
def test_padding(padding, strides, expected, layout, recorded):
    """What cuDNN cannot pad is padded before; images that need no copy are not copied."""
    case = cases.ConvCase(image=(6, 5), padding=padding, strides=strides, layout=layout)
    recorded.check(case)
    assert all(expected in line for line in recorded.convolutions())


def test_pointwise_is_a_product(recorded):
    products = recorded.backend.libraries["cublaslt"]
    products.emulation_record()
    case = cases.ConvCase(kernel=(1, 1), cin=7, cout=8)
    recorded.check(case)
    assert not recorded.lines()
    lines = [v for v in products.emulation_record().decode().splitlines() if v[:6] == "matmul"]
    assert len(lines) == 3
    assert "m=8 n=60 k=7" in lines[0]

    recorded.check(cases.ConvCase(kernel=(1, 1), strides=(2, 2)))
    assert len(recorded.convolutions()) == 3


def test_plans_are_kept(recorded):
    """And algorithms that were refused in the end are not tried again."""
    case = cases.ConvCase(image=(7, 11))
    recorded.check(case)
    lines = recorded.lines()
    for what in ("heuristic", "refusal"):
        assert sum(line.startswith(what) for line in lines) == 3
    recorded.check(case)
    assert len(recorded.lines()) == 3


def test_plans_are_kept_by_alignment(recorded):
    case = cases.ConvCase(image=(7, 13))
    operands = arrays(case)
    for misaligned, asked in (((), 1), (("input",), 1), ((), 0), (("input",), 0)):
        recorded.run.forward(case, *operands, misaligned=misaligned)
        lines = recorded.lines()
        assert sum(line.startswith("heuristic") for line in lines) == asked


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_large_batches_go_in_parts(layout, recorded):
    """The emulated cuDNN takes tensors of 5000 elements, in place of 2**31 - 1."""
    case = cases.ConvCase(batch=5, image=(10, 12), cin=20, cout=3, layout=layout, side=True)
    recorded.check(case)
    lines = recorded.convolutions()
    images = [int(line.split("x=")[1].split("x")[0]) for line in lines]
    assert images == [2, 2, 1] * 3


def test_errors_are_not_kept(recorded):
    case = cases.ConvCase(cin=5, cout=13)
    recorded.library.emulation_fail(b"w=13x5x3x3")
    with pytest.raises(RuntimeError, match="cuDNN error 4000"):
        recorded.run.forward(case, *arrays(case))
    recorded.library.emulation_fail(b"")
    recorded.run.forward(case, *arrays(case))


@pytest.mark.gpu
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_on_tensorflows_gpu(case, exact_float32):
    def forward(*arguments):
        with tf.device("GPU:0"):
            y = test_conv.fused(*arguments)
        assert "GPU:0" in y.device
        return y

    def gradients(*arguments):
        with tf.device("GPU:0"):
            values = test_conv.fused_gradients(*arguments)
        assert all("GPU:0" in value.device for value in values)
        return values

    test_conv.check(case, forward=forward, gradients=gradients)
