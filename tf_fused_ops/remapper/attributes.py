"""Reads the attributes of ops from their protos: asking an op for one takes as long as for all."""

import functools

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import tensor_util

from tf_fused_ops.remapper import custom_gradients

# Set by who wants an op to stay.
KEEP = "_grappler_do_not_remove"

# Attributes that say how an op runs, not what it computes.
_INCIDENTAL = frozenset({"use_cudnn_on_gpu"})
_LISTS = ("s", "i", "f", "b", "type", "shape", "tensor", "func")


class Signature:
    """What an op is, but for its name and its inputs; ops of layers that are alike share one.

    Attributes:
        attrs: The attributes, name -> AttrValue, with the identity of an overridden gradient in
            place of its name.
        device: The device that the op was put on.
        kept: Whether the op is marked as one to be kept.
        differing: A place for notes on what differs from a node or a constant of a pattern.
    """

    def __init__(self, serialized, identify_gradient):
        """Reads a signature.

        Args:
            serialized: A NodeDef without name, type and inputs, as bytes.
            identify_gradient: What tells the overridden gradients of ops apart.
        """
        node_def = node_def_pb2.NodeDef.FromString(serialized)
        attrs = node_def.attr
        overridden = custom_gradients.ATTRIBUTE in attrs
        self.attrs = semantic_attrs(node_def, identify_gradient) if overridden else attrs
        self.device, self.kept = node_def.device, KEEP in attrs
        self.differing = {}

    @functools.cached_property
    def array(self):
        """The value of a Const op."""
        return tensor_util.MakeNdarray(self.attrs["value"].tensor)


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
