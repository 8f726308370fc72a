"""Fixtures and the line that reproduces a failure."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Off by default on some processors, where stock TensorFlow then has no gradient of a dilated
# convolution to compare with.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import settings

from tf_fused_ops import _core, _library

settings.register_profile("tests", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("tests")

ROOT = Path(__file__).resolve().parent.parent
BEST_ISA = _library.isa()


ISAS = _library.available_isas()


def _integer_isas():
    """Returns the instruction sets that differ in products of integers."""
    name = "avx512_vnni"
    try:
        _library.set_isa(name)
    except ValueError:
        return ISAS
    _library.set_isa(BEST_ISA)
    return list(dict.fromkeys([*ISAS, name]))


INTEGER_ISAS = _integer_isas()


def _with_isa(name):
    _library.set_isa(name)
    assert _library.isa() == name
    yield name
    _library.set_isa(BEST_ISA)


@pytest.fixture(params=ISAS)
def isa(request):
    """Runs the test with every instruction set that the processor has."""
    yield from _with_isa(request.param)


@pytest.fixture(params=INTEGER_ISAS)
def integer_isa(request):
    """The same for what multiplies integers."""
    yield from _with_isa(request.param)


@pytest.fixture(params=_core.available_isas())
def core_isa(request):
    """The same for the core that runs on NumPy arrays."""
    best = _core.isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(best)


def _without_isa(item):
    """Returns the name of a test but for its instruction set."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    for fixture in ("isa", "integer_isa", "core_isa"):
        if fixture in parameters:
            return item.nodeid.replace(parameters[fixture], "", 1)
    return item.nodeid


def pytest_collection_modifyitems(items):
    """Runs a case with one instruction set after another, so that tests can keep what they compare
    it with until the next."""
    first = {}
    for position, item in enumerate(items):
        first.setdefault(_without_isa(item), position)
    items.sort(key=lambda item: first[_without_isa(item)])


@pytest.fixture
def exact_float32():
    """Products of float32 on a GPU are not rounded to TF32."""
    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(allowed)


@pytest.fixture(autouse=True)
def seeds():
    """Every test starts from the same random state."""
    np.random.seed(0)
    tf.random.set_seed(0)


@pytest.fixture
def run_python():
    """Runs a Python program in a fresh process and returns its output."""

    def run(program, *arguments, threads=None, **environment):
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        if threads is not None:
            env |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": "1"}
        result = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("Reproduce", f"python -m pytest {shlex.quote(item.nodeid)}"))
    return report
