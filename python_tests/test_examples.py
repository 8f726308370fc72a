"""The examples run, and reach what they promise."""

import pytest
from conftest import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, run_python):
    assert "accuracy" in run_python(path.read_text())
