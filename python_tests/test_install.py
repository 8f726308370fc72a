"""What the build decides: which TensorFlow, which requirements, what goes into which object."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parent.parent
FIND = ROOT / "build_tools" / "find_tensorflow.py"

pytestmark = pytest.mark.skipif(not FIND.exists(), reason="needs the checkout")


@pytest.fixture
def backend(monkeypatch):
    pytest.importorskip("setuptools", minversion="77")
    monkeypatch.syspath_prepend(str(FIND.parent))
    import backend

    return backend


def test_an_installed_tensorflow_is_not_required_again(backend, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(backend, "find_folder", lambda folders: folders[0])
    assert backend.get_requires_for_build_wheel() == ["cmake>=3.20", "ninja"]


def test_a_missing_tensorflow_is_required_for_the_build(backend, monkeypatch):
    monkeypatch.setattr(backend, "find_folder", lambda folders: None)
    (requirement,) = (r for r in backend.get_requires_for_build_editable() if "tensorflow" in r)
    assert re.fullmatch(r"tensorflow(-cpu)?~=2\.21\.0", requirement)


def test_an_old_cmake_is_replaced(backend, monkeypatch, tmp_path):
    program = tmp_path / "cmake"
    program.write_text("#!/bin/sh\necho cmake version 3.16.3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert "cmake>=3.20" in backend.get_requires_for_build_wheel()


def test_find_tensorflow_describes_the_installed_one():
    import tensorflow as tf

    printed = subprocess.run(
        [sys.executable, FIND], capture_output=True, text=True, check=True
    ).stdout
    facts = json.loads(printed)
    assert facts["version"] == tf.__version__
    assert Path(facts["include"], "tensorflow", "core", "framework", "op_kernel.h").exists()
    assert Path(facts["library"]).exists()


@pytest.mark.parametrize("version", ["2.20.0", "2.22.0"])
def test_another_tensorflow_stops_the_build_with_one_sentence(tmp_path, version):
    package = tmp_path / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    program = f"""
import sys
sys.path.insert(0, {str(FIND.parent)!r})
import find_tensorflow
sys.path.insert(0, {str(tmp_path)!r})
find_tensorflow.site_folders = lambda: [{str(tmp_path)!r}]
find_tensorflow.describe()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert f"holds {version}" in line and "pip install 'tensorflow-cpu~=2.21.0'" in line


def _isa_objects():
    """Returns {instruction set: the objects compiled for it alone}."""
    found = {}
    for path in sorted(ROOT.glob("build/**/tfo_core_*.dir/cc/core/*_isa.cc.o")):
        isa = re.search(r"tfo_core_(\w+)\.dir", str(path)).group(1)
        if isa != "portable":
            found.setdefault(isa, []).append(path)
    if not found:
        pytest.skip("the objects of the build are not here")
    return found


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_instruction_sets_share_no_inline_functions():
    for isa, path in ((isa, path) for isa, paths in _isa_objects().items() for path in paths):
        listed = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True)
        weak = re.findall(r" [WVu] (.*)", listed.stdout)
        # The linker keeps one definition of a weak symbol, whatever instructions it is made of.
        assert [symbol for symbol in weak if f"tfo::{isa}::" not in symbol] == [], path


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
@pytest.mark.parametrize(
    ("isa", "instruction"),
    [("avx2", "vfmadd"), ("avx512", "%zmm"), ("avx512_bf16", "vdpbf16ps"), ("amx", "tdpbf16ps")],
)
def test_contractions_are_made_of_the_instructions_of_their_set(isa, instruction):
    objects = _isa_objects()
    if isa not in objects:
        pytest.skip(f"the compiler does not know {isa}, or the processor is another")
    for kernel in ("correlations", "conv_gradient"):
        (path, *_) = (path for path in objects[isa] if path.name == f"{kernel}_isa.cc.o")
        command = ["objdump", "-d", "--no-show-raw-insn", path]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        assert instruction in listed.stdout, path


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
@pytest.mark.parametrize("isa", ["avx512_bf16", "amx"])
def test_types_that_a_set_adds_nothing_for_are_left_to_another(isa):
    kernels = {
        "attention_forward": ["AttentionForward"],
        "attention_gradient": ["AttentionGradient"],
        "conv_gradient": ["ConvGradient"],
        "correlations": [
            *("ConvForward", "ConvTranspose", "ConvPackedBytes", "ConvPackFilters"),
            *("ConvInputGradient", "ConvFilterGradientOfFewColumns"),
        ],
        "recurrent": ["RecurrentForward", "RecurrentGradient"],
    }
    if isa == "avx512_bf16":  # AMX multiplies all types that there are for weights of few bits
        kernels["weight_only_matmul"] = ["WeightOnlyMatMul"]
    objects = _isa_objects()
    if isa not in objects:
        pytest.skip(f"the compiler does not know {isa}, or the processor is another")
    for kernel, functions in kernels.items():
        (path, *_) = (path for path in objects[isa] if path.name == f"{kernel}_isa.cc.o")
        listed = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True)
        for function in functions:
            assert f" U tfo::avx512::{function}(" in listed.stdout, path
        assert "<double>" not in listed.stdout, path


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_integers_are_multiplied_by_the_instructions_for_them():
    objects = _isa_objects()
    for isa in ("avx512_vnni", "avx512_bf16", "amx"):
        if isa not in objects:
            pytest.skip(f"the compiler does not know {isa}, or the processor is another")
        (path,) = (path for path in objects[isa] if path.name == "quantized_matmul_isa.cc.o")
        command = ["objdump", "-d", "--no-show-raw-insn", path]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "vpdpbusd" in listed.stdout, path


def test_version_is_read_alike_everywhere():
    import tf_fused_ops
    from tf_fused_ops import _library

    text = (ROOT / "tf_fused_ops" / "_version.py").read_text()
    assert f'__version__ = "{tf_fused_ops.__version__}"' in text
    assert _library.build_info()["package_version"] == tf_fused_ops.__version__
