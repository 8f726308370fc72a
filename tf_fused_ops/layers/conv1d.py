"""`FusedConv1D`: keras.layers.Conv1D on the fused convolution."""

import keras
import tensorflow as tf
from keras import ops

from tf_fused_ops.layers.conv import GroupedConvolution
from tf_fused_ops.ops import conv2d_bias_act


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedConv1D(GroupedConvolution, keras.layers.Conv1D):
    """1D convolution with bias, residual and activation in one op.

    activation(conv1d(inputs, kernel) + bias + side_input)

    Takes the arguments of `keras.layers.Conv1D` and has its weights in its order; dilated and
    causal ones, whose padding is part of the op, are fused, too. LoRA runs stock ops, and grouped
    convolutions do but on the CPU; sigmoid, softmax and activations that the fused op does not know
    follow it as an op of their own. The reason is in the log at TF_CPP_VMODULE=remapper=3.

    Call arguments:
        inputs: Tensor (batch, length, channels), or (batch, channels, length) with
            `data_format="channels_first"`; float16, bfloat16, float32 or float64.
        side_input: Tensor of the output's shape, added before the activation, or None.

    Output shape:
        That of `keras.layers.Conv1D`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._settle_jit()

    @property
    def _height(self):
        """The axis that makes an image of a line."""
        return 1 if self.data_format == "channels_last" else 2

    @property
    def _attributes(self):
        padding = self.padding.upper()
        if self.padding == "causal":
            padding = self._compute_causal_padding()
            padding.insert(self._height, [0, 0])
        return {
            "strides": [1, *self.strides],
            "padding": padding,
            "data_format": self._layout,
            "dilations": [1, *self.dilation_rate],
        }

    def _fuse(self, inputs, bias, side_input=None, **epilogue):
        y = conv2d_bias_act(
            tf.expand_dims(inputs, self._height),
            tf.expand_dims(self._filters, 0),
            bias,
            side_input=None if side_input is None else tf.expand_dims(side_input, self._height),
            **self._attributes,
            **epilogue,
        )
        return tf.squeeze(y, [self._height])

    def _convolve(self, inputs):
        causal = self.padding == "causal"
        return ops.conv(
            ops.pad(inputs, self._compute_causal_padding()) if causal else inputs,
            self.kernel,
            strides=list(self.strides),
            padding="valid" if causal else self.padding,
            dilation_rate=self.dilation_rate,
            data_format=self.data_format,
        )
