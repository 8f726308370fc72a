"""PEP 517 backend: setuptools, plus the build requirements that only this machine can tell.

A TensorFlow in the environment that pip installs into is used as it is, and so is that of the
Python that TFO_TENSORFLOW_PYTHON names; only where there is neither does the isolated build
environment get one of its own (headers and C++ ABI of `tensorflow-cpu`, `tensorflow` and
`tensorflow[and-cuda]` of one release are the same, for every Python). CMake and Ninja come from
PyPI only where the machine has none.
"""

import os
import platform
import re
import shutil
import subprocess

from find_tensorflow import find_folder, site_folders
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

MINIMUM_CMAKE = (3, 20)


def _has_cmake():
    if shutil.which("cmake") is None:
        return False
    answer = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"(\d+)\.(\d+)", answer.stdout)
    return version is not None and tuple(map(int, version.groups())) >= MINIMUM_CMAKE


def get_requires_for_build_wheel(config_settings=None):
    """Returns what the isolated build environment needs beside setuptools and pybind11."""
    del config_settings
    requirements = []
    if not _has_cmake():
        requirements.append("cmake>=3.20")
    if shutil.which("ninja") is None:
        requirements.append("ninja")
    if not os.environ.get("TFO_TENSORFLOW_PYTHON") and find_folder(site_folders()) is None:
        name = "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"
        requirements.append(f"{name}~=2.21.0")
    return requirements


get_requires_for_build_editable = get_requires_for_build_wheel
