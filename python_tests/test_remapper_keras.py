"""What Keras layers emit is fused: every activation, in a train step."""

import keras
import pytest
import tensorflow as tf
from remapping import assert_same, gradient_count, rule_counts, values

from tf_fused_ops.function import function

ACTIVATIONS = {
    "relu": "relu",
    "relu6": "relu6",
    "elu": "elu",
    "leaky_relu": "leaky_relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "silu": "silu",
    "hard_silu": "hard_swish",
    "mish": "mish",
    "gelu": "gelu_erf",
}
LAYERS = {
    "matmul_bias": (lambda activation: keras.layers.Dense(5, activation=activation), (6, 7)),
    "conv2d_bias": (
        lambda activation: keras.layers.Conv2D(4, 3, activation=activation),
        (2, 6, 6, 3),
    ),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("family", LAYERS)
def test_layer(family, activation):
    make, shape = LAYERS[family]
    layer = make(activation)
    (x,) = values(shape)
    layer(x)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return loss, tape.gradient(loss, layer.trainable_variables)

    compiled = function(step)
    assert_same(compiled(x), tf.function(step)(x))
    assert rule_counts(compiled) == {f"{family}_{ACTIVATIONS[activation]}": 1}
    assert gradient_count(compiled) == 1


def test_small_network():
    """Convolutions and a GELU head: a stated number of fusions, gradients equal to stock."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(8, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )
    (x,) = values((4, 8, 8, 1))
    labels = tf.constant([1, 2, 3, 4])

    def step(x):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.reduce_mean(losses)
        return loss, tape.gradient(loss, model.trainable_variables)

    signature = [tf.TensorSpec([None, 8, 8, 1])]
    compiled = function(step, input_signature=signature)
    assert_same(compiled(x), tf.function(step, input_signature=signature)(x))
    assert rule_counts(compiled) == {
        "conv2d_bias_relu": 2,
        "matmul_bias_gelu_erf": 1,
        "matmul_bias": 1,
    }
    assert gradient_count(compiled) == 4
