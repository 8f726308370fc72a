"""`FusedDepthwiseConv2D`: keras.layers.DepthwiseConv2D on the fused convolution."""

import keras
from keras import ops

from tf_fused_ops._devices import device_type
from tf_fused_ops.layers.conv import Convolution


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedDepthwiseConv2D(Convolution, keras.layers.DepthwiseConv2D):
    """Depthwise 2D convolution with bias, residual and activation in one op, on the CPU.

    activation(depthwise_conv2d(inputs, kernel) + bias + side_input)

    Takes the arguments of `keras.layers.DepthwiseConv2D` and has its weights in its order; strides
    may differ. Sigmoid, softmax and activations that the fused op does not know follow it as an op
    of their own. The reason is in the log at TF_CPP_VMODULE=remapper=3.

    Call arguments:
        inputs: Tensor (batch, height, width, channels), or (batch, channels, height, width) with
            `data_format="channels_first"`; float16, bfloat16, float32 or float64.
        side_input: Tensor of the output's shape, added before the activation, or None.

    Output shape:
        That of `keras.layers.DepthwiseConv2D`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._settle_jit()

    def _unsuited(self, inputs):
        reason = super()._unsuited(inputs)
        if reason is None and device_type(inputs.device) != "CPU":
            return "depthwise convolutions are fused on the CPU alone"
        return reason

    @property
    def _filters(self):
        # Each channel is a group.
        height, width, channels, multiplier = self.kernel.shape
        return ops.reshape(self.kernel, (height, width, 1, channels * multiplier))

    def _convolve(self, inputs):
        return ops.depthwise_conv(
            inputs,
            self.kernel,
            strides=self.strides,
            padding=self.padding,
            data_format=self.data_format,
            dilation_rate=self.dilation_rate,
        )
