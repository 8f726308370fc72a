"""Proves that two tensors of a graph have the same shape, also where the static shape is not known.

`dimension` names the size of one axis by where it comes from: a number if it is known, else an
expression over the axes of other tensors. Equal names mean equal sizes at run time.
"""

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
    }
    | {"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "TfFusedOps>BatchNormAct"}
)
_ELEMENTWISE = frozenset({"Add", "AddV2", "Mul", "Sub"})
_WINDOWED = frozenset({"Conv2D", "MaxPool", "AvgPool", "TfFusedOps>Conv2DBiasAct"})
_WINDOW_ATTRS = ("strides", "padding", "explicit_paddings", "dilations", "ksize", "data_format")
# How far to look back; chains of shape-preserving ops between two axes are short.
_MAX_DEPTH = 200


def same_shape(a, b):
    """Returns whether two tensors are known to have the same shape."""
    if a.shape.rank is None or a.shape.rank != b.shape.rank:
        return False
    return all(dimension(a, axis) == dimension(b, axis) for axis in range(a.shape.rank))


def dimension(tensor, axis, depth=_MAX_DEPTH):
    """Returns a hashable name of the size of one axis: equal names mean equal sizes.

    Args:
        tensor: A graph tensor of known rank.
        axis: A non-negative axis.
        depth: How many ops to look back.

    Returns:
        The static size if there is one, else a tuple that names where the size comes from.
    """
    size = tensor.shape[axis]
    if size is not None or depth == 0:
        return ("unknown", id(tensor), axis) if size is None else size
    op = tensor.op
    if op.type in _SAME_SHAPE and tensor.value_index == 0:
        return dimension(op.inputs[0], axis, depth - 1)
    if op.type in _ELEMENTWISE:
        a, b = op.inputs
        if a.shape.rank == b.shape.rank == tensor.shape.rank:
            name = dimension(a, axis, depth - 1)
            if name == dimension(b, axis, depth - 1):
                return name
    if op.type in _WINDOWED:
        name = dimension(op.inputs[0], axis, depth - 1)
        if axis == 0:
            return name
        attrs = op.node_def.attr
        if attrs["padding"].s == b"SAME" and attrs["strides"].list.i[axis] == 1:
            return name
        window = tuple(attrs[a].SerializeToString() for a in _WINDOW_ATTRS if a in attrs)
        kernel = op.inputs[1].shape if len(op.inputs) > 1 else ()
        if None not in tuple(kernel):
            return ("window", window, tuple(kernel), axis, name)
    return ("unknown", id(tensor), axis)
