"""`FusedDepthwiseConv2D`, `FusedSeparableConv2D`: Keras's layers on the fused convolution."""

import keras
from keras import ops

from tf_fused_ops._devices import device_type
from tf_fused_ops.layers.conv import Convolution
from tf_fused_ops.ops import conv2d_bias_act


class _Depthwise(Convolution):
    """What layers share whose convolution has a group for each channel."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._settle_jit()

    def _unsuited(self, inputs):
        reason = super()._unsuited(inputs)
        if reason is None and device_type(inputs.device) != "CPU":
            return "depthwise convolutions are fused on the CPU alone"
        return reason

    @property
    def _depthwise(self):
        """The depthwise kernel, (height, width, channels, multiplier)."""
        raise NotImplementedError

    @property
    def _filters(self):
        height, width, channels, multiplier = self._depthwise.shape
        return ops.reshape(self._depthwise, (height, width, 1, channels * multiplier))


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedDepthwiseConv2D(_Depthwise, keras.layers.DepthwiseConv2D):
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

    @property
    def _depthwise(self):
        return self.kernel

    def _convolve(self, inputs):
        return ops.depthwise_conv(inputs, self.kernel, **self._geometry)


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedSeparableConv2D(_Depthwise, keras.layers.SeparableConv2D):
    """Depthwise and 1x1 convolution, the latter with bias, residual and activation, on the CPU.

    activation(conv2d(depthwise_conv2d(inputs, depthwise_kernel), pointwise_kernel) + bias +
    side_input)

    Takes the arguments of `keras.layers.SeparableConv2D` and has its weights in its order; strides
    may differ. Sigmoid, softmax and activations that the fused op does not know follow it as an op
    of their own. The reason is in the log at TF_CPP_VMODULE=remapper=3.

    Call arguments:
        inputs: Tensor (batch, height, width, channels), or (batch, channels, height, width) with
            `data_format="channels_first"`; float16, bfloat16, float32 or float64.
        side_input: Tensor of the output's shape, added before the activation, or None.

    Output shape:
        That of `keras.layers.SeparableConv2D`.
    """

    @property
    def _depthwise(self):
        return self.depthwise_kernel

    def _fuse(self, inputs, bias, **epilogue):
        depthwise = super()._fuse(inputs, None, activation="none", name=f"{self.name}_depthwise")
        filters = ops.convert_to_tensor(self.pointwise_kernel)
        return conv2d_bias_act(depthwise, filters, bias, data_format=self._layout, **epilogue)

    def _convolve(self, inputs):
        kernels = self.depthwise_kernel, self.pointwise_kernel
        return ops.separable_conv(inputs, *kernels, **self._geometry)
