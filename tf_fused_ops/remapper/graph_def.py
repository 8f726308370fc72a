"""Rewrites GraphDefs. One is imported into a graph, rewritten there in place like any other, and
written out again; so are the functions of its library: bodies of calls and control flow.
"""

import abc
import contextlib
import dataclasses
import functools

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import function_def_to_graph, graph_to_function_def

from tf_fused_ops.remapper import custom_gradients, forward_bodies
from tf_fused_ops.remapper.report import Report
from tf_fused_ops.remapper.rewriter import remap_graph

_SUFFIX = "_fused"
_SHAPES = "_output_shapes"


class Transform(abc.ABC):
    """What is done to every graph of a GraphDef."""

    def skip(self, definition):
        """Returns why a FunctionDef is left alone, or None."""
        return None

    @abc.abstractmethod
    def __call__(self, graph, outputs, name):
        """Rewrites a tf.Graph in place.

        Args:
            graph: The graph.
            outputs: The tensors that leave it.
            name: What the report calls it.

        Returns:
            (the outputs, each replaced by its counterpart if it has one; Report).
        """


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function of a library, as far as `compiled_convs` asks."""

    cached_definition: object

    @functools.cached_property
    def graph(self):
        """Its body."""
        return function_def_to_graph.function_def_to_graph(self.cached_definition)


class Remap(Transform):
    """The pass of the remapper."""

    def __init__(self, options, source):
        self._options = options
        self._identify_gradient = custom_gradients.identify_in(source.library)
        self._pairs = forward_bodies.pairs(source)
        self._functions = {f.signature.name: _Function(f) for f in source.library.function}

    def skip(self, definition):
        compiled = "_XlaMustCompile" in definition.attr and definition.attr["_XlaMustCompile"].b
        return "it is compiled by XLA" if compiled else None

    def __call__(self, graph, outputs, name):
        pair = self._pairs.get(name)
        no_body = contextlib.nullcontext(forward_bodies.Beside())
        with forward_bodies.beside(graph, *pair) if pair else no_body as body:
            outputs, report = remap_graph(
                graph,
                outputs,
                self._options,
                name,
                self._identify_gradient,
                body.withheld,
                find_function=self._functions.get,
            )
        report.refused = [r for r in report.refused if body.names.isdisjoint(r.nodes)]
        return outputs, report


def rewrite(source, names, transform, title, kept=None, rename=True):
    """Rewrites a GraphDef with the functions of its library.

    Args:
        source: The GraphDef; it is not changed.
        names: Names of the tensors that are fetched; None for the first output of every node that
            no other node reads.
        transform: A Transform.
        title: What the report calls the graph.
        kept: {name of a function or "" for the graph: names of tensors and nodes that must still be
            there}.
        rename: Whether functions that change get new names: a process may know the old ones.

    Returns:
        (GraphDef, names of the fetched tensors in it, Reports of functions and of the graph).

    Raises:
        ValueError: There is no tensor of a name.
    """
    kept, made = kept or {}, {}
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(source, name="")
        functions = [
            _rewrite_function(f, transform, kept.get(f.signature.name, ()), made)
            for f in source.library.function
        ]
    tensors = _tensors(graph, names)
    fetched = tensors + [graph.as_graph_element(name) for name in kept.get("", ())]
    replaced, report = transform(graph, fetched, title)
    listed = {op.name for op in graph.get_operations()}
    result = graph.as_graph_def(add_shapes=_has_shapes(source.node))
    nodes = [node for node in result.node if node.name in listed]
    result.ClearField("node")
    result.node.extend(nodes)
    aliases = list(_aliases(fetched, replaced, listed))
    result.node.extend(aliases)
    aliased = {node.name for node in aliases}
    final = [
        (old if old.op.name in aliased else new).name
        for old, new in zip(tensors, replaced, strict=False)
    ]
    made |= _functions(result)
    library = result.library
    library.CopyFrom(source.library)
    library.ClearField("function")
    library.function.extend(definition for definition, _ in functions)
    known = {definition.signature.name for definition in source.library.function}
    library.function.extend(made[name] for name in sorted(made.keys() - known))
    if rename:
        _rename(result, {report.graph for _, report in functions if report.fused})
    result.versions.CopyFrom(source.versions)
    return result, tuple(final), (*(r for _, r in functions), report)


def _functions(graph_def):
    return {definition.signature.name: definition for definition in graph_def.library.function}


def _has_shapes(nodes):
    """Returns whether nodes say which shapes their outputs have. Those that are read from variables
    in function bodies could not be inferred again."""
    return any(_SHAPES in node.attr for node in nodes)


def _tensors(graph, names):
    """Returns the tensors of these names."""
    if names is None:
        ends = (op for op in graph.get_operations() if op.outputs)
        return [op.outputs[0] for op in ends if not any(t.consumers() for t in op.outputs)]
    try:
        return [graph.get_tensor_by_name(name if ":" in name else f"{name}:0") for name in names]
    except (KeyError, ValueError) as error:
        raise ValueError(f"outputs: {error}") from error


def _aliases(old, new, listed, name=lambda tensor: tensor.name):
    """Yields nodes by which replaced tensors can still be had under their names.

    Args:
        old: The tensors and ops before.
        new: The same after.
        listed: Names of the nodes that are there.
        name: Says how a node calls one of its inputs.
    """
    vanished, awaited = {}, {}
    for before, after in zip(old, new, strict=True):
        if isinstance(before, tf.Operation):
            if before.name not in listed:
                awaited[before] = after
        elif after is not before and before.op.name not in listed:
            vanished.setdefault(before.op, {})[before.value_index] = after
    for op in awaited.keys() - vanished.keys():
        yield node_def_pb2.NodeDef(name=op.name, op="NoOp", input=[f"^{awaited[op].name}"])
    for op, ports in vanished.items():
        # Ports that nobody asks for hold whatever is at hand.
        first = next(iter(ports.values()))
        tensors = [ports.get(port, first) for port in range(max(ports) + 1)]
        node = node_def_pb2.NodeDef(name=op.name, op="IdentityN", device=first.op.device)
        node.input.extend(map(name, tensors))
        node.attr["T"].list.type.extend(tensor.dtype.as_datatype_enum for tensor in tensors)
        yield node


def _rename(graph_def, changed):
    """Gives rewritten functions and their callers new names."""
    functions = graph_def.library.function
    callers = True
    while callers:
        callers = {
            function.signature.name
            for function in functions
            if any(call.name in changed for node in function.node_def for call in _calls(node))
        } - changed
        changed = changed | callers
    bodies = [graph_def.node, *(function.node_def for function in functions)]
    for call in (call for body in bodies for node in body for call in _calls(node)):
        if call.name in changed:
            call.name += _SUFFIX
    for function in functions:
        if function.signature.name in changed:
            function.signature.name += _SUFFIX


def _calls(node):
    """Returns the references to functions among a node's attributes."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        yield from value.list.func


def _rewrite_function(definition, transform, kept, made):
    """Returns the rewritten FunctionDef, under the same name, and the report.

    Args:
        definition: The FunctionDef.
        transform: A Transform.
        kept: Names of tensors and nodes that must still be there.
        made: A dict that takes in, by name, the functions that the new nodes call.
    """
    name = definition.signature.name
    reason = transform.skip(definition)
    if reason:
        return definition, Report(name, skipped=reason)
    graph = function_def_to_graph.function_def_to_graph(definition)
    count = len(graph.outputs)
    named = [graph.as_graph_element(name) for name in kept]
    fetched = [*graph.outputs, *named, *graph.control_outputs]
    replaced, report = transform(graph, fetched, name)
    if not report.fused:
        return definition, report
    made |= _functions(graph.as_graph_def())
    graph.outputs = replaced[:count]
    result = type(definition)()
    result.CopyFrom(definition)
    result.ClearField("node_def")
    inputs = [tensor.name for tensor in graph.inputs]
    nested = graph_to_function_def._create_input_dict(graph, inputs)
    listed, with_shapes = set(), _has_shapes(definition.node_def)
    for op in graph.get_operations():
        listed.add(op.name)
        if op.outputs and op.outputs[0].name in inputs:
            continue
        node = result.node_def.add()
        node.CopyFrom(op.node_def)
        node.input[:] = [
            i if i.startswith("^") else nested[i.removesuffix(":0")] for i in op.node_def.input
        ]
        if with_shapes and op.outputs:
            node.attr[_SHAPES].list.shape.extend(tensor.shape.as_proto() for tensor in op.outputs)

    def name_of(tensor):
        return nested[tensor.name.removesuffix(":0")]

    aliases = _aliases(fetched[count:], replaced[count:], listed, name_of)
    result.node_def.extend(aliases)
    for argument, tensor in zip(definition.signature.output_arg, graph.outputs, strict=True):
        result.ret[argument.name] = name_of(tensor)
    return result, report
