"""Which Keras activations the fused ops know."""

import dataclasses

import keras
import tensorflow as tf

_DEFAULT_SLOPE = 0.2


@dataclasses.dataclass(frozen=True)
class Fusable:
    """An activation of the fused ops.

    Attributes:
        name: Value of the ops' `activation` attribute.
        alpha: leaky_relu's slope below zero.
    """

    name: str
    alpha: float = _DEFAULT_SLOPE


@keras.saving.register_keras_serializable(package="tf_fused_ops")
def gelu_tanh(x):
    """GELU in its tanh form, for which Keras has no name of its own.

    Args:
        x: A floating-point tensor.

    Returns:
        A tensor of x's shape and dtype.
    """
    return keras.activations.gelu(x, approximate=True)


# Sigmoid and softmax are missing on purpose: Keras's losses read the logits off what they return.
_FUNCTIONS = {
    keras.activations.linear: "none",
    keras.activations.relu: "relu",
    keras.activations.relu6: "relu6",
    keras.activations.elu: "elu",
    keras.activations.selu: "selu",
    keras.activations.leaky_relu: "leaky_relu",
    keras.activations.tanh: "tanh",
    keras.activations.softplus: "softplus",
    keras.activations.hard_sigmoid: "hard_sigmoid",
    keras.activations.silu: "silu",
    keras.activations.hard_silu: "hard_swish",
    keras.activations.mish: "mish",
    keras.activations.gelu: "gelu_erf",
    gelu_tanh: "gelu_tanh",
    keras.ops.relu: "relu",
    keras.ops.relu6: "relu6",
    keras.ops.elu: "elu",
    keras.ops.selu: "selu",
    keras.ops.leaky_relu: "leaky_relu",
    keras.ops.tanh: "tanh",
    keras.ops.softplus: "softplus",
    keras.ops.hard_sigmoid: "hard_sigmoid",
    keras.ops.silu: "silu",
    keras.ops.hard_silu: "hard_swish",
    keras.ops.gelu: "gelu_tanh",
    tf.nn.relu: "relu",
    tf.nn.relu6: "relu6",
    tf.nn.elu: "elu",
    tf.nn.selu: "selu",
    tf.nn.leaky_relu: "leaky_relu",
    tf.nn.tanh: "tanh",
    tf.nn.softplus: "softplus",
    tf.nn.silu: "silu",
    tf.nn.gelu: "gelu_erf",
}


def fusable(activation):
    """Returns the `Fusable` that computes what a Keras activation does, or None.

    Args:
        activation: A function, a layer (ReLU, LeakyReLU, ELU, Activation) or None.
    """
    if activation is None:
        return Fusable("none")
    if isinstance(activation, keras.Layer):
        return _of_layer(activation)
    try:
        name = _FUNCTIONS.get(activation)
    except TypeError:
        return None
    return Fusable(name) if name else None


def _of_layer(layer):
    kind = type(layer)
    if layer.activity_regularizer is not None:  # which is applied in the layer's own call
        return None
    if kind is keras.layers.Activation:
        return fusable(layer.activation)
    if kind is keras.layers.ELU and layer.alpha == 1:
        return Fusable("elu")
    if kind is keras.layers.LeakyReLU:
        return Fusable("leaky_relu", float(layer.negative_slope))
    if kind is keras.layers.ReLU and layer.threshold == 0:
        if layer.max_value is None:
            slope = float(layer.negative_slope)
            return Fusable("leaky_relu", slope) if slope else Fusable("relu")
        if layer.max_value == 6 and layer.negative_slope == 0:
            return Fusable("relu6")
    return None
