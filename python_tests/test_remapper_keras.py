"""What Keras layers emit is fused: every activation, in a train step."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    gradient_count,
    op_counts,
    reasons,
    rule_counts,
    step_of,
    values,
)

from tf_fused_ops.function import function

ACTIVATIONS = {
    "relu": "relu",
    "relu6": "relu6",
    "elu": "elu",
    "selu": "selu",
    "leaky_relu": "leaky_relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "softplus": "softplus",
    "hard_sigmoid": "hard_sigmoid",
    "silu": "silu",
    "hard_silu": "hard_swish",
    "mish": "mish",
    "gelu": "gelu_erf",
}
LAYERS = {
    "matmul_bias": (lambda activation: keras.layers.Dense(5, activation=activation), (6, 7)),
    "matmul": (
        lambda activation: keras.layers.Dense(5, activation=activation, use_bias=False),
        (6, 7),
    ),
    "dense": (
        lambda activation: keras.layers.Dense(5, activation=activation, use_bias=False),
        (2, 3, 7),
    ),
    "batch_matmul": (
        lambda activation: keras.layers.EinsumDense("abc,cd->abd", (None, 5), activation),
        (2, 3, 7),
    ),
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
        "sparse_cross_entropy": 1,
    }
    assert gradient_count(compiled) == 5


# Architecture -> the fusions of a train step of unknown batch, all with their gradients, besides
# the updates of variables.
ARCHITECTURES = {
    "ResNet50": {
        "conv2d_moments": 53,
        "conv2d_bias": 52,
        "pad_conv2d_bias": 1,
        "moments_batch_norm": 4,
        "moments_batch_norm_relu": 33,
        "moments_batch_norm_add_relu": 16,
        "matmul_bias": 1,
        "sparse_cross_entropy": 1,
    },
    "VGG16": {
        "conv2d_bias": 5,
        "conv2d_bias_relu": 8,
        "matmul_bias": 1,
        "sparse_cross_entropy": 1,
        "matmul_bias_relu": 2,
        "relu_max_pool": 5,
    },
    "MobileNetV3Small": {
        "conv2d_moments": 23,
        "grouped_conv2d": 7,
        "trained_conv2d": 23,
        "pad_conv2d": 4,
        "conv2d_bias": 1,
        "conv2d_bias_hard_sigmoid": 9,
        "conv2d_bias_hard_swish": 1,
        "conv2d_bias_relu": 9,
        "moments_batch_norm": 5,
        "moments_batch_norm_add": 6,
        "moments_batch_norm_hard_swish": 18,
        "moments_batch_norm_relu": 5,
    },
    "EfficientNetV2B0": {
        "conv2d_moments": 59,
        "grouped_conv2d": 16,
        "trained_conv2d": 43,
        "conv2d_bias_sigmoid": 16,
        "conv2d_bias_silu": 16,
        "matmul_bias": 1,
        "sparse_cross_entropy": 1,
        "moments_batch_norm": 5,
        "moments_batch_norm_add": 15,
        "moments_batch_norm_silu": 39,
    },
    "ConvNeXtTiny": {
        "conv2d_bias": 22,
        "dense_bias": 18,
        "dense_bias_gelu_erf": 18,
        "layer_norm": 23,
        "matmul_bias": 1,
        "sparse_cross_entropy": 1,
    },
}
# What is gone from a ResNet altogether.
STOCK = {"Rsqrt", "RsqrtGrad", "Conv2D", "Conv2DBackpropFilter", "Relu"}


@pytest.fixture
def float64():
    """Keras in double precision: training amplifies rounding, so float32 would hide mistakes."""
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name, float64):
    """A train step: loss, gradients, new weights and moving averages of stock, and a stated count
    of fusions."""
    keras.utils.set_random_seed(0)
    build = getattr(keras.applications, name)
    model = build(weights=None, input_shape=(32, 32, 3), classes=10)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    (x,) = values((4, 32, 32, 3), dtype="float64")
    labels = tf.constant([1, 2, 3, 4])

    def step(x, labels):
        with tf.GradientTape() as tape:
            probabilities = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, probabilities)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, gradients

    signature = [tf.TensorSpec([None, 32, 32, 3], tf.float64), tf.TensorSpec([None], tf.int32)]
    compiled = function(step, input_signature=signature)
    start = model.get_weights()
    results = []
    for run in (step, compiled):
        model.set_weights(start)
        loss, gradients = run(x, labels)
        results.append([loss, *gradients, *map(tf.convert_to_tensor, model.get_weights())])
    updates = {"gradient_descent": len(model.trainable_variables)}
    fused = ARCHITECTURES[name] | {"sparse_cross_entropy": 1}
    assert rule_counts(compiled) == fused | updates
    joined = ARCHITECTURES[name].get("conv2d_moments", 0)  # forward alone
    assert gradient_count(compiled) == sum(fused.values()) - joined
    counts = op_counts(compiled.get_concrete_function())
    if name == "ResNet50":
        assert not counts.keys() & STOCK
    largest = max(float(tf.norm(value)) for value in results[0])
    for found, expected in zip(*reversed(results), strict=True):
        assert float(tf.norm(found - expected)) <= 1e-6 * largest


DENSE = {
    "rank_3": ((2, 3, 6), (2, 3, 6)),
    "rank_4": ((2, 3, 4, 6), (2, 3, 4, 6)),
    "unknown_batch": ((2, 3, 6), (None, 3, 6)),
    "unknown_time": ((2, 3, 6), (None, None, 6)),
    "batch_of_one": ((1, 3, 6), (1, 3, 6)),
    "equal_sizes": ((6, 6, 6), (6, 6, 6)),
}


@pytest.mark.parametrize("family", ["dense_bias", "dense"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_dense_of_higher_rank(name, residual, family):
    """What Keras makes of a dense layer on sequences: tensordot, in static and dynamic form."""
    shape, known = DENSE[name]
    layer = keras.layers.Dense(6, use_bias=family == "dense_bias")
    layer.build(shape)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x) + x if residual else layer(x)
            loss = tf.reduce_sum(keras.activations.gelu(y) ** 2)
        return loss, tape.gradient(loss, [x, *layer.trainable_variables])

    signature = [tf.TensorSpec(known)]
    compiled = function(step, input_signature=signature)
    args = values(shape)
    assert_same(compiled(*args), tf.function(step, input_signature=signature)(*args), units=256)
    rule = f"{family}_add_gelu_erf" if residual else f"{family}_gelu_erf"
    assert (rule_counts(compiled), gradient_count(compiled)) == ({rule: 1}, 1)
    assert "MatMul" not in op_counts(compiled.get_concrete_function())


@pytest.mark.parametrize("use_bias", [False, True])
def test_dense_of_higher_rank_with_broadcast_side_input(use_bias):
    layer = keras.layers.Dense(6, use_bias=use_bias)
    layer.build((2, 3, 6))

    def forward(x, side):
        return tf.nn.relu(layer(x) + side)

    family, fused = ("dense_bias_add", {"dense_bias": 1}) if use_bias else ("dense_add", {})
    compiled = check(forward, values((2, 3, 6), (2, 1, 6)), fused)
    assert "may broadcast" in reasons(compiled)[f"{family}_relu"]


def test_product_in_another_layout():
    """A tensordot over another axis is a dense layer on what it transposes."""

    def forward(x, w, b):
        return tf.nn.relu(tf.nn.bias_add(tf.tensordot(x, w, [[1], [0]]), b))

    operands = values((2, 3, 6), (3, 5), (5,))
    check(forward, operands, {"dense_bias_relu": 1})
    check(step_of(forward), operands, {"dense_bias_relu": 1}, gradients=1, units=256)
