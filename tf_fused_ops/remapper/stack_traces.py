"""Lets the stack traces of ops, by which TensorFlow says where an op comes from, show user code.

The frames of this package are left out, and a fused op has the line of the ops it stands for.
"""

import functools
import pathlib

from tensorflow.python.util import tf_stack

from tf_fused_ops.remapper import source

_PACKAGE = pathlib.Path(__file__).parents[1]


class HideFrames(tf_stack.StackTraceFilter):
    """A context in which stack traces leave out this package's frames."""

    def get_filtered_filenames(self):
        """Returns the paths of the files whose frames are left out."""
        return _files() | self.parent.get_filtered_filenames()


class ShowLineOf(tf_stack.StackTraceMapper):
    """A context in which `extract_stack` ends at the user's line that made an op, where known."""

    def __init__(self, op):
        super().__init__()
        self._op = op

    def get_effective_source_map(self):
        """Returns {(file, line): the (file, line, function) to show instead}."""
        known, frame = self.parent.get_effective_source_map(), source.user_frame(self._op)
        return known | {_INNERMOST: (frame.filename, frame.lineno, frame.name)} if frame else known


def extract_stack():
    """Returns the stack trace for an op that is being added."""
    return tf_stack.extract_stack(stacklevel=1)


_INNERMOST = (__file__, extract_stack.__code__.co_firstlineno + 2)


@functools.cache
def _files():
    # Filters come first, then what is shown instead.
    return frozenset(map(str, _PACKAGE.rglob("*.py"))) - {__file__}
