"""Proves that two tensors of a graph have the same shape, also where the static shape is not known.

`dimension` names the size of one axis by where it comes from: a number if it is known, else an
expression over the axes of other tensors. Equal names mean equal sizes at run time.
"""

import math
import weakref
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import tensor_util

from tf_fused_ops.remapper import folding

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
        "Softmax",
        "Softplus",
        "Erf",
        "Erfc",
        "Exp",
        "Neg",
        "Reciprocal",
        "Rsqrt",
        "Selu",
        "Softsign",
        "Sqrt",
        "Square",
        "AddN",
        "Cumsum",
        "LogicalNot",
        "OnesLike",
        "ZerosLike",
        "MatrixBandPart",
        "TfFusedOps>Act",
        "TfFusedOps>Dropout",
        "TfFusedOps>GroupNormAct",
        "TfFusedOps>LayerNorm",
        "TfFusedOps>Prelu",
        "TfFusedOps>Softmax",
    }
    | {"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "TfFusedOps>BatchNormAct"}
)
_ELEMENTWISE = frozenset(
    {"Add", "AddV2", "Mul", "RealDiv", "Sub", "LogicalAnd", "LogicalOr", "SelectV2"}
    | {"Maximum", "Minimum", "SquaredDifference"}
    | {"Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"}
)
_PRODUCT = frozenset({"MatMul", "TfFusedOps>MatMulBiasAct"})
_WINDOWED = frozenset(
    {"Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "Conv3D", "MaxPool3D", "AvgPool3D"}
    | {"TfFusedOps>Conv2DBiasAct", "TfFusedOps>Conv3DBiasAct", "TfFusedOps>MaxPoolAct"}
)
_PADDING = frozenset({"Pad", "PadV2", "MirrorPad"})
# Which make a tensor of a shape that they are told first.
_OF_SHAPES = frozenset(
    {"Fill", "RandomUniform", "RandomStandardNormal"}
    | {"StatelessRandomUniformV2", "StatelessRandomNormalV2"}
)
_REDUCTIONS = frozenset({"Max", "Mean", "Min", "Prod", "Sum"})
_WINDOW_ATTRS = ("strides", "padding", "explicit_paddings", "dilations", "ksize", "data_format")


def same_shape(a, b):
    """Returns whether two tensors are known to have the same shape."""
    if a.shape.rank is None or a.shape.rank != b.shape.rank:
        return False
    if a.shape.is_fully_defined() and b.shape.is_fully_defined():
        return a.shape == b.shape
    namer = _namer(a)
    return all(namer.name(a, axis) == namer.name(b, axis) for axis in range(a.shape.rank))


def dimension(tensor, axis):
    """Returns a hashable name of the size of one axis: equal names mean equal sizes.

    Args:
        tensor: A graph tensor of known rank.
        axis: A non-negative axis.

    Returns:
        The static size if there is one, else a tuple that names where the size comes from.
    """
    return _namer(tensor).name(tensor, axis)


def dimensions(tensor):
    """Returns the names of the sizes of all axes of a tensor of known rank, as a list."""
    return [dimension(tensor, axis) for axis in range(tensor.shape.rank)]


def sizes(tensor):
    """Returns the shape of a tensor for `tf.reshape`, which is left one unknown size to find."""
    known = tensor.shape.as_list()
    # Without elements it cannot find any.
    if known.count(None) > (0 if 0 in known else 1):
        return tf.shape(tensor)
    return [-1 if size is None else size for size in known]


# Graph -> its _Namer. That inputs are redirected to fused ops does not change sizes.
_namers = weakref.WeakKeyDictionary()


def _namer(tensor):
    return _namers.setdefault(tensor.graph, _Namer())


class _Namer:
    """Names sizes; residual networks lead to the same tensors over and over."""

    def __init__(self):
        self._known = {}
        self._windows = {}

    def name(self, tensor, axis):
        """Returns the name of one axis."""
        # Not by recursion: networks are deeper than Python's stack.
        origins, pending = {}, [(tensor, axis)]
        while pending:
            place = pending[-1]
            key = _key(*place)
            if self._name(*place) is not None:
                pending.pop()
            elif key not in origins:
                origins[key] = _origin(*place)
                pending += origins[key].axes
            else:
                found = self._of(origins[key])
                self._known[key] = ("unknown", *key) if found is None else found
        return self._name(tensor, axis)

    def _of(self, origin):
        """Returns the name that an origin of named axes makes, or None."""
        names = {self._name(*source) for source in origin.axes}
        if len(names) > 1 or not names:
            return None
        (name,) = names
        if not origin.window:
            return name
        # Numbered, since names within names would be compared over and over.
        return self._windows.setdefault((*origin.window, name), ("window", len(self._windows)))

    def _name(self, tensor, axis):
        """Returns the name of one axis if it is known already, or None."""
        size = tensor.shape[axis]
        return self._known.get(_key(tensor, axis)) if size is None else size


def _key(tensor, axis):
    return id(tensor), axis


class _Origin(NamedTuple):
    """Where the size of an axis comes from.

    Attributes:
        axes: Pairs of a tensor and an axis; the size is known if theirs have one name.
        window: What a window makes of that size; windows that are equal make the same of it.
    """

    axes: list
    window: tuple = ()


_UNKNOWN = _Origin([])


def _origin(tensor, axis):
    """Returns where an axis has its size from: the inputs of its op, as far as those tell."""
    op = tensor.op
    if tensor.shape.rank is None:
        return _UNKNOWN
    if op.type in _SAME_SHAPE and tensor.value_index == 0:
        return _Origin([(op.inputs[0], axis)])
    if op.type in _ELEMENTWISE:
        return _broadcast(op.inputs, axis, tensor.shape.rank)
    if op.type == "Einsum":
        return _einsum(op, axis)
    if op.type == "IdentityN":
        return _Origin([(op.inputs[tensor.value_index], axis)])
    if op.type in _PRODUCT and axis < tensor.shape.rank - 1:
        inner = axis == tensor.shape.rank - 2 and op.get_attr("transpose_a")
        return _Origin([(op.inputs[0], axis + inner)])
    if op.type == "BatchMatMulV2":
        return _product(op, axis, tensor.shape.rank)
    if op.type == "Reshape":
        return _reshaped(op, axis)
    if op.type == "Transpose":
        order = tensor_util.constant_value(op.inputs[1])
        if order is None:
            return _UNKNOWN
        return _Origin([(op.inputs[0], int(order[axis]) % tensor.shape.rank)])
    if op.type in _OF_SHAPES or (op.type == "Conv2DBackpropInput" and op.inputs[0].shape == [4]):
        return _given(op.inputs[0].op, axis)
    if op.type in ("ExpandDims", "StridedSlice"):
        return _indexed(op, axis)
    if op.type == "Squeeze":
        return _without(op, axis, op.get_attr("squeeze_dims"))
    if op.type in _REDUCTIONS:
        return _reduced(op, axis)
    if op.type in ("GatherV2", "ResourceGather"):
        return _gathered(op, axis)
    if op.type in _PADDING:
        paddings = tensor_util.constant_value(op.inputs[1])
        unpadded = paddings is not None and not paddings[axis].any()
        return _Origin([(op.inputs[0], axis)]) if unpadded else _UNKNOWN
    if op.type == "ConcatV2":
        joined = tensor_util.constant_value(op.inputs[-1])
        other = joined is not None and joined % tensor.shape.rank != axis
        return _broadcast(op.inputs[:-1], axis, tensor.shape.rank) if other else _UNKNOWN
    if op.type == "TfFusedOps>Conv2DTransposeBiasAct":
        return _given(op.inputs[-1].op, axis)
    if op.type in _WINDOWED:
        return _windowed(op, axis)
    if op.type == "Tile":
        return _tiled(op, axis)
    return _UNKNOWN


def _product(op, axis, rank):
    """Returns where an axis of a product of batches has its size from."""
    a, b = op.inputs
    if axis == rank - 1:
        columns = None if b.shape.rank is None else b.shape.rank - 1 - op.get_attr("adj_y")
        return _UNKNOWN if columns is None else _Origin([(b, columns)])
    if axis < rank - 2 and b.shape.rank != 2:
        return _broadcast(op.inputs, axis, rank)
    inner = axis == rank - 2 and op.get_attr("adj_x")
    own = axis - (rank - (a.shape.rank or 0))
    return _Origin([(a, own + inner)]) if own >= 0 else _UNKNOWN


def _reshaped(op, axis):
    """The one size that is not known, if all others make up as many elements as before, or one that
    was asked of a tensor."""
    shapes = op.inputs[0].shape, op.outputs[0].shape
    before, after = ([] if shape.rank is None else shape.as_list() for shape in shapes)
    if before.count(None) == after.count(None) == 1:
        elements = [
            math.prod(size for size in sizes if size is not None) for sizes in (before, after)
        ]
        if elements[0] == elements[1] != 0:
            return _Origin([(op.inputs[0], before.index(None))])
    return _given(op.inputs[1].op, axis)


def _tiled(op, axis):
    """Returns where an axis of copies that follow each other along others has its size from."""
    multiples = op.inputs[1]
    if multiples.op.type == "Pack":
        multiple = tensor_util.constant_value(multiples.op.inputs[axis])
    else:
        known = tensor_util.constant_value(multiples)
        multiple = None if known is None else known[axis]
    return _Origin([(op.inputs[0], axis)]) if multiple == 1 else _UNKNOWN


def _gathered(op, axis):
    """Returns where an axis of rows that indices choose has its size from."""
    indices = op.inputs[1]
    along = tensor_util.constant_value(op.inputs[2]) if op.type == "GatherV2" else 0
    if along != 0 or op.get_attr("batch_dims") or axis >= (indices.shape.rank or 0):
        return _UNKNOWN
    return _Origin([(indices, axis)])


def _given(shape, index):
    """Returns where an element of a shape is from, given the op that makes the shape."""
    while True:
        length = shape.outputs[0].shape[0] if shape.outputs[0].shape.rank == 1 else None
        if length is None or not -length <= index < length:
            return _UNKNOWN
        index %= length
        if shape.type == "Shape":
            return _Origin([(shape.inputs[0], index)])
        found = _ELEMENTS[shape.type](shape, index) if shape.type in _ELEMENTS else None
        if found is None:
            return _UNKNOWN
        shape, index = found


def _packed(op, index):
    """Returns of which op's output an element is that is packed, and its index there."""
    return folding.element(op.inputs[index].op)


def _joined(op, index):
    """Returns which op's output an element of a concatenation is from, and its index there."""
    for vector in op.inputs[:-1]:
        length = vector.shape[0]
        if length is None:
            return None
        if index < length:
            return vector.op, index
        index -= length
    return None


def _sliced(op, index):
    """Returns of which op's output a slice takes an element, and its index there."""
    begin, strides = (tensor_util.constant_value(op.inputs[i]) for i in (1, 3))
    length = op.inputs[0].shape[0]
    if begin is None or strides is None or begin.size != 1 or strides[0] != 1 or length is None:
        return None
    if any(op.get_attr(f"{name}_mask") for name in ("new_axis", "ellipsis", "shrink_axis")):
        return None
    first = 0 if op.get_attr("begin_mask") else slice(int(begin[0]), None).indices(length)[0]
    return op.inputs[0].op, first + index


def _cut(op, index):
    """Returns of which op's output `tf.slice` takes an element, and its index there."""
    begin = op.inputs[1]
    # The last one begins at the rank, less one.
    packed = begin.op.type == "Pack"
    first = folding.scalar(begin.op.inputs[0]) if packed else tensor_util.constant_value(begin)
    return None if first is None else (op.inputs[0].op, first.item() + index)


def _chosen(op, index):
    """Returns of which op's output an element is that indices choose, and its index there."""
    indices, axis = (tensor_util.constant_value(op.inputs[i]) for i in (1, 2))
    if indices is None or indices.ndim != 1 or axis != 0 or op.get_attr("batch_dims"):
        return None
    return op.inputs[0].op, int(indices[index])


# By the type of an op that makes a vector.
_ELEMENTS = {
    "Pack": _packed,
    "ConcatV2": _joined,
    "StridedSlice": _sliced,
    "Slice": _cut,
    "GatherV2": _chosen,
}


def _indexed(op, axis):
    """Returns where an axis has its size from behind new axes and whole ones."""
    source, rank = op.inputs[0], op.outputs[0].shape.rank
    if source.shape.rank is None:
        return _UNKNOWN
    if op.type == "ExpandDims":
        new = tensor_util.constant_value(op.inputs[1])
        if new is None:
            return _UNKNOWN
        return _Origin([(source, axis - (axis > int(new.item()) % rank))])
    begin_mask, end_mask, new_axis_mask, ellipsis_mask, shrink_mask = (
        op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "new_axis", "ellipsis", "shrink_axis")
    )
    strides = tensor_util.constant_value(op.inputs[3])
    if ellipsis_mask or shrink_mask or strides is None:
        return _UNKNOWN
    whole = axis >= len(strides) or ((begin_mask & end_mask) >> axis & 1 and strides[axis] == 1)
    before = sum(new_axis_mask >> i & 1 for i in range(axis))
    return _Origin([(source, axis - before)]) if whole else _UNKNOWN


def _without(op, axis, gone):
    """Returns where an axis has its size from behind an op that takes some axes away."""
    source = op.inputs[0]
    rank = source.shape.rank
    # Squeeze takes all of size one where it names none.
    if not rank or not len(gone):
        return _UNKNOWN
    left = [i for i in range(rank) if i not in {int(place) % rank for place in gone}]
    return _Origin([(source, left[axis])])


def _reduced(op, axis):
    """Returns where an axis has its size from behind a reduction over others."""
    axes = tensor_util.constant_value(op.inputs[1])
    if axes is None:
        return _UNKNOWN
    if not op.get_attr("keep_dims"):
        return _without(op, axis, axes.reshape(-1))
    # One over which it goes has size one, which is known.
    return _Origin([(op.inputs[0], axis)])


def _einsum(op, axis):
    operands, _, result = op.get_attr("equation").decode().partition("->")
    # Dots are no letters.
    if "." in operands:
        return _UNKNOWN
    # Operands that share a letter have one size there, or the op fails.
    for letters, tensor in zip(operands.split(","), op.inputs, strict=True):
        if result[axis] in letters:
            return _Origin([(tensor, letters.index(result[axis]))])
    return _UNKNOWN


def _broadcast(inputs, axis, rank):
    axes = []
    for tensor in inputs:
        if tensor.shape.rank is None:
            return _UNKNOWN
        own = axis - (rank - tensor.shape.rank)
        # What is missing or 1 takes the size of the others.
        if own >= 0 and tensor.shape[own] != 1:
            axes.append((tensor, own))
    return _Origin(axes)


def _windowed(op, axis):
    source = (op.inputs[0], axis)
    if axis == 0:
        return _Origin([source])
    attrs = op.node_def.attr
    # The channels of what filters make are as many as those say.
    first = attrs["data_format"].s in (b"NCHW", b"NCDHW")
    if len(op.inputs) > 1 and axis == (1 if first else op.outputs[0].shape.rank - 1):
        return _UNKNOWN
    if attrs["padding"].s == b"SAME":
        # Whatever the window is.
        stride = attrs["strides"].list.i[axis]
        return _Origin([source], ("SAME", stride)) if stride > 1 else _Origin([source])
    window = tuple(attrs[a].SerializeToString() for a in _WINDOW_ATTRS if a in attrs)
    kernel = tuple(op.inputs[1].shape) if len(op.inputs) > 1 else ()
    return _UNKNOWN if None in kernel else _Origin([source], (window, kernel, axis))
