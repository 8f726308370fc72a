"""The layers under the checks that Keras runs on its own, and saved and loaded."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.testing import TestCase
from layer_cases import CASES, fused_counts
from remapping import assert_same, op_counts, values

from tf_fused_ops import layers

WEIGHTS = {"conv": (2, 0), "conv_strided": (1, 0), "conv_dilated": (2, 0)}
WEIGHTS |= {"conv_channels_first": (2, 0), "dense": (2, 0), "dense_rank_3": (1, 0)}
WEIGHTS |= {"batch_norm": (2, 2), "batch_norm_rank_2": (1, 2), "batch_norm_channels_first": (1, 2)}
FAMILIES = ("conv", "batch_norm", "dense")
ACTIVATIONS = [None, "relu", "gelu", "softmax", layers.gelu_tanh, keras.layers.LeakyReLU(0.1)]


@pytest.mark.parametrize("name", CASES)
def test_keras_checks(name):
    case = CASES[name]
    trainable, fixed = WEIGHTS[name]
    TestCase("run_layer_test").run_layer_test(
        case.fused,
        init_kwargs={**case.options, "activation": "relu"},
        input_shape=case.shape,
        expected_output_shape=case.output_shape,
        expected_num_trainable_weights=trainable,
        expected_num_non_trainable_weights=fixed,
        expected_num_losses=0,
        supports_masking="conv" not in name,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_config_round_trip(family, activation):
    case = CASES[family]
    options = {**case.options, "dtype": "mixed_bfloat16", "name": "x", "trainable": False}
    layer = case.fused(activation=activation, **options)
    config = layer.get_config()
    again = case.fused.from_config(config)
    assert again.get_config() == config
    stock = case.stock(**options).get_config()
    assert {**config, "activation": 0} == {**stock, "activation": 0}
    serialized = keras.saving.serialize_keras_object(layer)
    assert serialized["registered_name"] == f"tf_fused_ops>{case.fused.__name__}"
    restored = keras.saving.deserialize_keras_object(serialized)
    assert type(restored) is case.fused
    assert restored.get_config() == config


def test_other_arguments_are_kept():
    layer = layers.FusedConv2D(
        4,
        3,
        kernel_regularizer=keras.regularizers.L2(0.1),
        bias_constraint="non_neg",
        kernel_initializer=keras.initializers.HeNormal(seed=3),
        activity_regularizer="l1",
    )
    stock = keras.layers.Conv2D.from_config(layer.get_config())
    (x,) = values((1, 5, 5, 2))
    assert_same(layer(x), stock(x))
    assert_same(layer.losses, stock.losses)
    assert len(layer.losses) == 2


def test_unknown_argument():
    with pytest.raises(ValueError, match="sideways"):
        layers.FusedDense(3, sideways=True)


def test_seed_gives_the_same_initial_weights():
    weights = []
    for kind in (layers.FusedDense, keras.layers.Dense):
        keras.utils.set_random_seed(5)
        layer = kind(3)
        layer.build((None, 4))
        weights.append(layer.get_weights()[0])
    np.testing.assert_array_equal(*weights)


def _model():
    inputs = keras.Input((8, 8, 3))
    x = layers.FusedConv2D(4, 3, padding="same", activation="silu")(inputs)
    y = layers.FusedConv2D(4, 3, padding="same", use_bias=False)(x)
    y = layers.FusedBatchNormalization(activation=keras.layers.LeakyReLU(0.1))(y, side_input=x)
    y = keras.layers.GlobalAveragePooling2D()(y)
    return keras.Model(inputs, layers.FusedDense(3, activation=layers.gelu_tanh)(y))


@pytest.fixture
def trained():
    keras.utils.set_random_seed(1)
    model = _model()
    model.compile("adam", "mse")
    x, y = values((8, 8, 8, 3), (8, 3))
    model.fit(x, y, verbose=0)
    return model, x


def test_keras_file(trained, tmp_path):
    model, x = trained
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_same(loaded(x), model(x))
    assert fused_counts(loaded, x) == fused_counts(model, x) != {}
    loaded.fit(x, model(x), verbose=0)


def test_weights_file(trained, tmp_path):
    model, x = trained
    model.save_weights(tmp_path / "model.weights.h5")
    other = _model()
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same(other(x), model(x))


def test_loading_in_another_program(trained, tmp_path, run_python):
    """Without the import Keras names the class; with it, files and SavedModels load as they are."""
    model, x = trained
    model.save(tmp_path / "model.keras")
    model.export(str(tmp_path / "saved"), verbose=False)
    np.save(tmp_path / "x.npy", x)
    program = """
import sys, keras, numpy as np, tensorflow as tf
folder = sys.argv[1]
try:
    keras.saving.load_model(folder + "/model.keras")
except Exception as error:
    print(error)
import tf_fused_ops.layers
model = keras.saving.load_model(folder + "/model.keras")
loaded = tf.saved_model.load(folder + "/saved")
x = np.load(folder + "/x.npy")
np.savez(folder + "/y.npz", keras=model(x), saved=loaded.serve(x))
"""
    told = run_python(program, str(tmp_path))
    assert "Could not locate class 'FusedConv2D'" in told
    assert "tf_fused_ops>FusedConv2D" in told
    results = np.load(tmp_path / "y.npz")
    assert_same(results["keras"], model(x).numpy())
    assert_same(results["saved"], model(x).numpy())


def test_export_keeps_the_fused_ops(trained, tmp_path):
    model, x = trained
    model.export(str(tmp_path / "saved"), verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    assert op_counts(loaded.signatures["serving_default"])["TfFusedOps>Conv2DBiasAct"] == 2
    assert_same(loaded.serve(x), model(x))
