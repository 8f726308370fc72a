"""What the tests of the Keras layers share: the table of layers, and what is done to them."""

import collections

import keras
import numpy as np
import tensorflow as tf
from remapping import FUSED, assert_same, op_counts, values

from tf_fused_ops import layers

KINDS = (
    layers.FusedConv1D,
    layers.FusedConv2D,
    layers.FusedBatchNormalization,
    layers.FusedGroupNormalization,
    layers.FusedLayerNormalization,
    layers.FusedRMSNormalization,
    layers.FusedDense,
    layers.FusedDepthwiseConv2D,
    layers.FusedSeparableConv2D,
    layers.FusedConv2DTranspose,
    layers.FusedConv3D,
    layers.FusedLSTM,
    layers.FusedGRU,
    layers.FusedSimpleRNN,
)

Case = collections.namedtuple(
    "Case", "fused stock options shape output_shape op count", defaults=[1]
)

CASES = {
    "conv": Case(
        layers.FusedConv2D,
        keras.layers.Conv2D,
        {"filters": 4, "kernel_size": 3, "padding": "same"},
        (2, 6, 6, 3),
        (2, 6, 6, 4),
        FUSED["Conv2D"],
    ),
    "conv_strided": Case(
        layers.FusedConv2D,
        keras.layers.Conv2D,
        {"filters": 4, "kernel_size": (3, 2), "strides": 2, "use_bias": False},
        (2, 9, 8, 3),
        (2, 4, 4, 4),
        FUSED["Conv2D"],
    ),
    "conv_dilated": Case(
        layers.FusedConv2D,
        keras.layers.Conv2D,
        {"filters": 4, "kernel_size": 3, "dilation_rate": 2, "padding": "same"},
        (2, 6, 6, 3),
        (2, 6, 6, 4),
        FUSED["Conv2D"],
    ),
    "conv_channels_first": Case(
        layers.FusedConv2D,
        keras.layers.Conv2D,
        {"filters": 4, "kernel_size": 3, "data_format": "channels_first"},
        (2, 3, 6, 6),
        (2, 4, 4, 4),
        FUSED["Conv2D"],
    ),
    "conv_grouped": Case(
        layers.FusedConv2D,
        keras.layers.Conv2D,
        {"filters": 6, "kernel_size": 3, "padding": "same", "groups": 2},
        (2, 6, 6, 4),
        (2, 6, 6, 6),
        FUSED["Conv2D"],
    ),
    "depthwise_conv": Case(
        layers.FusedDepthwiseConv2D,
        keras.layers.DepthwiseConv2D,
        {"kernel_size": 3, "padding": "same"},
        (2, 6, 6, 5),
        (2, 6, 6, 5),
        FUSED["Conv2D"],
    ),
    "depthwise_conv_strided": Case(
        layers.FusedDepthwiseConv2D,
        keras.layers.DepthwiseConv2D,
        {"kernel_size": (3, 2), "strides": 2, "depth_multiplier": 3, "use_bias": False},
        (2, 9, 8, 4),
        (2, 4, 4, 12),
        FUSED["Conv2D"],
    ),
    "depthwise_conv_channels_first": Case(
        layers.FusedDepthwiseConv2D,
        keras.layers.DepthwiseConv2D,
        {"kernel_size": 3, "dilation_rate": 2, "data_format": "channels_first"},
        (2, 4, 7, 7),
        (2, 4, 3, 3),
        FUSED["Conv2D"],
    ),
    "separable_conv": Case(
        layers.FusedSeparableConv2D,
        keras.layers.SeparableConv2D,
        {"filters": 7, "kernel_size": 3, "padding": "same"},
        (2, 6, 6, 5),
        (2, 6, 6, 7),
        FUSED["Conv2D"],
        2,
    ),
    "separable_conv_strided": Case(
        layers.FusedSeparableConv2D,
        keras.layers.SeparableConv2D,
        {
            "filters": 3,
            "kernel_size": (3, 2),
            "strides": 2,
            "depth_multiplier": 2,
            "use_bias": False,
        },
        (2, 9, 8, 4),
        (2, 4, 4, 3),
        FUSED["Conv2D"],
        2,
    ),
    "separable_conv_channels_first": Case(
        layers.FusedSeparableConv2D,
        keras.layers.SeparableConv2D,
        {"filters": 5, "kernel_size": 3, "dilation_rate": 2, "data_format": "channels_first"},
        (2, 4, 7, 7),
        (2, 5, 3, 3),
        FUSED["Conv2D"],
        2,
    ),
    "conv_transpose": Case(
        layers.FusedConv2DTranspose,
        keras.layers.Conv2DTranspose,
        {"filters": 4, "kernel_size": 4, "strides": 2, "padding": "same"},
        (2, 5, 6, 3),
        (2, 10, 12, 4),
        FUSED["transposed convolution"],
    ),
    "conv_transpose_padded": Case(
        layers.FusedConv2DTranspose,
        keras.layers.Conv2DTranspose,
        {
            "filters": 4,
            "kernel_size": (3, 2),
            "strides": (2, 3),
            "output_padding": (1, 0),
            "use_bias": False,
        },
        (2, 5, 6, 3),
        (2, 12, 17, 4),
        FUSED["transposed convolution"],
    ),
    "conv_transpose_dilated": Case(
        layers.FusedConv2DTranspose,
        keras.layers.Conv2DTranspose,
        {"filters": 4, "kernel_size": 3, "dilation_rate": 2, "padding": "same"},
        (2, 6, 6, 3),
        (2, 6, 6, 4),
        FUSED["transposed convolution"],
    ),
    "conv_transpose_channels_first": Case(
        layers.FusedConv2DTranspose,
        keras.layers.Conv2DTranspose,
        {"filters": 4, "kernel_size": 3, "strides": 2, "data_format": "channels_first"},
        (2, 3, 5, 6),
        (2, 4, 11, 13),
        FUSED["transposed convolution"],
    ),
    "conv1d": Case(
        layers.FusedConv1D,
        keras.layers.Conv1D,
        {"filters": 4, "kernel_size": 3, "padding": "same", "strides": 2},
        (2, 9, 3),
        (2, 5, 4),
        FUSED["Conv2D"],
    ),
    "conv1d_causal": Case(
        layers.FusedConv1D,
        keras.layers.Conv1D,
        {"filters": 4, "kernel_size": 3, "padding": "causal", "dilation_rate": 2},
        (2, 9, 3),
        (2, 9, 4),
        FUSED["Conv2D"],
    ),
    "conv3d": Case(
        layers.FusedConv3D,
        keras.layers.Conv3D,
        {"filters": 4, "kernel_size": 3, "padding": "same"},
        (2, 4, 6, 5, 3),
        (2, 4, 6, 5, 4),
        FUSED["Conv3D"],
    ),
    "conv3d_strided": Case(
        layers.FusedConv3D,
        keras.layers.Conv3D,
        {"filters": 4, "kernel_size": (1, 3, 2), "strides": (1, 2, 2), "use_bias": False},
        (2, 3, 9, 8, 3),
        (2, 3, 4, 4, 4),
        FUSED["Conv3D"],
    ),
    "conv3d_dilated": Case(
        layers.FusedConv3D,
        keras.layers.Conv3D,
        {"filters": 4, "kernel_size": 2, "dilation_rate": (1, 2, 3)},
        (2, 4, 6, 7, 3),
        (2, 3, 4, 4, 4),
        FUSED["Conv3D"],
    ),
    "batch_norm": Case(
        layers.FusedBatchNormalization,
        keras.layers.BatchNormalization,
        {"momentum": 0.7},
        (4, 5, 5, 3),
        (4, 5, 5, 3),
        FUSED["FusedBatchNormV3"],
    ),
    "batch_norm_rank_2": Case(
        layers.FusedBatchNormalization,
        keras.layers.BatchNormalization,
        {"epsilon": 1e-2, "scale": False},
        (8, 3),
        (8, 3),
        FUSED["FusedBatchNormV3"],
    ),
    "batch_norm_channels_first": Case(
        layers.FusedBatchNormalization,
        keras.layers.BatchNormalization,
        {"axis": 1, "center": False},
        (4, 3, 5, 5),
        (4, 3, 5, 5),
        FUSED["FusedBatchNormV3"],
    ),
    "dense": Case(
        layers.FusedDense,
        keras.layers.Dense,
        {"units": 5},
        (6, 4),
        (6, 5),
        FUSED["MatMul"],
    ),
    "dense_rank_3": Case(
        layers.FusedDense,
        keras.layers.Dense,
        {"units": 5, "use_bias": False},
        (2, 3, 4),
        (2, 3, 5),
        FUSED["MatMul"],
    ),
}


def pair(case, activation=None, dtype="float32"):
    """Returns a fused layer and what computes the same of stock layers, with equal weights.

    Returns:
        The fused layer, the stock layer, and the function (x, side, training) of the latter.
    """
    fused = case.fused(activation=activation, dtype=dtype, **case.options)
    # TensorFlow's own gradient of a channels-first bias is wrong on the processor.
    first = case.options.get("data_format") == "channels_first"
    layout = {"data_format": "channels_last"} if first else {}
    stock = case.stock(dtype=dtype, **{**case.options, **layout})
    fused.build(case.shape)
    stock.build(tuple(case.shape[i] for i in (0, 2, 3, 1)) if first else case.shape)
    randomize(fused)
    stock.set_weights(fused.get_weights())
    activate = keras.activations.get(activation)

    def reference(x, side=None, training=False):
        x = tf.transpose(x, (0, 2, 3, 1)) if first else x
        y = stock(x, training=training) if "batch" in stock.name else stock(x)
        y = tf.transpose(y, (0, 3, 1, 2)) if first else y
        return activate(y if side is None else y + tf.cast(side, y.dtype))

    return fused, stock, reference


def call(layer, x, side=None, training=False):
    """Calls a fused layer; only batch norm is told about training."""
    options = {"training": training} if "batch" in layer.name else {}
    return layer(x, **options) if side is None else layer(x, side, **options)


def classes(model):
    """Returns the class names of a model's layers, without inputs."""
    names = [type(layer).__name__ for layer in model.layers]
    return [name for name in names if name != "InputLayer"]


def randomize(layer):
    """Gives a layer weights that are neither zero nor one; variances stay positive."""
    for i, weight in enumerate(layer.weights):
        weight.assign(
            keras.random.uniform(weight.shape, 0.2, 1.0, seed=i) * (1 if i % 2 else -1)
            if "variance" not in weight.name
            else keras.random.uniform(weight.shape, 0.2, 1.0, seed=i)
        )


def trained(function, layer, x, dy, *side):
    """Returns the output and all gradients of a training step: of the inputs, of the variables."""
    with tf.GradientTape() as tape:
        tape.watch([x, *side])
        y = function(x, *side)
    variables = [v.value for v in layer.trainable_variables]
    return y, tape.gradient(y, [x, *side, *variables], output_gradients=dy)


def filled(make, shape, target):
    """Returns a stock model with weights that are neither zero nor one, and four inputs and targets
    of these shapes."""
    keras.utils.set_random_seed(3)
    model = make()
    for layer in model.layers:
        if "batch" in layer.name:
            randomize(layer)
    return model, *values((4, *shape), (4, *target))


def assert_same_weights(model, other):
    """Asserts equal weights of the layers of the same names, be their order another."""
    for layer in (layer for layer in other.layers if layer.weights):
        found = model.get_layer(layer.name).get_weights()
        for weight, expected in zip(found, layer.get_weights(), strict=True):
            assert_same(tf.constant(weight), tf.constant(expected), units=1024)


def check_conversion(model, x, kind, op):
    """Asserts that a model is converted and back: equal outputs, and a fused layer and op for each
    of its convolutions of a kind; returns the class names of the converted one's layers."""
    converted = layers.convert(model)
    count = classes(converted).count(f"Fused{kind}")
    for training in (False, True):
        assert_same(converted(x, training=training), model(x, training=training), units=512)
    counts = op_counts(tf.function(converted).get_concrete_function(x))
    assert counts[op] == count
    back = layers.revert(converted)
    assert classes(back).count(kind) == count
    assert not any(name.startswith("Fused") for name in classes(back))
    assert_same(back(x), model(x), units=512)
    assert_same_weights(back, model)
    return classes(converted)


def check_training(model, x, y):
    """Trains a model and its conversion, which is returned, for three steps, which move the weights
    by far more than rounding does; asserts equal losses and weights."""
    before = [w.numpy() for w in model.trainable_weights]
    losses, converted = [], layers.convert(model)
    for made in (model, converted):
        made.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        losses.append([made.train_on_batch(x, y) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][2] < losses[0][0]
    moved = [np.abs(w - old).max() for w, old in zip(model.trainable_weights, before, strict=True)]
    assert min(moved) > 1e-4
    assert_same_weights(model, converted)
    return converted


def check_saving(model, x, op, folder):
    """Asserts that a converted model is saved, loaded and exported with its fused ops."""
    converted = layers.convert(model)
    converted.save(folder / "model.keras")
    loaded = keras.saving.load_model(folder / "model.keras")
    assert classes(loaded) == classes(converted)
    assert_same(loaded(x), converted(x))
    converted.export(str(folder / "saved"), verbose=False)
    archive = tf.saved_model.load(str(folder / "saved"))
    assert_same(archive.serve(x), model(x), units=512)
    expected = op_counts(tf.function(converted).get_concrete_function(x))[op]
    assert op_counts(archive.signatures["serving_default"])[op] == expected > 0


def fused_counts(function, *args):
    """Returns {fused op type: number} in the graph of a tf.function."""
    counts = op_counts(tf.function(function).get_concrete_function(*args))
    return {name: count for name, count in counts.items() if name.startswith("TfFusedOps>")}
