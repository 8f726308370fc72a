"""`FusedLayerNormalization` and `FusedRMSNormalization`: Keras's layers on the fused ops."""

import keras
import tensorflow as tf
from keras import ops

from tf_fused_ops.layers.fused import FusedLayer
from tf_fused_ops.ops import _decimals, layer_norm, rms_norm


class _OverLastAxis(FusedLayer):
    """A normalization that is fused over the last axis alone."""

    fused_ops = ("TfFusedOps>LayerNorm", "TfFusedOps>LayerNormGrad")
    takes_activation = False
    takes_side_input = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._settle_jit()

    def _unsuited(self, inputs):
        reason = super()._unsuited(inputs)
        if reason:
            return reason
        if self.axis not in ([-1], [inputs.shape.rank - 1]):
            return f"axis {self.axis} is not the last one alone"
        if inputs.dtype == tf.float64 and not _decimals.survives(self.epsilon):
            return f"epsilon {self.epsilon} has more digits than the op's attribute"
        return None

    def _normalize(self, inputs, wide):
        """The fused op, with weights of dtype `wide`."""
        raise NotImplementedError

    def _fused_call(self, inputs):
        reason = self._objection(inputs)
        if reason:
            self._tell(reason)
            return super().call(inputs)
        wide = "float64" if inputs.dtype == tf.float64 else "float32"
        return ops.cast(self._normalize(inputs, wide), self.compute_dtype)


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedLayerNormalization(_OverLastAxis, keras.layers.LayerNormalization):
    """Layer normalization in one op, and its gradients in another.

    Takes the arguments of `keras.layers.LayerNormalization`, has its weights in its order. Axes
    other than the last run stock ops, and so does `rms_scaling`. The reason is in the log at
    TF_CPP_VMODULE=remapper=3.

    Call arguments:
        inputs: Tensor of rank 2 or more; float16, bfloat16, float32 or float64.

    Output shape:
        That of the input.
    """

    def _never_fuses(self):
        return "rms_scaling is on" if self.rms_scaling else None

    def call(self, inputs):
        return self._fused_call(inputs)

    def _normalize(self, inputs, wide):
        return layer_norm(
            inputs,
            ops.cast(self.gamma, wide) if self.scale else None,
            ops.cast(self.beta, wide) if self.center else None,
            epsilon=self.epsilon,
            name=self.name,
        )


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedRMSNormalization(_OverLastAxis, keras.layers.RMSNormalization):
    """RMS normalization in one op, and its gradients in another.

    Takes the arguments of `keras.layers.RMSNormalization`, has its weight. Axes other than the last
    run stock ops. The reason is in the log at TF_CPP_VMODULE=remapper=3.

    Call arguments:
        x: Tensor of rank 2 or more; float16, bfloat16, float32 or float64.

    Output shape:
        That of the input.
    """

    def call(self, x):
        return self._fused_call(x)

    def _normalize(self, inputs, wide):
        scale = ops.cast(self.scale, wide)
        return rms_norm(inputs, scale, epsilon=self.epsilon, name=self.name)
