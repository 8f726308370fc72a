"""Adds fused ops to a graph.

The wrappers that TensorFlow generates for an op also convert what they are given, ask for defaults
and open a name scope, which takes longer than adding the op.
"""

import functools

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.framework import op_def_library, op_def_registry


def emit(op_type, *inputs, name, **attrs):
    """Adds an op to the graph that is the default.

    Args:
        op_type: The registered name.
        *inputs: A tensor of that graph per input, a list of tensors where the input is a list.
        name: The op's name; a number is appended if it is taken.
        **attrs: Its attributes, but those that follow from the inputs or have their default value.

    Returns:
        The outputs, by name; a list of outputs has one tensor or none.
    """
    _, results = _signature(op_type)
    op = add(op_type, *inputs, name=name, **attrs)
    names = [name for name, number_attr in results if not number_attr or attrs.get(number_attr)]
    return dict(zip(names, op.outputs, strict=True))


def add(op_type, *inputs, name, **attrs):
    """Adds an op as `emit` does; returns the op."""
    arguments, _ = _signature(op_type)
    flat, protos = [], {}
    for (number_attr, type_attr), value in zip(arguments, inputs, strict=True):
        if number_attr:
            protos[number_attr] = AttrValue(i=len(value))
            flat += value
        else:
            flat.append(value)
            if type_attr:
                protos[type_attr] = AttrValue(type=value.dtype.as_datatype_enum)
    for key, value in attrs.items():
        proto = _attribute(op_type, key, tuple(value) if isinstance(value, list) else value)
        if proto is not None:
            protos[key] = proto
    # Without the search for deprecated arguments that `create_op` makes.
    graph = tf.compat.v1.get_default_graph()
    return graph._create_op_internal(op_type, flat, name=name, attrs=protos)


@functools.cache
def _signature(op_type):
    """Returns the attributes that inputs decide, and the outputs' names with those that count them.

    An input decides the number of its tensors if it is a list, and their dtype.
    """
    op_def = op_def_registry.get(op_type)
    return (
        [(argument.number_attr, argument.type_attr) for argument in op_def.input_arg],
        [(argument.name, argument.number_attr) for argument in op_def.output_arg],
    )


@functools.lru_cache(maxsize=1024)
def _attribute(op_type, key, value):
    """Returns an AttrValue; None for the default, since setting takes time and the graph itself
    sets defaults."""
    (attr_def,) = (attr for attr in op_def_registry.get(op_type).attr if attr.name == key)
    proto = op_def_library.value_to_attr_value(value, attr_def.type, key)
    return None if proto == attr_def.default_value else proto
