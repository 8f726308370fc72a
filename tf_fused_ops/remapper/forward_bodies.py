"""Shows a backward function what the values are that it takes from its forward function.

TensorFlow differentiates a function that another one calls by two: a forward function, which also
returns what the gradients read, and a backward function, to which callers hand that over. Only the
former tells what it is. So its body is put beside that of the latter while this is rewritten. There
it is never run: of its values only those may be used that are handed over.
"""

import collections
import contextlib
import dataclasses

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import attributes
from tensorflow.python.framework import function_def_to_graph

from tf_fused_ops.remapper import hiding
from tf_fused_ops.remapper.attributes import KEEP

_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


@dataclasses.dataclass(frozen=True)
class Beside:
    """A forward body in the graph of a backward function.

    Attributes:
        names: Names of its ops.
        withheld: Its tensors that the backward function is not given.
    """

    names: frozenset = frozenset()
    withheld: tuple = ()


def pairs(graph_def):
    """Finds the forward functions of backward functions.

    Args:
        graph_def: A GraphDef.

    Returns:
        {name of a backward function: (FunctionDef of its forward function, {number of an argument:
        number of the result that every caller hands over})}.
    """
    functions = {f.signature.name: f for f in graph_def.library.function}
    forward_of = {
        name: f.attr[attributes.FORWARD_FUNCTION].s.decode()
        for name, f in functions.items()
        if attributes.FORWARD_FUNCTION in f.attr
    }
    calls = collections.defaultdict(list)
    for nodes in (graph_def.node, *(f.node_def for f in functions.values())) if forward_of else ():
        called = {node.name: node.attr["f"].func.name for node in nodes if node.op in _CALLS}
        for node in nodes:
            name = called.get(node.name)
            if forward_of.get(name) in functions:
                calls[name].append(_handed_over(node, called, forward_of[name]))
    return {
        name: (functions[forward_of[name]], dict(known))
        for name, found in calls.items()
        if (known := set.intersection(*found))
    }


def _handed_over(call, called, forward):
    """Returns the (argument, result) pairs of a call that come from one call of a function."""
    inputs = [name.split(":") for name in call.input]
    makers = {maker for maker, *_ in inputs if called.get(maker) == forward}
    if len(makers) != 1:
        return set()
    return {
        (argument, int(port[-1]) if port else 0)
        for argument, (maker, *port) in enumerate(inputs)
        if maker in makers
    }


@contextlib.contextmanager
def beside(graph, forward, handed_over):
    """Puts the body of a forward function beside that of a backward function.

    Args:
        graph: The FuncGraph of the backward function.
        forward: The FunctionDef of the forward function.
        handed_over: {argument of the former: result of the latter}.

    Yields:
        Beside.
    """
    body = function_def_to_graph.function_def_to_graph(forward)
    old_ops, definition = body.get_operations(), body.as_graph_def()
    for node in definition.node:
        node.attr[KEEP].b = True
    with graph.as_default():
        ops = tf.graph_util.import_graph_def(
            definition, return_elements=[op.name for op in old_ops], name="forward"
        )
    copies = dict(zip(old_ops, ops, strict=True))
    for old, new in copies.items():
        for tensor, copy in zip(old.outputs, new.outputs, strict=True):
            copy.set_shape(tensor.shape)
    arguments = {}
    for argument, number in handed_over.items():
        result = body.outputs[number]
        value = copies[result.op].outputs[result.value_index]
        arguments[id(value)] = graph.inputs[argument]
        _redirect(graph.inputs[argument].consumers(), {id(graph.inputs[argument]): value})
    values = (tensor for op in ops for tensor in op.outputs)
    withheld = tuple(tensor for tensor in values if id(tensor) not in arguments)
    yield Beside(frozenset(op.name for op in ops), withheld)
    inside = set(ops)
    everything = type(graph).get_operations(graph)
    _redirect((op for op in everything if op not in inside), arguments)
    hiding.hide(graph, ops[::-1])


def _redirect(ops, replacements):
    """Makes ops read other tensors, {id: tensor}."""
    for op in ops:
        for port, tensor in enumerate(op.inputs):
            if id(tensor) in replacements:
                op._update_input(port, replacements[id(tensor)])
