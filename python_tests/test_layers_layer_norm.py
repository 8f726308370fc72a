"""The layer and RMS norm layers: like the stock layers in all but the ops that they run."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.testing import TestCase
from layer_cases import classes, fused_counts, randomize
from remapping import FUSED, assert_same, values

from tf_fused_ops import layers
from tf_fused_ops.layers import fused

LAYER_NORM = FUSED["layer norm"]
STOCK = {
    layers.FusedLayerNormalization: keras.layers.LayerNormalization,
    layers.FusedRMSNormalization: keras.layers.RMSNormalization,
}
LAYER, RMS = STOCK
KINDS = pytest.mark.parametrize("kind", STOCK, ids=lambda kind: kind.__name__)
OPTIONS = pytest.mark.parametrize(
    "kind, options",
    [
        (LAYER, {}),
        (LAYER, {"scale": False}),
        (LAYER, {"center": False}),
        (LAYER, {"axis": [-1], "epsilon": 1e-6}),
        (RMS, {}),
        (RMS, {"axis": [-1], "epsilon": 1e-3}),
    ],
    ids=lambda part: part.__name__ if isinstance(part, type) else str(part),
)


@pytest.fixture
def told(monkeypatch):
    """The lines that the layers log."""
    lines = []
    monkeypatch.setattr(fused.log, "vlog", lambda level, line: lines.append(line))
    return lines


def pair(kind, shape, **options):
    """Returns a fused layer and the stock layer with equal weights."""
    made = [kind(**options), STOCK[kind](**options)]
    for layer in made:
        layer.build(shape)
    randomize(made[0])
    made[1].set_weights(made[0].get_weights())
    return made


def trained(layer, x):
    """Returns the output and all gradients of a training step."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
        loss = tf.reduce_sum(tf.cast(y, "float32") ** 3)
    return y, tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])


@OPTIONS
@pytest.mark.parametrize("dtype", ["float32", "float64", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("shape", [(4, 21), (2, 3, 16), (2, 3, 2, 5)], ids=str)
def test_as_stock(shape, dtype, kind, options, told):
    layer, stock = pair(kind, shape, dtype=dtype, **options)
    (x,) = values(shape, dtype=layer.compute_dtype)
    assert_same(trained(layer, x), trained(stock, x), units=256)
    assert fused_counts(layer, x) == {LAYER_NORM: 1}
    assert told == []
    assert not layer.supports_jit


@OPTIONS
def test_keras_checks(kind, options):
    weights = options.get("scale", True) + options.get("center", kind is LAYER)
    TestCase("run_layer_test").run_layer_test(
        kind,
        init_kwargs=options,
        input_shape=(4, 3, 5),
        expected_output_shape=(4, 3, 5),
        expected_num_trainable_weights=weights,
        expected_num_non_trainable_weights=0,
        expected_num_losses=0,
        supports_masking=kind is LAYER,
    )


@KINDS
def test_config_is_that_of_the_stock_layer(kind):
    options = {"epsilon": 1e-4, "dtype": "mixed_bfloat16", "name": "x", "trainable": False}
    layer = kind(**options)
    config = layer.get_config()
    assert config == STOCK[kind](**options).get_config()
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(restored) is kind
    assert restored.get_config() == config


UNSUITED = {
    "axis": (LAYER, {"axis": 1}, (2, 3, 4), "float32", "axis [1] is not the last one"),
    "axes": (LAYER, {"axis": [1, 2]}, (2, 3, 4), "float32", "axis [1, 2] is not the last one"),
    "digits": (LAYER, {"epsilon": 1 / 3}, (2, 3), "float64", "more digits"),
    "rms_scaling": (LAYER, {"rms_scaling": True}, (2, 3), "float32", "rms_scaling is on"),
    # Keras lays the scale along the last axis whatever `axis` is.
    "rms axis": (RMS, {"axis": 1}, (2, 4, 4), "float32", "axis [1] is not the last one"),
    "rms digits": (RMS, {"epsilon": 1 / 3}, (2, 3), "float64", "more digits"),
}


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`")
@pytest.mark.parametrize("name", UNSUITED)
def test_falls_back(name, told):
    kind, options, shape, dtype, reason = UNSUITED[name]
    layer, stock = pair(kind, shape, dtype=dtype, **options)
    (x,) = values(shape, dtype=dtype)
    assert_same(trained(layer, x), trained(stock, x))
    assert reason in told[-1]
    assert fused_counts(layer, x) == {}


@KINDS
def test_compiled_by_xla(kind, told):
    layer, stock = pair(kind, (2, 3))
    (x,) = values((2, 3))
    assert_same(tf.function(layer, jit_compile=True)(x), stock(x))
    assert "XLA" in told[-1]


def encoder(normalization):
    """A pre-norm block, with a residual and an activation right behind a norm, too."""
    inputs = keras.Input((6, 8))
    y = normalization()(inputs)
    y = keras.layers.MultiHeadAttention(2, 4)(y, y)
    x = keras.layers.Add()([inputs, y])
    y = keras.layers.Dense(16, activation="gelu")(normalization(epsilon=1e-6)(x))
    x = x + keras.layers.Dense(8)(y)
    x = keras.layers.Add()([normalization()(x), x])
    return keras.Model(inputs, keras.layers.ReLU()(normalization(name="last")(x)))


@KINDS
def test_convert_and_revert(kind):
    model = encoder(STOCK[kind])
    for layer in model._flatten_layers(include_self=False, recursive=False):
        randomize(layer)
    converted = layers.convert(model)
    assert [name for name in classes(converted) if "Norm" in name] == [kind.__name__] * 4
    # The norm takes in neither.
    assert classes(converted)[-3:] == ["Add", kind.__name__, "ReLU"]
    (x,) = values((3, 6, 8))
    assert_same(converted(x), model(x), units=256)
    assert fused_counts(converted, x)[LAYER_NORM] == 4
    assert converted.get_layer("last").get_config() == model.get_layer("last").get_config()
    back = layers.revert(converted)
    assert classes(back).count(STOCK[kind].__name__) == 4
    assert not any(name.startswith("Fused") for name in classes(back))
    assert_same(back(x), model(x))
    for old, new in zip(model.get_weights(), back.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@KINDS
def test_saving(kind, tmp_path):
    model = encoder(kind)
    (x,) = values((3, 6, 8))
    model.save(tmp_path / "model.keras")
    model.export(str(tmp_path / "saved"), verbose=False)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert classes(loaded) == classes(model)
    assert_same(loaded(x), model(x))
    archive = tf.saved_model.load(str(tmp_path / "saved"))
    assert_same(archive.serve(x), model(x))


@KINDS
def test_fit_as_stock(kind):
    losses = []
    for normalization in (kind, STOCK[kind]):
        keras.utils.set_random_seed(1)
        model = encoder(normalization)
        model.compile("adam", "mse", jit_compile=False)
        x, y = (v.numpy() for v in values((16, 6, 8), (16, 6, 8)))
        losses.append(model.fit(x, y, batch_size=4, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < losses[0][0]
