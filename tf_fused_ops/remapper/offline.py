"""`remap`: the pass on graphs that are not being traced."""

import dataclasses
import os
import sys

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from tf_fused_ops.remapper import graph_def as graph_defs
from tf_fused_ops.remapper import saved_model
from tf_fused_ops.remapper.report import Report
from tf_fused_ops.remapper.rewriter import RemapOptions


@dataclasses.dataclass(frozen=True)
class RemapResult:
    """A rewritten graph.

    Attributes:
        graph_def: The GraphDef, with its function library.
        outputs: Names of the output tensors in it, in the order asked for.
        reports: One report per graph: the functions of the library, then the graph itself.
    """

    graph_def: graph_pb2.GraphDef
    outputs: tuple[str, ...]
    reports: tuple[Report, ...]

    @property
    def report(self):
        """All reports in one."""
        return Report.of_all(self.reports)


def remap(target, outputs=None, options=None):
    """Replaces chains of stock ops in a graph by fused ops.

    Args:
        target: One of these; it is not changed.
            - A `tf.types.experimental.ConcreteFunction`.
            - A GraphDef.
            - A `keras.Model` that knows its inputs, taken as it computes in inference.
            - The path of a SavedModel's folder. The result is its first graph with all functions;
              `python -m tf_fused_ops convert` or `remapper.convert` saves the whole anew.
        outputs: For a GraphDef, the names of the tensors that are fetched ("name:0"). The default
            is the first output of every node that no other node reads.
        options: A `RemapOptions`.

    Returns:
        A `RemapResult`. A node whose output is fetched keeps its name.

    Raises:
        TypeError: `target` is something else.
        ValueError: A name in `outputs` is not in the graph, a Keras model does not know its inputs,
            or a folder holds no SavedModel.
    """
    options = options or RemapOptions()
    if isinstance(target, (str, os.PathLike)):
        return RemapResult(*saved_model.remap(target, options))
    if isinstance(target, graph_pb2.GraphDef):
        return _remap(target, outputs, options, "graph")
    if _is_keras_model(target):
        target = _inference(target)
    if isinstance(target, ConcreteFunction):
        names = [tensor.name for tensor in target.outputs]
        title = target.name if isinstance(target.name, str) else target.name.decode()
        # The shapes of captured variables could not be inferred.
        source = target.graph.as_graph_def(add_shapes=True)
        result = _remap(source, names, options, title)
        _restore(result.graph_def.library, target.graph.as_graph_def().library)
        return result
    raise TypeError(
        "target must be a ConcreteFunction, a GraphDef, a Keras model or the path of a SavedModel; "
        f"got {type(target).__name__}"
    )


def _remap(source, names, options, title):
    transform = graph_defs.Remap(options, source)
    return RemapResult(*graph_defs.rewrite(source, names, transform, title))


def _restore(library, original):
    """Makes functions that did not change what this process knows them as, without shapes."""
    known = {function.signature.name: function for function in original.function}
    for function in library.function:
        if function.signature.name in known:
            function.CopyFrom(known[function.signature.name])


def _is_keras_model(target):
    """Asks without importing Keras: who has a model has imported it."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(target, keras.Model)


def _inference(model):
    """Returns the ConcreteFunction of a Keras model's inference."""
    # A subclass that was never called has none, a Sequential no other name for its only one.
    inputs = getattr(model, "input", None)
    if inputs is None:
        inputs = next(iter(getattr(model, "inputs", None) or ()), None)
    if inputs is None:
        raise ValueError(
            f"the Keras model {model.name} does not know its inputs: give "
            "tf.function(model).get_concrete_function(…) instead"
        )
    specs = tf.nest.map_structure(
        lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype, tensor.name), inputs
    )
    infer = tf.function(lambda inputs: model(inputs, training=False))
    return infer.get_concrete_function(specs)
