"""Times the peers in turns, after all have computed the same."""

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tf_fused_ops.bench import machine
from tf_fused_ops.bench.pace import Pace
from tf_fused_ops.bench.workers import Worker, WorkerDied, WorkerError

# How far, in multiples of the root mean square, an element may be from the reference's.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}
# Batch norm's pre-activations can round to either side of a rectifier's zero.
FAR_ELEMENTS = 1e-4
_NARROW = ("float16", "bfloat16")
_PAUSE = 0.01  # seconds, in which threads that wait by spinning go to sleep


class Effort(NamedTuple):
    """How long to measure: rounds, seconds of a peer's turn in a round, and `Pace`'s patience."""

    rounds: int
    seconds: float
    patience: float


FULL = Effort(rounds=7, seconds=0.2, patience=10.0)
QUICK = Effort(rounds=3, seconds=0.02, patience=0.5)


class Contestant(NamedTuple):
    """A peer with a number of threads."""

    peer: str
    threads: int


class Timing(NamedTuple):
    """A contestant's seconds for one call.

    Attributes:
        median: Over the rounds, of a round's median.
        least: Of all calls.
        spread: The rounds' range over their median.
        error: Why there is no time, or None.
        doubt: How the outputs differ from what is right, or None; of the first peer only, which
            is timed all the same.
        slow_rounds: How many rounds the machine was slow beside, see `pace.Pace`.
    """

    median: float = None
    least: float = None
    spread: float = None
    error: str = None
    doubt: str = None
    slow_rounds: int = 0


class Disagreement(WorkerError):
    """A peer has computed something else than the others."""


class Contest:
    """Holds a process for each contestant and has them run one at a time.

    Args:
        contestants: Sequence of `Contestant`; the first is what the others are compared with.
        effort: An `Effort`.
        device: A name of `workers.DEVICES`.
    """

    def __init__(self, contestants, effort, device="cpu"):
        self._contestants = contestants
        self._effort = effort
        self._device = device
        self._pace = Pace(max(each.threads for each in contestants), effort.patience)
        self._stack = contextlib.ExitStack()
        self._workers = {}

    def __enter__(self):
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def card(self, dtype):
        """The GPU's name and its `machine.Roofs`, as TensorFlow reaches them."""
        threads = self._contestants[0].threads
        name, operations, copied = self._ask(Contestant("stock", threads), "card", dtype=dtype)
        return name, machine.Roofs(operations, copied)

    def run(self, name, dtype, mode):
        """Times one case.

        Args:
            name: Of a case, as `table.select` takes it.
            dtype: "float32", "bfloat16", "float16" or "float64".
            mode: "forward" or "step".

        Returns:
            A dict from `Contestant` to `Timing`.
        """
        timings, loaded, doubts = {}, [], {}
        expected = self._wide_reference(name, mode) if dtype in _NARROW else None
        for contestant in self._contestants:
            try:
                paths = self._ask(contestant, "load", name=name, dtype=dtype, mode=mode)
                expected = expected or paths
                check_equal(paths, expected, TOLERANCE[dtype])
                loaded.append(contestant)
            except Disagreement as error:
                if contestant == self._contestants[0]:
                    loaded.append(contestant)
                    doubts[contestant] = str(error)
                else:
                    timings[contestant] = Timing(error=str(error))
            except WorkerError as error:
                timings[contestant] = Timing(error=str(error))
        rounds = {contestant: [] for contestant in loaded}
        slow = dict.fromkeys(loaded, 0)
        self._pace.begin()
        for number in range(self._effort.rounds):
            # Every peer comes after another one in each round.
            first = number % max(len(loaded), 1)
            for contestant in loaded[first:] + loaded[:first]:
                if contestant in timings:
                    continue
                try:
                    rounds[contestant].append(self._turn(contestant))
                    slow[contestant] += not self._pace.steady
                except WorkerError as error:
                    timings[contestant] = Timing(error=str(error))
        for contestant in loaded:
            with contextlib.suppress(WorkerError):
                self._ask(contestant, "unload")
            if contestant not in timings:
                timings[contestant] = summarize(rounds[contestant])._replace(
                    doubt=doubts.get(contestant), slow_rounds=slow[contestant]
                )
        for path in Path(self._folder).iterdir():
            path.unlink()
        return {contestant: timings[contestant] for contestant in self._contestants}

    def _turn(self, contestant):
        """The seconds of each call in a turn; of another turn if the machine was slow beside it."""
        while True:
            time.sleep(_PAUSE)
            seconds = self._ask(contestant, "run", seconds=self._effort.seconds)
            if self._pace.kept():
                return seconds

    def _wide_reference(self, name, mode):
        """Files of what the first peer computes in float32, None if it cannot.

        In 16 bits it need not be right: stock TensorFlow adds gradients of a bias in bfloat16.
        """
        try:
            paths = self._ask(self._contestants[0], "load", name=name, dtype="float32", mode=mode)
        except WorkerError:
            return None
        # The worker will save what it computes in 16 bits under the same names.
        return [
            Path(path).rename(Path(self._folder, f"wide_{i}.npy")) for i, path in enumerate(paths)
        ]

    def _ask(self, contestant, what, **arguments):
        if what == "load":
            arguments["folder"] = self._folder
        if contestant not in self._workers:
            processors = machine.processors(contestant.threads)
            worker = self._stack.enter_context(Worker(contestant.peer, processors, self._device))
            self._workers[contestant] = worker
        try:
            return self._workers[contestant].ask(what, **arguments)
        except WorkerDied:
            del self._workers[contestant]  # the next case starts another
            raise


def summarize(rounds):
    """The `Timing` of a list of rounds, each a list of seconds."""
    medians = [statistics.median(seconds) for seconds in rounds]
    median = statistics.median(medians)
    return Timing(median, min(map(min, rounds)), (max(medians) - min(medians)) / median)


def check_equal(paths, expected, tolerance):
    """Compares saved arrays.

    Args:
        paths: Files of a peer's arrays.
        expected: Files of the reference's.
        tolerance: In multiples of the root mean square.

    Raises:
        Disagreement: They differ.
    """
    for i, (path, other) in enumerate(zip(paths, expected, strict=True)):
        value, reference = np.load(path, mmap_mode="r"), np.load(other, mmap_mode="r")
        if value.shape != reference.shape:
            raise Disagreement(f"output {i} has the shape {value.shape}, not {reference.shape}")
        scale = np.sqrt(np.mean(np.square(reference, dtype=np.float64)))
        far = ~(np.abs(np.subtract(value, reference, dtype=np.float64)) <= tolerance * scale)
        if np.mean(far) > FAR_ELEMENTS:
            raise Disagreement(f"output {i} differs in {np.mean(far):.2%} of the elements")
