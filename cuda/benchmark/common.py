"""What the benchmarks of this folder share: the launchers, the clock, the arguments."""

import argparse
import importlib.machinery
import importlib.util
import statistics
import sys
import time
from pathlib import Path

import torch

DTYPES = ("bfloat16", "float16", "float32")


def launchers():
    """Returns the launchers' module, without TensorFlow: its CUDA libraries are not PyTorch's."""
    package = importlib.util.find_spec("tf_fused_ops")
    folders = package.submodule_search_locations if package else []
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    paths = [Path(folder, f"_cuda{suffix}") for folder in folders for suffix in suffixes]
    found = [path for path in paths if path.exists()]
    if not found:
        sys.exit("the GPU half is not built: TFO_CUDA=ON pip install -e .")
    spec = importlib.util.spec_from_file_location("_cuda", found[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Cycles for which the GPU is kept waiting, so that all is launched by the time it starts: a few
# milliseconds.
_HEAD_START = 5_000_000


def milliseconds(function, seconds):
    """The median time that `function` takes on the GPU, caches flushed before each run.

    Args:
        function: Launches what is timed.
        seconds: How long to repeat it.
    """
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    times, begin = [], time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 5:
        flush.zero_()
        torch.cuda._sleep(_HEAD_START)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class Bench:
    """What was asked for on the command line.

    Args:
        doc: The program's docstring.

    Attributes:
        dtype: Of PyTorch.
    """

    def __init__(self, doc):
        parser = argparse.ArgumentParser(description=doc.splitlines()[0])
        parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
        parser.add_argument("--seconds", type=float, default=0.2, help="time spent on each number")
        parser.add_argument(
            "--eager", action="store_true", help="leave torch.compile out, which takes a while"
        )
        arguments = parser.parse_args()
        if not torch.cuda.is_available():
            sys.exit("no GPU: nothing can be measured")
        self.dtype, self._seconds = getattr(torch, arguments.dtype), arguments.seconds
        self._eager = arguments.eager
        print(f"{torch.cuda.get_device_name()}, {arguments.dtype}, PyTorch {torch.__version__}")

    def time(self, function):
        """Milliseconds."""
        return milliseconds(function, self._seconds)

    def copy_rate(self, case):
        """Measures a copy of a case's tensors; returns its GB/s."""
        return 2 * case.bytes / self.time(case.copy) / 1e6

    def show_rate(self, name, function, moved, copy_rate):
        """Prints an operation's time, its rate for the bytes moved, and its share of a copy's."""
        time = self.time(function)
        rate = moved / time / 1e6
        print(f"  {name:<26} {time:8.3f} ms {rate:7.0f} GB/s {rate / copy_rate:6.1%} of copy")

    def show_peers(self, step, function, inputs, dy):
        """Times a forward pass with all gradients beside PyTorch's.

        Args:
            step: Ours, as a function without arguments.
            function: PyTorch's forward pass, a function of `inputs`.
            inputs: Tensors; what is differentiated.
            dy: The gradient of what `function` returns.
        """
        ours = self.time(step)
        print(f"  forward and gradients      {ours:8.3f} ms")
        peers = {"PyTorch eager": function}
        if not self._eager:
            peers["torch.compile"] = torch.compile(function)
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        for peer, forward in peers.items():
            theirs = self.time(lambda: torch.autograd.grad(forward(*inputs), inputs, dy))  # noqa: B023
            print(f"    beside {peer:<19} {theirs:8.3f} ms, ours is {theirs / ours:.2f}x as fast")
