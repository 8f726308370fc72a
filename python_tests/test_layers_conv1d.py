"""The layer for convolutions of lines: what the stock layer computes, in one op each way."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_cases import classes, fused_counts, randomize
from remapping import FUSED, assert_same, op_counts, values

from tf_fused_ops import layers
from tf_fused_ops.layers import conv, fused

LAYER, STOCK = layers.FusedConv1D, keras.layers.Conv1D
OP = FUSED["Conv2D"]
# The operands of a product have a gradient op each.
BOTH_WAYS = {OP: 1, f"{OP}Grad": 2}
LINES = (2, 9, 6)
OPTIONS = {
    "valid": {"kernel_size": 4},
    "valid, strides": {"kernel_size": 2, "strides": 3, "use_bias": False},
    "valid, dilated": {"kernel_size": 3, "dilation_rate": 4},
    "same": {"kernel_size": 3, "padding": "same"},
    "same, strides": {"kernel_size": 4, "strides": 2, "padding": "same"},
    "same, dilated": {"kernel_size": 2, "dilation_rate": 3, "padding": "same"},
    "causal": {"kernel_size": 3, "padding": "causal"},
    "causal, strides": {"kernel_size": 3, "strides": 2, "padding": "causal"},
    "causal, dilated": {"kernel_size": 2, "dilation_rate": 8, "padding": "causal"},
    "groups": {"kernel_size": 3, "groups": 2, "padding": "same"},
    "groups, causal": {"kernel_size": 3, "groups": 3, "padding": "causal"},
    "points": {"kernel_size": 1},
}
EACH = pytest.mark.parametrize("name", OPTIONS)
LAYOUT = pytest.mark.parametrize("layout", ["channels_last", "channels_first"])


@pytest.fixture
def told(monkeypatch):
    """The lines that the layers and the conversion log."""
    lines = []
    monkeypatch.setattr(fused.log, "vlog", lambda level, line: lines.append(line))
    return lines


def swapped(tensor, layout):
    """Returns lines with the channels last in the layout, or the other way round."""
    return tf.transpose(tensor, (0, 2, 1)) if layout == "channels_first" else tensor


def layer_and_linear(layout="channels_last", dtype="float32", activation=None, **options):
    """Returns a fused layer, and the stock layer of the same weights without activation, whose
    channels are last, since TensorFlow has no kernel for others on a CPU."""
    options = {"filters": 12, "dtype": dtype, **options}
    layer, stock = LAYER(data_format=layout, activation=activation, **options), STOCK(**options)
    layer.build(tuple(swapped(tf.zeros(LINES), layout).shape))
    stock.build(LINES)
    randomize(layer)
    stock.set_weights(layer.get_weights())
    return layer, stock


def trained(function, layer, x, dy, *side):
    """Returns the output and all gradients of a training step."""
    with tf.GradientTape() as tape:
        tape.watch([x, *side])
        y = function(x, *side)
    variables = [v.value for v in layer.trainable_variables]
    return y, *tape.gradient(y, [x, *side, *variables], output_gradients=dy)


@pytest.mark.parametrize("sizes", ["known", "unknown"])
@pytest.mark.parametrize("side", [False, True])
@LAYOUT
@EACH
def test_as_stock(name, layout, side, sizes, told):
    layer, linear = layer_and_linear(layout, activation="tanh", **OPTIONS[name])
    y_shape = linear.compute_output_shape(LINES)
    given = values(LINES, *[y_shape] * (1 + side))

    def reference(x, *side):
        return tf.tanh(sum(side, linear(x)))

    def step(*given):
        found = trained(layer, layer, *(swapped(t, layout) for t in given))
        # The output, and the gradients of what is lines.
        lines = 2 + side
        return [swapped(t, layout) for t in found[:lines]], found[lines:]

    unknown = sizes == "unknown"
    specs = [tf.TensorSpec([None, None, t.shape[2]] if unknown else t.shape) for t in given]
    found = tf.function(step, input_signature=specs)(*given)
    assert_same(found, trained(reference, linear, *given), units=256)
    assert told == []
    assert fused_counts(step, *specs) == BOTH_WAYS


@pytest.mark.parametrize("dtype", ["float64", "mixed_float16", "mixed_bfloat16"])
def test_policies(dtype):
    layer, stock = layer_and_linear(dtype=dtype, **OPTIONS["causal, dilated"])
    (x,) = values(LINES)
    assert_same(layer(x), stock(x), units=8)
    assert fused_counts(layer, x) == {OP: 1}


@pytest.mark.parametrize("side", [False, True])
def test_lora_is_left_to_stock(side, told):
    options = {"filters": 4, "kernel_size": 3, "padding": "causal", "lora_rank": 2}
    layer, stock = LAYER(activation="relu", **options), STOCK(**options)
    (x,) = values(LINES)
    for made in (layer, stock):
        made.build(x.shape)
    randomize(layer)
    stock.set_weights(layer.get_weights())
    z = stock(x)
    others = values(z.shape, seed=1) if side else []
    assert_same(layer(x, *others), keras.activations.relu(z + others[0] if side else z))
    assert "LoRA" in told[0]
    assert fused_counts(layer, x) == {}


def test_groups_on_another_device(told, monkeypatch):
    monkeypatch.setattr(conv, "device_type", lambda _: "GPU")
    layer, stock = layer_and_linear(**OPTIONS["groups"])
    (x,) = values(LINES)
    assert_same(layer(x), stock(x))
    assert "2 groups" in told[0]


def temporal_net():
    """Causal convolutions of growing dilation with residual sums, as of speech and of series."""
    inputs = x = keras.Input((32, 4))
    for dilation in (1, 2, 4):
        y = STOCK(6, 2, padding="causal", dilation_rate=dilation, activation="relu")(x)
        y = STOCK(6, 2, padding="causal", dilation_rate=dilation, use_bias=False)(y)
        y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
        x = keras.layers.ReLU()(keras.layers.Add()([STOCK(6, 1)(x), y]))
    return keras.Model(inputs, STOCK(2, 1, activation="tanh")(x))


def filled():
    """Returns a stock model with weights that are neither zero nor one, its inputs, and targets."""
    keras.utils.set_random_seed(3)
    model = temporal_net()
    for layer in model.layers:
        if "batch" in layer.name:
            randomize(layer)
    return model, *values((4, 32, 4), (4, 32, 2))


def test_convert_and_revert(told):
    model, x, _ = filled()
    converted = layers.convert(model)
    kinds = {"FusedConv1D": 10, "FusedBatchNormalization": 3}
    assert {kind: classes(converted).count(kind) for kind in classes(converted)} == kinds
    assert told == []
    for training in (False, True):
        assert_same(converted(x, training=training), model(x, training=training), units=512)
    counts = op_counts(tf.function(converted).get_concrete_function(x))
    assert counts[OP] == 10
    assert not counts.keys() & {"Conv2D", "SpaceToBatchND", "Pad"}
    back = layers.revert(converted)
    assert classes(back).count("Conv1D") == 10
    assert not any(kind.startswith("Fused") for kind in classes(back))
    assert_same(back(x), model(x), units=512)


def test_training_as_stock():
    """Three steps, which move the weights by far more than rounding does."""
    model, x, y = filled()
    before = [w.numpy() for w in model.trainable_weights]
    losses = []
    converted = layers.convert(model)
    for made in (model, converted):
        made.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        losses.append([made.train_on_batch(x, y) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][2] < losses[0][0]
    for layer in (layer for layer in model.layers if layer.weights):
        for found, expected in zip(
            converted.get_layer(layer.name).get_weights(), layer.get_weights(), strict=True
        ):
            assert_same(tf.constant(found), tf.constant(expected), units=1024)
    moved = [np.abs(w - old).max() for w, old in zip(model.trainable_weights, before, strict=True)]
    assert min(moved) > 1e-4


def test_saving(tmp_path):
    model, x, _ = filled()
    converted = layers.convert(model)
    converted.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert classes(loaded) == classes(converted)
    assert_same(loaded(x), converted(x))
    converted.export(str(tmp_path / "saved"), verbose=False)
    archive = tf.saved_model.load(str(tmp_path / "saved"))
    assert_same(archive.serve(x), model(x), units=512)
    assert op_counts(archive.signatures["serving_default"])[OP] == 10
