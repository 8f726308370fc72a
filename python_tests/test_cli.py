"""The command line: what it prints and how it ends."""

import json

import pytest

import tf_fused_ops
from tf_fused_ops import _library
from tf_fused_ops.cli import main


def test_info(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert tf_fused_ops.__version__ in printed
    assert _library.isa() in printed
    assert "\x1b" not in printed


def test_info_as_json(capsys):
    assert main(["info", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)
    assert sections["in use"]["instruction set used"] == _library.isa()
    assert sections["built for"]["TensorFlow"].startswith("2.21")
    assert "portable" in sections["in use"]["instruction sets found"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "command"),
        (["nonsense"], "nonsense"),
        (["info", "--nonsense"], "--nonsense"),
        (["demo", "--output", "/dev/null/folder"], "--output"),
    ],
)
def test_bad_input_is_one_sentence(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1 and expected in printed.err
