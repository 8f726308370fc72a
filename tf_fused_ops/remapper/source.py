"""Says which line of the user's code made an op."""

import functools
import os
import sysconfig
import weakref

import tensorflow as tf


@functools.cache
def _library_folders():
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    tensorflow = os.path.dirname(tf.__file__)
    site = sysconfig.get_paths()["purelib"]
    return tuple(
        folder + os.sep for folder in (here, tensorflow, site, sysconfig.get_paths()["stdlib"])
    )


def user_frame(op):
    """Returns the innermost frame outside libraries that created an op, or None."""
    folders = _library_folders()
    # Without TensorFlow's own frames, which take long to read.
    frames = op.traceback.get_user_frames() if op.traceback else ()
    for frame in reversed(frames):
        name = frame.filename
        if (
            not name.startswith(folders)
            and not name.startswith("<")
            and "__autograph_generated" not in name
        ):
            return frame
    return None


def user_line(op):
    """Returns "file:line" of the `user_frame` of an op, or None."""
    frame = user_frame(op)
    return f"{frame.filename}:{frame.lineno}" if frame else None


class Origin:
    """Where an op was made, looked up only when it is asked for, as tracebacks take long to read.

    It keeps no graph alive.
    """

    def __init__(self, op):
        self._graph, self._name = weakref.ref(op.graph), op.name

    def line(self):
        """Returns what `user_line` returns for the op, or None if its graph is gone."""
        graph = self._graph()
        return None if graph is None else user_line(graph.get_operation_by_name(self._name))
