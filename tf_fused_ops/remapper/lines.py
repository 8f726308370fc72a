"""Rules for convolutions of lines of pixels, which are ones of images of one row."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper.contraction import AddAct
from tf_fused_ops.remapper.convolution import Conv2DBiasAct


class Row:
    """What rules share whose convolution yields images of one row, which squeeze makes lines.

    Attributes:
        counts_back: Whether stock counts the axis of the row from the last one.
    """

    gradient_ops: ClassVar = {}
    counts_back = False

    def product(self, view, anchor):
        squeezes = (op for op in view.users(anchor.outputs[0]) if op.type == "Squeeze")
        return next((op.outputs[0] for op in squeezes), anchor.outputs[0])

    def scalable(self, attrs, shapes):
        return False

    def linear(self, attrs, input, filters, bias=None, **others):
        z = super().linear(attrs, *self.images(attrs, input, filters), **others)
        return self.add_bias(attrs, tf.squeeze(z, [self.axis(attrs)]), bias)

    def axis(self, attrs):
        """Returns the axis of the row, as stock has it."""
        return _height(attrs) - 4 * self.counts_back

    def images(self, attrs, input, filters):
        """Makes of operands what stock convolves."""
        return input, filters

    def widen(self, match, tensor):
        return tf.expand_dims(tensor, _height(match.attrs))

    def narrow(self, match, tensor):
        return tf.squeeze(tensor, [_height(match.attrs)])


class Line(Row):
    """What rules for lines of pixels share, of which expand_dims makes images."""

    counts_back = True

    def variants(self, view, anchor):
        images = (tensor.op.type for tensor in anchor.inputs if tensor.shape.rank == 4)
        if all(op_type == "ExpandDims" for op_type in images):
            yield from super().variants(view, anchor)

    def images(self, attrs, input, filters):
        return tf.expand_dims(input, self.axis(attrs)), tf.expand_dims(filters, 0)

    def narrow_gradient(self, match, name, gradient):
        height = _height(match.attrs)
        axis = {"input": height, "filters": 0, "side_input": height}.get(name)
        if axis is None:
            return super().narrow_gradient(match, name, gradient)
        return tf.squeeze(gradient, [axis])

    def factors(self, match):
        return [self.widen(match, match.operands["input"]),
                tf.expand_dims(match.operands["filters"], 0)]  # fmt: skip


class Conv1DBiasAct(Line, Conv2DBiasAct):
    """act(bias_add(conv1d(input, filters), bias)): conv2d between expand_dims and squeeze."""

    family = "conv1d_bias"
    operands: ClassVar = {"input": (3,), "filters": (3,), "bias": (1, 3)}


class Conv1DAct(Conv1DBiasAct):
    """act(conv1d(input, filters))."""

    family = "conv1d"
    operands: ClassVar = {"input": (3,), "filters": (3,)}
    differentiable = ("input", "filters")


class Conv1DBiasAddAct(AddAct, Conv1DBiasAct):
    """act(bias_add(conv1d(input, filters), bias) + side_input)."""

    family = "conv1d_bias_add"
    operands: ClassVar = Conv1DBiasAct.operands | {"side_input": (3,)}
    differentiable = (*Conv1DBiasAct.differentiable, "side_input")


class RowConv2DBiasAct(Row, Conv2DBiasAct):
    """act(bias_add(squeeze(conv2d(input, filters)), bias)) where the convolution yields one row.

    As in `keras.layers.SeparableConv1D` and `DepthwiseConv1D`.
    """

    family = "row_conv2d_bias"
    operands: ClassVar = {"input": (4,), "filters": (4,), "bias": (1, 3)}

    def variants(self, view, anchor):
        if any(op.type == "Squeeze" for op in view.users(anchor.outputs[0])):
            yield from super().variants(view, anchor)


def _height(attrs):
    """Returns the axis that makes an image of a line."""
    return 2 if attrs["data_format"] == b"NCHW" else 1
