"""The activations: their names, stock TensorFlow forms, and what their slope is read from."""

import math

import tensorflow as tf

from tf_fused_ops.ops import _autodiff


# tf.nn.gelu rounds its constants to float32, in float64 as well.
def _gelu_tanh(z):
    return 0.5 * z * (1 + tf.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)))


# The values of the ops' `activation` attribute, as stock TensorFlow computes them.
STOCK = {
    "none": lambda z, alpha: z,
    "relu": lambda z, alpha: tf.nn.relu(z),
    "relu6": lambda z, alpha: tf.nn.relu6(z),
    "elu": lambda z, alpha: tf.nn.elu(z),
    "selu": lambda z, alpha: tf.nn.selu(z),
    "leaky_relu": lambda z, alpha: tf.nn.leaky_relu(z, alpha),
    "sigmoid": lambda z, alpha: tf.sigmoid(z),
    "tanh": lambda z, alpha: tf.tanh(z),
    "softplus": lambda z, alpha: tf.nn.softplus(z),
    "hard_sigmoid": lambda z, alpha: tf.nn.relu6(z + 3) / 6,
    "silu": lambda z, alpha: z * tf.sigmoid(z),
    "hard_swish": lambda z, alpha: z * tf.nn.relu6(z + 3) / 6,
    "mish": lambda z, alpha: z * tf.tanh(tf.nn.softplus(z)),
    "gelu_tanh": lambda z, alpha: _gelu_tanh(z),
    "gelu_erf": lambda z, alpha: 0.5 * z * (1 + tf.math.erf(z * math.sqrt(0.5))),
}

# Self-normalizing networks' lambda, and lambda times their alpha (Klambauer et al., 2017).
_SELU_SCALE = 1.0507009873554805
_SELU_LIMIT = 1.7580993408473769

# The slope read off the activation's value y.
_SLOPE_FROM_VALUE = {
    "none": lambda y, alpha: tf.ones_like(y),
    "relu": lambda y, alpha: tf.cast(y > 0, y.dtype),
    "relu6": lambda y, alpha: tf.cast((y > 0) & (y < 6), y.dtype),
    "elu": lambda y, alpha: tf.where(y < 0, y + 1, tf.ones_like(y)),
    "selu": lambda y, alpha: tf.where(y < 0, y + _SELU_LIMIT, _SELU_SCALE * tf.ones_like(y)),
    "leaky_relu": lambda y, alpha: tf.where(y > 0, tf.ones_like(y), tf.cast(alpha, y.dtype)),
    "sigmoid": lambda y, alpha: y * (1 - y),
    "tanh": lambda y, alpha: 1 - y * y,
}

_ALIASES = {"linear": "none", "swish": "silu", "hard_silu": "hard_swish"}


def canonical_name(activation, approximate=False):
    """Returns the attribute value for what a caller passed as `activation`.

    Args:
        activation: A name of the table, None or "linear" for none, "swish", "hard_silu", or "gelu".
        approximate: Whether "gelu" is the tanh form; otherwise it is the erf form.

    Raises:
        ValueError: The name is unknown.
    """
    if activation is None:
        return "none"
    if activation == "gelu":
        return "gelu_tanh" if approximate else "gelu_erf"
    name = _ALIASES.get(activation, activation) if isinstance(activation, str) else activation
    if not isinstance(name, str) or name not in STOCK:
        known = ", ".join([*STOCK, "gelu"])
        raise ValueError(f"activation must be one of {known}; got {activation!r}")
    return name


def slope_from_value(activation, alpha):
    """Whether the slope can be read off the value; otherwise it needs the pre-activation."""
    return activation in _SLOPE_FROM_VALUE and not (activation == "leaky_relu" and alpha < 0)


def gradient(activation, dy, saved, alpha):
    """The gradient of the pre-activation in stock TensorFlow ops.

    Args:
        activation: A name of the table.
        dy: The gradient of the activation's value.
        saved: The value where `slope_from_value`, otherwise the pre-activation; unused for "none".
        alpha: leaky_relu's slope below zero.

    Returns:
        A tensor of dy's shape and dtype.
    """
    if activation == "none":
        return dy
    if slope_from_value(activation, alpha):
        return dy * _SLOPE_FROM_VALUE[activation](saved, alpha)
    return gradient_from_argument(activation, dy, saved, alpha)


def gradient_from_argument(activation, dy, z, alpha):
    """As `gradient`, from the pre-activation `z` for every activation."""
    return _autodiff.pull_back(lambda z: [STOCK[activation](z, alpha)], [z], [dy])[0]
