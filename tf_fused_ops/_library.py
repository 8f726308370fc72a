"""Checks and loads the op library.

`ops` holds the generated wrappers of the registered ops. Importing this module compares what
`_ops.so` was built for (`_build_info.json` beside it, read before the library is opened, since a
library of another C++ ABI cannot be opened) with what is installed; a mismatch raises
`LibraryError` with one sentence that names the remedy. The GPU kernels, `_cuda_ops.so`, are loaded
where they were built and TensorFlow is built with CUDA; without them everything works on the CPU,
and `cuda_status` says why.
"""

import ctypes
import importlib.machinery
import importlib.util
import json
import platform
import site
import types
from itertools import count
from pathlib import Path

from tf_fused_ops._gpu_code import gpu_code
from tf_fused_ops._version import __version__

_FOLDER = Path(__file__).absolute().parent
_LIBRARY = _FOLDER / "_ops.so"
_CUDA_LIBRARY = _FOLDER / "_cuda_ops.so"
_SUPPORTED = "2.21"
_PYTHON = platform.python_version()
_INSTALL_TENSORFLOW = (
    f"run `pip install 'tensorflow-cpu~={_SUPPORTED}.0'` (processor only) or "
    f"`pip install 'tensorflow[and-cuda]~={_SUPPORTED}.0'` (NVIDIA graphics cards)"
)


class LibraryError(ImportError):
    """The op library is missing or does not fit the installed TensorFlow."""


def _rebuild():
    """Returns the command that builds the package anew, as the end of a sentence."""
    if (_FOLDER.parent / "CMakeLists.txt").exists():
        return f"run `pip install -e {_FOLDER.parent}` to build it anew"
    return (
        "run `pip install --force-reinstall --no-deps .` in the source folder of tf_fused_ops "
        "to build it anew"
    )


def _read_build_info():
    path = _FOLDER / "_build_info.json"
    if not _LIBRARY.exists() or not path.exists():
        raise LibraryError(
            f"The tf_fused_ops in {_FOLDER} has not been built (it lacks {_LIBRARY.name} or "
            f"{path.name}): {_rebuild()}{_installed_elsewhere()}."
        )
    return json.loads(path.read_text())


def _installed_elsewhere():
    """Tells about a built copy that the source tree hides, as it does in its own folder."""
    for folder in site.getsitepackages():
        if Path(folder, "tf_fused_ops", _LIBRARY.name).exists():
            return f", or change to another folder to use the copy installed in {folder}"
    return ""


def _check_python_modules():
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    for name in ("_core", "_logging", "_graph_def"):
        if any((_FOLDER / f"{name}{suffix}").exists() for suffix in suffixes):
            continue
        built = " and ".join(sorted(path.name for path in _FOLDER.glob(f"{name}.*so")))
        raise LibraryError(
            f"tf_fused_ops was built for another Python than the running {_PYTHON} "
            f"({built or 'nothing'} is there, {name}{suffixes[0]} is needed): {_rebuild()}."
        )


def _import_tensorflow():
    if importlib.util.find_spec("tensorflow") is None:
        raise LibraryError(
            f"tf_fused_ops needs TensorFlow {_SUPPORTED} and none is installed: "
            f"{_INSTALL_TENSORFLOW}."
        )
    import tensorflow

    return tensorflow


def _minor(version):
    return version.split(".")[:2]


def _check(info, tensorflow):
    built, installed = info["tensorflow_version"], tensorflow.__version__
    if info["package_version"] != __version__:
        raise LibraryError(
            f"_ops.so was built for tf_fused_ops {info['package_version']}, but the Python files "
            f"in {_FOLDER} are {__version__}: {_rebuild()}."
        )
    if _minor(built) != _minor(installed):
        remedy = _rebuild() if _minor(installed) == _minor(_SUPPORTED) else _INSTALL_TENSORFLOW
        raise LibraryError(
            f"tf_fused_ops was built for TensorFlow {built}, but TensorFlow {installed} is "
            f"installed: {remedy}."
        )
    abi = int(tensorflow.sysconfig.CXX11_ABI_FLAG)
    if info["cxx11_abi"] != abi:
        raise LibraryError(
            f"tf_fused_ops was built with _GLIBCXX_USE_CXX11_ABI={info['cxx11_abi']}, but the "
            f"installed TensorFlow {installed} uses {abi}: {_rebuild()}."
        )


def _load(info, tensorflow):
    try:
        ops = tensorflow.load_op_library(str(_LIBRARY))
    except tensorflow.errors.NotFoundError as error:
        raise LibraryError(
            f"_ops.so was built for TensorFlow {info['tensorflow_version']} with "
            f"{info['compiler']} and does not fit the installed TensorFlow "
            f"{tensorflow.__version__} ({error.message}): {_rebuild()}."
        ) from error
    if not hasattr(ops, "tf_fused_ops_act"):
        ops = _wrap_registered_ops()
    handle = ctypes.CDLL(str(_LIBRARY))
    _check_same_build(_LIBRARY, info)
    for name in ("tfo_isa", "tfo_available_isa"):
        getattr(handle, name).restype = ctypes.c_char_p
    handle.tfo_set_isa.argtypes = [ctypes.c_char_p]
    handle.tfo_available_isa.argtypes = [ctypes.c_int]
    return ops, handle


def _wrap_registered_ops():
    """Returns what `load_op_library` returns unless TensorFlow has opened the library before, as it
    does where `TF_PLUGGABLE_DEVICE_LIBRARY_PATH` names it."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.framework import _pywrap_python_op_gen

    buffer = pywrap_tf_session.TF_GetAllOpList()
    known = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(buffer))
    pywrap_tf_session.TF_DeleteBuffer(buffer)
    own = op_def_pb2.OpList(op=(op for op in known.op if op.name.startswith("TfFusedOps>")))
    wrappers = types.ModuleType(f"{__name__}.ops")
    exec(_pywrap_python_op_gen.GetPythonWrappers(own.SerializeToString()), vars(wrappers))
    # As `load_op_library` tells AutoGraph.
    wrappers._IS_TENSORFLOW_PLUGIN = True
    return wrappers


def _check_same_build(library, info):
    answer = ctypes.CDLL(str(library)).tfo_build_info
    answer.restype = ctypes.c_char_p
    if json.loads(answer()) != info:
        raise LibraryError(
            f"{library.name} and _build_info.json in {_FOLDER} come from different builds: "
            f"{_rebuild()}."
        )


def _load_cuda(info, tensorflow):
    """Loads the GPU kernels and returns (loaded, what there is to say about it)."""
    if info.get("cuda_compiler", "none") == "none":
        return False, "not built (no CUDA compiler was found, or TFO_CUDA was OFF)"
    if not _CUDA_LIBRARY.exists():
        return False, f"{_CUDA_LIBRARY.name} is missing: {_rebuild()}"
    if not tensorflow.test.is_built_with_cuda():
        return False, "not loaded, as the installed TensorFlow is built without CUDA"
    try:
        tensorflow.load_op_library(str(_CUDA_LIBRARY))
        _check_same_build(_CUDA_LIBRARY, info)
    except (tensorflow.errors.OpError, LibraryError) as error:
        return False, f"not loaded: {error}"
    return True, "loaded"


_info = _read_build_info()
_check_python_modules()
_tensorflow = _import_tensorflow()
_check(_info, _tensorflow)
ops, _handle = _load(_info, _tensorflow)
_cuda_loaded, _cuda_status = _load_cuda(_info, _tensorflow)


def build_info():
    """Returns what the op library was built for.

    Returns:
        A dict with package_version, tensorflow_version, cxx11_abi, compiler, processor,
        cuda_compiler and cuda_archs ("none" without the GPU half).
    """
    return dict(_info)


def cuda_loaded():
    """Returns whether the GPU kernels are registered with TensorFlow."""
    return _cuda_loaded


def cuda_status():
    """Returns "loaded", or in words why the GPU kernels are not."""
    return _cuda_status


def cuda_code():
    """Returns the GPU code in the binary as (architecture, form) pairs; empty where none was built.

    An architecture is a compute capability times ten, a form "machine code" or "PTX".
    """
    return gpu_code(_CUDA_LIBRARY) if _CUDA_LIBRARY.exists() else []


def isa():
    """Returns the name of the instruction set in use, one of `available_isas`."""
    return _handle.tfo_isa().decode()


def available_isas():
    """Returns the names of the instruction sets that this processor can run, oldest first."""
    return [name.decode() for name in iter(map(_handle.tfo_available_isa, count()).__next__, None)]


def set_isa(name):
    """Chooses the instruction set for all following op executions.

    Args:
        name: "portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16" or "amx".

    Raises:
        ValueError: The name is unknown, or this processor lacks the instruction set.
    """
    if not _handle.tfo_set_isa(name.encode()):
        raise ValueError(f"isa: {name!r} is none of {', '.join(available_isas())}")
