"""Finds runs of Keras layers that one fused layer can stand for."""

import collections
import dataclasses

import keras

from tf_fused_ops.layers.activation import fusable, gelu_tanh
from tf_fused_ops.layers.batch_norm import FusedBatchNormalization
from tf_fused_ops.layers.conv import FusedConv2D
from tf_fused_ops.layers.conv1d import FusedConv1D
from tf_fused_ops.layers.conv3d import FusedConv3D
from tf_fused_ops.layers.conv_transpose import FusedConv2DTranspose
from tf_fused_ops.layers.dense import FusedDense
from tf_fused_ops.layers.depthwise_conv import FusedDepthwiseConv2D, FusedSeparableConv2D
from tf_fused_ops.layers.group_norm import FusedGroupNormalization
from tf_fused_ops.layers.layer_norm import FusedLayerNormalization, FusedRMSNormalization
from tf_fused_ops.layers.recurrent import FusedGRU, FusedLSTM, FusedSimpleRNN
from tf_fused_ops.remapper import log

# Exact classes: a subclass may compute anything.
FUSED = {
    keras.layers.Conv1D: FusedConv1D,
    keras.layers.Conv2D: FusedConv2D,
    keras.layers.BatchNormalization: FusedBatchNormalization,
    keras.layers.Dense: FusedDense,
    keras.layers.DepthwiseConv2D: FusedDepthwiseConv2D,
    keras.layers.SeparableConv2D: FusedSeparableConv2D,
    keras.layers.Conv2DTranspose: FusedConv2DTranspose,
    keras.layers.Conv3D: FusedConv3D,
    keras.layers.GroupNormalization: FusedGroupNormalization,
    keras.layers.LayerNormalization: FusedLayerNormalization,
    keras.layers.RMSNormalization: FusedRMSNormalization,
    keras.layers.LSTM: FusedLSTM,
    keras.layers.GRU: FusedGRU,
    keras.layers.SimpleRNN: FusedSimpleRNN,
}
STOCK = {fused: stock for stock, fused in FUSED.items()}

# Functions that are called on symbolic tensors become operations of Keras, not layers.
_OPERATIONS = {
    "Relu": lambda operation: keras.activations.relu,
    "Relu6": lambda operation: keras.activations.relu6,
    "Silu": lambda operation: keras.activations.silu,
    "Gelu": lambda operation: gelu_tanh if operation.approximate else keras.activations.gelu,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Steps that become one fused layer.

    Attributes:
        steps: The steps in order; the first is the convolution, normalization or matrix product.
        activation: The activation, or None to keep the first layer's.
        side: The symbolic tensor that is added, or None.
    """

    steps: tuple
    activation: object = None
    side: object = None


def find(steps, outputs, calls):
    """Finds the runs of a model.

    Args:
        steps: All steps, inputs first.
        outputs: The symbolic tensors that leave the model.
        calls: {id of layer: number of its calls}, in this model and those around and in it.

    Returns:
        A list of runs without common steps; every layer that can be fused alone begins one.
    """
    search = _Search(steps, outputs, calls)
    # From the outputs back: of two summands it is the later one that takes the sum in.
    return [run for step in reversed(steps) for run in search.run(step)]


class _Search:
    def __init__(self, steps, outputs, calls):
        self._leaving = {id(tensor) for tensor in outputs}
        self._calls = calls
        self._readers = collections.defaultdict(list)
        self._taken = set()
        for step in steps:
            for tensor in step.inputs:
                self._readers[id(tensor)].append(step)

    def run(self, head):
        """Returns the run that a step begins, in a list, which is empty if it begins none."""
        layer = head.operation
        fused = FUSED.get(type(layer), type(layer))
        if fused not in STOCK:
            return []
        reason = fused._never_fuses(layer)
        if reason:
            tell(layer.name, reason)
            return []
        steps, activation, side = [head], None, None
        if fused.takes_activation and self._extensible(head):
            add = self._reader(head) if fused.takes_side_input else None
            side = self._other_summand(head, add)
            if side is not None:
                steps.append(add)
            follower = self._reader(steps[-1])
            activation = self._activation(head, follower)
            if activation is not None:
                steps.append(follower)
        self._taken.update(steps)
        return [Run(tuple(steps), activation, side)]

    def _extensible(self, head):
        """Whether what follows may become part of the layer."""
        layer = head.operation
        activation = getattr(layer, "activation", None)
        return (
            len(head.inputs) == 1
            and self._calls[id(layer)] == 1
            and layer.activity_regularizer is None
            and (activation is None or activation is keras.activations.linear)
        )

    def _reader(self, step):
        """Returns the one step that reads the only output of a step, or None."""
        tensor = step.outputs[0]
        readers = self._readers[id(tensor)]
        if len(step.outputs) != 1 or id(tensor) in self._leaving or len(readers) != 1:
            return None
        return None if readers[0] in self._taken else readers[0]

    def _other_summand(self, head, add):
        """Returns the tensor that `add` adds to the output of `head`, or None."""
        if add is None or not _is_sum(add.operation) or len(add.inputs) != 2:
            return None
        (y,) = head.outputs
        if not _alike(head.operation, add.operation):
            return None
        side = add.inputs[add.inputs[0] is y]
        reason = _cannot_add(y, side)
        if reason:
            tell(f"{head.operation.name} with {add.operation.name}", reason)
            return None
        return side

    def _activation(self, head, follower):
        """Returns the activation that a step computes, for the fused layer to compute, or None."""
        if follower is None or len(follower.inputs) != 1:
            return None
        operation = follower.operation
        if not _alike(head.operation, operation):
            return None
        if not isinstance(operation, keras.Layer):
            return _of_operation(operation)
        found = fusable(operation)
        if found is None:
            return None
        if type(operation) is keras.layers.Activation:
            return operation.activation
        named = {"relu": keras.activations.relu, "relu6": keras.activations.relu6}
        return named.get(found.name, operation)


def _of_operation(operation):
    kind = type(operation)
    make = _OPERATIONS.get(kind.__name__) if kind.__module__ == "keras.src.ops.nn" else None
    return make(operation) if make else None


def _cannot_add(y, side):
    """Returns why the sum of two symbolic tensors cannot be fused, in words, or None."""
    if any(getattr(tensor, "_keras_mask", None) is not None for tensor in (y, side)):
        return "a summand has a mask"
    if side.dtype != y.dtype:
        return f"the summands have types {y.dtype} and {side.dtype}"
    if None in side.shape[1:] or tuple(side.shape) != tuple(y.shape):
        return f"shapes {y.shape} and {side.shape} are not known to be equal"
    return None


def _is_sum(operation):
    kind = type(operation)
    if kind is keras.layers.Add:
        return True
    return kind.__name__ == "Add" and kind.__module__ == "keras.src.ops.numpy"


def _alike(layer, follower):
    """Whether a layer may compute in the follower's place: same types, nothing on the side."""
    if not isinstance(follower, keras.Layer):
        return True
    return follower.activity_regularizer is None and follower.compute_dtype == layer.compute_dtype


def tell(what, reason):
    """Logs why a layer is not fused."""
    log.vlog(log.NEAR_MISS, f"Not fused: layer {what}: {reason}")
