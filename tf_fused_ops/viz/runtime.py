"""What really ran: the graphs that TensorFlow's runtime made of a function when it was called."""

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from tf_fused_ops.function import function as fused_function
from tf_fused_ops.viz.errors import VizError, sentence

EXECUTED = "executed"  # after grappler
PARTITIONS = "partitions"  # after placement: one graph per device
STAGES = (EXECUTED, PARTITIONS)


def run(source, stage, fused=False):
    """Calls a program once, with zeros, and collects the runtime's graphs.

    Args:
        source: A sources.Source.
        stage: EXECUTED or PARTITIONS.
        fused: Whether to run it through `tf_fused_ops.function`.

    Returns:
        The GraphDefs that the stock program starts with and that was run.

    Raises:
        VizError: It cannot be called.
    """
    given, ran = _collect(_callable(source, False), source)
    if fused:
        _, ran = _collect(_callable(source, True), source)
    if stage == EXECUTED:
        return given, ran.post_optimization_graph
    return given, _merged(ran.partition_graphs)


def _callable(source, fused):
    """Returns a function that the runtime has not seen yet."""
    if source.python_function is not None:
        return (fused_function if fused else tf.function)(source.python_function)
    if fused:
        raise VizError("only a Python function or a Keras model can be run with fused ops")
    if source.concrete is not None:
        graph = source.concrete.graph
        return ConcreteFunction.from_func_graph(graph, source.concrete.function_type, {})
    names = [node.name for node in source.graph_def.node if node.op == "Placeholder"]

    def imported(*inputs):
        return tf.graph_util.import_graph_def(
            source.graph_def, dict(zip(names, inputs, strict=True)), list(source.outputs), name=""
        )

    return tf.function(imported, autograph=False)


def _collect(function, source):
    """Returns (the graph that a function starts with, the run's FunctionGraphs)."""
    arguments = [_zeros(spec) for spec in _specs(source)]
    state = context.context()
    state.enable_graph_collection()
    state.export_run_metadata()  # drops what others have collected and left there
    try:
        function(*arguments)
        metadata = state.export_run_metadata()
    except Exception as error:
        raise VizError(f"{source.title} cannot be run: {sentence(error)}") from error
    finally:
        state.disable_graph_collection()
    if not metadata.function_graphs:
        raise VizError(f"{source.title} ran, but TensorFlow recorded no graph of it")
    graphs = max(metadata.function_graphs, key=lambda g: len(g.pre_optimization_graph.node))
    return graphs.pre_optimization_graph, graphs


def _specs(source):
    """Returns the specs of the arguments, without captured ones."""
    if source.concrete is not None:
        flat = tf.nest.flatten(source.concrete.structured_input_signature)
        return [spec for spec in flat if isinstance(spec, tf.TensorSpec)]
    return [
        tf.TensorSpec(node.attr["shape"].shape, tf.as_dtype(node.attr["dtype"].type))
        for node in source.graph_def.node
        if node.op == "Placeholder"
    ]


def _zeros(spec):
    if not spec.shape.is_fully_defined():
        raise VizError(f"to run it, all its inputs need known shapes, not {spec.shape}")
    # A constant would be made by a function of its own, whose graph would be collected too.
    return tf.constant(np.zeros(spec.shape, spec.dtype.as_numpy_dtype), spec.dtype)


def _merged(partitions):
    """Returns the graphs of all devices as one."""
    merged = graph_pb2.GraphDef()
    for partition in partitions:
        merged.node.extend(partition.node)
        known = {function.signature.name for function in merged.library.function}
        merged.library.function.extend(
            f for f in partition.library.function if f.signature.name not in known
        )
        merged.versions.CopyFrom(partition.versions)
    return merged
