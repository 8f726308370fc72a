"""Models with fused layers saved and loaded, where tf_fused_ops is imported and where it is not."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_cases import fused_counts
from remapping import assert_same, op_counts, values

from tf_fused_ops import _library, layers


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


def _stock():
    """A stock model in whose conversion the order of the weights is another."""
    inputs = keras.Input((8, 8, 3))
    y = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
    y = keras.layers.Add()([keras.layers.Conv2D(4, 3, padding="same")(y), y])
    head = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.ReLU()])
    y = head(keras.layers.GlobalAveragePooling2D()(y))
    activated = keras.layers.ReLU()(keras.layers.Dense(2)(y))
    return keras.Model(inputs, [keras.layers.Dense(3)(y), activated])


def test_weights_file_of_a_stock_model(tmp_path):
    """It goes through the stock model: the order of the layers of the other may be another."""
    stock, fused = _stock(), layers.convert(_stock())
    stock.save_weights(tmp_path / "stock.weights.h5")
    assert [w.shape for w in fused.weights] != [w.shape for w in stock.weights]
    with pytest.raises(ValueError, match="into the stock model, then convert that"):
        fused.load_weights(tmp_path / "stock.weights.h5")
    loaded = _stock()
    loaded.load_weights(tmp_path / "stock.weights.h5")
    (x,) = values((2, 8, 8, 3))
    assert_same(layers.convert(loaded)(x), stock(x), units=256)


def test_weights_file_for_a_stock_model(tmp_path):
    """Conversion keeps the names of the layers that have weights."""
    stock = _stock()
    fused = layers.convert(stock)
    x, *y = values((8, 8, 8, 3), (8, 3), (8, 2))
    fused.compile("sgd", ["mse", "mse"])
    fused.fit(x, y, verbose=0)
    for layer in fused.layers:
        stock.get_layer(layer.name).set_weights(layer.get_weights())
    stock.save_weights(tmp_path / "stock.weights.h5")
    loaded = _stock()
    loaded.load_weights(tmp_path / "stock.weights.h5")
    assert_same(loaded(x), fused(x), units=256)


class Subclassed(keras.Model):
    """Made of the layers of one of two modules."""

    def __init__(self, conv, normalization, dense):
        super().__init__()
        self.conv = conv(4, 3)
        self.normalization = normalization()
        self.dense = dense(3)

    def call(self, x, training=False):
        y = self.normalization(self.conv(x), training=training)
        return self.dense(keras.ops.mean(y, (1, 2)))


def test_weights_of_a_subclassed_model():
    """There the order is that of the attributes."""
    fused = Subclassed(layers.FusedConv2D, layers.FusedBatchNormalization, layers.FusedDense)
    kinds = keras.layers.Conv2D, keras.layers.BatchNormalization, keras.layers.Dense
    stock = Subclassed(*kinds)
    (x,) = values((2, 8, 8, 3))
    fused(x, training=True), stock(x)
    stock.set_weights(fused.get_weights())
    assert_same(stock(x), fused(x))
    stock(x, training=True)
    fused.set_weights(stock.get_weights())
    assert_same(fused(x), stock(x))


LOADING = """
import sys, keras, numpy as np, tensorflow as tf
folder = sys.argv[1]

def message(load, path):
    try:
        load(folder + path)
    except Exception as error:
        return str(error)

print("KERAS", message(keras.saving.load_model, "/model.keras"))
print("FUNCTION", message(keras.saving.load_model, "/function.keras"))
print("H5", message(keras.saving.load_model, "/model.h5"))
print("SAVED", message(tf.saved_model.load, "/saved"))
print("LAYER", message(lambda path: keras.layers.TFSMLayer(path, "serve"), "/saved"))
x = np.load(folder + "/x.npy")
stock = keras.saving.load_model(folder + "/stock.keras")(x)
archive = tf.saved_model.load(folder + "/portable")
portable = archive.serve(x)
assert not any(name.startswith("tf_fused_ops") for name in sys.modules)
import tf_fused_ops.layers
model = keras.saving.load_model(folder + "/model.keras")(x)
archive = tf.saved_model.load(folder + "/saved")
saved = archive.serve(x)
np.savez(folder + "/y.npz", stock=stock, portable=portable, keras=model, saved=saved)
"""


def test_loading_in_another_program(trained, tmp_path, run_python):
    """Without tf_fused_ops stock models load; the others do with it, and say so without it."""
    model, x = trained
    model.save(tmp_path / "model.keras")
    model.save(tmp_path / "model.h5")
    keras.Sequential([keras.Input((2,)), keras.layers.Activation(layers.gelu_tanh)]).save(
        tmp_path / "function.keras"
    )
    model.export(str(tmp_path / "saved"), verbose=False)
    stock = layers.revert(model)
    stock.save(tmp_path / "stock.keras")
    stock.export(str(tmp_path / "portable"), verbose=False)
    np.save(tmp_path / "x.npy", x)
    told = run_python(LOADING, str(tmp_path))
    keras_file, function, h5, saved, layer = re.split("^[A-Z0-9]+ ", told, flags=re.M)[1:]
    assert "Could not locate class 'FusedConv2D'" in keras_file
    assert "import tf_fused_ops.layers before you load this" in keras_file
    assert "Could not locate function 'tf_fused_ops>gelu_tanh'" in function
    assert "Unknown layer: 'tf_fused_ops>FusedConv2D'" in h5
    assert "Op type not registered 'TfFusedOps>Conv2DBiasAct'" in saved
    assert layer == saved
    results = np.load(tmp_path / "y.npz")
    assert sorted(results) == ["keras", "portable", "saved", "stock"]
    for y in results.values():
        assert_same(y, model(x).numpy(), units=256)


LOADING_BY_NAME = """
import sys, numpy as np, tensorflow as tf
folder = sys.argv[1]
archive = tf.saved_model.load(folder + "/saved")
y = archive.serve(np.load(folder + "/x.npy"))
assert "tf_fused_ops" not in sys.modules
np.save(folder + "/y.npy", y)
# The package finds the library opened already.
import tf_fused_ops as tfo
step = tfo.function(lambda x, w, b: tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), b)))
print(tfo.act(tf.ones(3), "relu").numpy(), step(tf.ones([2, 3]), tf.ones([3, 4]), tf.ones(4)))
assert step.remap_reports[-1].counts() == {"matmul_bias_relu": 1}
"""


def test_loading_where_the_environment_names_the_library(trained, tmp_path, run_python):
    model, x = trained
    model.export(str(tmp_path / "saved"), verbose=False)
    np.save(tmp_path / "x.npy", x)
    library = str(_library._LIBRARY)
    run_python(LOADING_BY_NAME, str(tmp_path), TF_PLUGGABLE_DEVICE_LIBRARY_PATH=library)
    assert_same(np.load(tmp_path / "y.npy"), model(x).numpy(), units=256)


def test_export_keeps_the_fused_ops(trained, tmp_path):
    model, x = trained
    model.export(str(tmp_path / "saved"), verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    assert op_counts(loaded.signatures["serving_default"])["TfFusedOps>Conv2DBiasAct"] == 2
    assert_same(loaded.serve(x), model(x))
