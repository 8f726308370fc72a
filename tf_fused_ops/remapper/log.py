"""Log lines in TensorFlow's own format, switched on by TF_CPP_VMODULE=remapper=<level>."""

import sys

# Grappler's remapper logs from this file; sharing its name shares the switch and the habit of
# grepping for it.
_FILE = "remapper.cc"

FUSION = 2
NEAR_MISS = 3


def _logging():
    # Linked to TensorFlow's framework library, which has to be loaded first.
    import tensorflow  # noqa: F401

    from tf_fused_ops import _logging as module

    return module


def vlog(level, message):
    """Logs one line if TF_CPP_VMODULE asks for it.

    Args:
        level: FUSION or NEAR_MISS.
        message: The text of the line.
    """
    module = _logging()
    if module.vlog_level(_FILE) >= level:
        module.vlog(_FILE, sys._getframe(1).f_lineno, level, message)
