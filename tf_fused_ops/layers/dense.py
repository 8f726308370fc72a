"""`FusedDense`: keras.layers.Dense on the fused matrix product."""

import keras
from keras import ops

from tf_fused_ops.layers.fused import FusedLayer, lora_or_quantized
from tf_fused_ops.ops import matmul_bias_act


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedDense(FusedLayer, keras.layers.Dense):
    """Dense layer with bias, residual and activation in one op.

    activation(matmul(inputs, kernel) + bias + side_input)

    Takes the arguments of `keras.layers.Dense` and has its weights in its order. LoRA and quantised
    layers run stock ops; sigmoid, softmax and activations that the fused op does not know follow it
    as an op of their own. The reason is in the log at TF_CPP_VMODULE=remapper=3.

    Call arguments:
        inputs: Tensor (batch, ..., channels); float16, bfloat16, float32 or float64.
        side_input: Tensor of the output's shape, added before the activation, or None.
        training: As for `keras.layers.Dense`.

    Output shape:
        (batch, ..., units)
    """

    fused_ops = ("TfFusedOps>MatMulBiasAct", "TfFusedOps>MatMulBiasActGrad")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._settle_jit()

    def _never_fuses(self):
        return lora_or_quantized(self)

    def call(self, inputs, side_input=None, training=None):
        reason = self._objection(inputs)
        if reason:
            self._tell(reason)
            return self._stock(inputs, side_input, training)
        activation, rest = self._fused_activation()
        y = matmul_bias_act(
            inputs,
            ops.convert_to_tensor(self.kernel),
            None if self.bias is None else ops.convert_to_tensor(self.bias),
            activation=activation.name,
            side_input=side_input,
            alpha=activation.alpha,
            name=self.name,
        )
        return y if rest is None else rest(y)

    def quantized_call(self, inputs, side_input=None, training=None):
        """Runs the stock quantised layer.

        Raises:
            ValueError: There is a side input, which no stock layer can add before the activation.
        """
        if side_input is not None:
            raise ValueError(f"Layer {self.name} is quantised and cannot take a side_input.")
        self._tell(self._never_fuses())
        return super().quantized_call(inputs, training=training)

    def _stock(self, inputs, side_input, training):
        if side_input is None:
            return super().call(inputs, training=training)
        y = ops.matmul(inputs, self.kernel)
        if self.bias is not None:
            y = y + self.bias
        return self.activation(y + side_input)
