"""Adds fused ops to a graph.

The wrappers that TensorFlow generates for an op also convert what they are given, ask for defaults
and open a name scope, which takes longer than adding the op.
"""

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import op_def_library


def emit(op_type, *inputs, name, **attrs):
    """Adds an op to the graph that is the default.

    Args:
        op_type: The registered name.
        *inputs: A tensor of that graph per input, a list of tensors where the input is a list.
        name: The op's name; a number is appended if it is taken.
        **attrs: Its attributes, but those that follow from the inputs or have their default value.

    Returns:
        The outputs, by name.
    """
    graph = tf.compat.v1.get_default_graph()
    op_def = graph.op_def_for_type(op_type)
    flat, protos = [], {}
    for argument, value in zip(op_def.input_arg, inputs, strict=True):
        if argument.number_attr:
            protos[argument.number_attr] = attr_value_pb2.AttrValue(i=len(value))
            flat += value
        else:
            flat.append(value)
            if argument.type_attr not in protos:
                dtype = value.dtype.as_datatype_enum
                protos[argument.type_attr] = attr_value_pb2.AttrValue(type=dtype)
    for attr in op_def.attr:
        if attr.name in attrs:
            protos[attr.name] = op_def_library.value_to_attr_value(
                attrs[attr.name], attr.type, attr.name
            )
    op = graph.create_op(op_type, flat, name=name, attrs=protos, op_def=op_def)
    return dict(zip((argument.name for argument in op_def.output_arg), op.outputs, strict=True))
