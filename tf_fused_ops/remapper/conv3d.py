"""Rules for convolutions of volumes with bias, side input and activation."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops._library import isa
from tf_fused_ops.remapper.contraction import AddAct, ImageBiasAct

# Why some windows are left to stock.
STOCK_IS_FASTER = "stock ops are faster for float32 of many channels with AVX-512"
GAPS = "its windows leave pixels between them, where TensorFlow puts them elsewhere"
_FEW_CHANNELS = 8


class Conv3DBiasAct(ImageBiasAct):
    """act(bias_add(conv3d(input, filters), bias))."""

    family = "conv3d_bias"
    anchor = "Conv3D"
    operands: ClassVar = {"input": (5,), "filters": (5,), "bias": (1, 5)}
    contraction = ("input", "filters")
    differentiable = ("input", "filters", "bias")
    captured: ClassVar = {
        "Conv3D": {
            "strides": [1, 1, 1, 1, 1],
            "padding": b"SAME",
            "data_format": b"NDHWC",
            "dilations": [1, 1, 1, 1, 1],
        }
    }
    fused_ops = ("TfFusedOps>Conv3DBiasAct", "TfFusedOps>Conv3DBiasActGrad")

    def linear(self, attrs, input, filters, bias=None):
        conv = {name: attrs[name] for name in self.captured[self.anchor]}
        return self.add_bias(attrs, tf.raw_ops.Conv3D(input=input, filter=filters, **conv), bias)

    def add_bias(self, attrs, z, bias):
        # BiasAdd calls the last dimension of any tensor that of NHWC.
        return super().add_bias(attrs | {"data_format": "NHWC"}, z, bias)

    def check(self, match):
        return self._misfit(match) or super().check(match)

    def _misfit(self, match):
        """Returns why the layout or the channels of a match rule the fused op out, or None."""
        data_format = match.attrs["data_format"]
        if data_format != b"NDHWC":
            return f"its layout is {data_format.decode()}, not NDHWC"
        input, filters = (match.operands[name].shape for name in self.contraction)
        if input[-1] is None or input[-1] != filters[-2]:
            found = f"{input[-1]} in the input, {filters[-2]} in the filters"
            return f"its channels are not known or do not fit: {found}"
        dilations = match.attrs["dilations"][1:4]
        if stock_is_faster(filters, dilations, match.operands["input"].dtype):
            return STOCK_IS_FASTER
        windows = filters[:3], match.attrs["strides"][1:4], dilations
        if match.attrs["padding"] == b"SAME" and leaves_pixels(*windows):
            return GAPS
        return None

    def forward_attributes(self, match):
        return {}

    def attributes(self, match):
        attributes = super().attributes(match)
        del attributes["data_format"]
        return attributes


def stock_is_faster(filters, dilations, dtype):
    """Returns whether there are so many planes under a window, which are brought together as
    channels, that this takes longer than what is saved.

    Measured on a Zen 4, 3x3x3 with stride 1 and relu, in times of stock's: forward 0.95 to 1.14 and
    a training step 1.1 to 1.25 from 16 channels on; 0.85 to 1.1 and 0.7 to 0.9 of up to 8.

    Args:
        filters: Their shape.
        dilations: Of depth, height and width.
        dtype: The tf.DType of the input.
    """
    depth, height, width, channels, _ = filters
    general = depth != 1 and (height, width) != (1, 1) and tuple(dilations) == (1, 1, 1)
    few = channels is not None and channels <= _FEW_CHANNELS
    return dtype == tf.float32 and general and not few and isa().startswith("avx512")


def leaves_pixels(sizes, strides, dilations):
    """Returns whether more than one pixel, which padding would share out, may lie between two
    windows.

    Args:
        sizes: The filters' depth, height and width; None for those that are not known.
        strides: Of depth, height and width.
        dilations: Likewise.
    """
    extents = (
        1 if size is None else (size - 1) * dilation + 1
        for size, dilation in zip(sizes, dilations, strict=True)
    )
    return any(stride - extent > 1 for stride, extent in zip(strides, extents, strict=True))


class Conv3DAct(Conv3DBiasAct):
    """act(conv3d(input, filters))."""

    family = "conv3d"
    operands: ClassVar = {"input": (5,), "filters": (5,)}
    differentiable = ("input", "filters")


class Conv3DAddAct(AddAct, Conv3DAct):
    """act(conv3d(input, filters) + side_input)."""

    family = "conv3d_add"
    operands: ClassVar = Conv3DAct.operands | {"side_input": (5,)}
    differentiable = (*Conv3DAct.differentiable, "side_input")


class Conv3DBiasAddAct(AddAct, Conv3DBiasAct):
    """act(bias_add(conv3d(input, filters), bias) + side_input)."""

    family = "conv3d_bias_add"
    operands: ClassVar = Conv3DBiasAct.operands | {"side_input": (5,)}
    differentiable = (*Conv3DBiasAct.differentiable, "side_input")
