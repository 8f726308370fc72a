"""Activations and the ways people write them.

A spelling is stock TensorFlow code. It is traced to obtain a pattern, so it stands for exactly the
ops that this TensorFlow makes of it; commutative operands need no spelling of their own.
"""

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from tf_fused_ops.remapper import pattern


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation of the fused ops.

    Attributes:
        name: Value of the fused ops' `activation` attribute.
        label: How the log calls it.
        spellings: Functions of x (and alpha) made of stock TensorFlow code.
        slope_from_output: Whether the slope can be computed from the activation's output.
        ops: Op types; every spelling has one of them, so that where they are missing none need be
            traced.
        captured: {op type: {attribute: default}} that a match may have any value of.
    """

    name: str
    label: str
    spellings: tuple[Callable, ...]
    slope_from_output: bool
    ops: tuple[str, ...] = ()
    captured: dict = dataclasses.field(default_factory=dict, hash=False, compare=False)

    @property
    def own_op(self):
        """The op type, if the activation is an op of TensorFlow's and so has a gradient op."""
        return self.ops[0] if self.slope_from_output and self.ops else None

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

_SILU = (tf.nn.silu, lambda x: x * tf.sigmoid(x))

_HARD_SIGMOID = (
    lambda x: tf.nn.relu6(x + 3.0) / 6.0,
    lambda x: tf.nn.relu6(x + 3.0) * (1.0 / 6.0),
)

_HARD_SWISH = (
    lambda x: x * tf.nn.relu6(x + 3.0) / 6.0,
    lambda x: x * (tf.nn.relu6(x + 3.0) / 6.0),
    lambda x: x * tf.nn.relu6(x + 3.0) * (1.0 / 6.0),
    lambda x: x * (tf.nn.relu6(x + 3.0) * (1.0 / 6.0)),
)

_MISH = (lambda x: x * tf.tanh(tf.math.softplus(x)),)

NONE = Activation("none", "", (lambda x: x,), True)

ACTIVATIONS = (
    NONE,
    Activation("relu", "Relu", (tf.nn.relu,), True, ("Relu",)),
    Activation("relu6", "Relu6", (tf.nn.relu6,), True, ("Relu6",)),
    Activation("elu", "Elu", (tf.nn.elu,), True, ("Elu",)),
    Activation("selu", "Selu", (tf.nn.selu,), True, ("Selu",)),
    Activation(
        "leaky_relu",
        "LeakyRelu",
        (tf.nn.leaky_relu,),
        True,
        ("LeakyRelu",),
        {"LeakyRelu": {"alpha": 0.2}},
    ),
    Activation("sigmoid", "Sigmoid", (tf.sigmoid,), True, ("Sigmoid",)),
    Activation("tanh", "Tanh", (tf.tanh,), True, ("Tanh",)),
    Activation("softplus", "Softplus", (tf.math.softplus,), False, ("Softplus",)),
    Activation("hard_sigmoid", "HardSigmoid", _HARD_SIGMOID, False, ("Relu6",)),
    Activation("silu", "Silu", _SILU, False, ("Sigmoid",)),
    Activation("hard_swish", "HardSwish", _HARD_SWISH, False, ("Relu6",)),
    Activation("mish", "Mish", _MISH, False, ("Softplus",)),
    Activation("gelu_tanh", "GeluApproximate", _GELU_TANH, False, ("Tanh",)),
    Activation("gelu_erf", "GeluExact", _GELU_ERF, False, ("Erf", "Erfc")),
)


@functools.cache
def traced(activation, spelling, dtype):
    """Returns the pattern of a spelling of an activation, for an operand of unknown shape."""
    attrs = {name: value for group in activation.captured.values() for name, value in group.items()}
    free = {(op_type, name) for op_type, group in activation.captured.items() for name in group}

    def stock(_, z):
        return {"y": spelling(z, **attrs)}

    return pattern.trace(stock, {"z": tf.TensorSpec(None, dtype)}, free=free)
