"""Rules for convolutions with neither bias nor activation, as batch norm follows them.

TensorFlow has one op for each, which is as fast as a fused one, but slower gradients. So they are
fused where a gradient is in the graph. Measured on two cores, the output and both gradients in
times of stock's, float32: with AVX-512 (Zen 5) 0.3 to 1.0, once 1.1 (3x3 windows, 16 channels),
transposed ones 0.6 to 0.9; with AVX2 (Zen 3) 0.3 to 1.1 and 0.5 to 0.8; in bfloat16 much alike. A
training step of a U-Net is 1.6 times as fast with AVX2 as without these rules.
"""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops._devices import device_type
from tf_fused_ops._library import isa
from tf_fused_ops.remapper.conv3d import Conv3DAct
from tf_fused_ops.remapper.conv_transpose import Conv2DTransposeAct
from tf_fused_ops.remapper.convolution import Conv2DAct, are_grouped, images


class _Trained:
    """What these rules share."""

    forward_alone = False

    def variants(self, view, anchor):
        # A report need not name every convolution of a graph that trains none.
        if self.is_trained(view, anchor) and device_type(anchor.device) == "CPU":
            yield from super().variants(view, anchor)

    def is_trained(self, view, anchor):
        """Returns whether an anchor may have a gradient in a graph."""
        return any(view.has([op_type]) for op_type in self.stock_gradients)


class TrainedConv2D(_Trained, Conv2DAct):
    """conv2d(input, filters), not in groups; conv1d, too, which has that inside."""

    family = "trained_conv2d"
    stock_gradients = ("Conv2DBackpropFilter", "Conv2DBackpropInput")
    # Where only the input gradient is taken, its op may as well be a transposed convolution.
    gradient_ops: ClassVar = {"Conv2DBackpropFilter": "filters"}

    def variants(self, view, anchor):
        input, filters = anchor.inputs
        if not are_grouped(input.shape, filters.shape, view.attr(anchor, "data_format")):
            yield from super().variants(view, anchor)

    def backward_variants(self, view, op):
        grouped = are_grouped(*images(op), view.attr(op, "data_format"))
        if not grouped and not _is_transposed(view, op) and device_type(op.device) == "CPU":
            yield from super().backward_variants(view, op)


class TrainedConv2DTranspose(_Trained, Conv2DTransposeAct):
    """conv2d_transpose(input, filters, output_shape)."""

    family = "trained_conv2d_transpose"

    def is_trained(self, view, anchor):
        readers = view.users(anchor.inputs[2])
        gradients = (op for op in readers if view.types[op] == "Conv2DBackpropFilter")
        return any(_is_transposed(view, op) for op in gradients)


class TrainedConv3D(_Trained, Conv3DAct):
    """conv3d(input, filters).

    With AVX-512 alone, float32, stock's takes the time of its multiply-adds: this one's is 0.8 to
    1.2 of that. With AVX2 it is 0.02 to 0.9 (1.1 for the gradient of the filters alone), in
    bfloat16 0.7 to 1.1, and for windows of one pixel 0.7 anywhere.
    """

    family = "trained_conv3d"
    stock_gradients = ("Conv3DBackpropFilterV2", "Conv3DBackpropInputV2")

    def check(self, match):
        single = match.outputs["y"].dtype == tf.float32
        larger = match.operands["filters"].shape[:3] != [1, 1, 1]
        if single and larger and isa().startswith("avx512"):
            return "stock ops are faster for float32 with AVX-512"
        return super().check(match)


def _is_transposed(view, filter_gradient):
    """Returns whether a filter gradient is that of a transposed convolution: the op that may be the
    input gradient beside it comes before the image, or before a convolution of the image by the
    same filters, which is the input gradient then."""
    image, _, dz = filter_gradient.inputs

    def comes_first(op):
        readers = view.users(op.inputs[1])
        later = [r for r in readers if view.types[r] == "Conv2D" and r.inputs[0] is image]
        return any(view.position[op] < view.position[other] for other in (image.op, *later))

    others = (op for op in view.users(dz) if view.types[op] == "Conv2DBackpropInput")
    return any(map(comes_first, others))


RULES = (TrainedConv2D(), TrainedConv2DTranspose(), TrainedConv3D())
