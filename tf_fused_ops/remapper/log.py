"""Log lines in TensorFlow's own format, switched on by TF_CPP_VMODULE=remapper=<level>."""

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


def enabled(level):
    """Returns whether lines of this level are printed."""
    return _logging().vlog_level(_FILE) >= level


def vlog(level, message, line=0):
    """Logs one line if TF_CPP_VMODULE asks for it.

    Args:
        level: FUSION or NEAR_MISS.
        message: The text of the line.
        line: The line number to print after the file name.
    """
    _logging().vlog(_FILE, line, level, message)
