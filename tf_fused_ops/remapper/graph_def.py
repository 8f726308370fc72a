"""`remap`: the pass on graphs that are not being traced.

A GraphDef is imported into a graph, rewritten there in place like any other, and written out again;
so are the functions of its library, which are the bodies of control flow and of calls.
"""

import dataclasses

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework import function_def_to_graph, graph_to_function_def

from tf_fused_ops.remapper.report import Report
from tf_fused_ops.remapper.rewriter import remap_graph

_SUFFIX = "_fused"


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
        return Report(
            graph=self.reports[-1].graph,
            fused=[fusion for report in self.reports for fusion in report.fused],
            refused=[refusal for report in self.reports for refusal in report.refused],
            seconds=sum(report.seconds for report in self.reports),
        )


def remap(target, outputs=None, options=None):
    """Replaces chains of stock ops in a graph by fused ops.

    Args:
        target: A `tf.types.experimental.ConcreteFunction` or a GraphDef; it is not changed.
        outputs: For a GraphDef, the names of the tensors that are fetched ("name:0"). The default
            is the first output of every node that no other node reads.
        options: A `RemapOptions`.

    Returns:
        A `RemapResult`. A node whose first output is fetched keeps its name.

    Raises:
        TypeError: `target` is something else.
        ValueError: A name in `outputs` is not in the graph.
    """
    if isinstance(target, ConcreteFunction):
        names = [tensor.name for tensor in target.outputs]
        return _remap_graph_def(target.graph.as_graph_def(), names, options, target.name)
    if isinstance(target, graph_pb2.GraphDef):
        return _remap_graph_def(target, outputs, options, "graph")
    raise TypeError(f"target must be a ConcreteFunction or a GraphDef; got {type(target).__name__}")


def _remap_graph_def(source, names, options, title):
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(source, name="")
        functions = [_remap_function(f, options) for f in source.library.function]
    tensors = _tensors(graph, names)
    replaced, report = remap_graph(graph, tensors, options, title)
    listed = {op.name for op in graph.get_operations()}
    result = graph.as_graph_def()
    nodes = [node for node in result.node if node.name in listed]
    result.ClearField("node")
    result.node.extend(nodes)
    final = [_named(result, old, new, listed) for old, new in zip(tensors, replaced, strict=True)]
    result.library.ClearField("function")
    result.library.function.extend(definition for definition, _ in functions)
    _rename(result, {report.graph for _, report in functions if report.fused})
    result.versions.CopyFrom(source.versions)
    return RemapResult(result, tuple(final), (*(r for _, r in functions), report))


def _tensors(graph, names):
    """Returns the tensors to fetch."""
    if names is None:
        ends = (op for op in graph.get_operations() if op.outputs)
        return [op.outputs[0] for op in ends if not any(t.consumers() for t in op.outputs)]
    try:
        return [graph.get_tensor_by_name(name if ":" in name else f"{name}:0") for name in names]
    except (KeyError, ValueError) as error:
        raise ValueError(f"outputs: {error}") from error


def _named(graph_def, old, new, listed):
    """Gives a replaced first output its old name back; returns the name to fetch."""
    if new is old or old.value_index != 0 or old.op.name in listed:
        return new.name
    identity = node_def_pb2.NodeDef(
        name=old.op.name, op="Identity", input=[new.name], device=new.op.device
    )
    identity.attr["T"].type = new.dtype.as_datatype_enum
    graph_def.node.append(identity)
    listed.add(old.op.name)
    return old.name


def _rename(graph_def, changed):
    """Gives rewritten functions and their callers new names: a process may know the old ones."""
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


def _remap_function(definition, options):
    """Returns the rewritten FunctionDef, under the same name, and the report."""
    name = definition.signature.name
    if "_XlaMustCompile" in definition.attr and definition.attr["_XlaMustCompile"].b:
        return definition, Report(name, skipped="it is compiled by XLA")
    graph = function_def_to_graph.function_def_to_graph(definition)
    graph.outputs, report = remap_graph(graph, graph.outputs, options, name)
    if not report.fused:
        return definition, report
    result = type(definition)()
    result.CopyFrom(definition)
    result.ClearField("node_def")
    inputs = [tensor.name for tensor in graph.inputs]
    nested = graph_to_function_def._create_input_dict(graph, inputs)
    for op in graph.get_operations():
        if op.outputs and op.outputs[0].name in inputs:
            continue
        node = result.node_def.add()
        node.CopyFrom(op.node_def)
        node.input[:] = [
            i if i.startswith("^") else nested[i.removesuffix(":0")] for i in op.node_def.input
        ]
    for argument, tensor in zip(definition.signature.output_arg, graph.outputs, strict=True):
        result.ret[argument.name] = nested[tensor.name.removesuffix(":0")]
    return result, report
