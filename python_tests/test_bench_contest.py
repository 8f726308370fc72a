"""The benchmark's contest: what peers compute is compared, and when they are timed."""

import numpy as np
import pytest

from tf_fused_ops.bench import contest, machine, pace
from tf_fused_ops.bench.contest import Timing


def test_disagreement_is_found(tmp_path):
    paths = [str(tmp_path / f"{i}.npy") for i in range(3)]
    values = np.random.default_rng(0).normal(size=100_000)
    np.save(paths[0], values)
    np.save(paths[1], values * (1 + 1e-5))
    np.save(paths[2], np.where(np.arange(values.size) < 50, np.nan, values))
    contest.check_equal(paths[1:2], paths[:1], 1e-4)
    with pytest.raises(contest.Disagreement, match="output 0 differs"):
        contest.check_equal(paths[1:2], paths[:1], 1e-6)
    with pytest.raises(contest.Disagreement, match=r"output 0 differs in 0\.05%"):
        contest.check_equal(paths[2:3], paths[:1], 1e-4)


def test_narrow_types_are_compared_with_float32(tmp_path, monkeypatch):
    stock, ours = contestants = [contest.Contestant(peer, 1) for peer in ("stock", "ours")]
    computed = {  # of sums that the first peer adds in bfloat16
        (stock, "float32"): np.full(100, 256.0),
        (stock, "bfloat16"): np.full(100, 128.0),
        (ours, "bfloat16"): np.full(100, 257.0),
    }

    def ask(self, contestant, what, dtype=None, **arguments):
        if what == "load":
            path = tmp_path / f"{contestant.peer}_0.npy"
            np.save(path, computed[contestant, dtype])
            return [str(path)]
        return [1.0] if what == "run" else None

    monkeypatch.setattr(contest.Contest, "_ask", ask)
    monkeypatch.setattr(machine, "brief_rate", lambda threads: 1.0)
    with contest.Contest(contestants, contest.Effort(1, 0.0, 0.0)) as held:
        held._folder = tmp_path
        timings = held.run("matmul_tiny", "bfloat16", "step")
    assert timings[ours] == Timing(1.0, 1.0, 0.0)
    assert timings[stock] == Timing(
        1.0, 1.0, 0.0, doubt="output 0 differs in 100.00% of the elements"
    )


def test_summary_takes_rounds_for_its_spread():
    timing = contest.summarize([[2, 1, 3], [4, 4, 5], [6]])
    assert timing == Timing(median=4, least=1, spread=1.0)


@pytest.fixture
def paced(monkeypatch):
    """A `Pace` of a machine whose rates are those of the list that is returned beside it."""
    rates = [10.0]
    monkeypatch.setattr(machine, "brief_rate", lambda threads: rates.pop(0))
    monkeypatch.setattr(pace, "_WAIT", 0.0)
    held = pace.Pace(2, patience=100.0)
    held.begin()
    return held, rates


def test_a_turn_counts_at_full_pace_before_and_after(paced):
    held, rates = paced
    rates += [9.0, 8.5]
    assert held.kept() and held.kept() and held.steady
    rates += [5.0, 5.0, 9.0]  # slow after the turn; then it is waited for the pace
    assert not held.kept() and not rates
    rates += [9.0]
    assert held.kept()
    rates += [12.0, 9.0, 11.0]  # what is full grows with the best that was seen
    assert held.kept()
    assert not held.kept() and not rates


def test_a_slow_machine_before_a_case_is_no_matter(paced):
    held, rates = paced
    rates += [5.0, 9.0, 9.0, 9.0]
    assert not held.kept()
    held.begin()
    assert held.kept() and not rates


def test_patience_ends_and_is_renewed(paced, monkeypatch):
    held, rates = paced
    clock = iter(range(10_000))
    monkeypatch.setattr(pace.time, "monotonic", lambda: next(clock))
    rates += [5.0] * 1000
    assert held.kept()
    left = len(rates)
    assert held.kept() and len(rates) == left - 1 and not held.steady
    held.begin()
    assert held.kept() and len(rates) < left - 3


def test_a_slow_turn_is_taken_again_and_told_of(monkeypatch):
    turns = iter([7.0, 1.0, 2.0])
    rates = iter([10.0, 5.0, 10.0, 10.0, 5.0])
    ours = contest.Contestant("ours", 1)

    def ask(self, contestant, what, **arguments):
        return [next(turns)] if what == "run" else []

    monkeypatch.setattr(contest.Contest, "_ask", ask)
    monkeypatch.setattr(machine, "brief_rate", lambda threads: next(rates))
    clock = iter([0.0, 0.0, 0.0, 2.0, 2.0])  # the patience ends in the last turn
    monkeypatch.setattr(pace.time, "monotonic", lambda: next(clock))
    with contest.Contest([ours], contest.Effort(2, 0.0, 1.0)) as held:
        timings = held.run("matmul_tiny", "float32", "forward")
    assert timings[ours] == Timing(1.5, 1.0, 1 / 1.5, slow_rounds=1)
