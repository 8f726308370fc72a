"""Graphs as the pictures need them: nodes, edges with ports, function bodies, shapes.

A `Program` is read from a GraphDef. The GraphDef is imported, so that TensorFlow itself says which
output an input name means and which dtypes and static shapes the tensors have.
"""

import dataclasses

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph, tensor_util

from tf_fused_ops.viz.errors import VizError, sentence

_LONGEST_TEXT = 200
_MOST_ELEMENTS = 16
# Notes of TensorFlow's about the tracing, not about the computation.
_HIDDEN_ATTRS = frozenset({"_output_shapes", "_user_specified_name", "_construction_context"})


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An output of a node.

    Attributes:
        dtype: Name of the dtype.
        shape: Tuple of dimensions, None where one is unknown; None for an unknown rank.
        bytes: Its size, or None if that is unknown.
    """

    dtype: str
    shape: tuple | None
    bytes: int | None

    def __str__(self):
        if self.shape is None:
            return f"{self.dtype}[…]"
        return f"{self.dtype}[{','.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclasses.dataclass(frozen=True)
class Node:
    """A node.

    Attributes:
        name: Its name.
        op: The op type.
        inputs: (node name, output port) per input.
        controls: Names of the nodes that it waits for.
        outputs: A Tensor per output.
        device: The device string; "" if it has none.
        attrs: Attribute name -> text.
        calls: (attribute name, function name) of the functions that it runs.
        source: "file:line" of the user's code that made it, or None.
    """

    name: str
    op: str
    inputs: tuple
    controls: tuple
    outputs: tuple
    device: str
    attrs: dict
    calls: tuple
    source: str | None = None


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph or a function's body.

    Attributes:
        name: Of the function, or what the graph is called.
        nodes: Node name -> Node.
        arguments: Names of the nodes that are the arguments.
        results: (node name, output port) per result.
    """

    name: str
    nodes: dict
    arguments: tuple
    results: tuple


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph with the functions that it calls.

    Attributes:
        graph: The main Graph.
        functions: Function name -> Graph.
        graph_def: What they were read from.
    """

    graph: Graph
    functions: dict
    graph_def: object

    def graphs(self):
        """Returns all graphs, the main one first."""
        return [self.graph, *self.functions.values()]


def read(graph_def, outputs=(), name="graph", sources=None):
    """Reads a GraphDef.

    Args:
        graph_def: The GraphDef, with its function library.
        outputs: Names of the fetched tensors.
        name: What the main graph is called.
        sources: {(function name or "", node name): "file:line"}.

    Returns:
        A Program.

    Raises:
        VizError: TensorFlow cannot import the graph.
    """
    sources = sources or {}
    graph = tf.Graph()
    with graph.as_default():
        try:
            tf.graph_util.import_graph_def(graph_def, name="")
        except Exception as error:
            raise VizError(f"TensorFlow cannot import the graph: {sentence(error)}") from error
        shapes = _argument_shapes(graph)
        functions = {}
        for definition in graph_def.library.function:
            body = _body(definition, shapes.get(definition.signature.name))
            shapes = _argument_shapes(body) | shapes
            functions[definition.signature.name] = _graph(
                body, definition.signature.name, body.inputs, body.outputs, sources
            )
    fetched = [graph.get_tensor_by_name(name) for name in outputs]
    fed = [op.outputs[0] for op in graph.get_operations() if op.type == "Placeholder"]
    main = _graph(graph, name, fed, fetched, sources, key="")
    return Program(main, functions, graph_def)


def _body(definition, input_shapes):
    """Returns a function's body as a graph with arguments of the given shapes, if they fit."""
    if input_shapes is not None and len(input_shapes) == len(definition.signature.input_arg):
        try:
            return function_def_to_graph.function_def_to_graph(definition, input_shapes)
        except (ValueError, tf.errors.OpError):  # The caller's shapes do not suit every body.
            pass
    return function_def_to_graph.function_def_to_graph(definition)


def _argument_shapes(graph):
    """Returns {function name: shapes of what plain calls in a graph pass to it}."""
    return {
        op.get_attr("f").name: [tensor.shape for tensor in op.inputs]
        for op in graph.get_operations()
        if op.type in ("PartitionedCall", "StatefulPartitionedCall")
    }


def _graph(graph, name, arguments, results, sources, key=None):
    key = name if key is None else key
    nodes = {
        op.name: _node(op, sources.get((key, op.name)))
        for op in graph.get_operations()
    }  # fmt: skip
    return Graph(
        name,
        nodes,
        tuple(tensor.op.name for tensor in arguments),
        tuple((tensor.op.name, tensor.value_index) for tensor in results),
    )


def _node(op, source):
    attrs = {name: value for name, value in op.node_def.attr.items() if name not in _HIDDEN_ATTRS}
    return Node(
        name=op.name,
        op=op.type,
        inputs=tuple((tensor.op.name, tensor.value_index) for tensor in op.inputs),
        controls=tuple(other.name for other in op.control_inputs),
        outputs=tuple(_tensor(tensor) for tensor in op.outputs),
        device=op.device,
        attrs={name: attr_text(value) for name, value in sorted(attrs.items())},
        calls=tuple(_calls(attrs)),
        source=source,
    )


def _tensor(tensor):
    shape = tensor.shape
    dims = None if shape.rank is None else tuple(shape.as_list())
    count = shape.num_elements()
    known = count is not None and tensor.dtype not in (tf.resource, tf.variant, tf.string)
    return Tensor(tensor.dtype.name, dims, count * tensor.dtype.size if known else None)


def _calls(attrs):
    for name, value in sorted(attrs.items()):
        if value.HasField("func"):
            yield name, value.func.name
        for index, function in enumerate(value.list.func):
            yield f"{name}[{index}]", function.name


def attr_text(value):
    """Returns an AttrValue as short text."""
    kind = value.WhichOneof("value")
    if kind is None:
        return ""
    if kind == "list":
        fields = [field for field, _ in value.list.ListFields()]
        items = [_scalar_text(field.name, item) for field in fields
                 for item in getattr(value.list, field.name)]  # fmt: skip
        return _shorten(f"[{', '.join(items)}]")
    return _shorten(_scalar_text(kind, getattr(value, kind)))


def _scalar_text(kind, value):
    if kind == "s":
        return value.decode("utf-8", "backslashreplace")
    if kind == "type":
        return tf.as_dtype(value).name if value else "?"
    if kind == "shape":
        return str(tf.TensorShape(value)).replace("None", "?")
    if kind == "func":
        return value.name
    if kind == "tensor":
        return _tensor_text(value)
    return f"{value:g}" if kind == "f" else str(value)


def _tensor_text(proto):
    dtype = tf.as_dtype(proto.dtype).name
    shape = tf.TensorShape(proto.tensor_shape)
    text = f"{dtype}[{','.join(map(str, shape.as_list()))}]"
    if shape.num_elements() > _MOST_ELEMENTS or dtype in ("resource", "variant"):
        return text
    return f"{text} {tensor_util.MakeNdarray(proto).tolist()}"


def _shorten(text):
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
