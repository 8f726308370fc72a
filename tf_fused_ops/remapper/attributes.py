"""Reads the attributes of ops from their protos: asking an op for one takes as long as for all."""

import tensorflow as tf

from tf_fused_ops.remapper import custom_gradients

# Attributes that say how an op runs, not what it computes.
_INCIDENTAL = frozenset({"use_cudnn_on_gpu"})
_LISTS = ("s", "i", "f", "b", "type", "shape", "tensor", "func")


def semantic_attrs(node_def, identify_gradient=custom_gradients.identify):
    """Returns the attributes of an op that decide what it, or its gradient, computes."""
    attrs, protos = {}, node_def.attr
    for name in protos:
        if not name.startswith("_"):
            if name not in _INCIDENTAL:
                attrs[name] = protos[name]
        elif name == custom_gradients.ATTRIBUTE:
            identity = identify_gradient(protos[name].s.decode())
            if identity is not None:
                attrs[name] = identity
    return attrs


def value(proto):
    """Returns what `get_attr` of an op with this AttrValue does."""
    kind = proto.WhichOneof("value")
    if kind == "list":
        kind = next((name for name in _LISTS if getattr(proto.list, name)), None)
        values = list(getattr(proto.list, kind)) if kind else []
        return list(map(tf.as_dtype, values)) if kind == "type" else values
    found = getattr(proto, kind)
    return tf.as_dtype(found) if kind == "type" else found
