"""The demo in its quick form, and the parts that it consists of."""

import numpy as np
import pytest

import tf_fused_ops
from tf_fused_ops.demo import graphs, measure

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from tf_fused_ops.cli import main
from tf_fused_ops.demo import digits


def test_quick_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    status = main(["demo", "--quick", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "FAILS" not in printed and "all claims hold" in printed
    assert "\x1b" not in printed
    for name in ("loss_curves.png", "training_step.html", "prediction.svg"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_digits_are_split_without_overlap():
    split = digits.load()
    assert split.train_images.shape == (1437, 8, 8, 1) and split.test_images.shape == (360, 8, 8, 1)
    assert split.train_images.max() == 1.0 and set(split.test_labels) == set(range(10))
    assert len(list(digits.batches(split, epochs=2))) == digits.steps(split, epochs=2) == 44


def test_training_step_is_fused_forward_and_backward():
    split = digits.load()
    images, labels = next(digits.batches(split, epochs=1))
    training = digits.make_training(tf_fused_ops.function)
    counts = graphs.op_counts(training.train_step.get_concrete_function(images, labels))
    fused = {graphs.short_name(kind) for kind in counts if graphs.is_fused(kind)}
    for name in ("Conv2DBiasAct", "BatchNormAct", "MatMulBiasAct"):
        assert {name, f"{name}Grad"} <= fused, counts
    for name in ("BiasAdd", "Relu", "ReluGrad", "FusedBatchNormV3", "FusedBatchNormGradV3", "Erfc"):
        assert counts[name] == 0, counts


def test_relative_difference():
    assert measure.relative_difference(np.array([1.0, 4.0]), np.array([2.0, 4.0])) == 0.25


def test_times_are_taken_in_turns():
    calls = []
    seconds = measure.interleaved_times(
        [lambda: calls.append("a"), lambda: calls.append("b")], 3, lambda: None, warm_up=1
    )
    assert calls == ["a", "b"] * 4 and len(seconds) == 2
