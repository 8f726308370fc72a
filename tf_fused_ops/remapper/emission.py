"""Adds fused ops to a graph.

The wrappers that TensorFlow generates for an op also convert what they are given, ask for defaults
and open a name scope, which takes longer than adding the op. `Graph.create_op` makes and parses
protos of every attribute, where here one that is serialized already is as good.
"""

import contextlib
import functools
import threading

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import record
from tensorflow.python.framework import op_def_library, op_def_registry

from tf_fused_ops.remapper.stack_traces import HideFrames


class _Current(threading.local):
    """What is being rewritten.

    Attributes:
        constants: (value, dtype) -> the tensor in its graph.
        trace: The stack trace of the op in whose place new ones are added.
    """

    constants = None
    trace = None


_current = _Current()


@contextlib.contextmanager
def outside(graph):
    """New ops go into a graph, whatever devices and control dependencies are around."""
    around, _current.constants = _current.constants, {}
    try:
        with graph.as_default(), tf.control_dependencies(None), tf.device(None), HideFrames():
            yield
    finally:
        _current.constants = around


@contextlib.contextmanager
def emitting(op, controls):
    """New ops take the place of others, unseen by tapes.

    Args:
        op: One of the others; its device and its stack trace are those of the new ops.
        controls: The ops that the others had to wait for.
    """
    nothing = contextlib.nullcontext()
    device = tf.device(op.device) if op.device else nothing
    waiting = tf.control_dependencies(controls) if controls else nothing
    with device, waiting, record.stop_recording():
        if trace := op.traceback:
            # TensorFlow's own frames take long to read. What is sliced counts as the user's.
            _current.trace = trace.get_user_frames()[:]
        try:
            yield
        finally:
            _current.trace = None


def emit(op_type, *inputs, name, **attrs):
    """Adds an op to the graph that is the default.

    Args:
        op_type: The registered name.
        *inputs: A tensor of that graph per input, a list of tensors where the input is a list.
        name: The op's name; a number is appended if it is taken.
        **attrs: Its attributes, but those that follow from the inputs or have their default value;
            values, or AttrValue protos.

    Returns:
        The outputs, by name; a list of outputs has one tensor or none.
    """
    op = add(op_type, *inputs, name=name, **attrs)
    names = [name for name, count in _results(op_type) if not count or attrs.get(count)]
    return dict(zip(names, op.outputs, strict=True))


def add(op_type, *inputs, name, **attrs):
    """Adds an op as `emit` does, as `Graph.create_op` would for tensors of the graph itself.

    Returns:
        The op.
    """
    graph, flat = tf.compat.v1.get_default_graph(), []
    with graph._mutation_lock(), graph._c_graph.get() as c_graph:
        new = pywrap_tf_session.TF_NewOperation(c_graph, op_type, graph.unique_name(name))
        for value in inputs:
            if isinstance(value, list):
                ends = [tensor._as_tf_output() for tensor in value]
                pywrap_tf_session.TF_AddInputList(new, ends)
                flat += value
            else:
                pywrap_tf_session.TF_AddInput(new, value._as_tf_output())
                flat.append(value)
        for op in graph._control_dependencies_for_inputs({tensor.op for tensor in flat}):
            pywrap_tf_session.TF_AddControlInput(new, op._c_op)
        for key, value in attrs.items():
            if isinstance(value, attr_value_pb2.AttrValue):
                proto = value.SerializeToString()
            else:
                proto = _attribute(op_type, key, tuple(value) if isinstance(value, list) else value)
            if proto is not None:
                pywrap_tf_session.TF_SetAttrValueProto(new, key, proto)
        finished = pywrap_tf_session.TF_FinishOperation(new)
        if _current.trace:
            pywrap_tf_session.TF_SetOpStackTrace(finished, _current.trace)
        op = graph._create_op_from_tf_operation(finished)
    # What `op.inputs` would ask for.
    op._inputs_val = tuple(flat)
    op._control_flow_post_processing(flat)
    return op


def reshape(tensor, shape, name="Reshape"):
    """Returns a tensor in another shape.

    Args:
        tensor: The tensor.
        shape: A list of sizes, one of which may be -1, or a tensor of them.
        name: The op's name; a number is appended if it is taken.
    """
    if not isinstance(shape, list):
        return tf.reshape(tensor, shape, name=name)
    if tensor.shape.rank == len(shape) and (shape == [-1] or tensor.shape.as_list() == shape):
        return tensor
    return add("Reshape", tensor, constant(shape, tf.int32), name=name).outputs[0]


def constant(value, dtype):
    """Returns a scalar, or a vector, in the graph that is rewritten, the same one for the same
    value."""
    whole = tuple(value) if isinstance(value, list) else float(value)
    constants, key = _current.constants, (whole, dtype)
    if key not in constants:
        with tf.control_dependencies(None), tf.device(None):
            constants[key] = tf.constant(value, dtype)
    return constants[key]


@functools.cache
def _results(op_type):
    """Returns the outputs' names with the attributes that count them."""
    outputs = op_def_registry.get(op_type).output_arg
    return [(argument.name, argument.number_attr) for argument in outputs]


@functools.lru_cache(maxsize=1024)
def _attribute(op_type, key, value):
    """Returns a serialized AttrValue; None for the default, since setting takes time and the graph
    itself sets defaults."""
    (attr_def,) = (attr for attr in op_def_registry.get(op_type).attr if attr.name == key)
    proto = op_def_library.value_to_attr_value(value, attr_def.type, key)
    return None if proto == attr_def.default_value else proto.SerializeToString()
