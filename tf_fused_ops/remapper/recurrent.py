"""Keras's recurrent layers, whose loops are replaced while they are traced.

A layer's loop is a graph of its own, and its gradient another, so there is no chain to find
afterwards. Keras lets backends put an op of theirs in the place of a loop; here the method that
asks them, `inner_loop` of a stock layer, is wrapped once, and does nothing unless an enclosing
graph belongs to the decorator.
"""

import dataclasses
import functools
import sys
import threading

import tensorflow as tf
from tensorflow.python.framework import ops

from tf_fused_ops.remapper import log, source
from tf_fused_ops.remapper.report import Fusion, Refusal

# Forward, gradient.
FUSED_OPS = ("TfFusedOps>Recurrent", "TfFusedOps>RecurrentGrad")
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Loop:
    """A kind of layer whose loop is replaced.

    Attributes:
        name: The name of the rule, by which it is switched off.
        layer: The name of Keras's layer.
    """

    name: str
    layer: str

    @property
    def code(self):
        """The stock code."""
        return f"def stock(x):\n    return keras.layers.{self.layer}(units)(x)\n"


LOOPS = (Loop("lstm", "LSTM"), Loop("gru", "GRU"), Loop("simple_rnn", "SimpleRNN"))


def install(find_options):
    """Wraps Keras's layers if Keras is there and computes with TensorFlow; but once.

    Args:
        find_options: Returns the options of the decorator around a graph, or None where it is left
            alone.
    """
    keras = sys.modules.get("keras")
    if keras is None or keras.backend.backend() != "tensorflow":
        return
    with _lock:
        for loop in LOOPS:
            layer = getattr(keras.layers, loop.layer)
            if not hasattr(layer.inner_loop, "_tfo_loop"):
                layer.inner_loop = _wrapped(loop, layer, find_options)


def take_reports(graph):
    """Returns what has been done to the loops of layers in a graph since this was asked last:
    fusions, with the gradients that are in the same graph, and refusals."""
    fused, refused = getattr(graph, "_tfo_loops", ((), ()))
    graph._tfo_loops = [], []
    return [_with_gradients(graph, fusion) for fusion in fused], list(refused)


def _wrapped(loop, layer, find_options):
    original = layer.inner_loop

    @functools.wraps(original)
    def inner_loop(self, sequences, initial_state, mask, training=False):
        graph = ops.get_default_graph()
        # What runs while a graph is traced is no part of it.
        ours = type(self) is layer and not tf.executing_eagerly()
        options = find_options(graph) if ours else None
        if options is None or not options.allows(loop.name):
            return original(self, sequences, initial_state, mask, training=training)
        from tf_fused_ops.layers import recurrent

        if not hasattr(graph, "_tfo_loops"):
            graph._tfo_loops = [], []
        fused, refused = graph._tfo_loops
        reason = recurrent.objection(self, sequences, mask, training)
        if reason:
            log.vlog(log.NEAR_MISS, f"Not fused: {loop.name} at {self.name}: {reason}")
            refused.append(Refusal(loop.name, (self.name,), reason))
            return original(self, sequences, initial_state, mask, training=training)
        outputs = recurrent.run(self, sequences, initial_state, mask, training)
        op = outputs[2][0].op
        message = f"Fuse loop of {self.name} ({loop.layer}): {op.name}"
        log.vlog(log.FUSION, message)
        origin = source.Origin(op)
        fused.append(Fusion(loop.name, (self.name,), (op.name,), (message,), 0, origin))
        return outputs

    inner_loop._tfo_loop = loop
    return inner_loop


def _with_gradients(graph, fusion):
    """Counts the gradients that a graph has of a layer's op in it."""
    (name,) = fusion.fused
    _, gradient = FUSED_OPS
    y = graph.get_operation_by_name(name).outputs[0]
    backward = [op for op in y.consumers() if op.type == gradient]
    lines = [f"Fuse gradient of the loop of {fusion.nodes[0]}: {op.name}" for op in backward]
    for line in lines:
        log.vlog(log.FUSION, line)
    names = (*fusion.fused, *(op.name for op in backward))
    return dataclasses.replace(
        fusion, fused=names, messages=(*fusion.messages, *lines), gradients=len(backward)
    )
