"""Rules for transposed convolutions with bias, side input and activation."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper.contraction import AddAct, ImageBiasAct
from tf_fused_ops.remapper.convolution import Conv2DBiasAct, is_gradient
from tf_fused_ops.remapper.lines import Line


class Conv2DTransposeBiasAct(ImageBiasAct):
    """act(bias_add(conv2d_transpose(input, filters, output_shape), bias)).

    Variants, by attribute:
        y_shape: The static shape of the result; what autodiff makes of the sum depends on it.
    """

    family = "conv2d_transpose_bias"
    anchor = "Conv2DBackpropInput"
    operands: ClassVar = {"input": (4,), "filters": (4,), "bias": (1, 4), "output_shape": (1,)}
    contraction = ("input", "filters")
    differentiable = ("input", "filters", "bias")
    captured: ClassVar = {"Conv2DBackpropInput": Conv2DBiasAct.captured["Conv2D"]}
    keyed = ("data_format",)
    fused_ops = ("TfFusedOps>Conv2DTransposeBiasAct", "TfFusedOps>Conv2DTransposeBiasActGrad")

    def default_attrs(self):
        return super().default_attrs() | {"y_shape": [None] * 4}

    def variants(self, view, anchor):
        shape = anchor.outputs[0].shape
        if shape.rank == 4 and not is_gradient(view, anchor, "Conv2D"):
            for attrs in super().variants(view, anchor):
                yield attrs | {"y_shape": shape.as_list()}

    def operand_dtype(self, name, dtype, attrs):
        return tf.int32 if name == "output_shape" else dtype

    def linear(self, attrs, input, filters, output_shape, bias=None):
        conv = {name: attrs[name] for name in self.captured[self.anchor]}
        z = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=output_shape, filter=filters, out_backprop=input, **conv
        )
        z.set_shape(attrs["y_shape"])
        return self.add_bias(attrs, z, bias)

    def check(self, match):
        return self._misfit(match) or super().check(match)

    def _misfit(self, match):
        """Returns why the shapes of a match rule the fused op out, or None."""
        sizes = match.operands["output_shape"]
        if sizes.shape != [4]:
            return f"{sizes.name} of shape {sizes.shape} is not the shape of an image"
        input, filters = (match.operands[name].shape for name in self.contraction)
        output = self.contraction_op(match).outputs[0].shape
        channel = 1 if match.attrs["data_format"] == b"NCHW" else -1
        found = [output[channel], input[channel]]
        if None in found or found != filters[-2:].as_list():
            of_filters = f"{filters[-2]} and {filters[-1]}"
            return (
                f"its channels are not known or do not fit: {found[0]} in the output and "
                f"{found[1]} in the input, {of_filters} in the filters"
            )
        return None

    def further_inputs(self, match):
        return (match.operands["output_shape"],)

    def forward_attributes(self, match):
        return {}

    def label(self, match):
        return super().label(match).replace(self.anchor, "Conv2DTranspose")


class Conv2DTransposeAct(Conv2DTransposeBiasAct):
    """act(conv2d_transpose(input, filters, output_shape))."""

    family = "conv2d_transpose"
    operands: ClassVar = {"input": (4,), "filters": (4,), "output_shape": (1,)}
    differentiable = ("input", "filters")


class Conv2DTransposeBiasAddAct(AddAct, Conv2DTransposeBiasAct):
    """act(bias_add(conv2d_transpose(input, filters, output_shape), bias) + side_input)."""

    family = "conv2d_transpose_bias_add"
    operands: ClassVar = Conv2DTransposeBiasAct.operands | {"side_input": (4,)}
    differentiable = (*Conv2DTransposeBiasAct.differentiable, "side_input")


class Conv1DTransposeBiasAct(Line, Conv2DTransposeBiasAct):
    """act(bias_add(conv1d_transpose(input, filters, output_shape), bias)): conv2d_transpose between
    expand_dims and squeeze."""

    family = "conv1d_transpose_bias"
    operands: ClassVar = {"input": (3,), "filters": (3,), "bias": (1, 3), "output_shape": (1,)}
    counts_back = False
