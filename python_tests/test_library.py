"""Loading: what does not fit ends in one sentence with the remedy; what fits loads in any order."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tf_fused_ops
from tf_fused_ops import _library

PACKAGE = Path(tf_fused_ops.__file__).parent


def run_python(code, *folders, **environment):
    """Runs code in a new interpreter that finds packages in `folders` first."""
    path = os.pathsep.join(map(str, folders))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )


def last_line(result):
    assert result.returncode == 1, result.stderr
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture
def copy(tmp_path):
    """A folder holding a copy of the package that a test may spoil."""
    shutil.copytree(PACKAGE, tmp_path / "tf_fused_ops", ignore=shutil.ignore_patterns("*.pyc"))
    return tmp_path


def doctor(folder, **changes):
    path = folder / "tf_fused_ops" / "_build_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def stand_in(folder, version=None, abi=None):
    """Makes a TensorFlow that has nothing but a version and an ABI, and returns its folder."""
    info = _library.build_info()
    package = folder / "stand_in" / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"__version__ = {version or info['tensorflow_version']!r}\n"
        f"class sysconfig: CXX11_ABI_FLAG = {info['cxx11_abi'] if abi is None else abi}\n"
    )
    return package.parent


def test_built_for_another_tensorflow(copy):
    doctor(copy, tensorflow_version="2.20.0")
    message = last_line(run_python("import tf_fused_ops", stand_in(copy), copy))
    assert "built for TensorFlow 2.20.0, but TensorFlow 2.21" in message
    assert "pip install" in message and message.endswith(".")


@pytest.mark.parametrize("version", ["2.20.0", "2.22.0", "3.0.0-rc1"])
def test_another_tensorflow_is_installed(copy, version):
    message = last_line(run_python("import tf_fused_ops", stand_in(copy, version), copy))
    assert "built for TensorFlow 2.21" in message and f"TensorFlow {version} is inst" in message
    assert "pip install 'tensorflow-cpu~=2.21.0'" in message


def test_another_abi(copy):
    other = 1 - _library.build_info()["cxx11_abi"]
    message = last_line(run_python("import tf_fused_ops", stand_in(copy, abi=other), copy))
    assert f"_GLIBCXX_USE_CXX11_ABI={1 - other}" in message and f"uses {other}" in message
    assert "pip install" in message


def test_another_package_version(copy):
    doctor(copy, package_version="0.0.0")
    message = last_line(run_python("import tf_fused_ops", stand_in(copy), copy))
    assert "built for tf_fused_ops 0.0.0" in message and "pip install" in message


def test_library_and_information_of_different_builds(copy):
    doctor(copy, compiler="another compiler")
    message = last_line(run_python("import tf_fused_ops", copy))
    assert "come from different builds" in message and "pip install" in message


@pytest.mark.parametrize("name", ["_ops.so", "_build_info.json"])
def test_missing_file(copy, name):
    (copy / "tf_fused_ops" / name).unlink()
    message = last_line(run_python("import tf_fused_ops", copy))
    assert "has not been built" in message and name in message and "pip install" in message


def test_another_python(copy):
    for path in (copy / "tf_fused_ops").glob("_logging.*so"):
        path.rename(path.with_name("_logging.cpython-39-x86_64-linux-gnu.so"))
    message = last_line(run_python("import tf_fused_ops", copy))
    assert "built for another Python" in message and "cpython-39" in message


def test_undefined_symbol(copy):
    library = copy / "tf_fused_ops" / "_ops.so"
    content = library.read_bytes()
    symbol = b"_ZN10tensorflow8OpKernel"
    assert symbol in content
    library.write_bytes(content.replace(symbol, b"_ZN10tensorflow8OpKernXX"))
    message = last_line(run_python("import tf_fused_ops", copy))
    assert "does not fit the installed TensorFlow" in message and "pip install" in message


def test_no_tensorflow(copy):
    code = """
        import importlib.util, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name: None if name == "tensorflow" else find(name)
        import tf_fused_ops
    """
    message = last_line(run_python(code, copy))
    assert "needs TensorFlow 2.21 and none is installed" in message
    assert "tensorflow-cpu~=2.21.0" in message and "tensorflow[and-cuda]~=2.21.0" in message


@pytest.mark.parametrize(
    "code",
    [
        "import tensorflow; import tf_fused_ops",
        "import tf_fused_ops; import tensorflow",
        "import keras; import tf_fused_ops",
        "import tf_fused_ops, importlib; importlib.reload(tf_fused_ops)",
        "import tf_fused_ops._library as l, importlib; importlib.reload(l); l.ops",
    ],
)
def test_import_order_and_repetition(code):
    result = run_python(code, PACKAGE.parent)
    assert result.returncode == 0, result.stderr


def test_build_info_names_the_installed_tensorflow():
    import tensorflow as tf

    info = _library.build_info()
    assert info["tensorflow_version"] == tf.__version__
    assert info["package_version"] == tf_fused_ops.__version__


PRINT_ISA = "from tf_fused_ops import _library; print(_library.isa())"


@pytest.mark.parametrize("isa", _library.available_isas())
def test_isa_can_be_set_by_the_environment(isa):
    result = run_python(PRINT_ISA, PACKAGE.parent, TF_FUSED_OPS_ISA=isa)
    assert result.stdout.strip() == isa, result.stderr


def test_the_default_isa_is_the_fastest():
    """Intel's processors multiply pairs of bfloat16 slowly."""
    isas = _library.available_isas()
    if "GenuineIntel" in Path("/proc/cpuinfo").read_text():
        isas = [isa for isa in isas if isa != "avx512_bf16"]
    result = run_python(PRINT_ISA, PACKAGE.parent, TF_FUSED_OPS_ISA="")
    assert result.stdout.strip() == isas[-1], result.stderr


def test_set_isa():
    before = _library.isa()
    try:
        _library.set_isa("portable")
        assert _library.isa() == "portable"
    finally:
        _library.set_isa(before)
    assert _library.isa() == before
    with pytest.raises(ValueError, match="isa: 'sse9'"):
        _library.set_isa("sse9")
