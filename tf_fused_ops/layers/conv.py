"""`FusedConv2D`: keras.layers.Conv2D on the fused convolution."""

import keras
from keras import ops

from tf_fused_ops._devices import device_type
from tf_fused_ops.layers.fused import FusedLayer, lora_or_quantized
from tf_fused_ops.ops import conv2d_bias_act


class Convolution(FusedLayer):
    """What layers share that run the fused convolution; mixed in as `FusedLayer` is."""

    fused_ops = ("TfFusedOps>Conv2DBiasAct", "TfFusedOps>Conv2DBiasActGrad")
    winograd = False

    @property
    def _filters(self):
        """The kernel as the fused op takes it."""
        return ops.convert_to_tensor(self.kernel)

    def _convolve(self, inputs):
        """The stock convolution without bias and activation."""
        return self.convolution_op(inputs, self.kernel)

    @property
    def _layout(self):
        return "NHWC" if self.data_format == "channels_last" else "NCHW"

    @property
    def _attributes(self):
        """What the fused convolutions take beside tensors and the epilogue."""
        return {
            "strides": list(self.strides),
            "padding": self.padding.upper(),
            "data_format": self._layout,
            "dilations": list(self.dilation_rate),
        }

    @property
    def _geometry(self):
        """What the stock convolutions take beside tensors."""
        return {
            "strides": self.strides,
            "padding": self.padding,
            "data_format": self.data_format,
            "dilation_rate": self.dilation_rate,
        }

    def _fuse(self, inputs, bias, **epilogue):
        """The fused convolution; the epilogue is that of `conv2d_bias_act`."""
        options = {**self._attributes, "winograd": self.winograd, **epilogue}
        return conv2d_bias_act(inputs, self._filters, bias, **options)

    def call(self, inputs, side_input=None):
        reason = self._objection(inputs)
        if reason:
            self._tell(reason)
            return self._stock(inputs, side_input)
        activation, rest = self._fused_activation()
        y = self._fuse(
            inputs,
            None if self.bias is None else ops.convert_to_tensor(self.bias),
            activation=activation.name,
            side_input=side_input,
            alpha=activation.alpha,
            name=self.name,
        )
        return y if rest is None else rest(y)

    def _stock(self, inputs, side_input):
        if side_input is None:
            return super().call(inputs)
        y = self._convolve(inputs)
        if self.bias is not None:
            pixels = (1,) * self.rank
            last = self.data_format == "channels_last"
            y = y + ops.reshape(self.bias, (1, *pixels, -1) if last else (1, -1, *pixels))
        return self.activation(y + side_input)


class GroupedConvolution(Convolution):
    """What layers share whose convolution may be in groups, which are fused on the CPU."""

    def _never_fuses(self):
        return lora_or_quantized(self)

    def _unsuited(self, inputs):
        reason = super()._unsuited(inputs)
        if reason is None and self.groups != 1 and device_type(inputs.device) != "CPU":
            return f"the convolution has {self.groups} groups, which is fused on the CPU alone"
        return reason


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedConv2D(GroupedConvolution, keras.layers.Conv2D):
    """2D convolution with bias, residual and activation in one op.

    activation(conv2d(inputs, kernel) + bias + side_input)

    Takes the arguments of `keras.layers.Conv2D` and has its weights in its order; `winograd=True`
    allows Winograd's algorithm for 3x3 kernels, see `tf_fused_ops.conv2d_bias_act`. LoRA runs stock
    ops, and grouped convolutions do but on the CPU; sigmoid, softmax and activations that the fused
    op does not know follow it as an op of their own. The reason is in the log at
    TF_CPP_VMODULE=remapper=3.

    Call arguments:
        inputs: Tensor (batch, height, width, channels), or (batch, channels, height, width) with
            `data_format="channels_first"`; float16, bfloat16, float32 or float64.
        side_input: Tensor of the output's shape, added before the activation, or None.

    Output shape:
        That of `keras.layers.Conv2D`.
    """

    def __init__(self, *args, winograd=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.winograd = bool(winograd)
        self._settle_jit()

    def get_config(self):
        """Returns the stock layer's configuration, with `winograd` where it is allowed."""
        return {**super().get_config(), **({"winograd": True} if self.winograd else {})}
