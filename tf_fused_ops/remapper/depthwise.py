"""Makes depthwise convolutions ones in groups of a channel, for which there are rules.

TensorFlow has ops of their own for them, with filters [height, width, channels, multiplier].
"""

import collections
import functools

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper import custom_gradients
from tf_fused_ops.remapper.attributes import KEEP
from tf_fused_ops.remapper.convolution import GROUPED
from tf_fused_ops.remapper.emission import add, emitting, reshape

_FORWARD = "DepthwiseConv2dNative"
_INPUT_GRADIENT, _FILTERS_GRADIENT = f"{_FORWARD}BackpropInput", f"{_FORWARD}BackpropFilter"
# Where gradient ops take filters, or input; of the other they take the shape.
_GIVEN = {_INPUT_GRADIENT: 1, _FILTERS_GRADIENT: 0}
OPS = (_FORWARD, _INPUT_GRADIENT, _FILTERS_GRADIENT)
_ATTRIBUTES = ("strides", "padding", "explicit_paddings", "dilations", "data_format")
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


def regroup(view, options):
    """Puts convolutions in groups in the place of depthwise ones and of their gradients.

    Args:
        view: A GraphView.
        options: RemapOptions.

    Returns:
        The convolutions and gradient ops that are in the graph now.
    """
    names = (GROUPED.name, f"{GROUPED.name}_grad")
    found = [op for kind in OPS for op in view.ops(kind) if _is_movable(op)]
    if not found or not all(map(options.allows, names)):
        return []
    known, made, results = {}, [], {}
    for op, operands in _operands(view, found):
        # They may be outputs of what has been replaced already.
        input, filters = (results.get(id(tensor), tensor) for tensor in operands)
        if not _fits(op, input, filters):
            continue
        with emitting(op, op.control_inputs):
            key = id(input), id(filters)
            if key not in known:
                known[key] = _Operands(op.name, input, filters)
            new, result = _KINDS[op.type](op, known[key])
        view.remove([op])
        view.swap([(op.outputs[0], result)])
        results[id(op.outputs[0])] = result
        made.append(new)
    # The shapes that gradient ops were given are read by nothing now.
    view.bury()
    return made


class _Operands:
    """Input and filters of a depthwise convolution as one in groups takes them."""

    def __init__(self, name, input, filters):
        height, width, channels, multiplier = self.stock_shape = filters.shape.as_list()
        self.input = input
        shape = [height, width, 1, channels * multiplier]
        self.filters = reshape(filters, shape, f"{name}_filters")
        self._name = name

    @functools.cached_property
    def sizes(self):
        """The sizes of both, from where the gradient of a convolution has them."""
        return add("ShapeN", [self.input, self.filters], name=f"{self._name}_sizes").outputs


def _forward(op, operands):
    conv = _add("Conv2D", op, operands.input, operands.filters)
    return conv, conv.outputs[0]


def _input_gradient(op, operands):
    conv = _add("Conv2DBackpropInput", op, operands.sizes[0], operands.filters, op.inputs[2])
    conv.outputs[0].set_shape(operands.input.shape)
    return conv, conv.outputs[0]


def _filters_gradient(op, operands):
    conv = _add("Conv2DBackpropFilter", op, operands.input, operands.sizes[1], op.inputs[2])
    conv.outputs[0].set_shape(operands.filters.shape)
    return conv, reshape(conv.outputs[0], operands.stock_shape, f"{op.name}_gradient")


def _add(op_type, op, *inputs):
    """Adds a convolution, or gradient of one, with the attributes of a depthwise op."""
    attributes = {name: op.node_def.attr[name] for name in _ATTRIBUTES}
    return add(op_type, *inputs, name=f"{op.name}_grouped", **attributes)


_KINDS = dict(zip(OPS, (_forward, _input_gradient, _filters_gradient), strict=True))


def _is_movable(op):
    """Returns whether an op may be replaced, as far as it tells itself."""
    attributes = op.node_def.attr
    return (
        KEEP not in attributes
        and custom_gradients.ATTRIBUTE not in attributes
        and device_type(op.device) == "CPU"
        and op.outputs[0].dtype.name in _DTYPES
    )


def _fits(op, input, filters):
    """Returns whether shapes are known to be those of a depthwise convolution, and of this op's."""
    if input.shape.rank != 4 or not filters.shape.is_fully_defined():
        return False
    first = op.get_attr("data_format") == b"NCHW"
    channels, result = filters.shape[2], op.outputs[0].shape
    if input.shape[1 if first else 3] != channels or channels < 2 or 0 in filters.shape:
        return False
    if op.type == _FORWARD:
        return True
    expected = filters.shape if op.type == _FILTERS_GRADIENT else input.shape
    return expected[1:].is_fully_defined() and expected[1:] == result[1:]


def _operands(view, ops):
    """Returns pairs (op, (input, filters)) of those for which both are found, producers first.

    A gradient op is given one of them, and the shape of the other, which is what it will need. Who
    is given the other and the same incoming gradient knows it, or the one forward op that reads the
    first. That may be the second gradient of another convolution, so that what is computed later
    does not count.
    """
    found, by_gradient = {}, collections.defaultdict(list)
    readers = collections.defaultdict(list)

    def is_known_at(op, tensors):
        return max(view.position[tensor.op] for tensor in tensors) < view.position[op]

    for op in ops:
        if op.type == _FORWARD:
            found[op] = tuple(op.inputs)
            for tensor in op.inputs:
                readers[id(tensor)].append(op)
        else:
            by_gradient[id(op.inputs[2])].append(op)
    for alike in by_gradient.values():
        given = {op.type: op.inputs[_GIVEN[op.type]] for op in alike}
        if len(alike) == len(given) == 2:
            pair = given[_FILTERS_GRADIENT], given[_INPUT_GRADIENT]
            if all(is_known_at(op, pair) for op in alike):
                found |= dict.fromkeys(alike, pair)
                continue
        for op in alike:
            known = op.inputs[_GIVEN[op.type]]
            pairs = (tuple(reader.inputs) for reader in readers[id(known)])
            pairs = [pair for pair in pairs if is_known_at(op, pair)]
            if len(pairs) == 1:
                found[op] = pairs[0]
    return sorted(found.items(), key=lambda item: view.position[item[0]])
