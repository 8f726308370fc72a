"""`FusedLSTM`, `FusedGRU` and `FusedSimpleRNN`: Keras's recurrent layers on the fused ops."""

import keras
import tensorflow as tf
from keras import ops, tree

from tf_fused_ops.layers.fused import FusedLayer, name_of, unsuited
from tf_fused_ops.ops import gru, lstm, simple_rnn
from tf_fused_ops.remapper.recurrent import FUSED_OPS

_SPELLINGS = (keras.activations, keras.ops, tf.nn)
_ACTIVATIONS = {getattr(where, name): name for where in _SPELLINGS for name in ("tanh", "relu")}
_SIGMOIDS = [where.sigmoid for where in _SPELLINGS]
_CELLS = (keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell)


def never_fuses(layer):
    """Returns why the configuration of a recurrent layer, stock or fused, rules the fused op out,
    in words, or None."""
    cell = layer.cell
    if type(cell) not in _CELLS:
        return f"its cell is a {type(cell).__name__}"
    if cell.activation not in _ACTIVATIONS:
        return f"activation {name_of(cell.activation)} is neither tanh nor relu"
    gates = getattr(cell, "recurrent_activation", None)
    if gates is not None and gates not in _SIGMOIDS:
        return f"recurrent_activation {name_of(gates)} is not sigmoid"
    if not getattr(cell, "reset_after", True):
        return "reset_after is False: the product needs the reset gate"
    return None


def objection(layer, sequences, mask, training):
    """Returns why a call of a recurrent layer, stock or fused, cannot be fused, in words, or None.

    Args:
        layer: The layer.
        sequences: Its input.
        mask: The mask of time steps, also in a list, or None.
        training: Whether dropout applies.
    """
    reason = never_fuses(layer) or unsuited(FUSED_OPS, sequences)
    if reason:
        return reason
    if sequences.shape.rank != 3:
        return f"the input has rank {sequences.shape.rank}"
    mask = _only(mask)
    if mask is not None and mask.shape.rank != 2:
        return f"the mask has rank {mask.shape.rank}"
    if training and layer.cell.recurrent_dropout:
        return "recurrent_dropout changes the states of every step"
    if training and layer.cell.dropout and getattr(layer.cell, "implementation", 2) == 1:
        return "implementation 1 has a dropout for each gate"
    return None


def run(layer, sequences, initial_state, mask, training):
    """Computes what the `inner_loop` of a recurrent layer, stock or fused, does in one op.

    Args:
        layer: The layer.
        sequences: Its input, [batch, steps, features].
        initial_state: The states before the first step.
        mask: Tensor [batch, steps] of the steps that count, also in a list, or None.
        training: Whether dropout applies.

    Returns:
        (the last output, all outputs, the states behind the last step).
    """
    cell, states = layer.cell, tree.flatten(initial_state)
    # A GRU reads but the first.
    states = states[: 2 if type(cell) is keras.layers.LSTMCell else 1]
    # Cells with gates have none at 1.
    drops = cell.dropout > 0 and (cell.dropout < 1 or type(cell) is keras.layers.SimpleRNNCell)
    if training and drops:
        sequences = sequences * ops.expand_dims(cell.get_dropout_mask(sequences[:, 0]), 1)
    dtype = cell.compute_dtype
    kernels = [ops.cast(kernel, dtype) for kernel in (cell.kernel, cell.recurrent_kernel)]
    bias = None if cell.bias is None else ops.cast(cell.bias, dtype)
    batch, steps = tf.unstack(tf.shape(sequences)[:2])
    states = [_spread(state, [batch, layer.units]) for state in states]
    mask = _only(mask)
    if mask is not None:
        mask = _spread(ops.cast(mask, "bool"), [batch, steps])
    y, states = _function(cell, bias)(
        ops.cast(sequences, dtype),
        *kernels,
        initial_state=states if len(states) > 1 else states[0],
        mask=mask,
        activation=_ACTIVATIONS[cell.activation],
        go_backwards=layer.go_backwards,
        name=layer.name,
    )
    states = tree.flatten(states)
    last = states[0]
    if mask is not None:
        if layer.zero_output_for_mask:
            y = ops.where(mask[..., None], y, ops.zeros_like(y))
        # Not a state: before any step that counts there are zeros.
        last = y[:, 0 if layer.go_backwards else -1]
    return last, ops.flip(y, axis=1) if layer.go_backwards else y, states


def _only(mask):
    """Returns the first of the masks that Keras has for several inputs."""
    return tree.flatten(mask)[0] if tree.is_nested(mask) else mask


def _spread(value, sizes):
    """Returns a tensor for every row of the batch, also where it has but one row."""
    return tf.broadcast_to(value, sizes) if value.shape[0] == 1 else value


def _function(cell, bias):
    """Returns the function of a cell with its bias."""

    def with_bias(function, **biases):
        return lambda *args, **kwargs: function(*args, **biases, **kwargs)

    if type(cell) is keras.layers.LSTMCell:
        return with_bias(lstm, bias=bias)
    if type(cell) is keras.layers.SimpleRNNCell:
        return with_bias(simple_rnn, bias=bias)
    if bias is None:
        return gru
    return with_bias(gru, bias=bias[0], recurrent_bias=bias[1])


class _FusedRecurrent(FusedLayer):
    fused_ops = FUSED_OPS
    takes_activation = False
    takes_side_input = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._settle_jit()

    def _never_fuses(self):
        return never_fuses(self)

    def inner_loop(self, sequences, initial_state, mask, training=False):
        reason = objection(self, sequences, mask, training)
        if reason is None:
            return run(self, sequences, initial_state, mask, training)
        self._tell(reason)
        return super().inner_loop(sequences, initial_state, mask, training=training)


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedLSTM(_FusedRecurrent, keras.layers.LSTM):
    """Long short-term memory with all steps in one op, and their gradients in another.

    Takes the arguments of `keras.layers.LSTM` and has its weights in its order. Activations other
    than tanh and relu, gates other than by sigmoid, and recurrent dropout in training run stock
    ops; `unroll` and `use_cudnn` count only there. The reason is in the log at
    TF_CPP_VMODULE=remapper=3.

    Call arguments:
        sequences: Tensor (batch, steps, features); float16, bfloat16, float32 or float64.
        initial_state: As for `keras.layers.LSTM`.
        mask: As for `keras.layers.LSTM`.
        training: As for `keras.layers.LSTM`.

    Output shape:
        That of the stock layer.
    """


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedGRU(_FusedRecurrent, keras.layers.GRU):
    """Gated recurrent units with all steps in one op, and their gradients in another.

    Takes the arguments of `keras.layers.GRU` and has its weights in its order. `reset_after=False`,
    activations other than tanh and relu, gates other than by sigmoid, and recurrent dropout in
    training run stock ops; `unroll` and `use_cudnn` count only there. The reason is in the log at
    TF_CPP_VMODULE=remapper=3.

    Call arguments:
        sequences: Tensor (batch, steps, features); float16, bfloat16, float32 or float64.
        initial_state: As for `keras.layers.GRU`.
        mask: As for `keras.layers.GRU`.
        training: As for `keras.layers.GRU`.

    Output shape:
        That of the stock layer.
    """


@keras.saving.register_keras_serializable(package="tf_fused_ops")
class FusedSimpleRNN(_FusedRecurrent, keras.layers.SimpleRNN):
    """A fully connected recurrent layer with all steps in one op, and their gradients in another.

    Takes the arguments of `keras.layers.SimpleRNN` and has its weights in its order. Activations
    other than tanh and relu, and recurrent dropout in training run stock ops; `unroll` counts only
    there. The reason is in the log at TF_CPP_VMODULE=remapper=3.

    Call arguments:
        sequences: Tensor (batch, steps, features); float16, bfloat16, float32 or float64.
        initial_state: As for `keras.layers.SimpleRNN`.
        mask: As for `keras.layers.SimpleRNN`.
        training: As for `keras.layers.SimpleRNN`.

    Output shape:
        That of the stock layer.
    """
