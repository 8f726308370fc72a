"""Activations and the ways people write them.

A spelling is stock TensorFlow code. It is traced to obtain a pattern, so it stands for exactly the
ops that this TensorFlow makes of it; commutative operands need no spelling of their own.
"""

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.framework import func_graph

from tf_fused_ops.remapper import pattern


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation of the fused ops.

    Attributes:
        name: Value of the fused ops' `activation` attribute.
        label: How the log calls it.
        spellings: Functions of x (and alpha) made of stock TensorFlow code.
        slope_from_output: Whether the slope can be computed from the activation's output.
        captured: {op type: {attribute: default}} that a match may have any value of.
    """

    name: str
    label: str
    spellings: tuple[Callable, ...]
    slope_from_output: bool
    captured: dict = dataclasses.field(default_factory=dict, hash=False, compare=False)

    def needs_pre_activation(self, attrs):
        """Returns whether the gradient needs the pre-activation, given the captured attributes."""
        return not self.slope_from_output or attrs.get("alpha", 0) < 0


def _gelu_tanh(cube, x):
    return 0.5 * x * (1.0 + tf.tanh(0.7978845608028654 * (x + 0.044715 * cube(x))))


def _gelu_tanh_half_last(cube, x):
    return x * (0.5 * (1.0 + tf.tanh(0.7978845608028654 * (x + 0.044715 * cube(x)))))


_CUBES = (
    lambda x: tf.pow(x, 3),
    lambda x: x * x * x,
    lambda x: x * tf.square(x),
    lambda x: x * (x * x),
)

_GELU_TANH = (
    lambda x: tf.nn.gelu(x, approximate=True),
    *(
        functools.partial(form, cube)
        for form in (_gelu_tanh, _gelu_tanh_half_last)
        for cube in _CUBES
    ),
)

_GELU_ERF = (
    lambda x: tf.nn.gelu(x, approximate=False),
    lambda x: 0.5 * x * (1.0 + tf.math.erf(x / 1.4142135623730951)),
    lambda x: 0.5 * x * (1.0 + tf.math.erf(x * 0.7071067811865476)),
    lambda x: x * (0.5 * (1.0 + tf.math.erf(x / 1.4142135623730951))),
    lambda x: x * (0.5 * (1.0 + tf.math.erf(x * 0.7071067811865476))),
    lambda x: 0.5 * x * tf.math.erfc(-x * 0.7071067811865476),
)

_HARD_SWISH = (
    lambda x: x * tf.nn.relu6(x + 3.0) / 6.0,
    lambda x: x * (tf.nn.relu6(x + 3.0) / 6.0),
    lambda x: x * tf.nn.relu6(x + 3.0) * (1.0 / 6.0),
    lambda x: x * (tf.nn.relu6(x + 3.0) * (1.0 / 6.0)),
)

NONE = Activation("none", "", (lambda x: x,), True)

ACTIVATIONS = (
    NONE,
    Activation("relu", "Relu", (tf.nn.relu,), True),
    Activation("relu6", "Relu6", (tf.nn.relu6,), True),
    Activation("elu", "Elu", (tf.nn.elu,), True),
    Activation("leaky_relu", "LeakyRelu", (tf.nn.leaky_relu,), True, {"LeakyRelu": {"alpha": 0.2}}),
    Activation("sigmoid", "Sigmoid", (tf.sigmoid,), True),
    Activation("tanh", "Tanh", (tf.tanh,), True),
    Activation("silu", "Silu", (tf.nn.silu, lambda x: x * tf.sigmoid(x)), False),
    Activation("hard_swish", "HardSwish", _HARD_SWISH, False),
    Activation("mish", "Mish", (lambda x: x * tf.tanh(tf.math.softplus(x)),), False),
    Activation("gelu_tanh", "GeluApproximate", _GELU_TANH, False),
    Activation("gelu_erf", "GeluExact", _GELU_ERF, False),
)


@functools.cache
def traced_ops(spelling, dtype):
    """Returns the op types of a spelling, in the order of its code."""
    graph = func_graph.FuncGraph("spelling")
    with graph.as_default():
        y = spelling(tf.compat.v1.placeholder(dtype))
    return tuple(op.type for op in pattern.needed_ops(graph, [y]))


@functools.cache
def op_types(spelling, dtype):
    """Returns the op types of a spelling; a graph without them need not be searched."""
    return frozenset(traced_ops(spelling, dtype))
