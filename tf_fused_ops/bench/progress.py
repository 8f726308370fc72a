"""Tells how far a long run is: a bar where rich is installed and a person looks, else lines."""

import contextlib
import importlib.util
import sys


@contextlib.contextmanager
def shown(total):
    """Shows progress on the standard error.

    Args:
        total: Number of steps.

    Yields:
        A function that takes what the next step is about, and is called before each.
    """
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        columns = BarColumn(), MofNCompleteColumn(), Elapsed(), TextColumn("{task.description}")
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=total)
            done = -1

            def bar(what):
                nonlocal done
                done += 1
                progress.update(task, description=what, completed=done)

            yield bar
        return
    number = 0

    def line(what):
        nonlocal number
        number += 1
        print(f"[{number}/{total}] {what}", file=sys.stderr, flush=True)

    yield line
