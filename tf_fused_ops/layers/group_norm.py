"""`FusedGroupNormalization`: keras.layers.GroupNormalization on the fused group norm."""

import keras
import tensorflow as tf
from keras import ops

from tf_fused_ops.layers.fused import FusedLayer
from tf_fused_ops.ops import _decimals, group_norm_act

_MAX_RANK = 5


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedGroupNormalization(FusedLayer, keras.layers.GroupNormalization):
    """Group normalization with activation in one op, and its gradients in another.

    activation(group_norm(inputs))

    Takes the arguments of `keras.layers.GroupNormalization`, has its weights in its order. Axes
    other than the last and 1 run stock ops; sigmoid, softmax and activations that the fused op does
    not know follow it as an op of their own. The reason is in the log at
    TF_CPP_VMODULE=remapper=3.

    Args:
        activation: Activation function, or None for none.
        **kwargs: As for `keras.layers.GroupNormalization`.

    Call arguments:
        inputs: Tensor of rank 2 to 5; float16, bfloat16, float32 or float64.

    Output shape:
        That of the input.
    """

    fused_ops = ("TfFusedOps>GroupNormAct", "TfFusedOps>GroupNormActGrad")
    takes_side_input = False

    def __init__(self, *args, activation=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = keras.activations.get(activation)
        self._settle_jit()

    def _unsuited(self, inputs):
        reason = super()._unsuited(inputs)
        if reason:
            return reason
        rank = inputs.shape.rank
        if not 2 <= rank <= _MAX_RANK:
            return f"the input has rank {rank}"
        if self.axis not in (-1, 1, rank - 1):
            return f"axis {self.axis} is neither the last one nor 1"
        if inputs.dtype == tf.float64 and not _decimals.survives(self.epsilon):
            return f"epsilon {self.epsilon} has more digits than the op's attribute"
        return None

    def call(self, inputs):
        reason = self._objection(inputs)
        if reason:
            self._tell(reason)
            return self.activation(super().call(inputs))
        activation, rest = self._fused_activation()
        wide = "float64" if inputs.dtype == tf.float64 else "float32"
        y = group_norm_act(
            inputs,
            ops.cast(self.gamma, wide) if self.scale else None,
            ops.cast(self.beta, wide) if self.center else None,
            groups=self.groups,
            activation=activation.name,
            epsilon=self.epsilon,
            data_format="NHWC" if self.axis in (-1, inputs.shape.rank - 1) else "NCHW",
            alpha=activation.alpha,
            name=self.name,
        )
        y = ops.cast(y, self.compute_dtype)
        return y if rest is None else rest(y)

    def get_config(self):
        """Returns the stock layer's configuration with the activation."""
        return {
            **super().get_config(),
            "activation": keras.activations.serialize(self.activation),
        }
