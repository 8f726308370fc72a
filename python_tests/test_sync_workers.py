"""Synchronised batch norm over processes: one batch's losses and weights, and lost workers."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import worker
from conftest import ROOT

PROGRAM = ROOT / "python_tests" / "worker.py"
WORKERS = len(worker.SIZES[0])


def start(arguments, cluster=None, index=None):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if cluster:
        config = {"cluster": {"worker": cluster}, "task": {"type": "worker", "index": index}}
        env["TF_CONFIG"] = json.dumps(config)
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def job(*arguments):
    """Starts all workers; "{}" in an argument is the worker's number."""
    with contextlib.ExitStack() as sockets:
        ports = [sockets.enter_context(socket.socket()) for _ in range(WORKERS)]
        for port in ports:
            port.bind(("localhost", 0))
        cluster = [f"localhost:{port.getsockname()[1]}" for port in ports]
    workers = [
        start([str(argument).format(i) for argument in arguments], cluster, i)
        for i in range(WORKERS)
    ]
    try:
        yield workers
    finally:
        for process in workers:
            process.kill()
            process.communicate()


def test_remapped_train_step(tmp_path):
    """Convolutions, synchronised batch norms and a dense head, traced and rewritten as one step."""
    alone = start([tmp_path / "alone.npz"])
    with job(tmp_path / "{}.npz") as workers:
        for process in [alone, *workers]:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    expected = np.load(tmp_path / "alone.npz")
    names = [name for name in expected.files if name.startswith("arr")]
    # The strategy spreads an update over devices, so that stays as it is.
    rules = [row for row in expected["rules"] if row[0] != "momentum"]
    assert len(rules) == len(expected["rules"]) - 1
    for i in range(WORKERS):
        found = np.load(tmp_path / f"{i}.npz")
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-6)
        for name in names:
            size = np.abs(expected[name]).max()
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=5e-6 * size + 1e-7)
        np.testing.assert_array_equal(found["rules"], rules)
        ops = list(found["ops"])
        for op in ("Moments", "Apply", "GradSums", "GradApply"):
            assert ops.count(f"TfFusedOps>BatchNorm{op}") == 2
        assert ops.count("TfFusedOps>Conv2DBiasActGrad") == 5
        assert ops.count("TfFusedOps>MatMulBiasActGrad") == 4
    assert "TfFusedOps>BatchNormActGrad" in expected["ops"]


@pytest.mark.parametrize(
    ("fault", "errors"),
    [("kill", ("UnavailableError",)), ("sleep", ("DeadlineExceededError", "UnavailableError"))],
)
def test_lost_worker(tmp_path, fault, errors):
    """The others end within the collective's timeout, and learn nothing from what they have."""
    # About once in twenty times, TensorFlow itself crashes when a collective times out: the answer
    # to a RecvBuf then meets the CancellationManager of a step that is over, or its mutex.
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with job(folder / "{}.npz", fault) as workers:
            output, log = workers[0].communicate(timeout=300)
        if workers[0].returncode != -signal.SIGSEGV and "Mutex corrupt" not in log:
            break
    assert workers[0].returncode == 3, log
    name, step, unchanged, seconds = output.split()
    assert name in errors
    assert (step, unchanged) == ("1", "True")
    assert float(seconds) < worker.TIMEOUT + 15
    assert not (folder / "0.npz").exists()
