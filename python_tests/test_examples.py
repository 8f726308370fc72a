"""The examples run, and reach what they promise: they check it themselves."""

import pytest
from conftest import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, run_python):
    program = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    assert run_python(program, "--quick")


def test_documented():
    """The table of the examples lists them all."""
    text = (ROOT / "docs" / "examples.md").read_text()
    assert [path.name for path in EXAMPLES if f"(../examples/{path.name})" not in text] == []
