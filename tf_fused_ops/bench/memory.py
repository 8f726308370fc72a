"""The memory that a training step needs."""

import re
from pathlib import Path

from tf_fused_ops.bench import machine
from tf_fused_ops.bench.stacks import TITLES
from tf_fused_ops.bench.workers import PEERS, Worker, WorkerError


def measure(call):
    """Runs a training step and watches this process's resident memory.

    Args:
        call: Takes a step, and releases what it returns.

    Returns:
        A dict: "start", the bytes before the first step, and "peak", the most bytes during the
        second one; the first compiles.
    """
    start = _status("VmRSS")
    call()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    call()
    return {"start": start, "peak": _status("VmHWM")}


def _status(key):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{key}:\s*(\d+) kB$", text, re.MULTILINE)[1])


def run(stacks, peers, threads, on_step):
    """Measures every stack with every peer, each in a fresh process.

    Args:
        stacks: Names of `stacks.STACKS`.
        peers: Names of `workers.PEERS`.
        threads: Number of threads.
        on_step: Called with what comes next.

    Returns:
        A list of dicts: "stack", "title", and "peers", a dict from peer to "start" and "peak" in
        bytes, or to "error".
    """
    results = []
    for stack in stacks:
        measured = {}
        for peer in peers:
            on_step(f"{stack}: {PEERS[peer]}")
            with Worker(peer, machine.processors(threads)) as worker:
                try:
                    measured[peer] = worker.ask("memory", stack=stack)
                except WorkerError as error:
                    measured[peer] = {"error": str(error)}
        results.append({"stack": stack, "title": TITLES[stack], "peers": measured})
    return results


def over_start(measured):
    """Megabytes (10^6) that a step needs over the start, or None."""
    return None if "error" in measured else (measured["peak"] - measured["start"]) / 1e6
