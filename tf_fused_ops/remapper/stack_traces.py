"""Lets the stack traces of ops, by which TensorFlow says where an op comes from, show user code."""

import functools
import pathlib

from tensorflow.python.util import tf_stack

_PACKAGE = pathlib.Path(__file__).parents[1]


class HideFrames(tf_stack.StackTraceFilter):
    """A context in which stack traces leave out this package's frames."""

    def get_filtered_filenames(self):
        """Returns the paths of the files whose frames are left out."""
        return _files() | self.parent.get_filtered_filenames()


@functools.cache
def _files():
    return frozenset(map(str, _PACKAGE.rglob("*.py")))
