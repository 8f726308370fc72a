"""Compiles the GPU half against the stand-in headers of this folder, for the processor, and the
stand-ins for NVIDIA's libraries (libraries/)."""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-Wno-attributes"),
    # Libraries are looked for beside the module, and some of the tests' batches are too large.
    *("-Ddlopen=emulated_dlopen", "-DTFO_CUDNN_MAX_ELEMENTS=5000"),
)
LIBRARIES = {"cublaslt": "libcublasLt.so.12", "cudnn": "libcudnn.so.9"}
MODULE = f"_cuda_emulation{sysconfig.get_config_var('EXT_SUFFIX')}"


def _sources():
    """The module's sources: all of the GPU half but its module and TensorFlow's kernels."""
    folders = [ROOT / "cuda", ROOT / "cuda" / "python", HERE]
    found = [path for folder in folders for path in folder.glob("*.c[cu]")]
    return sorted(path for path in found if path.name != "cuda_module.cc")


def _compiler():
    import pybind11

    includes = (HERE, ROOT, pybind11.get_include(), sysconfig.get_path("include"))
    return [os.environ.get("CXX", "g++"), *FLAGS, *(f"-I{path}" for path in includes)]


def _digest():
    digest = hashlib.sha256(repr(_compiler()).encode())
    files = [path for path in HERE.rglob("*") if path.suffix in (".h", ".cc", ".py")]
    for pattern in ("cuda/*.*", "cuda/python/*.*", "cc/core/*.h", "cc/python/*.h"):
        files += ROOT.glob(pattern)
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run(*command):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(result.stderr)


def _make(folder):
    def compile_one(source):
        made = folder / f"{source.parent.name}_{source.name}.o"
        _run(*_compiler(), "-x", "c++", "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, _sources()))
    _run(_compiler()[0], "-shared", *objects, "-ldl", "-o", folder / MODULE)
    for path in objects:
        path.unlink()
    for name, soname in LIBRARIES.items():
        source = HERE / "libraries" / f"{name}.cc"
        _run(*_compiler(), "-shared", f"-Wl,-soname,{soname}", source, "-o", folder / soname)


def load():
    """Compiles, unless these very sources have been compiled before, and loads.

    Returns:
        The module, and the stand-ins for the libraries by name, as ctypes sees them.
    """
    parent = ROOT / "build" / "cuda_emulation"
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / _digest()
    with open(parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = Path(tempfile.mkdtemp(dir=parent))
            _make(made)
            made.rename(folder)
    spec = importlib.util.spec_from_file_location("_cuda_emulation", folder / MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    libraries = {name: ctypes.CDLL(str(folder / soname)) for name, soname in LIBRARIES.items()}
    for library in libraries.values():
        library.emulation_record.restype = ctypes.c_char_p
    return module, libraries
