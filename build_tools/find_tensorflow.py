"""Finds the TensorFlow that the package is being built for.

Run as a script it prints what CMake needs to know about it, as JSON. CMake runs it with the Python
that the package is built for, or with the one that TFO_TENSORFLOW_PYTHON names.
pip builds in an isolated environment that hides the packages of the environment it installs into;
the interpreter's own site-packages folders still name that environment, so they come first.
"""

import importlib.machinery
import json
import os
import site
import sys
from pathlib import Path

SUPPORTED = (2, 21)
CHOICE = (
    "'tensorflow-cpu~=2.21.0' (processor only) or "
    "'tensorflow[and-cuda]~=2.21.0' (NVIDIA graphics cards)"
)


def site_folders():
    """Returns the site-packages folders of the environment that the interpreter belongs to."""
    folders = site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    return folders


def find_folder(search_path):
    """Returns the site-packages folder on `search_path` that holds a TensorFlow, or None."""
    spec = importlib.machinery.PathFinder.find_spec("tensorflow", search_path)
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).parent.parent)


def describe():
    """Imports TensorFlow and returns its version, C++ flags, header folder and library."""
    folder = find_folder(site_folders() + sys.path)
    if folder is None:
        raise SystemExit(f"No TensorFlow to build against: run pip install {CHOICE}.")
    if folder not in sys.path:
        sys.path.append(folder)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        import tensorflow as tf
    except Exception as error:
        raise SystemExit(f"The TensorFlow in {folder} cannot be imported: {error}") from error
    if tuple(int(part) for part in tf.__version__.split(".")[:2]) != SUPPORTED:
        raise SystemExit(
            f"tf_fused_ops is written for TensorFlow 2.21, and {folder} holds {tf.__version__}: "
            f"run pip install {CHOICE}."
        )
    flags = tf.sysconfig.get_compile_flags()
    standards = [flag.split("c++")[1] for flag in flags if flag.startswith(("--std=", "-std="))]
    return {
        "version": tf.__version__,
        "cxx11_abi": int(tf.sysconfig.CXX11_ABI_FLAG),
        "cxx_standard": standards[-1],
        "include": tf.sysconfig.get_include(),
        "library": str(Path(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")),
        "definitions": ";".join(flag[2:] for flag in flags if flag.startswith("-D")),
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
