"""The process of one peer; `workers.Worker` starts this file by its path and talks to it.

Requests are lines of JSON on the standard input, answers lines of JSON on the standard output.
"""

import gc
import json
import os
import sys
import time
import types
from pathlib import Path

# How many calls are timed together: a GPU is waited for as rarely as in a program that trains.
_TOGETHER = {"cpu": 1, "gpu": 20}


class Server:
    """Answers requests; one program is loaded at a time.

    Args:
        programs: What `load` is called on, as `tensorflow_programs.Programs`.
        together: How many calls are timed together.
    """

    def __init__(self, programs, together):
        self._programs = programs
        self._together = together
        self._call = None

    def load(self, name, dtype, mode, folder):
        """Loads a case and saves what it computes; returns the files."""
        import numpy as np

        from tf_fused_ops.bench import table

        self.unload()
        (case,) = table.select([name], dtype).values()
        self._call, arrays = self._programs.load(case, mode)
        paths = [str(Path(folder, f"{os.getpid()}_{i}.npy")) for i in range(len(arrays))]
        for path, array in zip(paths, arrays, strict=True):
            np.save(path, array)
        return paths

    def run(self, seconds):
        """Calls the program for some time; returns the seconds of a call, of each turn's calls."""
        self._call()  # brings back into the caches what others have displaced
        self._programs.wait()
        times, start = [], time.perf_counter()
        while not times or time.perf_counter() - start < seconds:
            before = time.perf_counter()
            for _ in range(self._together):
                self._call()
            self._programs.wait()
            times.append((time.perf_counter() - before) / self._together)
        return times

    def unload(self):
        """Lets go of the program."""
        self._call = None
        gc.collect()

    def card(self, dtype):
        """Returns the name of the GPU, and the operations and bytes that it does in a second."""
        return self._programs.card(dtype)

    def memory(self, stack):
        """Runs a training step of a stack; returns what `memory.measure` does."""
        from tf_fused_ops.bench import memory, stacks

        return memory.measure(self._programs.load_stack(stacks.STACKS[stack]))


def main(peer, processors, device, package):
    """Serves until the standard input ends.

    Args:
        peer: A name of `workers.PEERS`.
        processors: Numbers of the processors to run on, with commas between them.
        device: A name of `workers.DEVICES`.
        package: The folder of tf_fused_ops.
    """
    requests = sys.stdin
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    processors = [int(number) for number in processors.split(",")]
    os.sched_setaffinity(0, processors)
    # The folder of the package instead of the folder of this file.
    sys.path[0] = str(package.parent)
    if peer not in ("ours", "winograd"):
        # The benchmark's modules only: no op library, and no TensorFlow beside PyTorch.
        bare = types.ModuleType("tf_fused_ops")
        bare.__path__ = [str(package)]
        sys.modules["tf_fused_ops"] = bare
    if peer.startswith("torch"):
        from tf_fused_ops.bench import torch_programs as programs
    else:
        from tf_fused_ops.bench import tensorflow_programs as programs
    programs.use_threads(len(processors))
    server = Server(programs.Programs(peer, device), _TOGETHER[device])
    gc.disable()
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"value": getattr(server, request["do"])(**request["with"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:], Path(__file__).resolve().parents[1])
