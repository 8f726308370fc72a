"""Compiles the GPU half against the stand-in headers of this folder, for the processor."""

import hashlib
import importlib.util
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ("device", "bias_act", "batch_norm")
BINDINGS = ("array.cc", "cuda_bias_act.cc", "cuda_batch_norm.cc")
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-Wno-attributes"),
)


def _sources():
    kernels = sorted(p for name in KERNELS for p in (ROOT / "cuda").glob(f"{name}*.cu"))
    bindings = [ROOT / "cuda" / "python" / name for name in BINDINGS]
    return kernels, [*bindings, *HERE.glob("*.cc")]


def _digest(command):
    digest = hashlib.sha256(repr(command).encode())
    for pattern in ("cuda/**/*.h", "cuda/**/*.cu", "cuda/python/*.cc", "cc/core/*.h"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    for path in sorted(HERE.iterdir()):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load():
    """Compiles, unless this very source has been compiled before, and returns the module."""
    import pybind11

    kernels, others = _sources()
    command = [
        *(os.environ.get("CXX", "g++"), *FLAGS, f"-I{HERE}", f"-I{ROOT}"),
        *(f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"),
        *("-x", "c++", *map(str, kernels), *map(str, others), "-o"),
    ]
    folder = ROOT / "build" / "cuda_emulation"
    folder.mkdir(parents=True, exist_ok=True)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    library = folder / f"{_digest(command)}{suffix}"
    if not library.exists():
        # Processes that compile at the same time replace each other's file by the same one.
        with tempfile.NamedTemporaryFile(dir=folder, suffix=suffix, delete=False) as file:
            result = subprocess.run([*command, file.name], capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(result.stderr)
        os.replace(file.name, library)
    spec = importlib.util.spec_from_file_location("_cuda_emulation", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
