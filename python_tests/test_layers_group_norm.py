"""The group norm layer: what the stock layer and its activation compute, in one op each way."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.testing import TestCase
from layer_cases import classes, fused_counts, randomize
from remapping import FUSED, assert_same, values

from tf_fused_ops import layers
from tf_fused_ops.layers import fused

GROUP_NORM = FUSED["group norm"]
LAYER = layers.FusedGroupNormalization
# Options, shape.
CASES = {
    "images": ({"groups": 4}, (2, 5, 3, 12)),
    "sequence": ({"groups": 2, "scale": False}, (3, 7, 10)),
    "volume": ({"groups": 3, "center": False}, (2, 2, 3, 2, 9)),
    "features": ({"groups": 5}, (4, 15)),
    "one group": ({"groups": 1, "epsilon": 1e-5}, (2, 4, 4, 6)),
    "instance norm": ({"groups": -1, "axis": 3}, (2, 4, 3, 7)),
    "channels first": ({"groups": 2, "axis": 1}, (2, 8, 4, 3)),
    "instances, channels first": ({"groups": -1, "axis": 1}, (2, 5, 4, 3)),
}


@pytest.fixture
def told(monkeypatch):
    """The lines that the layers log."""
    lines = []
    monkeypatch.setattr(fused.log, "vlog", lambda level, line: lines.append(line))
    return lines


def pair(shape, activation=None, **options):
    """Returns a fused layer and what computes the same of stock layers, with equal weights."""
    layer = LAYER(activation=activation, **options)
    # The op rounds to half precision once, not before the activation, too.
    wide = {"dtype": "float64" if options.get("dtype") == "float64" else "float32"}
    stock = keras.layers.GroupNormalization(**options | wide)
    for made in (layer, stock):
        made.build(shape)
    randomize(layer)
    stock.set_weights(layer.get_weights())
    activate = keras.activations.get(activation)

    def reference(x):
        return tf.cast(activate(stock(tf.cast(x, stock.dtype))), x.dtype)

    return layer, stock, reference


def trained(function, x, layer):
    """Returns the output and all gradients of a training step."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    # Not one that depends on y, which may be rounded either way.
    (dy,) = values(x.shape, dtype=x.dtype, seed=1)
    variables = [v.value for v in layer.trainable_variables]
    return y, tape.gradient(y, [x, *variables], output_gradients=dy)


@pytest.mark.parametrize("activation", [None, "silu", "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", CASES)
def test_as_stock(name, dtype, activation, told):
    options, shape = CASES[name]
    layer, stock, reference = pair(shape, activation, dtype=dtype, **options)
    (x,) = values(shape, dtype=layer.compute_dtype)
    assert_same(trained(layer, x, layer), trained(reference, x, stock), units=256)
    counts = fused_counts(lambda x: trained(layer, x, layer), x)
    assert counts == {GROUP_NORM: 1, f"{GROUP_NORM}Grad": 1}
    assert told == []
    assert not layer.supports_jit


def test_activation_that_the_op_does_not_know(told):
    layer, stock, reference = pair((2, 3, 3, 8), "softsign", groups=2)
    (x,) = values((2, 3, 3, 8))
    assert_same(trained(layer, x, layer), trained(reference, x, stock), units=256)
    assert "activation softsign follows" in told[-1]


@pytest.mark.parametrize("name", CASES)
def test_keras_checks(name):
    options, shape = CASES[name]
    TestCase("run_layer_test").run_layer_test(
        LAYER,
        init_kwargs=options,
        input_shape=shape,
        expected_output_shape=shape,
        expected_num_trainable_weights=options.get("scale", True) + options.get("center", True),
        expected_num_non_trainable_weights=0,
        expected_num_losses=0,
        supports_masking=True,
    )


def test_config_is_that_of_the_stock_layer_and_the_activation():
    options = {"groups": 2, "epsilon": 1e-4, "dtype": "mixed_bfloat16", "name": "x"}
    layer = LAYER(activation="silu", **options)
    config = layer.get_config()
    assert config.pop("activation") == "silu"
    assert config == keras.layers.GroupNormalization(**options).get_config()
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(restored) is LAYER
    assert restored.get_config() == layer.get_config()


UNSUITED = {
    "axis": ({"groups": 2, "axis": 2}, (2, 3, 4, 5), "float32", "axis 2 is neither the last"),
    "digits": ({"groups": 2, "epsilon": 1 / 3}, (2, 4), "float64", "more digits"),
    "rank": ({"groups": 2}, (1, 2, 1, 2, 2, 4), "float32", "the input has rank 6"),
}


@pytest.mark.parametrize("name", UNSUITED)
def test_falls_back(name, told):
    options, shape, dtype, reason = UNSUITED[name]
    layer, stock, reference = pair(shape, "relu", dtype=dtype, **options)
    (x,) = values(shape, dtype=dtype)
    assert_same(trained(layer, x, layer), trained(reference, x, stock))
    assert reason in told[-1]
    assert fused_counts(layer, x) == {}


def test_compiled_by_xla(told):
    layer, _, reference = pair((2, 3, 4), "relu", groups=2)
    (x,) = values((2, 3, 4))
    assert_same(tf.function(layer, jit_compile=True)(x), reference(x))
    assert "XLA" in told[-1]


def residual_block(normalization):
    """As diffusion models have it; the last norm's activation comes behind a sum."""
    inputs = keras.Input((8, 8, 12))
    x = normalization(4)(inputs)
    x = keras.layers.Activation("silu")(x)
    x = keras.layers.Conv2D(12, 3, padding="same")(x)
    x = normalization(4, epsilon=1e-5)(x)
    x = keras.activations.silu(x)
    x = keras.layers.Conv2D(12, 3, padding="same")(x)
    x = normalization(-1, name="last")(x)
    x = keras.layers.Add()([x, inputs])
    return keras.Model(inputs, keras.layers.ReLU()(x))


def test_convert_and_revert():
    model = residual_block(keras.layers.GroupNormalization)
    for layer in model.layers:
        randomize(layer)
    converted = layers.convert(model)
    assert classes(converted) == [
        *["FusedGroupNormalization", "FusedConv2D"] * 2, "FusedGroupNormalization", "Add", "ReLU"
    ]  # fmt: skip
    (x,) = values((3, 8, 8, 12))
    assert_same(converted(x), model(x), units=256)
    assert fused_counts(converted, x)[GROUP_NORM] == 3
    back = layers.revert(converted)
    kinds = classes(back)
    assert kinds.count("GroupNormalization") == 3
    assert kinds.count("Activation") == 2
    assert not any(name.startswith("Fused") for name in kinds)
    assert_same(back(x), model(x))
    for old, new in zip(model.get_weights(), back.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_saving(tmp_path):
    model = layers.convert(residual_block(keras.layers.GroupNormalization))
    (x,) = values((3, 8, 8, 12))
    model.save(tmp_path / "model.keras")
    model.export(str(tmp_path / "saved"), verbose=False)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert classes(loaded) == classes(model)
    assert_same(loaded(x), model(x))
    archive = tf.saved_model.load(str(tmp_path / "saved"))
    assert_same(archive.serve(x), model(x))


def test_fit_as_stock():
    losses = []
    for normalization in (LAYER, keras.layers.GroupNormalization):
        keras.utils.set_random_seed(1)
        model = residual_block(normalization)
        model.compile("adam", "mse", jit_compile=False)
        x, y = (v.numpy() for v in values((16, 8, 8, 12), (16, 8, 8, 12)))
        losses.append(model.fit(x, y, batch_size=4, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert losses[0][-1] < losses[0][0]
