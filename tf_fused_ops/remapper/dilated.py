"""Rules for dilated convolutions that stock code makes of convolutions of many small images.

`tf.nn.convolution`, and so every layer of Keras, makes as many images of one as a window leaves
pixels out (`SpaceToBatchND`), convolves those without padding, and puts the results together
(`BatchToSpaceND`), before a bias is added. One dilated convolution takes the place of all three,
with its gradients, and other rules find it then. What none takes is fused in the end where
TensorFlow has no kernel for it, see `alone`.
"""

from typing import ClassVar

import tensorflow as tf
from tensorflow.python.framework import ops

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper import kernels
from tf_fused_ops.remapper.conv3d import Conv3DAct
from tf_fused_ops.remapper.convolution import Conv2DAct
from tf_fused_ops.remapper.lines import Conv1DAct
from tf_fused_ops.remapper.rule import FIRST, Fused, Match, Rule


class DilatedConv2D(Rule):
    """batch_to_space(conv2d(space_to_batch(input, block, paddings), filters), block, crops).

    Variants, by attribute:
        block: By how much stock code divides the dimensions from the second one on.
        given: The padding for which `tf.nn.convolution` computes the paddings and crops when it
            runs, for images of unknown size; None if they are constants.
        windows: The filters' sizes, which the paddings follow from then.

    Attributes:
        convolution: The rule for the convolution.
    """

    family = "dilated_conv2d"
    turn = FIRST
    anchor = "Conv2D"
    operands: ClassVar = {"input": (4,), "filters": (4,)}
    differentiable = ("input", "filters")
    captured: ClassVar = {"Conv2D": {"data_format": b"NHWC"}}
    keyed = ("data_format",)
    # Those of the rules that find it then.
    fused_ops = ()
    convolution = Conv2DAct()

    def default_attrs(self):
        pairs = [[0, 0]] * (self.operands["input"][0] - 2)
        cut = {"block": [2] * len(pairs), "paddings": pairs, "crops": pairs}
        attrs = {"padding": b"VALID", "given": None, "windows": [None] * len(pairs)}
        return self.convolution.default_attrs() | attrs | cut

    def maker(self, anchor):
        """Returns the op that makes what an anchor convolves."""
        return anchor.inputs[0].op

    def variants(self, view, anchor):
        maker = self.maker(anchor)
        block = view.constant(maker.inputs[1]) if maker.type == "SpaceToBatchND" else None
        (rank,) = self.operands["input"]
        # Of an image of unknown rank there may be anything; and of ones, nothing would change.
        parts = block is not None and len(block) < rank and max(block) > 1
        for attrs in super().variants(view, anchor) if parts else ():
            attrs |= {"block": block.tolist()}
            if view.constant(maker.inputs[2]) is not None:
                yield attrs
                continue
            first = anchor.inputs[1].shape.rank - self.operands["filters"][0]
            windows = anchor.inputs[1].shape[first:-2].as_list()
            if None not in windows:
                given = b"SAME" if _pads(view, maker.inputs[2]) else b"VALID"
                yield attrs | {"given": given, "windows": windows}

    def operand_shape(self, name, attrs):
        if name == "filters":
            # TensorFlow asks for all sizes, and uses those of windows.
            return [*attrs["windows"], *[1 if attrs["given"] else None] * 2]
        return super().operand_shape(name, attrs)

    def parameters(self, attrs):
        constants = {"paddings": (2, tf.int32), "crops": (2, tf.int32)}
        return {} if attrs["given"] else constants

    def stock(self, attrs, input, filters):
        if attrs["given"]:
            dilations, _ = self._parts(attrs, "block", 1)
            pixels = "DHW"[-len(dilations) :]
            data_format = f"NC{pixels}" if _channels_first(attrs) else f"N{pixels}C"
            options = {"padding": attrs["given"].decode(), "data_format": data_format}
            return {"y": tf.nn.convolution(input, filters, dilations=dilations, **options)}
        block = {"block_shape": attrs["block"]}
        images = tf.raw_ops.SpaceToBatchND(input=input, paddings=attrs["paddings"], **block)
        z = self.convolution.linear(attrs, images, filters)
        return {"y": tf.raw_ops.BatchToSpaceND(input=z, crops=attrs["crops"], **block)}

    def check(self, match):
        reason, dilated = self._dilated(match)
        if reason:
            return reason
        device, dtype = device_type(match.nodes[0].device), match.outputs["y"].dtype
        for op_type in self.convolution.fused_ops:
            if not kernels.has_kernel(op_type, dtype, device):
                return f"{op_type} has no {dtype.name} kernel on {device}"
        return self.convolution.check(dilated)

    def fuse(self, match, training):
        _, dilated = self._dilated(match)
        return Fused({"y": self.convolution.linear(dilated.attrs, **match.operands)})

    def fuse_gradient(self, match, fused, dy, wanted):
        # As a tape has it; `tf.gradients` would put an Identity behind dy, of which rules know not.
        op, dz = fused.outputs["y"].op, dy
        if op.type == "Squeeze":
            dz, op = _gradients(op, dy)[0], op.inputs[0].op
        found = {}
        for name, tensor, gradient in zip(
            self.differentiable, op.inputs, _gradients(op, dz), strict=True
        ):
            widens = tensor.op.type == "ExpandDims" and tensor is not match.operands[name]
            found[name] = _gradients(tensor.op, gradient)[0] if widens else gradient
        return {name: found[name] for name in wanted}

    def describe(self, match):
        contraction = match.node(self.anchor).name
        return f"dilated {self.anchor}", f"contraction={contraction}"

    def dimensions(self, nothing, pixels):
        """Returns what an attribute says of the dimensions of the convolution's images, given what
        it says of those of the operand's."""
        return pixels

    def _dilated(self, match):
        """Returns why there is no such convolution, in words, or None, and the Match of it."""
        dilations, of_channels = self._parts(match.attrs, "block", 1)
        if of_channels != 1:
            return "it makes images of channels", None
        reason, padding = None, {"padding": match.attrs["given"]}
        if padding["padding"] is None:
            reason, padding = self._padding(match, dilations)
        changed = padding | {"dilations": self._in_order(match.attrs, 1, dilations)}
        attrs = match.attrs | changed
        return reason, Match(match.nodes, match.operands, match.outputs, attrs)

    def _padding(self, match, dilations):
        """Returns why the convolution cannot have the padding of a match, in words, or None, and
        the padding as attributes."""
        input, filters = (match.operands[name].shape for name in ("input", "filters"))
        sizes = input[2:] if _channels_first(match.attrs) else input[1:-1]
        sizes, windows = sizes.as_list(), filters[:-2].as_list()
        if None in (*sizes, *windows):
            return f"the sizes of image or filters are not known: {sizes}, {windows}", {}
        (paddings, *others), (crops, *more) = (
            self._parts(match.attrs, name, [0, 0]) for name in ("paddings", "crops")
        )
        whole = all(
            (size + sum(pair)) % step == 0
            for size, pair, step in zip(sizes, paddings, dilations, strict=True)
        )
        around = [
            [p - c for p, c in zip(*pairs, strict=True)]
            for pairs in zip(paddings, crops, strict=True)
        ]
        if not whole or min(map(min, around)) < 0 or [*others, *more] != [[0, 0]] * 2:
            return f"paddings {paddings} and crops {crops} are not those of a convolution", {}
        totals = [(size - 1) * step for size, step in zip(windows, dilations, strict=True)]
        if not any(map(any, around)):
            return None, {"padding": b"VALID"}
        if around == [[total // 2, total - total // 2] for total in totals]:
            return None, {"padding": b"SAME"}
        if "explicit_paddings" not in self.convolution.captured[self.anchor]:
            return f"its paddings {around} are neither SAME nor VALID", {}
        pairs = self._in_order(match.attrs, [0, 0], around)
        amounts = [amount for pair in pairs for amount in pair]
        return None, {"padding": b"EXPLICIT", "explicit_paddings": amounts}

    def _parts(self, attrs, name, nothing):
        """Returns what an attribute says of the pixels' dimensions, and of that of channels."""
        (rank,) = self.operands["input"]
        # Stock code begins at the second dimension, and leaves out the last ones.
        known = [*attrs[name], *[nothing] * (rank - 1 - len(attrs[name]))]
        return (known[1:], known[0]) if _channels_first(attrs) else (known[:-1], known[-1])

    def _in_order(self, attrs, nothing, pixels):
        """Returns an attribute of all dimensions of the convolution's images."""
        pixels = self.dimensions(nothing, pixels)
        return (
            [nothing, nothing, *pixels] if _channels_first(attrs) else [nothing, *pixels, nothing]
        )


def _pads(view, paddings):
    """Returns whether what `tf.nn.convolution` computes as paddings are those of "SAME": whether
    any of the constants that it computes them of has amounts."""
    ops, seen = [paddings.op], set()
    while ops:
        op = ops.pop()
        seen.add(op)
        for tensor in op.inputs:
            value = view.constant(tensor) if tensor.shape.rank == 2 else None
            if value is not None and value.any():
                return True
            # What they are computed of beside those is the shape of an image.
            if tensor.op.type != "Shape" and tensor.op not in seen:
                ops.append(tensor.op)
    return False


def _channels_first(attrs):
    return attrs["data_format"].startswith(b"NC")


def _gradients(op, dy):
    """Emits the gradients of an op by its inputs, as they are registered."""
    gradients = ops.get_gradient_function(op)(op, dy)
    return gradients if isinstance(gradients, (list, tuple)) else [gradients]


class DilatedConv1D(DilatedConv2D):
    """batch_to_space(conv1d(space_to_batch(input, block, paddings), filters), block, crops).

    conv1d is conv2d between expand_dims and squeeze.
    """

    family = "dilated_conv1d"
    operands: ClassVar = {"input": (3,), "filters": (3,)}
    convolution = Conv1DAct()

    def maker(self, anchor):
        # Of an image that is none of a line, there is no other.
        op = super().maker(anchor)
        return op.inputs[0].op if op.type == "ExpandDims" else anchor

    def dimensions(self, nothing, pixels):
        return [nothing, *pixels]


class DilatedConv3D(DilatedConv2D):
    """batch_to_space(conv3d(space_to_batch(input, block, paddings), filters), block, crops).

    The paddings and crops are those of "SAME" or "VALID".
    """

    family = "dilated_conv3d"
    anchor = "Conv3D"
    operands: ClassVar = {"input": (5,), "filters": (5,)}
    captured: ClassVar = {"Conv3D": {"data_format": b"NDHWC"}}
    convolution = Conv3DAct()

    def check(self, match):
        _, height, width = self._parts(match.attrs, "block", 1)[0]
        if height != width:
            return "TensorFlow takes the dilations of height and width for each other's"
        return super().check(match)


RULES = (DilatedConv2D(), DilatedConv1D(), DilatedConv3D())
