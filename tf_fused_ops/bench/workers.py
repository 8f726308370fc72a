"""The processes that hold the peers, seen from the one that compares them."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Name -> title, in the order of the tables.
PEERS = {
    "stock": "TF",
    "xla": "TF + XLA",
    "torch": "PyTorch",
    "torch_compile": "torch.compile",
    "ours": "tf_fused_ops",
    "winograd": "Winograd",
}
# The package itself; the second where that is asked for.
OURS, WINOGRAD = "ours", "winograd"

_THREADS = (
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
# Device -> what is set for the processes; on a GPU they share its memory.
DEVICES = {
    "cpu": {"CUDA_VISIBLE_DEVICES": ""},
    "gpu": {"TF_FORCE_GPU_ALLOW_GROWTH": "true"},
}


class WorkerError(Exception):
    """A peer cannot do what was asked; the message is one line."""


class WorkerDied(WorkerError):
    """A peer's process has ended."""


def installed(peer):
    """Tells whether this machine has what a peer needs."""
    return not peer.startswith("torch") or importlib.util.find_spec("torch") is not None


class Worker:
    """One peer in a process of its own, bound to its processors.

    Args:
        peer: A name of `PEERS`.
        processors: The numbers of the processors to run on; as many threads are used.
        device: A name of `DEVICES`: where the work is done.
    """

    def __init__(self, peer, processors, device="cpu"):
        self._peer = peer
        self._processors = processors
        self._device = device
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        program = Path(__file__).with_name("worker.py")
        numbers = ",".join(map(str, self._processors))
        threads = dict.fromkeys(_THREADS, str(len(self._processors)))
        self._log = self._stack.enter_context(tempfile.TemporaryFile("w+"))
        self._process = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, program, self._peer, numbers, self._device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **threads, **DEVICES[self._device]},
            )
        )
        self._stack.callback(self._process.kill)
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def ask(self, what, **arguments):
        """Has the worker do something.

        Args:
            what: The name of a method of `worker.Server`.
            **arguments: Its arguments.

        Returns:
            What the method returns.

        Raises:
            WorkerError: The method raised.
            WorkerDied: The process has ended.
        """
        request = json.dumps({"do": what, "with": arguments})
        try:
            print(request, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerDied(f"the process ended with {self._process.wait()}: {self._last_line()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(_sentence(answer["error"]))
        return answer["value"]

    def _last_line(self):
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or ["it said nothing"])[-1]


def _sentence(message):
    """A message in one line."""
    return " ".join(message.split())[:300]
