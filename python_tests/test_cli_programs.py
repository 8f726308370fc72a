"""The commands that look at a program: `viz`, `explain`, `rules`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
import viz_programs
from viz_programs import CONV_SPECS

from tf_fused_ops.cli import main
from tf_fused_ops.remapper import caches, recurrent, rules, slices, variable_updates

PROGRAMS = str(Path(__file__).with_name("viz_programs.py"))
OTHERS = (caches.UPDATE_CACHE, slices.JOINED, *variable_updates.UPDATES, *recurrent.LOOPS)
NAMES = {rule.name for rule in (*rules.RULES, *OTHERS)}
CONV = "float32[2,8,8,4], float32[3,3,4,8], float32[8]"
ROOT = Path(__file__).resolve().parent.parent


def _graph_file(folder):
    concrete = tf.function(viz_programs.conv_bias_relu).get_concrete_function(*CONV_SPECS)
    path = folder / "graph.pb"
    path.write_bytes(concrete.graph.as_graph_def().SerializeToString())
    return str(path)


def test_viz(tmp_path, capsys):
    path = tmp_path / "step.html"
    assert main(["viz", f"{PROGRAMS}:step", "--signature", CONV, "-o", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"written: {path}" in printed and "fused chains    1" in printed
    assert "\x1b" not in printed
    assert "conv2d_bias_relu" in path.read_text()


def test_viz_of_a_file_through_tensorflows_passes(tmp_path, capsys):
    graph = _graph_file(tmp_path)
    path = tmp_path / "g.dot"
    assert main(["viz", graph, "-o", str(path), "--passes", "constfold,remap"]) == 0
    assert "_FusedConv2D" in path.read_text()


def test_viz_without_passes(tmp_path, capsys):
    path = tmp_path / "g.dot"
    assert main(["viz", _graph_file(tmp_path), "-o", str(path), "--passes", "none"]) == 0
    assert "fused" not in capsys.readouterr().out
    assert "after" not in path.read_text()


def test_viz_lists_passes(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["viz", "--list-passes"])
    assert stopped.value.code == 0
    names = capsys.readouterr().out.split()
    assert {"tf_fused_ops", "remap", "layout", "executed"} <= set(names)


def test_explain(capsys):
    assert main(["explain", f"{PROGRAMS}:step", "--signature", CONV]) == 0
    printed = capsys.readouterr().out
    assert "1 chains fused (1 Conv2DBiasAct, 1 Conv2DBiasActGrad)" in printed
    assert f"({PROGRAMS}:" in printed
    assert "TensorFlow's own remapper would have fused 1 chains" in printed
    assert "_FusedConv2D (BiasAdd" in printed


def test_explain_says_what_was_nearly_fused(capsys):
    assert main(["explain", f"{PROGRAMS}:two_convolutions", "--signature", CONV]) == 0
    printed = capsys.readouterr().out
    assert "not conv2d_bias_relu at Relu: " in printed


def test_explain_as_json(capsys):
    claim = ["--require", "Conv2DBiasAct>=1", "--require", "conv2d_bias_*==1"]
    assert main(["explain", f"{PROGRAMS}:step", "--signature", CONV, "--json", *claim]) == 0
    report = json.loads(capsys.readouterr().out)
    (fused,) = report["fused"]
    assert fused["rule"] == "conv2d_bias_relu" and fused["source"].startswith(PROGRAMS)
    assert "Conv2D" in fused["nodes"] and len(fused["fused"]) == 2
    assert report["ops"] == {"Conv2DBiasAct": 1, "Conv2DBiasActGrad": 1}
    assert [claim["holds"] for claim in report["required"]] == [True, True]
    assert report["tensorflow"][0]["nodes"]


@pytest.mark.parametrize(
    ("claim", "status"),
    [("Conv2DBiasAct>=2", 1), ("Conv2DBiasAct==1", 0), ("MatMulBiasAct<1", 0), ("*Act>0", 0),
     ("TfFusedOps>Conv2DBiasAct<=1", 0), ("Conv2DBiasActGrad>5", 1)],
)  # fmt: skip
def test_required_claims(claim, status, capsys):
    arguments = ["explain", f"{PROGRAMS}:step", "--signature", CONV, "--require", claim]
    assert main(arguments) == status
    assert ("FAILS" in capsys.readouterr().out) == bool(status)


def test_rules(capsys):
    assert main(["rules"]) == 0
    printed = capsys.readouterr().out
    for name in NAMES:
        assert f"  {name} " in printed
    assert "tf.nn.gelu(x, approximate=True)" in printed and "on: CPU (" in printed


def test_where_rules_are_tried(capsys):
    assert main(["rules", "*slice_gradient*"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  on: CPU (float16, bfloat16, float32, float64)\n") == 2


def test_one_rule_with_its_code(capsys):
    assert main(["rules", "conv2d_bias_gelu_tanh"]) == 0
    printed = capsys.readouterr().out
    assert "tf.raw_ops.Conv2D(" in printed and "tf.raw_ops.BiasAdd(" in printed
    spellings = {r.spelling for r in rules.RULES if r.name == "conv2d_bias_gelu_tanh"}
    assert printed.count("act(x) = ") == len(spellings)


def test_rules_as_json(capsys):
    assert main(["rules", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {entry["rule"] for entry in table} == NAMES
    for entry in table:
        assert entry["code"][0].startswith("def ") and all(entry["spellings"])


def test_spellings_are_code_that_computes_what_the_rule_traces():
    from tf_fused_ops.cli import stock_code

    x = tf.constant([-1.5, -0.1, 0.0, 0.3, 2.0])
    for rule in {id(r.spelling): r for r in rules.RULES}.values():
        text = stock_code.of_spelling(rule.spelling, rule.activation.name)
        computed = eval(text, {"tf": tf, "x": x})
        tf.debugging.assert_near(computed, rule.spelling(x))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["explain", "no/such/file.pb"], "does not exist"),
        (["explain", PROGRAMS], "is not a .pb"),
        (["explain", f"{PROGRAMS}:nix"], "has no nix"),
        (["explain", f"{PROGRAMS}:NOT_A_FUNCTION"], "can be drawn"),
        (["explain", f"{PROGRAMS}:untraceable", "--signature", "int32[]"], "this one is broken"),
        (["explain", f"{PROGRAMS}:step"], "cannot be traced"),
        (["explain", f"{PROGRAMS}:step", "--signature", "float"], "--signature: 'float' is not"),
        (["explain", f"{PROGRAMS}:step", "--require", "many"], "'many' is not a claim"),
        (["explain", "x.pb", "--library", "no_such.so"], "--library no_such.so"),
        (["rules", "no_such_rule"], "there is no rule 'no_such_rule'"),
        (["viz", f"{PROGRAMS}:step"], "-o"),
        (["viz", f"{PROGRAMS}:step", "-o", "a.jpeg"], "has to end in"),
        (["viz", f"{PROGRAMS}:step", "-o", "a.svg", "--passes", "polish"], "no pass 'polish'"),
        (["viz", f"{PROGRAMS}:step", "-o", "a.svg", "--details", "dust"], "there is no dust"),
    ],
)
def test_bad_input_is_one_sentence(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1 and expected in printed.err


@pytest.mark.parametrize("content", [b"", b"\x00\x01nonsense", b"\x0a\x06\x0a\x01a\x12\x01Z"])
def test_files_that_are_not_graphs(content, tmp_path, capsys):
    path = tmp_path / "bad.pb"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["explain", str(path)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot" in line


@pytest.mark.parametrize("command", ["info", "rules", "explain", "viz", "convert", "demo"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"python -m tf_fused_ops {command}" in capsys.readouterr().out.split("options:")[1]


def _run(*arguments):
    command = [sys.executable, "-m", "tf_fused_ops", *arguments]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def test_in_a_process_of_its_own(tmp_path):
    """Found from the current folder, and without a trace on the other stream."""
    path = tmp_path / "graph.dot"
    done = _run("viz", "python_tests.viz_programs:step", "--signature", CONV, "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "\x1b" not in done.stdout + done.stderr
    assert path.exists()
    failed = _run("explain", f"{PROGRAMS}:step", "--signature", CONV, "--require", "MatMul*>=1")
    assert failed.returncode == 1 and "FAILS" in failed.stdout
    bad = _run("explain", f"{PROGRAMS}:untraceable", "--signature", "float32[2]")
    assert bad.returncode == 2 and bad.stdout == "" and "Traceback" not in bad.stderr
    assert bad.stderr.splitlines()[-1].endswith("this one is broken")


def test_rules_with_other_ops_elsewhere(capsys):
    assert main(["rules", "adam"]) == 0
    printed = capsys.readouterr().out
    assert "TfFusedOps>UpdateVariable" in printed and "elsewhere ResourceApplyAdam" in printed
