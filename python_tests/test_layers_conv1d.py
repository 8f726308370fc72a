"""The layer for convolutions of lines: what the stock layer computes, in one op each way."""

import keras
import pytest
import tensorflow as tf
from layer_cases import (
    check_conversion,
    check_saving,
    check_training,
    filled,
    fused_counts,
    randomize,
    trained,
)
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
        y, gradients = trained(layer, layer, *(swapped(t, layout) for t in given))
        # Those of what is lines come first.
        count = 1 + side
        of_lines = [swapped(t, layout) for t in gradients[:count]]
        return swapped(y, layout), [*of_lines, *gradients[count:]]

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


def test_convert_and_revert(told):
    model, x, _ = filled(temporal_net, (32, 4), (32, 2))
    found = check_conversion(model, x, "Conv1D", OP)
    assert sorted(found) == ["FusedBatchNormalization"] * 3 + ["FusedConv1D"] * 10
    assert told == []
    counts = op_counts(tf.function(layers.convert(model)).get_concrete_function(x))
    assert not counts.keys() & {"Conv2D", "SpaceToBatchND", "Pad"}


def test_training_as_stock():
    check_training(*filled(temporal_net, (32, 4), (32, 2)))


def test_saving(tmp_path):
    model, x, _ = filled(temporal_net, (32, 4), (32, 2))
    check_saving(model, x, OP, tmp_path)
