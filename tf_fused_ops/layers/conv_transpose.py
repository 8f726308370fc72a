"""`FusedConv2DTranspose`: keras.layers.Conv2DTranspose on the fused transposed convolution."""

import keras
import tensorflow as tf
from keras import ops

from tf_fused_ops.layers.conv import Convolution
from tf_fused_ops.ops import conv2d_transpose_bias_act


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedConv2DTranspose(Convolution, keras.layers.Conv2DTranspose):
    """Transposed 2D convolution with bias, residual and activation in one op, on the CPU.

    activation(conv2d_transpose(inputs, kernel) + bias + side_input)

    Takes the arguments of `keras.layers.Conv2DTranspose` and has its weights in its order. Sigmoid,
    softmax and activations that the fused op does not know follow it as an op of their own. The
    reason is in the log at TF_CPP_VMODULE=remapper=3.

    Call arguments:
        inputs: Tensor (batch, height, width, channels), or (batch, channels, height, width) with
            `data_format="channels_first"`; float16, bfloat16, float32 or float64.
        side_input: Tensor of the output's shape, added before the activation, or None.

    Output shape:
        That of `keras.layers.Conv2DTranspose`.
    """

    fused_ops = ("TfFusedOps>Conv2DTransposeBiasAct", "TfFusedOps>Conv2DTransposeBiasActGrad")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._settle_jit()

    @property
    def _geometry(self):
        return {**super()._geometry, "output_padding": self.output_padding}

    def _sizes(self, inputs):
        """The output's sizes; those that are not known before running are tensors."""
        given = tf.shape(inputs)
        known = [given[i] if size is None else size for i, size in enumerate(inputs.shape)]
        return self.compute_output_shape(known)

    def _fuse(self, inputs, bias, **epilogue):
        sizes = tf.stack(self._sizes(inputs))
        options = {**self._attributes, **epilogue}
        return conv2d_transpose_bias_act(inputs, self._filters, sizes, bias, **options)

    def _convolve(self, inputs):
        return ops.conv_transpose(inputs, self.kernel, **self._geometry)
