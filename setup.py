"""Drives CMake; everything else about the package stands in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = "tf_fused_ops"


class FreshBuildPy(build_py):
    """Copies the Python sources without keeping files of an earlier build that are gone since."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, PACKAGE), ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Builds the shared objects; in place or editable, into the source tree."""

    def run(self):
        in_tree = self.inplace or self.editable_mode
        output = Path(ROOT if in_tree else self.build_lib, PACKAGE).resolve()
        # One folder for all Pythons: the core's objects, most of the work, are the same for each.
        # The cache names programs of an isolated build environment that is gone, so it is not kept.
        build = ROOT / "build" / "pip"
        build.mkdir(parents=True, exist_ok=True)
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        cuda = os.environ.get("TFO_CUDA") or "AUTO"
        self._run(
            "configuring",
            *("cmake", "-S", str(ROOT), "-B", str(build), *generator),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTFO_OUTPUT_DIR={output}",
            f"-DTFO_CUDA={cuda}",
        )
        self._run(f"compiling with {jobs} jobs", "cmake", "--build", str(build), "-j", jobs)

    def _run(self, what, *command):
        print(f"tf_fused_ops: {what}: {' '.join(command)}", flush=True)
        subprocess.run(command, check=True)

    def get_outputs(self):
        return [str(path) for path in Path(self.build_lib, PACKAGE).glob("*.so")]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return []


setup(
    ext_modules=[Extension(f"{PACKAGE}._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": FreshBuildPy},
)
