"""The formats of pictures, by the ending of the file's name."""

import shutil
import subprocess
from pathlib import Path

import tensorflow as tf
from google.protobuf import text_format

from tf_fused_ops.viz import dot, engine, html, payload
from tf_fused_ops.viz.errors import VizError, sentence

FORMATS = ("svg", "html", "dot", "png", "pdf", "pbtxt", "tensorboard")
_MOST_NODES_FOR_DOT = 2000  # graphviz needs minutes for more


def format_of(path, wanted=None):
    """Returns the format of a file.

    Args:
        path: Where the picture goes.
        wanted: A format that overrules the file's ending.

    Raises:
        VizError: There is no such format.
    """
    name = wanted or Path(path).suffix.lstrip(".").lower()
    if name not in FORMATS:
        raise VizError(
            f"'{path}' has to end in .{', .'.join(FORMATS[:-1])}, or the format to be named "
            "(tensorboard writes a folder)"
        )
    return name


def write(path, wanted, title, subtitle, comparison, single, **choices):
    """Writes a picture.

    Args:
        path: Of the file; for "tensorboard" of a folder, for "pbtxt" of a pair of files
            (name.before.pbtxt, name.after.pbtxt).
        wanted: The format, or None.
        title: What is drawn.
        subtitle: Which passes it went through.
        comparison: A diff.Comparison.
        single: Whether only the first program is drawn.
        **choices: For "svg", as for `engine.draw`.

    Returns:
        The paths that were written.

    Raises:
        VizError: The format needs something that is missing, or the file cannot be written.
    """
    path = Path(path)
    kind = format_of(path, wanted)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "pbtxt":
            return _pair(path, comparison, single)
        if kind == "tensorboard":
            return _tensorboard(path, comparison, single)
        if kind in ("png", "pdf"):
            return _graphviz(path, kind, title, comparison, single)
        if kind == "dot":
            path.write_text(dot.text(title, comparison, single), "utf-8")
            return [path]
        data = payload.make(title, subtitle, comparison, single)
        text = html.page(data) if kind == "html" else engine.draw(data, **choices)["svg"]
        path.write_text(text, "utf-8")
        return [path]
    except OSError as error:
        raise VizError(f"{path} cannot be written: {error.strerror or error}") from error


def _programs(comparison, single):
    yield "before", comparison.before
    if not single:
        yield "after", comparison.after


def _pair(path, comparison, single):
    written = []
    for label, program in _programs(comparison, single):
        target = path if single else path.with_suffix(f".{label}.pbtxt")
        target.write_text(text_format.MessageToString(program.graph_def), "utf-8")
        written.append(target)
    return written


def _tensorboard(folder, comparison, single):
    written = []
    for label, program in _programs(comparison, single):
        try:
            writer = tf.summary.create_file_writer(str(folder / label))
        except tf.errors.OpError as error:
            raise VizError(f"{folder} cannot be written: {sentence(error)}") from error
        with writer.as_default(step=0):
            tf.summary.graph(program.graph_def)
        writer.close()
        written.append(folder / label)
    return written


def _graphviz(path, kind, title, comparison, single):
    if shutil.which("dot") is None:
        raise VizError(
            f".{kind} needs graphviz (apt-get install graphviz); .svg and .html do not need it"
        )
    programs = [program for _, program in _programs(comparison, single)]
    nodes = sum(len(graph.nodes) for program in programs for graph in program.graphs())
    if nodes > _MOST_NODES_FOR_DOT:
        raise VizError(f"{nodes} nodes are too many for graphviz; .svg and .html fold name scopes")
    text = dot.text(title, comparison, single)
    result = subprocess.run(
        ["dot", f"-T{kind}", "-o", str(path)], input=text, capture_output=True, text=True
    )
    if result.returncode:
        raise VizError(f"graphviz fails: {sentence(result.stderr)}")
    return [path]
