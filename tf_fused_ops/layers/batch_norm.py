"""`FusedBatchNormalization`: keras.layers.BatchNormalization on the fused batch norm."""

import keras
import tensorflow as tf
from keras import ops

from tf_fused_ops import distribute
from tf_fused_ops.layers.fused import FusedLayer
from tf_fused_ops.ops import _decimals, batch_norm_act, sync_batch_norm_act

_MAX_RANK = 5
_OPS = ("TfFusedOps>BatchNormAct", "TfFusedOps>BatchNormActGrad")
_SYNCHRONIZED_OPS = (
    "TfFusedOps>BatchNormMoments",
    "TfFusedOps>BatchNormApply",
    "TfFusedOps>BatchNormGradSums",
    "TfFusedOps>BatchNormGradApply",
)


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedBatchNormalization(FusedLayer, keras.layers.BatchNormalization):
    """Batch normalization with residual and activation in one op, in training and inference.

    activation(batch_norm(inputs) + side_input)

    Takes the arguments of `keras.layers.BatchNormalization`, has its weights in its order. Masks,
    renorm and axes other than the last and 1 run stock ops; sigmoid, softmax and activations that
    the fused op does not know follow it as an op of their own. The reason is in the log at
    TF_CPP_VMODULE=remapper=3.

    With `synchronized=True` the batch is that of all replicas of a `tf.distribute` strategy, or of
    the group of `tf_fused_ops.distribute.set_communicator`, as in `sync_batch_norm_act`.

    Args:
        activation: Activation function, or None for none.
        **kwargs: As for `keras.layers.BatchNormalization`.

    Call arguments:
        inputs: Tensor of rank 2 to 5; float16, bfloat16, float32 or float64.
        side_input: Tensor of the input's shape, added before the activation, or None.
        training: Whether to normalise with the statistics of the batch and to update the moving
            ones; has no effect while `trainable` is False.
        mask: As for `keras.layers.BatchNormalization`.
        inputs_mask: The mask of `inputs` where there is a side input; Keras passes it.

    Output shape:
        That of the input.

    Raises:
        ValueError: The statistics are synchronised by a communicator, but stock ops have to run,
            which do not know it.
    """

    def __init__(self, *args, activation=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = keras.activations.get(activation)
        self._settle_jit()

    @property
    def fused_ops(self):
        """The op types that the layer needs."""
        return _SYNCHRONIZED_OPS if self.synchronized else _OPS

    def _never_fuses(self):
        return "renorm is on" if self.renorm else None

    def _unsuited(self, inputs):
        reason = super()._unsuited(inputs)
        if reason:
            return reason
        rank = inputs.shape.rank
        if rank > _MAX_RANK:
            return f"the input has rank {rank}"
        if self.axis not in (-1, 1, rank - 1):
            return f"axis {self.axis} is neither the last one nor 1"
        for name in ("epsilon", "momentum") if inputs.dtype == tf.float64 else ():
            if not _decimals.survives(getattr(self, name)):
                return f"{name} {getattr(self, name)} has more digits than the op's attribute"
        return None

    def call(self, inputs, side_input=None, training=None, mask=None, inputs_mask=None):
        mask = inputs_mask if mask is None else mask
        reason = self._objection(inputs) or (None if mask is None else "there is a mask")
        if reason:
            self._tell(reason)
            self._check_stock_synchronizes(reason)
            y = super().call(inputs, training=training, mask=mask)
            return self.activation(y if side_input is None else y + side_input)
        return self._fused(inputs, side_input, bool(training and self.trainable))

    def _check_stock_synchronizes(self, reason):
        group = distribute.current() if self.synchronized else None
        if not isinstance(group, distribute.ReplicaContext | None):
            raise ValueError(
                f"layer {self.name} cannot synchronise its statistics by {type(group).__name__}, "
                f"since stock ops have to run: {reason}"
            )

    def _fused(self, inputs, side_input, learn):
        activation, rest = self._fused_activation()
        wide = "float64" if inputs.dtype == tf.float64 else "float32"
        last = self.axis in (-1, inputs.shape.rank - 1)
        batch_norm = sync_batch_norm_act if self.synchronized else batch_norm_act
        y, new_mean, new_variance, _, _ = batch_norm(
            inputs,
            ops.cast(self.gamma, wide) if self.scale else None,
            ops.cast(self.beta, wide) if self.center else None,
            ops.cast(self.moving_mean, wide),
            ops.cast(self.moving_variance, wide),
            None if side_input is None else ops.cast(side_input, inputs.dtype),
            activation=activation.name,
            epsilon=self.epsilon,
            momentum=self.momentum,
            training=learn,
            # Keras averages the biased variance.
            unbiased=False,
            data_format="NHWC" if last else "NCHW",
            alpha=activation.alpha,
            name=self.name,
        )
        if learn:
            self.moving_mean.assign(new_mean)
            self.moving_variance.assign(new_variance)
        y = ops.cast(y, self.compute_dtype)
        return y if rest is None else rest(y)

    def get_config(self):
        """Returns the stock layer's configuration with the activation."""
        return {
            **super().get_config(),
            "activation": keras.activations.serialize(self.activation),
        }
