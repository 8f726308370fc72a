"""Cases of the benchmark whose sizes are drawn at random."""

import numpy as np
import pytest

from tf_fused_ops.bench import contest, costs, drawn, machine, report, table, tensorflow_programs
from tf_fused_ops.bench.cases import ConvCase
from tf_fused_ops.cli import main
from tf_fused_ops.remapper import recurrent, rules

MANY = drawn.names(0, 100)
FAMILIES = list(dict.fromkeys(map(drawn.group_of, MANY)))


def _small(family):
    """The case of a family, of a hundred, whose training step takes the fewest operations."""
    cases = [drawn.case(name) for name in MANY if drawn.group_of(name) == family]
    return min(cases, key=lambda case: costs.work(case, "step").macs)


def test_a_name_stands_for_the_same_sizes_everywhere():
    """In the processes that time it, and on another machine."""
    assert drawn.case("random_conv_3_0").title() == "conv 3x3 s2 100→128, 4x80x9, silu"
    assert drawn.case("random_matmul_3_1") == drawn.case("random_matmul_3_1")
    titles = [drawn.case(name).title() for name in drawn.names(0, 20) + drawn.names(1, 20)]
    assert len(set(titles)) > 0.9 * len(titles)


def test_sizes_fit_and_are_not_too_large():
    known = {rule.name for rule in (*rules.RULES, *recurrent.LOOPS)}
    for name in MANY:
        case = drawn.case(name)
        work = costs.work(case, "step")
        assert work.macs <= 4e9, name
        assert work.bytes <= 2e8, name
        assert case.rule() in known, name
        if isinstance(case, ConvCase):
            assert min(case.output_image()) > 0, name


def test_they_stand_behind_those_of_the_table():
    names = ["random_recurrent_5_1", "conv_tiny", "random_conv_5_0"]
    selected = table.select(names, "bfloat16")
    assert list(selected) == ["conv_tiny", "random_recurrent_5_1", "random_conv_5_0"]
    assert {case.dtype for case in selected.values()} == {"bfloat16"}
    assert [table.group_of(name) for name in selected] == [
        "off_track", "random_recurrent", "random_conv",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["random_conv", "random_conv_1", "random_nothing_1_2"])
def test_other_names_are_refused(name):
    assert drawn.group_of(name) is None
    with pytest.raises(ValueError, match=f"'{name}' is none of"):
        table.select([name], "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_agree(family):
    """And ours is fused, or it would not load."""
    case = _small(family)
    stock, ours = (tensorflow_programs.Programs(p).load(case, "step")[1] for p in ("stock", "ours"))
    for value, expected in zip(ours, stock, strict=True):
        near = np.abs(value - expected) <= contest.TOLERANCE["float32"] * np.sqrt(
            np.mean(np.square(expected))
        )
        assert np.mean(~near) <= contest.FAR_ELEMENTS, str(case)


def test_list(capsys):
    assert main(["bench", "--list", "--random", "2", "--seed", "7"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == drawn.names(7, 2)
    assert len(names) == 2 * len(FAMILIES)
    assert main(["bench", "--list", "--random", "1", "--cases", "conv_tiny"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["conv_tiny", *drawn.names(0, 1)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--random", "0"], "--random: 0 is less than 1"),
        (["--random", "3", "--seed", "-1"], "--seed: -1 is less than 0"),
        (["--random", "some"], "--random"),
    ],
)
def test_bad_input_is_one_sentence(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


def test_means_are_those_of_a_family():
    timings = {peer: contest.Timing(ms, ms, 0.0) for peer, ms in (("stock", 3.0), ("ours", 2.0))}
    results = [
        (name, case, "forward", timings)
        for name, case in table.select(drawn.names(0, 2), "float32").items()
    ]
    roofs = machine.Roofs(operations=500e9, bytes=50e9)
    collected = report.collect({"dtype": "float32", "threads": 2}, roofs, results)
    assert [means["group"] for means in collected["geometric means"]] == FAMILIES
    lines = [line for line in report.lines(collected) if line.startswith("| geometric mean")]
    assert [line.split("|")[1].strip() for line in lines] == [
        f"geometric mean, {family.replace('_', ' ')}" for family in FAMILIES
    ]
    assert all("1.50x" in line for line in lines)
