"""The layer for convolutions of volumes: what the stock layer computes, in one op each way."""

import keras
import pytest
import tensorflow as tf
from layer_cases import (
    Case,
    check_conversion,
    check_saving,
    check_training,
    classes,
    filled,
    fused_counts,
    pair,
    randomize,
    trained,
)
from remapping import FUSED, assert_same, op_counts, values

from tf_fused_ops import layers
from tf_fused_ops.layers import fused
from tf_fused_ops.remapper import conv3d

LAYER, STOCK = layers.FusedConv3D, keras.layers.Conv3D
OP = FUSED["Conv3D"]
# The operands of a product have a gradient op each.
BOTH_WAYS = {OP: 1, f"{OP}Grad": 2}
VOLUMES = (2, 4, 6, 5, 3)
OPTIONS = {
    "same": {"kernel_size": 3, "padding": "same"},
    "same, strides": {"kernel_size": 3, "strides": 2, "padding": "same"},
    "same, one pixel between windows": {"kernel_size": 1, "strides": 2, "padding": "same"},
    "same, planes": {"kernel_size": (1, 3, 2), "strides": (1, 2, 1), "padding": "same"},
    "same, lines": {"kernel_size": (3, 1, 1), "padding": "same", "use_bias": False},
    "same, dilated": {"kernel_size": (2, 3, 2), "padding": "same", "dilation_rate": (1, 2, 2)},
    "valid": {"kernel_size": (2, 3, 4)},
    "valid, strides over the kernel": {"kernel_size": 1, "strides": (3, 4, 1)},
    "valid, dilated": {"kernel_size": 2, "dilation_rate": (3, 2, 1), "use_bias": False},
    "points": {"kernel_size": 1},
}
EACH = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture
def told(monkeypatch):
    """The lines that the layers and the conversion log."""
    lines = []
    monkeypatch.setattr(fused.log, "vlog", lambda level, line: lines.append(line))
    return lines


def case(**options):
    """Returns what `pair` takes."""
    options = {"filters": 4, **options}
    output_shape = tuple(STOCK(**options).compute_output_shape(VOLUMES))
    return Case(LAYER, STOCK, options, VOLUMES, output_shape, OP)


def check(of, activation=None, side=False, specs=None):
    """Asserts outputs and gradients of the stock layer, from one op each way; `specs` is what is
    known of the shapes of input and output while the step is traced."""
    layer, stock, reference = pair(of, activation)
    shapes = [of.shape, of.output_shape, *[of.output_shape] * side]
    specs = [tf.TensorSpec(shape) for shape in specs or shapes]

    @tf.function(input_signature=specs)
    def step(x, *others):
        return trained(layer, layer, x, *others)

    given = values(*shapes)
    assert_same(step(*given), trained(reference, stock, *given), units=256)
    counts = fused_counts(lambda *given: trained(layer, layer, *given), *specs)
    assert counts == BOTH_WAYS


@pytest.mark.parametrize("side", [False, True])
@EACH
def test_as_stock(name, side, told):
    check(case(**OPTIONS[name]), "relu", side)
    assert told == []


@EACH
def test_sizes_known_when_it_runs(name):
    unknown = [None] * 5
    check(case(**OPTIONS[name]), "tanh", True, [[*unknown[1:], 3], unknown, unknown])


@pytest.mark.parametrize("activation", ["sigmoid", layers.gelu_tanh, keras.layers.LeakyReLU(0.3)])
def test_activations(activation):
    check(case(**OPTIONS["same"]), activation, side=True)


@pytest.mark.parametrize("dtype", ["float64", "mixed_float16", "mixed_bfloat16"])
def test_policies(dtype):
    layer, stock, _ = pair(case(**OPTIONS["same, strides"]), "relu", dtype)
    (x,) = values(VOLUMES)
    assert_same(layer(x), stock(x) * tf.cast(stock(x) > 0, layer.compute_dtype), units=8)
    assert fused_counts(layer, x) == {OP: 1}


# Options, and the reason.
LEFT = {
    "groups": ({"filters": 6, "kernel_size": 2, "groups": 3}, "3 groups"),
    "gaps": (
        {"filters": 4, "kernel_size": 1, "strides": 3, "padding": "same"},
        "leave pixels between them",
    ),
    "lora": ({"filters": 4, "kernel_size": 2, "lora_rank": 2}, "LoRA"),
}


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("name", LEFT)
def test_left_to_stock(name, side, told):
    options, reason = LEFT[name]
    layer, stock = LAYER(activation="relu", **options), STOCK(**options)
    (x,) = values(VOLUMES)
    layer(x)
    randomize(layer)
    stock.build(x.shape)
    stock.set_weights(layer.get_weights())
    z = stock(x)
    others = values(z.shape, seed=1) if side else []
    told.clear()
    assert_same(layer(x, *others), keras.activations.relu(z + others[0] if side else z), units=128)
    assert fused_counts(layer, x) == {}
    assert reason in told[0]
    assert layer.supports_jit


def test_many_channels_are_left_to_stock(told, monkeypatch):
    monkeypatch.setattr(conv3d, "isa", lambda: "avx512")
    x, (layer, stock) = (
        values((2, 4, 6, 5, 9))[0],
        (c(4, 3, padding="same") for c in (LAYER, STOCK)),
    )
    for each in (layer, stock):
        each.build(x.shape)
    stock.set_weights(layer.get_weights())
    trace = tf.function(layer).get_concrete_function(tf.TensorSpec(x.shape))
    assert op_counts(trace)["Conv3D"] == 1 and OP not in op_counts(trace)
    assert_same(layer(x), stock(x))
    assert "stock ops are faster" in told[-1]


def test_channels_first_are_left_to_stock(told):
    """Of which TensorFlow has no kernel on a CPU: traced alone."""
    layer = LAYER(4, 2, data_format="channels_first")
    spec = tf.TensorSpec((2, 3, 4, 6, 5))
    assert op_counts(tf.function(layer).get_concrete_function(spec))["Conv3D"] == 1
    assert "its channels come first" in told[0]


def residual_net():
    """Of 3-D ResNets: with a summand, batch norm, a projection, a stem for lines of planes."""
    inputs = keras.Input((4, 8, 8, 2))
    x = STOCK(4, (1, 3, 3), padding="same", activation="relu")(inputs)
    y = keras.layers.ReLU()(STOCK(4, 3, padding="same")(x))
    x = keras.layers.ReLU()(keras.layers.Add()([STOCK(4, 3, padding="same")(y), x]))
    y = STOCK(6, 3, 2, padding="same", use_bias=False)(x)
    y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
    x = keras.layers.Add()([y, STOCK(6, 1, 2, use_bias=False)(x)])
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling3D()(x)))


CONVERTED = [
    *["FusedConv3D"] * 4,
    "FusedBatchNormalization",
    "FusedConv3D",
    *("GlobalAveragePooling3D", "FusedDense"),
]


def test_convert_and_revert(told):
    model, x, _ = filled(residual_net, (4, 8, 8, 2), (3,))
    assert sorted(check_conversion(model, x, "Conv3D", OP)) == sorted(CONVERTED)
    assert told == []


def test_training_as_stock():
    check_training(*filled(residual_net, (4, 8, 8, 2), (3,)))


def test_saving(tmp_path):
    model, x, _ = filled(residual_net, (4, 8, 8, 2), (3,))
    check_saving(model, x, OP, tmp_path)


def test_left_layers_of_converted_models(told):
    inputs = keras.Input((4, 6, 6, 4))
    x = STOCK(4, 2, groups=2, activation="relu")(inputs)
    model = keras.Model(inputs, STOCK(2, 1)(x))
    converted = layers.convert(model)
    assert classes(converted) == ["Conv3D", "FusedConv3D"]
    assert "2 groups" in told[0]
