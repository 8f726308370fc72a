"""Proves that two tensors of a graph have the same shape, also where the static shape is not known.

`dimension` names the size of one axis by where it comes from: a number if it is known, else an
expression over the axes of other tensors. Equal names mean equal sizes at run time.
"""

import weakref

from tensorflow.python.framework import tensor_util

_SAME_SHAPE = frozenset(
    {
        "Identity",
        "BiasAdd",
        "Cast",
        "StopGradient",
        "Relu",
        "Relu6",
        "Elu",
        "LeakyRelu",
        "Sigmoid",
        "Tanh",
        "Softplus",
        "Erf",
        "AddN",
        "TfFusedOps>Act",
    }
    | {"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "TfFusedOps>BatchNormAct"}
)
_ELEMENTWISE = frozenset({"Add", "AddV2", "Mul", "Sub"})
_PRODUCT = frozenset({"MatMul", "TfFusedOps>MatMulBiasAct"})
_WINDOWED = frozenset(
    {"Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "TfFusedOps>Conv2DBiasAct"}
)
_PADDING = frozenset({"Pad", "PadV2", "MirrorPad"})
_WINDOW_ATTRS = ("strides", "padding", "explicit_paddings", "dilations", "ksize", "data_format")
# How far to look back; chains of shape-preserving ops between two axes are short.
_MAX_DEPTH = 200


def same_shape(a, b):
    """Returns whether two tensors are known to have the same shape."""
    if a.shape.rank is None or a.shape.rank != b.shape.rank:
        return False
    if a.shape.is_fully_defined() and b.shape.is_fully_defined():
        return a.shape == b.shape
    namer = _namer(a)
    return all(
        namer.name(a, axis, _MAX_DEPTH) == namer.name(b, axis, _MAX_DEPTH)
        for axis in range(a.shape.rank)
    )


def dimension(tensor, axis):
    """Returns a hashable name of the size of one axis: equal names mean equal sizes.

    Args:
        tensor: A graph tensor of known rank.
        axis: A non-negative axis.

    Returns:
        The static size if there is one, else a tuple that names where the size comes from.
    """
    return _namer(tensor).name(tensor, axis, _MAX_DEPTH)


# Graph -> its _Namer. That inputs are redirected to fused ops does not change sizes.
_namers = weakref.WeakKeyDictionary()


def _namer(tensor):
    return _namers.setdefault(tensor.graph, _Namer())


class _Namer:
    """Names sizes; residual networks lead to the same tensors over and over."""

    def __init__(self):
        self._known = {}

    def name(self, tensor, axis, depth):
        """Returns the name of one axis; looks back over `depth` ops at most."""
        size = tensor.shape[axis]
        if size is not None:
            return size
        key = (id(tensor), axis)
        if key not in self._known:
            found = self._origin(tensor, axis, depth - 1) if depth else None
            self._known[key] = ("unknown", *key) if found is None else found
        return self._known[key]

    def _origin(self, tensor, axis, depth):
        """Returns the name that an axis has from the inputs of its op, or None."""
        op = tensor.op
        if op.type in _SAME_SHAPE and tensor.value_index == 0:
            return self.name(op.inputs[0], axis, depth)
        if op.type in _ELEMENTWISE:
            return self._broadcast(op.inputs, axis, tensor.shape.rank, depth)
        if op.type == "IdentityN":
            return self.name(op.inputs[tensor.value_index], axis, depth)
        if op.type in _PRODUCT and axis < tensor.shape.rank - 1:
            inner = axis == tensor.shape.rank - 2 and op.get_attr("transpose_a")
            return self.name(op.inputs[0], axis + inner, depth)
        if op.type in _PADDING:
            paddings = tensor_util.constant_value(op.inputs[1])
            unpadded = paddings is not None and not paddings[axis].any()
            return self.name(op.inputs[0], axis, depth) if unpadded else None
        if op.type == "ConcatV2":
            joined = tensor_util.constant_value(op.inputs[-1])
            other = joined is not None and joined % tensor.shape.rank != axis
            return (
                self._broadcast(op.inputs[:-1], axis, tensor.shape.rank, depth) if other else None
            )
        if op.type in _WINDOWED:
            return self._windowed(op, axis, depth)
        return None

    def _broadcast(self, inputs, axis, rank, depth):
        names = set()
        for tensor in inputs:
            if tensor.shape.rank is None:
                return None
            own = axis - (rank - tensor.shape.rank)
            # What is missing or 1 takes the size of the others.
            if own >= 0 and tensor.shape[own] != 1:
                names.add(self.name(tensor, own, depth))
        return names.pop() if len(names) == 1 else None

    def _windowed(self, op, axis, depth):
        name = self.name(op.inputs[0], axis, depth)
        if axis == 0:
            return name
        attrs = op.node_def.attr
        if attrs["padding"].s == b"SAME" and attrs["strides"].list.i[axis] == 1:
            return name
        window = tuple(attrs[a].SerializeToString() for a in _WINDOW_ATTRS if a in attrs)
        kernel = op.inputs[1].shape if len(op.inputs) > 1 else ()
        return None if None in tuple(kernel) else ("window", window, tuple(kernel), axis, name)
