"""Where the layers run stock ops: same numbers, and the reason in the log."""

import importlib

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf
from layer_cases import fused_counts, randomize
from remapping import assert_same, values

from tf_fused_ops import distribute, layers
from tf_fused_ops.layers import conv, depthwise_conv
from tf_fused_ops.layers import fused as fused_module


@pytest.fixture
def told(monkeypatch):
    """The lines that the layers log."""
    lines = []
    monkeypatch.setattr(fused_module.log, "vlog", lambda level, line: lines.append((level, line)))
    return lines


def check(told, layer, stock, reason, shape, side=False, **options):
    """Asserts that a fused layer runs stock ops, with equal results, and says why."""
    (x,) = values(shape)
    layer(x, **options)
    stock(x, **options)
    randomize(layer)
    stock.set_weights(layer.get_weights())
    expected = stock(x, **options)
    assert_same(layer(x, **options), expected)
    told.clear()
    assert fused_counts(lambda x: layer(x, **options), x) == {}
    assert [level for level, _ in told] == [fused_module.log.NEAR_MISS]
    assert told[0][1].startswith(f"Not fused: layer {layer.name} ({type(layer).__name__}): ")
    assert reason in told[0][1]
    if side:
        (side,) = values(expected.shape, seed=1)
        activated = keras.activations.get(getattr(layer, "activation", None))
        stock.activation = None
        assert_same(layer(x, side, **options), activated(stock(x, **options) + side))


def test_groups_on_another_device(told, monkeypatch):
    monkeypatch.setattr(conv, "device_type", lambda _: "GPU")
    options = {"filters": 4, "kernel_size": 3, "groups": 2, "activation": "relu"}
    layer = layers.FusedConv2D(**options)
    check(told, layer, keras.layers.Conv2D(**options), "2 groups", (1, 5, 5, 4), side=True)


@pytest.mark.parametrize("kind", ["DepthwiseConv2D", "SeparableConv2D"])
def test_depthwise_on_another_device(told, kind, monkeypatch):
    monkeypatch.setattr(depthwise_conv, "device_type", lambda _: "GPU")
    options = {"kernel_size": 3, "activation": "relu"}
    options |= {"filters": 6} if kind == "SeparableConv2D" else {}
    layer = getattr(layers, f"Fused{kind}")(**options)
    stock = getattr(keras.layers, kind)(**options)
    check(told, layer, stock, "on the CPU alone", (1, 5, 5, 4), side=True)


@pytest.mark.parametrize("name", ["epsilon", "momentum"])
def test_digits_in_double_precision(told, name):
    options = {name: 1 / 3, "dtype": "float64"}
    layer = layers.FusedBatchNormalization(**options)
    (x,) = values((4, 5), dtype="float64")
    expected = keras.layers.BatchNormalization(**options)(x, training=True)
    assert_same(layer(x, training=True), expected)
    assert "has more digits" in told[-1][1]


@pytest.mark.parametrize("family", ["conv", "dense"])
def test_lora(told, family):
    fused, stock, options, shape = {
        "conv": (
            layers.FusedConv2D,
            keras.layers.Conv2D,
            {"filters": 4, "kernel_size": 3},
            (1, 5, 5, 4),
        ),
        "dense": (layers.FusedDense, keras.layers.Dense, {"units": 4}, (3, 4)),
    }[family]
    layer = fused(lora_rank=2, **options)
    assert layer.supports_jit
    check(told, layer, stock(lora_rank=2, **options), "LoRA", shape, side=True)
    later = fused(**options)
    later.build(shape)
    later.enable_lora(2)
    other = stock(**options)
    other.build(shape)
    other.enable_lora(2)
    check(told, later, other, "LoRA", shape)


def test_quantized(told):
    layer, stock = layers.FusedDense(4, activation="relu"), keras.layers.Dense(4, activation="relu")
    (x,) = values((3, 4))
    for dense in (layer, stock):
        dense.build(x.shape)
    stock.set_weights(layer.get_weights())
    for dense in (layer, stock):
        dense.quantize("int8", type_check=False)
    assert_same(layer(x), stock(x))
    assert "quantised (int8)" in told[-1][1]
    with pytest.raises(ValueError, match=r"quantised and cannot take a side_input"):
        layer(x, layer(x))


def test_stock_ops_cannot_synchronize_by_a_communicator():
    x = tf.ones((2, 3))
    layer = layers.FusedBatchNormalization(synchronized=True, renorm=True, name="both")
    layer(x, training=True)
    distribute.set_communicator(replicas.Alone())
    try:
        with pytest.raises(ValueError, match=r"layer both cannot synchronise .* Alone, .* renorm"):
            layer(x, training=True)
    finally:
        distribute.set_communicator(None)


def test_renorm(told):
    _compare_batch_norm(told, "renorm", renorm=True)


def _compare_batch_norm(told, reason, shape=(4, 5, 5, 3), mask=None, **options):
    (x, side) = values(shape, shape)
    layer = layers.FusedBatchNormalization(activation="relu", **options)
    stock = keras.layers.BatchNormalization(**options)
    for training in (True, False):
        expected = keras.activations.relu(stock(x, training=training, mask=mask) + side)
        assert_same(layer(x, side, training=training, mask=mask), expected)
    assert_same([v.value for v in layer.weights], [v.value for v in stock.weights])
    assert reason in told[-1][1]
    assert fused_counts(lambda x: layer(x, mask=mask), x) == {}


def test_axis(told):
    _compare_batch_norm(told, "axis 2 is neither the last one nor 1", axis=2)


def test_mask(told):
    _compare_batch_norm(told, "mask", (4, 5, 3), mask=tf.sequence_mask([1, 5, 3, 2], 5))


def test_mask_attached_to_the_input(told):
    """A mask that another layer attached counts with and without a side input, and goes on."""
    (x,) = values((2, 4, 3))
    x = tf.concat([x[:, :2], tf.zeros((2, 2, 3))], 1)
    masked = keras.layers.Masking()(x)
    stock = keras.layers.BatchNormalization()
    layer = layers.FusedBatchNormalization()
    assert_same(layer(masked, training=True), stock(masked, training=True))
    y = layer(masked, x, training=True)
    assert_same(y, stock(masked, training=True) + x)
    assert y._keras_mask is not None
    assert "mask" in told[-1][1]


def test_xla(told):
    layer = layers.FusedDense(3, activation="relu")
    assert not layer.supports_jit
    (x,) = values((2, 4))
    expected = layer(x)
    assert_same(tf.function(layer, jit_compile=True)(x), expected)
    assert "XLA" in told[-1][1]


def test_jit_compile_auto_is_off():
    model = keras.Sequential([keras.Input((4,)), layers.FusedDense(3)])
    model.compile("sgd", "mse", jit_compile="auto")
    assert model.jit_compile is False


def test_integers(told):
    layer = layers.FusedBatchNormalization(dtype="int32", autocast=False)
    assert "dtype int32" in (layer._objection(tf.ones((2, 3), tf.int32)) or "")


def test_sparse(told):
    layer, stock = layers.FusedDense(3), keras.layers.Dense(3)
    x = tf.sparse.from_dense([[0.0, 1.0], [2.0, 0.0]])
    layer.build((None, 2))
    stock.build((None, 2))
    stock.set_weights(layer.get_weights())
    assert_same(layer(x), stock(x))
    assert "SparseTensor" in told[-1][1]


def test_other_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError) as error:
        importlib.reload(layers)
    assert str(error.value) == (
        "tf_fused_ops.layers needs Keras's TensorFlow backend, but Keras uses 'jax': set "
        "KERAS_BACKEND=tensorflow before keras is imported."
    )


def test_import_is_lazy(run_python):
    program = (
        "import sys, tf_fused_ops as tfo\n"
        "print('tf_fused_ops.layers' in sys.modules, end=' ')\n"
        "tfo.layers.FusedDense(3)\n"
        "print('tf_fused_ops.layers' in sys.modules)\n"
    )
    assert run_python(program) == "False True\n"


def test_sigmoid_is_told(told):
    layers.FusedDense(1, activation="sigmoid")(np.ones((1, 2), "float32"))
    assert "activation sigmoid follows as an op of its own" in told[-1][1]
