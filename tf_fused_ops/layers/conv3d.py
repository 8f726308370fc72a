"""`FusedConv3D`: keras.layers.Conv3D on the fused convolution of volumes."""

import keras

from tf_fused_ops.layers.conv import Convolution
from tf_fused_ops.layers.fused import lora_or_quantized
from tf_fused_ops.ops import conv3d_bias_act
from tf_fused_ops.remapper.conv3d import GAPS, STOCK_IS_FASTER, leaves_pixels, stock_is_faster


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedConv3D(Convolution, keras.layers.Conv3D):
    """3D convolution with bias, residual and activation in one op, on the CPU.

    activation(conv3d(inputs, kernel) + bias + side_input)

    Takes the arguments of `keras.layers.Conv3D` and has its weights in its order. LoRA, groups,
    `data_format="channels_first"`, "same" padding with strides that leave two pixels or more
    between windows, and many channels where stock ops are faster run those; sigmoid, softmax and
    activations that the fused op does not know follow it as an op of their own. The reason is in
    the log at TF_CPP_VMODULE=remapper=3.

    Call arguments:
        inputs: Tensor (batch, depth, height, width, channels); float16, bfloat16, float32 or
            float64.
        side_input: Tensor of the output's shape, added before the activation, or None.

    Output shape:
        That of `keras.layers.Conv3D`.
    """

    fused_ops = ("TfFusedOps>Conv3DBiasAct", "TfFusedOps>Conv3DBiasActGrad")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._settle_jit()

    def _never_fuses(self):
        if self.groups != 1:
            return f"the convolution has {self.groups} groups"
        if self.data_format != "channels_last":
            return "its channels come first"
        if self.padding == "same" and leaves_pixels(
            self.kernel_size, self.strides, self.dilation_rate
        ):
            return GAPS
        return lora_or_quantized(self)

    def _unsuited(self, inputs):
        if stock_is_faster(self.kernel.shape, self.dilation_rate, inputs.dtype):
            return STOCK_IS_FASTER
        return super()._unsuited(inputs)

    @property
    def _attributes(self):
        attributes = super()._attributes
        del attributes["data_format"]
        return attributes

    def _fuse(self, inputs, bias, **epilogue):
        return conv3d_bias_act(inputs, self._filters, bias, **self._attributes, **epilogue)
