"""Rules for convolutions with bias, side input and activation."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper import spellings
from tf_fused_ops.remapper.contraction import SUMS, AddAct, ImageBiasAct


class Conv2DBiasAct(ImageBiasAct):
    """act(bias_add(conv2d(input, filters), bias))."""

    family = "conv2d_bias"
    anchor = "Conv2D"
    operands: ClassVar = {"input": (4,), "filters": (4,), "bias": (1, 4)}
    contraction = ("input", "filters")
    differentiable = ("input", "filters", "bias")
    captured: ClassVar = {
        "Conv2D": {
            "strides": [1, 1, 1, 1],
            "padding": b"SAME",
            "explicit_paddings": [],
            "dilations": [1, 1, 1, 1],
            "data_format": b"NHWC",
        }
    }
    keyed = ("data_format",)
    fused_ops = ("TfFusedOps>Conv2DBiasAct", "TfFusedOps>Conv2DBiasActGrad")
    # 0.28 to 0.86 of the time of stock gradients (float32, windows 1x1 and 3x3, 16x56x56x64 to
    # 16x14x14x256; none, relu, tanh, silu, gelu_erf).
    backward_alone = True
    gradient_ops: ClassVar = {"Conv2DBackpropFilter": "filters", "Conv2DBackpropInput": "input"}

    def backward_variants(self, view, op):
        for added in self.added_backward(view, op.inputs[2]):
            input, filters = images(op)
            attrs = added | {name: op.get_attr(name) for name in Conv2DBiasAct.captured["Conv2D"]}
            channels_last = attrs["data_format"] == b"NHWC" or attrs["bias_op"] not in SUMS
            if input.rank == filters.rank == 4 and channels_last:
                shapes = {"input": input, "filters": filters, "bias": filters[-1:]}
                yield attrs, {name: shapes[name] for name in self.operands}

    def linear(self, attrs, input, filters, bias=None):
        conv = {name: attrs[name] for name in Conv2DBiasAct.captured["Conv2D"]}
        z = tf.raw_ops.Conv2D(input=input, filter=filters, **conv)
        return self.add_bias(attrs, z, bias)

    def scalable(self, attrs, shapes):
        # Windows stay inside the image, and the sizes of the result enter no constant.
        window = shapes["filters"][:-2]
        fits = attrs["padding"] == b"SAME" or window == [1, 1]
        # Other sizes would not divide each other.
        grouped = are_grouped(shapes["input"], shapes["filters"], attrs["data_format"])
        return fits and not grouped and attrs["bias_op"] not in SUMS

    def further_inputs(self, match):
        return ([],)

    def forward_attributes(self, match):
        plain = self.activation is spellings.NONE and "side_input" not in match.operands
        moments = {"num_moments": int(plain and match.attrs["take_moments"])}
        return super().forward_attributes(match) | moments

    def attributes(self, match):
        return super().attributes(match) | {"winograd": match.attrs["winograd"]}

    def label(self, match):
        return "grouped " * is_grouped(match) + super().label(match)

    def check(self, match):
        return _misfit(match) or super().check(match)


def images(op):
    """Returns the static shapes of input and filters of a stock convolution or gradient op."""
    input, filters = {
        "Conv2D": (op.inputs[0], op.inputs[1]),
        "Conv2DBackpropInput": (op.outputs[0], op.inputs[1]),
        "Conv2DBackpropFilter": (op.inputs[0], op.outputs[0]),
    }[op.type]
    return input.shape, filters.shape


def is_gradient(view, anchor, op_type):
    """Returns whether an op is the input gradient of one of a type, since that reads the same
    filters before it. It belongs to the backward pass of that."""
    readers = (op for op in view.users(view.inputs[anchor][1]) if view.types[op] == op_type)
    return any(view.position[op] < view.position[anchor] for op in readers)


def are_grouped(input, filters, data_format):
    """Returns whether static shapes are known to be those of a grouped convolution."""
    if not input or not filters:
        return False
    channels, each = input[1 if data_format == b"NCHW" else -1], filters[-2]
    return None not in (channels, each) and 0 < each < channels and channels % each == 0


def is_grouped(match):
    """Returns whether a matched convolution is known to be a grouped one."""
    shapes = (match.operands[name].shape for name in Conv2DBiasAct.contraction)
    return are_grouped(*shapes, match.attrs["data_format"])


def _misfit(match):
    """Returns why the channels of a matched convolution rule the fused op out, or None."""
    channels = match.operands["input"].shape[_channel_axis(match.attrs)]
    *_, each, filters = match.operands["filters"].shape
    if channels is not None and channels == each:
        return None
    found = f"{channels} in the input, {each} in the filters"
    if not is_grouped(match):
        return f"its channels are not known or do not fit: {found}"
    if device_type(match.nodes[0].device) != "CPU":
        return f"a grouped convolution, which is fused on the CPU alone: {found}"
    if filters is None or filters % (channels // each):
        return f"a grouped convolution of {filters} filters in {channels // each} groups"
    return None


def fits_winograd(match):
    """Returns whether Winograd's algorithm can compute a matched convolution."""
    steps = {*match.attrs["strides"], *match.attrs["dilations"]}
    windows = match.operands["filters"].shape[:2]
    return windows == (3, 3) and steps == {1} and not is_grouped(match)


def _channel_axis(attrs):
    return 1 if attrs["data_format"] == b"NCHW" else -1


class Conv2DAct(Conv2DBiasAct):
    """act(conv2d(input, filters))."""

    family = "conv2d"
    operands: ClassVar = {"input": (4,), "filters": (4,)}
    differentiable = ("input", "filters")

    def variants(self, view, anchor):
        if not is_gradient(view, anchor, "Conv2DBackpropInput"):
            yield from super().variants(view, anchor)


class WinogradConv2D(Conv2DAct):
    """conv2d(input, filters), which is left to stock where Winograd's algorithm does not fit."""

    family = "winograd_conv2d"
    gradient_ops: ClassVar = {}
    backward_alone = False

    def check(self, match):
        if device_type(match.node(self.anchor).device) != "CPU":
            return "Winograd's algorithm is for the CPU"
        if not fits_winograd(match):
            return "Winograd's algorithm is for 3x3 filters of stride and dilation 1"
        return super().check(match)


class GroupedConv2D(Conv2DAct):
    """conv2d(input, filters) in groups.

    Stock has it on the CPU, too, but for some dtypes no gradient of it.
    """

    family = "grouped_conv2d"

    def variants(self, view, anchor):
        input, filters = view.inputs[anchor]
        if are_grouped(input.shape, filters.shape, view.attr(anchor, "data_format")):
            yield from super().variants(view, anchor)

    def backward_variants(self, view, op):
        if are_grouped(*images(op), view.attr(op, "data_format")):
            yield from super().backward_variants(view, op)

    def label(self, match):
        return "grouped Conv2D"


GROUPED = GroupedConv2D()


class Conv2DAddAct(AddAct, Conv2DAct):
    """act(conv2d(input, filters) + side_input)."""

    family = "conv2d_add"
    operands: ClassVar = Conv2DAct.operands | {"side_input": (4,)}
    differentiable = (*Conv2DAct.differentiable, "side_input")


class Conv2DBiasAddAct(AddAct, Conv2DBiasAct):
    """act(bias_add(conv2d(input, filters), bias) + side_input)."""

    family = "conv2d_bias_add"
    operands: ClassVar = Conv2DBiasAct.operands | {"side_input": (4,)}
    differentiable = (*Conv2DBiasAct.differentiable, "side_input")
