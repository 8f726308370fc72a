"""The built GPU half where a library, one of its symbols or the device is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_backends import backend, why_no_gpu

from tf_fused_ops import _library

PACKAGE = Path(_library.__file__).parent
MODULES = sorted(PACKAGE.glob("_cuda.*so"))
pytestmark = pytest.mark.skipif(not MODULES, reason="the GPU half is not built")

# Loads the module alone, without TensorFlow. The arrays are never read.
PROGRAM = """
import importlib.util
import sys

import numpy as np

spec = importlib.util.spec_from_file_location("_cuda", sys.argv[1])
cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda)


class Array:
    def __init__(self, *shape):
        self.array = np.zeros(shape, np.float32)
        self.__cuda_array_interface__ = self.array.__array_interface__


kernel = 3 if sys.argv[2] == "conv" else 1
shape = cuda.ConvShape(
    batch=1, in_size=(5, 5), in_c=2, out_size=(5, 5), out_c=4, kernel=(kernel,) * 2,
    pads=(kernel // 2,) * 2,
)
arrays = Array(1, 5, 5, 2), Array(kernel, kernel, 2, 4), Array(1, 5, 5, 4)
try:
    cuda.conv_forward(shape, *arrays, stream=0)
except RuntimeError as error:
    print(error)
"""
SONAMES = {"matmul": "libcublasLt.so.12", "conv": "libcudnn.so.9"}
NAMES = {"matmul": "cuBLASLt", "conv": "cuDNN"}


def message(problem, folder):
    """What calling the launchers ends in where the loader looks into `folder` first."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(MODULES[0]), problem],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(why_no_gpu() is None, reason="the libraries are installed")
@pytest.mark.parametrize("problem", SONAMES)
def test_no_library(problem, tmp_path):
    text = message(problem, tmp_path)
    assert text.startswith(f"{NAMES[problem]}: not found")
    assert SONAMES[problem] in text
    assert "pip install tensorflow[and-cuda]" in text


@pytest.mark.parametrize("problem", SONAMES)
def test_library_without_its_symbols(problem, tmp_path):
    library = tmp_path / SONAMES[problem]
    source = tmp_path / "empty.c"
    source.write_text("")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    text = message(problem, tmp_path)
    assert text.startswith(f"{NAMES[problem]}: {SONAMES[problem]} lacks")


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_no_device():
    folder = Path(backend("emulated").libraries["cublaslt"]._name).parent
    assert "cudaGetDevice: CUDA error" in message("matmul", folder)
