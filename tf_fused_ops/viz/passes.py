"""The passes that a picture can show, by name: ours, TensorFlow's, and what really ran."""

import dataclasses

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer

from tf_fused_ops.remapper import remap
from tf_fused_ops.viz import diff, model, runtime
from tf_fused_ops.viz.errors import VizError, sentence

OURS = "tf_fused_ops"
_RENAMED = "_fused"  # what the remapper appends to the names of functions that it rewrites

# Grappler's names, and what people call them. "autoparallel" is left out: it ends the process.
GRAPPLER = {
    "remap": ("remapper",),
    "layout": ("layout_optimizer",),
    "arithmetic": ("arithmetic_optimization",),
    "constfold": ("constant_folding",),
    "common_subgraph_elimination": ("cse",),
    "dependency": ("dependency_optimization",),
    "pruning": ("model_pruner",),
    "function": ("function_optimization",),
    "loop": ("loop_optimization",),
    "shape": ("shape_optimization",),
    "memory": ("memory_optimization",),
    "auto_mixed_precision": (),
    "auto_mixed_precision_cpu": (),
    "auto_mixed_precision_onednn_bfloat16": (),
    "debug_stripper": (),
    "pin_to_host": (),
    "scoped_allocator": (),
    "implementation_selector": (),
}
_NAMES = {alias: name for name, aliases in GRAPPLER.items() for alias in (name, *aliases)}


def names():
    """Returns the names of all passes."""
    return (OURS, *GRAPPLER, *runtime.STAGES)


def canonical(passes):
    """Returns passes under their own names.

    Args:
        passes: A name, or a sequence of names.

    Raises:
        VizError: There is no pass of that name, or what really ran is not the last.
    """
    wanted = [passes] if isinstance(passes, str) else list(passes)
    known = _NAMES | {name: name for name in (OURS, *runtime.STAGES)}
    for name in wanted:
        if name not in known:
            raise VizError(f"there is no pass '{name}'; there are {', '.join(names())}")
    if any(name in runtime.STAGES for name in wanted[:-1]):
        raise VizError(f"{' and '.join(runtime.STAGES)} can only come last")
    return tuple(known[name] for name in wanted)


@dataclasses.dataclass(frozen=True)
class Result:
    """A program before and after passes.

    Attributes:
        comparison: A diff.Comparison.
        reports: The remapper's reports of our pass, if it was among them.
    """

    comparison: diff.Comparison
    reports: tuple = ()


def apply(source, passes):
    """Runs passes over a program, one after the other.

    Args:
        source: A sources.Source.
        passes: Names of passes.

    Returns:
        A Result.

    Raises:
        VizError: A pass is unknown or fails.
    """
    passes = canonical(passes)
    if passes and passes[-1] in runtime.STAGES:
        return _executed(source, passes)
    first = before = model.read(source.graph_def, source.outputs, source.title, source.lines)
    outputs, regions, reports = source.outputs, [], ()
    for name in passes:
        if name == OURS:
            result = remap(_copy(before.graph_def), list(outputs))
            graph_def, outputs, reports = result.graph_def, result.outputs, result.reports
        else:
            graph_def = _grappler(before.graph_def, outputs, name)
        _keep_shapes(before.graph_def, graph_def)
        after = model.read(graph_def, outputs, source.title, source.lines)
        if name == OURS:
            regions += _reported(reports, after, source.lines)
        else:
            regions += diff.infer_regions(diff.compare(before, after))
        before = after
    return Result(diff.compare(first, before, regions), reports)


def _reported(reports, after, lines):
    """Makes Regions of the remapper's reports."""
    for report in reports:
        name = "" if report is reports[-1] else report.graph
        new_name = name if name in after.functions or not name else name + _RENAMED
        for fusion in report.fused:
            first = next((lines[name, n] for n in fusion.nodes if (name, n) in lines), None)
            yield diff.Region(
                fusion.rule,
                tuple((name, node) for node in fusion.nodes),
                tuple((new_name, node) for node in fusion.fused),
                first,
                fusion.messages,
            )


def _keep_shapes(before, after):
    """Hands on what a pass forgets and nothing can infer: the shapes of captured variables."""
    bodies = {f.signature.name: f.node_def for f in before.library.function}
    pairs = [(before.node, after.node)]
    for function in after.library.function:
        name = function.signature.name
        old = bodies.get(name, bodies.get(name.removesuffix(_RENAMED)))
        if old is not None:
            pairs.append((old, function.node_def))
    for old, new in pairs:
        known = {(n.name, n.op): n.attr["_output_shapes"] for n in old
                 if "_output_shapes" in n.attr}  # fmt: skip
        for node in new:
            if (node.name, node.op) in known and "_output_shapes" not in node.attr:
                node.attr["_output_shapes"].CopyFrom(known[node.name, node.op])


def _copy(graph_def):
    copy = graph_pb2.GraphDef()
    copy.CopyFrom(graph_def)
    return copy


def _grappler(graph_def, outputs, name):
    """Runs one of grappler's passes offline; returns a GraphDef."""
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.optimizers.append(name)
    options.min_graph_nodes = -1
    options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    options.fail_on_optimizer_errors = True
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    # Grappler's passes leave nodes alone whose device they do not know.
    gpu = tf.config.list_logical_devices("GPU")
    device = f"/job:localhost/replica:0/task:0/device:{'GPU' if gpu else 'CPU'}:0"
    for node in _nodes(meta_graph.graph_def):
        node.device = node.device or device
    meta_graph.collection_def["train_op"].node_list.value.extend(
        outputs or [node.name for node in graph_def.node]
    )
    try:
        result = tf_optimizer.OptimizeGraph(config, meta_graph)
    except Exception as error:
        raise VizError(f"TensorFlow's pass {name} fails: {sentence(error)}") from error
    for node in _nodes(result):
        if node.device == device:
            node.device = ""
    return result


def _nodes(graph_def):
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _executed(source, passes):
    """Runs a program and compares what TensorFlow was given with what it ran."""
    *earlier, stage = passes
    if set(earlier) - {OURS}:
        raise VizError(f"only {OURS} can come before {stage}: TensorFlow runs its own passes")
    given, ran = runtime.run(source, stage, fused=bool(earlier))
    before, after = (model.read(graph_def, (), source.title) for graph_def in (given, ran))
    comparison = diff.compare(before, after)
    return Result(diff.compare(before, after, diff.infer_regions(comparison)))
