"""Runs the page's own layout and drawing code, for pictures without a browser."""

import importlib.resources
import json

from tf_fused_ops.viz.errors import VizError, sentence

SCRIPTS = ("vendor/dagre.min.js", "page/view.js", "page/picture.js")
_BUDGET = 30  # items that a static picture shows at most, if scopes can be kept closed
_SHAPES_BELOW = 24  # a picture of so few items has room for the tensors' shapes


def read(path):
    """Returns the text of a file of this package."""
    return importlib.resources.files("tf_fused_ops.viz").joinpath(path).read_text("utf-8")


def draw(payload, expand=None, details=(), constants=None):
    """Draws a payload as SVG.

    Args:
        payload: What `payload.make` returns.
        expand: None opens scopes as far as they fit; "all" opens all; a sequence of names opens
            those scopes and calls ("conv1", "while").
        details: What to write next to the ops: "shapes", "devices", "layouts".
        constants: Whether to show unchanged constants.

    Returns:
        {"svg": text, "visible": the keys of the visible items of each side}.

    Raises:
        VizError: The JavaScript engine is not installed, or the layout fails.
    """
    choice = {
        "budget": _BUDGET,
        "shapesBelow": _SHAPES_BELOW,
        "constants": bool(constants),
        "details": dict.fromkeys(details, True),
        "everything": expand == "all",
        "open": None
        if expand in (None, "all")
        else [key for name in expand for key in _keys(name)],
    }
    return call("draw", payload, choice)


def call(function, *arguments):
    """Calls a function of the scripts with plain data and returns its result."""
    try:
        from py_mini_racer import JSEvalException, MiniRacer
    except ImportError as error:
        raise VizError(
            "an SVG picture needs a layout engine: run pip install mini-racer, or write .html or "
            ".dot, which do not need it"
        ) from error
    context = MiniRacer()
    context.eval("globalThis.structuredClone ??= (v) => JSON.parse(JSON.stringify(v));0")
    for script in SCRIPTS:
        context.eval(f"{read(script)}\n;0")
    written = ", ".join(json.dumps(argument) for argument in arguments)
    try:
        return json.loads(context.eval(f"JSON.stringify({function}({written}))"))
    except JSEvalException as error:
        # The exception quotes all of the code; its last line but the stack is the message.
        lines = [line for line in str(error).splitlines() if "Error:" in line and len(line) < 300]
        raise VizError(f"the layout fails: {sentence(lines[0] if lines else error)}") from error
    finally:
        context.close()


def _keys(name):
    """Returns the keys that a scope or call of this name can have."""
    parts = name.rstrip("/").split("/")
    for end in range(1, len(parts) + 1):
        yield "/".join(parts[:end])
        yield "/".join(parts[:end]) + "/"
