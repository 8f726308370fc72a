"""Rules for convolutions of what a pad with zeros makes, which becomes part of them."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper.convolution import Conv2DAct, Conv2DBiasAct
from tf_fused_ops.remapper.lines import Conv1DAct, Conv1DBiasAct


class _Padded:
    """What these rules share."""

    gradient_ops: ClassVar = {}
    captured: ClassVar = {"Conv2D": Conv2DBiasAct.captured["Conv2D"] | {"padding": b"VALID"}}

    def default_attrs(self):
        (rank,) = self.operands["input"]
        return super().default_attrs() | {"paddings": [[0, 0]] * rank}

    def padded(self, anchor):
        """Returns what an anchor convolves, as it is before it is made an image."""
        return anchor.inputs[0]

    def variants(self, view, anchor):
        return super().variants(view, anchor) if self.padded(anchor).op.type == "Pad" else ()

    def parameters(self, attrs):
        return {"paddings": (2, tf.int32)}

    def scalable(self, attrs, shapes):
        return False

    def linear(self, attrs, input, filters, bias=None):
        padded = tf.raw_ops.Pad(input=input, paddings=attrs["paddings"])
        return super().linear(attrs, padded, filters, bias)

    def image_paddings(self, match):
        """Returns [before, after] of all dimensions of an image."""
        return match.attrs["paddings"]

    def check(self, match):
        channel = 1 if match.attrs["data_format"] == b"NCHW" else 3
        paddings = self.image_paddings(match)
        if match.attrs["padding"] != b"VALID":
            return f"a padded convolution that pads again: {match.attrs['padding'].decode()}"
        if any(paddings[0] + paddings[channel]) or min(map(min, paddings)) < 0:
            return f"paddings {match.attrs['paddings']} are not those of a convolution"
        return super().check(match)

    def attributes(self, match):
        amounts = [amount for pair in self.image_paddings(match) for amount in pair]
        return super().attributes(match) | {"padding": "EXPLICIT", "explicit_paddings": amounts}


class PadConv2DBiasAct(_Padded, Conv2DBiasAct):
    """act(bias_add(conv2d(pad(input, paddings), filters), bias))."""

    family = "pad_conv2d_bias"


class PadConv2DAct(PadConv2DBiasAct):
    """act(conv2d(pad(input, paddings), filters)).

    Also without an activation, where the convolution alone is left to stock: it saves the padded
    image. Measured on two cores with AVX2 in times of stock: forward 0.64 to 0.91, with gradients
    0.75 to 0.88, ResNet's stem with its batch norm 0.50.
    """

    family = "pad_conv2d"
    operands: ClassVar = Conv2DAct.operands
    differentiable = Conv2DAct.differentiable


class PadConv1DBiasAct(_Padded, Conv1DBiasAct):
    """act(bias_add(conv1d(pad(input, paddings), filters), bias)), as Keras has it if causal."""

    family = "pad_conv1d_bias"

    def padded(self, anchor):
        image = anchor.inputs[0]
        return image.op.inputs[0] if image.op.type == "ExpandDims" else image

    def image_paddings(self, match):
        first, *others = match.attrs["paddings"]
        height = 1 if match.attrs["data_format"] == b"NCHW" else 0
        return [first, *others[:height], [0, 0], *others[height:]]


class PadConv1DAct(PadConv1DBiasAct):
    """act(conv1d(pad(input, paddings), filters)), also without an activation."""

    family = "pad_conv1d"
    operands: ClassVar = Conv1DAct.operands
    differentiable = Conv1DAct.differentiable
