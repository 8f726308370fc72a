"""Graphs of a few fused ops, run op by op on the calling thread.

TensorFlow hands the graph of a function to another thread and waits for it, which takes longer than
a small fused op does.
"""

import itertools

import tensorflow as tf
from tensorflow.python.eager import context, execute, record
from tensorflow.python.ops import summary_ops_v2

_FUSED = "TfFusedOps>"
# Beside those, there may be what TensorFlow would not have made faster in a graph, and nothing that
# writes, so that all orders are the same.
_READ, _CONSTANT, _SAME = "ReadVariableOp", "Const", "Identity"
_PASSIVE = (_CONSTANT, _SAME, "NoOp", "Placeholder")
# Each costs some microseconds here, of the hundred that a function costs.
_MOST_OPS = 12
_MOST_ELEMENTS = 1024  # of a constant, which is then there twice


def wanted():
    """Whether nothing follows a call: no tape, callback, device scope or summary of graphs."""
    state = context.context()
    return not (
        record.could_possibly_record()
        or state.op_callbacks
        or state.device_name
        or summary_ops_v2._current_trace_context
    )


def _attributes(op):
    """Names and values of an op's attributes. Each costs time, so there are few of those that have
    their default: the runtime wants to be told types, and how long lists are."""
    given, arguments = op.node_def.attr, (*op.op_def.input_arg, *op.op_def.output_arg)
    lengths = {argument.number_attr for argument in arguments}
    names = [
        attribute.name
        for attribute in op.op_def.attr
        if attribute.type == "type"
        or attribute.name in lengths
        or given[attribute.name] != attribute.default_value
    ]
    values = [op.get_attr(name) for name in names]
    enums = [v.as_datatype_enum if isinstance(v, tf.DType) else v for v in values]
    return tuple(itertools.chain.from_iterable(zip(names, enums, strict=True)))


def _is_fused(op):
    # One without outputs writes.
    if not op.type.startswith(_FUSED) or not op.outputs:
        return False
    # Those with constant filters keep them packed, each its own.
    names = [attribute.name for attribute in op.op_def.attr]
    return not any(op.get_attr(name) for name in names if name.startswith("constant_"))


def _constants(graph):
    inputs = {tensor.name for tensor in graph.inputs}  # captured constants among them
    tensors = [op.outputs[0] for op in graph.get_operations() if op.type == _CONSTANT]
    return [tensor for tensor in tensors if tensor.name not in inputs]


def _has_few_ops(graph):
    ops = [op for op in graph.get_operations() if op.type not in _PASSIVE]
    return len(ops) <= _MOST_OPS and all(op.type == _READ or _is_fused(op) for op in ops)


def shorten(graph):
    """Returns the `ShortGraph` of a trace's `FuncGraph`, or None where TensorFlow should run it.

    That is where it has other ops, too many of them or large constants, devices to choose from, or
    outputs that no op makes anew.
    """
    if not _has_few_ops(graph) or len(context.context().list_logical_devices()) > 1:
        return None
    if any(tensor.shape.num_elements() > _MOST_ELEMENTS for tensor in _constants(graph)):
        return None
    short = ShortGraph(graph)
    return short if short.makes_outputs() else None


class ShortGraph:
    """The ops of a graph of fused ops in an order in which they can run.

    Args:
        graph: The `FuncGraph` of a trace.
    """

    def __init__(self, graph):
        constants = _constants(graph)
        self._constants = [tf.constant(tf.get_static_value(t), t.dtype) for t in constants]
        given = [*graph.inputs, *constants]
        self._given = len(given)
        self._places = {tensor.name: place for place, tensor in enumerate(given)}
        self._steps = []
        self._outputs = [self._place(tensor) for tensor in graph.outputs]
        # What no later step reads is let go, as TensorFlow does.
        needed = set(self._outputs)
        for _op, sources, outputs, done in reversed(self._steps):
            done.extend({*sources, *outputs} - needed)
            needed.update(sources)

    def makes_outputs(self):
        """Whether an op makes each output, and none is there twice."""
        outputs = set(self._outputs)
        return len(outputs) == len(self._outputs) and not outputs & set(range(self._given))

    def _place(self, tensor):
        """The place of a tensor among all values, once the ops that make it have been added."""
        while tensor.op.type == _SAME:
            tensor = tensor.op.inputs[0]
        if tensor.name not in self._places:
            op = tensor.op
            sources = [self._place(source) for source in op.inputs]
            outputs = range(len(self._places), len(self._places) + len(op.outputs))
            self._steps.append(((op.type, _attributes(op)), sources, outputs, []))
            self._places.update(zip([output.name for output in op.outputs], outputs, strict=True))
        return self._places[tensor.name]

    def run(self, inputs):
        """The outputs for a list of all inputs, captured ones included."""
        state = context.context()
        values = [*inputs, *self._constants]
        for (op_type, attributes), sources, outputs, done in self._steps:
            operands = [values[place] for place in sources]
            values += execute.execute(op_type, len(outputs), operands, attributes, state)
            for place in done:
                values[place] = None
        return [values[place] for place in self._outputs]
