"""What the drawing tools raise when something cannot be drawn."""

import re

# Autograph tells an error with the lines that led to it; the error itself stands at the end.
_AUTOGRAPH = "in user code:"
_RAISED = re.compile(r"[\w.]*(?:Error|Exception|Warning)\w*: ")


class VizError(ValueError):
    """The thing, the passes or the path cannot be used; the message is one sentence."""


def sentence(error):
    """Returns what an exception says in one line, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0] == _AUTOGRAPH:
        lines = [line for line in lines if _RAISED.match(line)] or lines[-1:]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
