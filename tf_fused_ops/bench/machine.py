"""The machine: what it is, and what it can do at best."""

import contextlib
import os
import platform
from pathlib import Path
from typing import NamedTuple

from tf_fused_ops import _core

# float32 by AMX takes six products of bfloat16, and what goes with cutting numbers into parts.
_WORTH_TILES = 10
# How many products of 8-bit integers are added at once for one of float32: one instruction does it
# for groups of four where the package has it, otherwise for pairs of 16 bits. Not measured.
_INTEGERS = {"avx512_vnni": 4, "avx512_bf16": 4, "amx": 4}
_INTEGER_PAIRS = 2
_BRIEFLY = 100_000  # rounds


class Roofs(NamedTuple):
    """Operations (a multiply-add is two) and bytes (read or written) a second, at best.

    `tiles` are AMX's in bfloat16 where float32 products are sums of those, otherwise 0; `integers`
    those of 8 bits, or 0 where that is not known.
    """

    operations: float
    bytes: float
    tiles: float = 0.0
    integers: float = 0.0

    def best(self, other):
        """The higher roofs of two measurements."""
        return Roofs(*map(max, self, other))

    @property
    def tiles_pay(self):
        """Whether AMX, if it is used, is as much faster as that takes."""
        return not self.tiles or self.tiles >= _WORTH_TILES * self.operations


def processors(threads):
    """Processors for some threads, on different cores as long as there are any.

    Args:
        threads: How many.

    Returns:
        A list of processor numbers.

    Raises:
        ValueError: This process may not use as many.
    """
    usable = sorted(os.sched_getaffinity(0))
    if not 1 <= threads <= len(usable):
        raise ValueError(f"{threads} is not between 1 and {len(usable)}, the processors at hand")
    first = [number for number in usable if number == min(_siblings(number) & set(usable))]
    return sorted([*first, *(n for n in usable if n not in first)][:threads])


def _siblings(number):
    """The processors of the same core."""
    path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    try:
        siblings = set()
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            siblings |= set(range(int(first), int(last or first) + 1))
        return siblings | {number}
    except OSError:
        return {number}


def cores():
    """The number of cores that this process may use."""
    usable = set(os.sched_getaffinity(0))
    return len({min(_siblings(number) & usable) for number in usable})


def measure(dtype, threads):
    """Measures the roofs.

    Args:
        dtype: "float32", "bfloat16", "float16" or "float64".
        threads: How many threads compute and copy.

    Returns:
        A `Roofs`.
    """
    with _bound(threads):
        operations = _core.multiply_add_rate(dtype, threads)
        same = dtype == "float32"
        single = operations if same else _core.multiply_add_rate("float32", threads)
        return Roofs(
            operations,
            _core.copy_rate(threads),
            _core.multiply_add_rate("bfloat16", threads) if _uses_tiles(dtype) else 0.0,
            single * _INTEGERS.get(_core.isa(), _INTEGER_PAIRS),
        )


def brief_rate(threads):
    """Operations a second by some threads, in float32, as two milliseconds show them."""
    with _bound(threads):
        return _core.multiply_add_rate("float32", threads, _BRIEFLY)


@contextlib.contextmanager
def _bound(threads):
    """This thread, and those that it starts, on as many processors."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors(threads))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _uses_tiles(dtype):
    return _core.isa() == "amx" and dtype == "float32"


def describe():
    """A dict that names the hardware and the instruction set in use."""
    return {
        "processor": _model(),
        "cores": cores(),
        "instruction set": _core.isa(),
        "bfloat16 instructions": "avx512_bf16" in _flags(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpuinfo(key):
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _model():
    return _cpuinfo("model name") or platform.machine()


def _flags():
    return _cpuinfo("flags").split()
