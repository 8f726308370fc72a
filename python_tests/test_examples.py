"""The examples run, and reach what they promise: they check it themselves."""

import pytest
from conftest import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, run_python):
    assert run_python(path.read_text(), "--quick")


def test_documented():
    """The table of the examples lists them all."""
    text = (ROOT / "docs" / "examples.md").read_text()
    assert [path.name for path in EXAMPLES if f"(../examples/{path.name})" not in text] == []
