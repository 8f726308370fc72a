"""Checks and loads the op library.

`ops` holds the generated wrappers of the registered ops. Importing this module compares what `_ops.so` was built for
(`_build_info.json` beside it, read before the library is opened, since a library of another C++ ABI cannot be opened)
with what is installed; a mismatch raises `LibraryError` with one sentence that names the remedy.
"""

import ctypes
import importlib.machinery
import importlib.util
import json
from pathlib import Path

from tf_fused_ops._version import __version__

_FOLDER = Path(__file__).resolve().parent
_LIBRARY = _FOLDER / "_ops.so"
_SUPPORTED = "2.21"
_INSTALL_TENSORFLOW = (
    f"run `pip install 'tensorflow-cpu~={_SUPPORTED}.0'` (processor only) or "
    f"`pip install 'tensorflow[and-cuda]~={_SUPPORTED}.0'` (NVIDIA graphics cards)"
)


class LibraryError(ImportError):
    """The op library is missing or does not fit the installed TensorFlow."""


def _rebuild():
    """Returns the sentence part that names the command which builds the package anew."""
    if (_FOLDER.parent / "CMakeLists.txt").exists():
        return f"run `pip install -e {_FOLDER.parent}` to build it anew"
    return (
        "run `pip install --force-reinstall --no-deps .` in the source folder of tf_fused_ops "
        "to build it anew"
    )


def _read_build_info():
    path = _FOLDER / "_build_info.json"
    if not _LIBRARY.exists() or not path.exists():
        where = "has not been built yet" if (_FOLDER.parent / "CMakeLists.txt").exists() else "is incomplete"
        raise LibraryError(
            f"The tf_fused_ops in {_FOLDER} {where} ({_LIBRARY.name} and {path.name} belong in it): {_rebuild()}."
        )
    return json.loads(path.read_text())


def _check_python_modules():
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    for name in ("_core",):
        if not any((_FOLDER / f"{name}{suffix}").exists() for suffix in suffixes):
            built = sorted(path.name for path in _FOLDER.glob(f"{name}.*so")) or ["nothing"]
            raise LibraryError(
                f"tf_fused_ops was built for another Python ({', '.join(built)}) than the running "
                f"one, which needs {name}{suffixes[0]}: {_rebuild()}."
            )


def _import_tensorflow():
    if importlib.util.find_spec("tensorflow") is None:
        raise LibraryError(
            f"tf_fused_ops needs TensorFlow {_SUPPORTED}, and none is installed: {_INSTALL_TENSORFLOW}."
        )
    import tensorflow

    return tensorflow


def _minor(version):
    return version.split(".")[:2]


def _check(info, tensorflow):
    installed = tensorflow.__version__
    if info["package_version"] != __version__:
        raise LibraryError(
            f"_ops.so was built for tf_fused_ops {info['package_version']}, but the Python files in "
            f"{_FOLDER} are {__version__}: {_rebuild()}."
        )
    if _minor(info["tensorflow_version"]) != _minor(installed):
        remedy = _rebuild() if _minor(installed) == _SUPPORTED.split(".") else _INSTALL_TENSORFLOW
        raise LibraryError(
            f"tf_fused_ops was built for TensorFlow {info['tensorflow_version']}, but TensorFlow "
            f"{installed} is installed: {remedy}."
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
            f"_ops.so was built for TensorFlow {info['tensorflow_version']} with {info['compiler']} and "
            f"does not fit the installed TensorFlow {tensorflow.__version__} ({error.message}): "
            f"{_rebuild()}."
        ) from error
    handle = ctypes.CDLL(str(_LIBRARY))
    for name in ("tfo_build_info", "tfo_isa"):
        getattr(handle, name).restype = ctypes.c_char_p
    handle.tfo_set_isa.argtypes = [ctypes.c_char_p]
    if json.loads(handle.tfo_build_info()) != info:
        raise LibraryError(
            f"_ops.so and _build_info.json in {_FOLDER} come from different builds: {_rebuild()}."
        )
    return ops, handle


_info = _read_build_info()
_check_python_modules()
_tensorflow = _import_tensorflow()
_check(_info, _tensorflow)
ops, _handle = _load(_info, _tensorflow)


def build_info():
    """Returns what the op library was built for.

    Returns:
        A dict with package_version, tensorflow_version, cxx11_abi, variant, compiler, processor.
    """
    return dict(_info)


def isa():
    """Returns the name of the instruction set in use: "portable", "avx2" or "avx512"."""
    return _handle.tfo_isa().decode()


def set_isa(name):
    """Chooses the instruction set for all following op executions.

    Args:
        name: "portable", "avx2" or "avx512".

    Raises:
        ValueError: The name is unknown, or this processor lacks the instruction set.
    """
    if _handle.tfo_set_isa(name.encode()) == 0:
        return
    raise ValueError(f"isa: {name!r} is unknown or not supported by this processor")
