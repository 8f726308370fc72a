"""Reads all ops of a graph at once: asking each of them takes several times as long."""

from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import c_api_util

from tf_fused_ops import _graph_def

# What would be longer, TensorFlow leaves blank.
_MAX_SERIALIZED = 2**31 - 1


def read(graph):
    """Reads the ops that a graph lists.

    Args:
        graph: A tf.Graph.

    Returns:
        Dicts in the order of the listing: op -> its type; op -> the tensors that it reads; op ->
        the ops that make these, then those that it waits for; op -> what `anonymous` returns, the
        same object for ops that are alike, or None where it is large.
    """
    listed = graph.get_operations()
    # A GraphDef has the ops that are left out of the listing, too.
    ops = type(graph).get_operations(graph)
    with graph._c_graph.get() as c_graph, c_api_util.tf_buffer() as buffer:
        pywrap_tf_session.TF_GraphToGraphDef(c_graph, buffer)
        serialized = pywrap_tf_session.TF_GetBuffer(buffer)
    if len(serialized) <= _MAX_SERIALIZED:
        found = _graph_def.read(serialized, ops)
    else:
        columns = zip(*((op.type, *inputs(op), None) for op in ops), strict=True)
        found = [dict(zip(ops, column, strict=True)) for column in columns]
    return found if listed == ops else [{op: column[op] for op in listed} for column in found]


def inputs(op):
    """Returns the tensors that an op reads, and the ops that make these and that it waits for."""
    tensors = tuple(op.inputs)
    return tensors, [tensor.op for tensor in tensors] + op.control_inputs


def anonymous(op):
    """Returns the device and the attributes of an op, as a serialized NodeDef."""
    return _graph_def.anonymous(op._node_def)
