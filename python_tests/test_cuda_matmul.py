"""Matrix product + bias + activation on the GPU: on one, and emulated where there is none.

Emulated, the kernels run on the processor, and a stand-in for cuBLASLt that follows its
documentation computes the products and records the calls.
"""

import cases
import numpy as np
import pytest
import tensorflow as tf
import test_matmul
from cuda_backends import backend
from hypothesis import given
from hypothesis import strategies as st
from launchers import GRADIENTS, Launchers
from test_cuda_tensorflow import why_not
from tolerances import assert_close

CASES = [case for case in cases.matmul_cases() if case.dtype != "float64"]
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
    test_matmul.check(case, forward=exact(run.forward), gradients=exact(run.gradients))
    assert name == "gpu" or not run.refusals


@BACKENDS
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, name):
    run = Launchers(backend(name))
    for n in (24, 33):
        case = cases.MatMulCase(act=act, dtype=dtype, m=31, k=17, n=n, side=True)
        test_matmul.check(case, forward=exact(run.forward), gradients=exact(run.gradients))


@given(case=test_matmul.random_cases(["float32"]), seed=st.integers(0, 1000))
def test_random_shapes(case, seed):
    run = Launchers(backend("emulated"))
    test_matmul.check(case, seed, run.forward, run.gradients)


@BACKENDS
@pytest.mark.parametrize("n", [24, 33])
@pytest.mark.parametrize("act", ["none", "relu", "gelu_tanh", "gelu_erf"])
def test_pre_activation(act, n, name):
    case = cases.MatMulCase(act=act, m=5, k=7, n=n)
    run = Launchers(backend(name))
    operands = arrays(case)
    y, pre_activation = run.forward(case, *operands, save=True, allow_tf32=False)
    plain = cases.MatMulCase(act="none", m=5, k=7, n=n)
    z = run.forward(plain, *operands, allow_tf32=False)
    np.testing.assert_allclose(pre_activation, z, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(y, run.forward(case, *operands, allow_tf32=False), rtol=2e-6)


@BACKENDS
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_same_bits_twice(dtype, name):
    case = cases.MatMulCase(act="gelu_tanh", dtype=dtype, lead=(3,), m=65, k=100, n=72)
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
    case = cases.MatMulCase(act=act, lead=(2,), m=9, k=6, n=11)
    run = Launchers(backend(name))
    a, b, _, _, dy = arrays(case, with_dy=True)
    saved = None if act == "none" else dy
    every = run.gradients(case, dy, a, b, saved, allow_tf32=False)
    alone = run.gradients(case, dy, a, b, saved, wanted=(wanted,), allow_tf32=False)
    for gradient, value, other in zip(GRADIENTS, alone, every, strict=True):
        if gradient == wanted:
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5)
        else:
            assert value is None


RELU, BIAS, GELU, AUX, BIAS_GRADIENT_A, BIAS_GRADIENT_B = 2, 4, 32, 128, 256, 512


class Recorded:
    """Emulated launchers whose stand-in for cuBLASLt tells what it was asked."""

    def __init__(self):
        self.backend = backend("emulated")
        self.run = Launchers(self.backend)
        self.library = self.backend.libraries["cublaslt"]
        self.lines()

    def lines(self):
        """The calls since the last time: products, and questions for an algorithm."""
        return self.library.emulation_record().decode().splitlines()

    def products(self, **expected):
        """The expected fields of the products since the last time, in order."""
        products = [line for line in self.lines() if line.startswith("matmul")]
        fields = [dict(word.split("=") for word in line.split()[1:]) for line in products]
        return [{k: int(product[k]) for k in expected} for product in fields]

    def epilogues(self):
        return [product["epilogue"] for product in self.products(epilogue=None)]

    def refuse(self, what):
        self.library.emulation_refuse(what.encode())


@pytest.fixture
def recorded():
    recorded = Recorded()
    yield recorded
    recorded.refuse("")
    recorded.library.emulation_fail(b"")


@pytest.mark.parametrize(
    ("act", "n", "save", "bias", "epilogue", "kernels"),
    [
        ("gelu_tanh", 24, True, True, GELU | AUX | BIAS, 0),
        ("gelu_tanh", 24, True, False, GELU | AUX, 0),
        ("gelu_tanh", 25, True, True, BIAS, 1),
        ("gelu_tanh", 25, False, True, GELU | BIAS, 0),
        ("gelu_erf", 24, True, True, BIAS, 1),
        ("relu", 25, False, True, RELU | BIAS, 0),
        ("relu", 24, False, False, RELU, 0),
        ("relu", 24, True, True, BIAS, 1),
        ("none", 24, False, True, BIAS, 0),
        ("silu", 24, False, False, 1, 1),
    ],
)
def test_what_the_library_computes(act, n, save, bias, epilogue, kernels, recorded):
    case = cases.MatMulCase(act=act, n=n, bias=bias)
    before = recorded.backend.module.launches()
    recorded.run.forward(case, *arrays(case), save=save)
    assert recorded.epilogues() == [epilogue]
    assert recorded.backend.module.launches() - before == kernels


@pytest.mark.parametrize(
    ("dtype", "epilogue"), [("float32", BIAS), ("float16", GELU | BIAS), ("bfloat16", GELU | BIAS)]
)
def test_exact_gelu(dtype, epilogue, recorded):
    """Where float32 is not to be rounded to TF32, its tanh is our own."""
    case = cases.MatMulCase(act="gelu_tanh", dtype=dtype)
    recorded.run.forward(case, *arrays(case), allow_tf32=False)
    assert recorded.epilogues() == [epilogue]


def test_falls_through(recorded):
    # Of a size that no other test has: answers are kept.
    case = cases.MatMulCase(act="gelu_tanh", m=13, k=21, n=40, side=True)
    operands = arrays(case)

    def check():
        test_matmul.check(case, forward=recorded.run.forward, gradients=recorded.run.gradients)

    recorded.refuse(f"k=21 transa=0 transb=0 epilogue={GELU | BIAS}")
    check()
    assert recorded.epilogues()[0] == BIAS
    (refusal,) = recorded.run.refusals
    assert "m = 13, n = 40, k = 21" in refusal
    assert "not supported" in refusal

    recorded.refuse(f"k=21 transa=0 transb=0 epilogue={BIAS}")
    case = cases.MatMulCase(act="gelu_erf", m=13, k=21, n=41, side=True)
    check()
    assert recorded.epilogues()[0] == 1
    assert len(recorded.run.refusals) == 2

    # No second question for the same shape.
    operands = arrays(case)
    recorded.run.forward(case, *operands)
    assert not [line for line in recorded.lines() if line.startswith("heuristic")]

    recorded.refuse("k=21 transa=0 transb=0")
    case = cases.MatMulCase(act="gelu_erf", m=13, k=21, n=42)
    with pytest.raises(RuntimeError, match=r"cublasLtMatmulAlgoGetHeuristic: .* not supported"):
        recorded.run.forward(case, *arrays(case))


@pytest.mark.parametrize(("tb", "epilogue"), [(False, BIAS_GRADIENT_A), (True, BIAS_GRADIENT_B)])
def test_bias_gradient_in_the_product(tb, epilogue, recorded):
    case = cases.MatMulCase(act="none", m=9, k=6, n=11, tb=tb)
    a, b, _, _, dy = arrays(case, with_dy=True)
    wanted = GRADIENTS[:3]
    gradients = recorded.run.gradients(case, dy, a, b, None, wanted=wanted)
    assert recorded.epilogues() == [epilogue, 1]
    assert_close("bias gradient", gradients[2], dy.sum(0), case.dtype)

    recorded.refuse(f"epilogue={epilogue}")
    case = cases.MatMulCase(act="none", m=8, k=6, n=11, tb=tb)
    a, b, _, _, dy = arrays(case, with_dy=True)
    gradients = recorded.run.gradients(case, dy, a, b, None, wanted=wanted)
    assert recorded.epilogues() == [1, 1]
    assert_close("bias gradient", gradients[2], dy.sum(0), case.dtype)


@pytest.mark.parametrize(
    ("dtype", "allow", "compute"),
    [("float32", True, 77), ("float32", False, 68), ("float16", True, 68), ("bfloat16", True, 68)],
)
def test_tf32(dtype, allow, compute, recorded):
    case = cases.MatMulCase(dtype=dtype)
    recorded.run.forward(case, *arrays(case), allow_tf32=allow)
    assert recorded.products(compute=None) == [{"compute": compute}]


def test_transposed_images(recorded):
    """Several transposed matrices are one product, of a copy."""
    case = cases.MatMulCase(act="relu", lead=(2, 3), m=33, k=35, n=5, ta=True)
    test_matmul.check(case, forward=recorded.run.forward, gradients=recorded.run.gradients)
    forward = recorded.products(m=None, n=None, k=None)[0]
    assert forward == {"m": 5, "n": 2 * 3 * 33, "k": 35}


@pytest.mark.parametrize("name", ["input", "filters", "bias", "side_input", "y", "pre_activation"])
def test_misaligned(name, recorded):
    """The library is told how the arrays are aligned: the stand-in refuses what breaks that."""
    case = cases.MatMulCase(act="gelu_tanh", m=4, k=8, n=16, dtype="float16", side=True)
    operands = arrays(case)
    expected = recorded.run.forward(case, *operands, save=True)
    value = recorded.run.forward(case, *operands, save=True, misaligned=(name,))
    assert recorded.epilogues() == [GELU | AUX | BIAS] * 2
    for v, e in zip(value, expected, strict=True):
        np.testing.assert_array_equal(v, e)


def test_errors_are_not_kept(recorded):
    case = cases.MatMulCase(m=3, k=22)
    recorded.library.emulation_fail(b"k=22")
    with pytest.raises(RuntimeError, match="cuBLASLt error 14"):
        recorded.run.forward(case, *arrays(case))
    recorded.library.emulation_fail(b"")
    recorded.run.forward(case, *arrays(case))


@pytest.mark.gpu
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_on_tensorflows_gpu(case, exact_float32):
    def forward(*arguments):
        with tf.device("GPU:0"):
            y = test_matmul.fused(*arguments)
        assert "GPU:0" in y.device
        return y

    def gradients(*arguments):
        with tf.device("GPU:0"):
            values = test_matmul.fused_gradients(*arguments)
        assert all("GPU:0" in value.device for value in values)
        return values

    test_matmul.check(case, forward=forward, gradients=gradients)
