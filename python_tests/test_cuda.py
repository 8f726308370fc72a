"""The GPU half without a GPU: what the binaries hold, need and export; loading; clear errors."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import tf_fused_ops
from tf_fused_ops import _library
from tf_fused_ops.cli import info

PACKAGE = Path(tf_fused_ops.__file__).parent
ARCHS = _library.build_info().get("cuda_archs", "none")
built = pytest.mark.skipif(ARCHS == "none", reason="the GPU half is not built")

REGISTERED = """
import json, sys
import tensorflow as tf
from tensorflow.python.framework import kernels
for name in ("_ops.so", "_cuda_ops.so"):
    tf.load_op_library(f"{sys.argv[1]}/{name}")
ops = json.loads(sys.argv[2])
found = {}
for op in ops:
    for kernel in kernels.get_registered_kernels_for_op("TfFusedOps>" + op).kernel:
        if kernel.device_type == "GPU":
            types = [c.allowed_values.list.type[0] for c in kernel.constraint if c.name == "T"]
            found.setdefault(op, []).extend(tf.dtypes.as_dtype(t).name for t in types)
print(json.dumps(found))
"""
OPS = [
    *("Act", "ActGrad"),
    *("BatchNormAct", "BatchNormActGrad", "BatchNormMoments", "BatchNormApply"),
    *("BatchNormGradSums", "BatchNormGradApply"),
    *("Conv2DBiasAct", "Conv2DBiasActGrad", "MatMulBiasAct", "MatMulBiasActGrad"),
    *("LayerNorm", "LayerNormGrad", "Softmax", "SoftmaxGrad", "Dropout", "RandomWords"),
    *("SparseSoftmaxCrossEntropy", "SparseSoftmaxCrossEntropyGrad"),
]
# Without an attribute for the type of elements.
UNTYPED = ["RandomWords"]

REMAPPED = """
import json, sys
import tensorflow as tf
from tf_fused_ops import function
tf.load_op_library(f"{sys.argv[1]}/_cuda_ops.so")
def cross_entropy(x):
    labels = tf.zeros(x.shape[:1], tf.int32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)
def dropout(x):
    return tf.nn.dropout(x, 0.25)
for code in (cross_entropy, dropout):
    @function
    def step(x):
        with tf.device("GPU:0"), tf.GradientTape() as tape:
            tape.watch(x)
            y = code(x)
            return y, tape.gradient(y, x)
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        step.get_concrete_function(tf.TensorSpec([6, 5], dtype))
        report = step.remap_reports[-1]
        fused = [[f.rule, f.gradients] for f in report.fused]
        print(json.dumps([dtype, fused, [r.reason for r in report.refused]]))
"""


def binaries():
    return [PACKAGE / "_cuda_ops.so", *PACKAGE.glob("_cuda.*.so")]


def symbols(binary, *options):
    result = subprocess.run(
        ["nm", "-D", *options, str(binary)], capture_output=True, text=True, check=True
    )
    return [line.split()[-1] for line in result.stdout.splitlines()]


@built
def test_loads_beside_the_ops_and_registers_kernels(run_python):
    found = json.loads(run_python(REGISTERED, str(PACKAGE), json.dumps(OPS)))
    assert sorted(found) == sorted(OPS)
    for op, types in found.items():
        expected = [] if op in UNTYPED else ["bfloat16", "float16", "float32"]
        assert sorted(types) == expected, op


@built
def test_rules_go_by_the_kernels_of_the_device(run_python):
    found = [json.loads(line) for line in run_python(REMAPPED, str(PACKAGE)).splitlines()]
    rules = {"sparse_cross_entropy": "SparseSoftmaxCrossEntropy", "dropout": "Dropout"}
    assert found == [
        [dtype, [], [f"TfFusedOps>{op} has no float64 kernel on GPU"]]
        if dtype == "float64"
        else [dtype, [[rule, 1]], []]
        for rule, op in rules.items()
        for dtype in ("float32", "float16", "bfloat16", "float64")
    ]


@built
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_neither_exports_nor_needs_cuda_symbols():
    assert len(binaries()) == 2
    for binary in binaries():
        exported = symbols(binary, "--defined-only")
        assert not [name for name in exported if re.match(r"_*(cu|nv)[a-zA-Z]*", name)], binary
        needed = symbols(binary, "--undefined-only")
        assert not [name for name in needed if re.match(r"_*cuda|cublas|cudnn", name)], binary


@built
def test_code_is_what_was_asked_for():
    expected = set()
    for arch in ARCHS.split(";"):
        number, _, form = arch.partition("-")
        capability = int(re.match(r"\d+", number)[0])
        expected |= {(capability, "machine code")} if form != "virtual" else set()
        expected |= {(capability, "PTX")} if form != "real" else set()
    assert set(_library.cuda_code()) == expected


@built
@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="cuobjdump is not installed")
def test_code_is_what_cuobjdump_lists():
    binary = PACKAGE / "_cuda_ops.so"
    listed = set()
    for option, form in (("--list-elf", "machine code"), ("--list-ptx", "PTX")):
        result = subprocess.run(["cuobjdump", option, binary], capture_output=True, text=True)
        listed |= {(int(arch), form) for arch in re.findall(r"sm_(\d+)", result.stdout)}
    assert set(_library.cuda_code()) == listed


CALL = """
from tf_fused_ops import _cuda
class Array:
    __cuda_array_interface__ = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False)}
_cuda.bias_act_forward(Array(), Array(), stream=0)
"""


@built
def test_call_without_a_device(run_python):
    with pytest.raises(AssertionError) as failure:
        run_python(CALL, CUDA_VISIBLE_DEVICES="")
    assert re.search(r"RuntimeError: cuda\w+: CUDA error \d+ \(.+\)", str(failure.value))


def test_status_says_why_the_kernels_are_not_loaded():
    if _library.cuda_loaded():
        assert _library.cuda_status() == "loaded"
    else:
        assert re.search("not built|missing|without CUDA|not loaded", _library.cuda_status())


def test_info_tells_the_code_in_words():
    code = [(80, "machine code"), (90, "machine code"), (90, "PTX"), (100, "machine code")]
    assert info.describe_gpu_code(code) == (
        "machine code for compute capability 8.0, 9.0, 10.0; "
        "PTX 9.0, which the driver translates for 9.0 and later"
    )
    assert info.describe_gpu_code([]) == "none"


PROJECT = """
cmake_minimum_required(VERSION 3.20...3.31)
project(configure LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "@ROOT@/cmake")
include(Cuda)
message(STATUS "has CUDA: ${TFO_HAS_CUDA}")
"""


@pytest.mark.skipif(not (ROOT / "cmake").exists(), reason="needs the checkout")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="CMake is not installed")
@pytest.mark.parametrize(
    "choice,words",
    [
        ("AUTO", ["No CUDA compiler found: building without the GPU half", "has CUDA: OFF"]),
        ("OFF", ["has CUDA: OFF"]),
        ("ON", ["TFO_CUDA=ON needs a CUDA compiler", "Install the CUDA toolkit"]),
        ("MAYBE", ["TFO_CUDA must be AUTO, ON or OFF, not MAYBE"]),
    ],
)
def test_configuring_without_a_compiler(tmp_path, choice, words):
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.replace("@ROOT@", str(ROOT)))
    result = subprocess.run(
        ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")],
        env=os.environ | {"TFO_CUDA": choice, "CUDACXX": str(tmp_path / "no-nvcc")},
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.sub(r"\s+", " ", result.stdout + result.stderr)
    assert all(word in said for word in words), said
    assert (result.returncode == 0) == (choice in ("AUTO", "OFF"))


@pytest.mark.skipif(not (ROOT / "cuda").exists(), reason="the benchmarks are not beside the tests")
def test_encoder_benchmark():
    """It also runs without a GPU; all peers take the same steps."""
    program = ROOT / "cuda" / "benchmark" / "encoder.py"
    sizes = ["--batch", "2", "--tokens", "16", "--width", "64", "--layers", "1"]
    command = [sys.executable, program, *sizes, "--policy", "float32", "--peers", "stock,ours"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    lines = subprocess.check_output(command, env=hidden, text=True).splitlines()
    told = re.compile(r"(\w+): [\d.]+ ms a step, losses ([\d.]+) ([\d.]+) ([\d.]+)(?: fused (.*))?")
    (_, *stock, none), (_, *ours, fused) = (told.fullmatch(line).groups() for line in lines[:2])
    assert none is None and {"1 attention", "2 layer_norm"} <= set(fused.split(", "))
    assert list(map(float, ours)) == pytest.approx(list(map(float, stock)), abs=2e-4)
    assert re.fullmatch(r"ours is [\d.]+x as fast as stock", lines[2])
