"""Pictures of graphs before and after fusing, and of what TensorFlow's own passes make of them.

    tfo.viz.draw(step, "step.html", inputs=[images, labels])

draws the graph of a function next to what the remapper makes of it.
"""

from tf_fused_ops.viz import passes as _passes
from tf_fused_ops.viz import sources as _sources
from tf_fused_ops.viz import writers as _writers
from tf_fused_ops.viz.diff import Change, Comparison, Region, compare
from tf_fused_ops.viz.errors import VizError
from tf_fused_ops.viz.model import read

__all__ = ["Change", "Comparison", "Region", "VizError", "compare", "draw", "pass_names", "read"]


def pass_names():
    """Returns the names of the passes that `draw` takes."""
    return _passes.names()


def draw(
    thing,
    path,
    passes=(_passes.OURS,),
    *,
    inputs=None,
    input_signature=None,
    outputs=None,
    title=None,
    format=None,
    expand=None,
    details=(),
    constants=False,
):
    """Draws a program before and after passes.

    Args:
        thing: A Python function, tf.function, ConcreteFunction, Keras model or GraphDef; the path
            of a .pb, .pbtxt or .keras file or of a SavedModel's folder; or a pair (before, after)
            of such things, which are drawn without passes.
        path: Where the picture goes: .svg, .html (interactive), .dot, .png and .pdf (where graphviz
            is installed) or .pbtxt (a pair of files, for Netron).
        passes: Names of passes, applied one after the other: "tf_fused_ops" is this package's,
            "remap", "layout", "constfold" and others (`pass_names()`) are TensorFlow's;
            "executed" and "partitions", at the end, show what TensorFlow really ran after all its
            passes, and after placing it on devices. Without passes the graph alone is drawn.
        inputs: Example arguments of a function.
        input_signature: Instead of them, a sequence of tf.TensorSpec.
        outputs: Names of the tensors to fetch from a GraphDef.
        title: What to call it.
        format: "svg", "html", "dot", "png", "pdf", "pbtxt" or "tensorboard" (a folder of event
            files), if the path does not say it.
        expand: For .svg, which scopes are open: None as many as fit, "all", or a sequence of names.
        details: For .svg, what to write next to the ops: "shapes", "devices", "layouts".
        constants: For .svg, whether to show unchanged constants and handles of variables too.

    Returns:
        A `Comparison`: the programs, what differs, what was fused, and what they cost.

    Raises:
        VizError: The thing, a pass or the path cannot be used; the message is one sentence.
    """
    _writers.format_of(path, format)
    wanted = {"inputs": inputs, "input_signature": input_signature, "outputs": outputs}
    if isinstance(thing, tuple) and len(thing) == 2:
        first, second = (_sources.load(part, **wanted) for part in thing)
        comparison = compare(*(read(s.graph_def, s.outputs, s.title, s.lines)
                               for s in (first, second)))  # fmt: skip
        title, subtitle, single = title or f"{first.title} and {second.title}", "", False
    else:
        source = _sources.load(thing, **wanted, title=title)
        names = _passes.canonical(passes)
        comparison = _passes.apply(source, names).comparison
        title, single = source.title, not names
        subtitle = f"through {', '.join(names)}" if names else ""
    _writers.write(
        path, format, title, subtitle, comparison, single,
        expand=expand, details=details, constants=constants,
    )  # fmt: skip
    return comparison
