"""Models go to fused layers and back with their weights, and compute the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_cases import KINDS, classes, fused_counts, randomize
from remapping import FUSED, assert_same, values

from tf_fused_ops import layers
from tf_fused_ops.layers import runs

CONV, BATCH_NORM, DENSE = FUSED["Conv2D"], FUSED["FusedBatchNormV3"], FUSED["MatMul"]


@pytest.fixture
def told(monkeypatch):
    """The lines that the conversion logs."""
    lines = []
    monkeypatch.setattr(runs.log, "vlog", lambda level, line: lines.append(line))
    return lines


def check(model, inputs, expected, counts=None):
    """Asserts equal outputs of convert and revert, and the layers and ops of the former."""
    for layer in model._flatten_layers(include_self=False, recursive=False):
        randomize(layer)
    converted = layers.convert(model)
    assert classes(converted) == expected
    y = model(inputs)
    assert_same(converted(inputs), y, units=256)
    if counts is not None:
        assert fused_counts(converted, inputs) == counts
    back = layers.revert(converted)
    assert_same(back(inputs), y)
    assert not any(isinstance(layer, KINDS) for layer in back._flatten_layers())
    for old, new in zip(model.get_weights(), back.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    return converted


def test_sequential():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Conv2D(4, 3),
            keras.layers.Activation("silu"),
            keras.layers.Flatten(),
            keras.layers.Dense(8),
            keras.layers.LeakyReLU(0.1),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    expected = ["FusedConv2D", "FusedBatchNormalization", "FusedConv2D", "Flatten", "FusedDense"]
    check(
        model,
        values((2, 8, 8, 3))[0],
        [*expected, "Dropout", "FusedDense"],
        {CONV: 2, BATCH_NORM: 1, DENSE: 2},
    )


def test_sequential_that_is_not_built():
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.ReLU(), keras.layers.Dense(2)])
    converted = layers.convert(model)
    assert not converted.built
    (x,) = values((3, 5))
    model(x)
    converted(x)
    assert classes(converted) == ["FusedDense", "FusedDense"]
    converted.set_weights(model.get_weights())
    assert_same(converted(x), model(x))
    assert_same(layers.convert(model)(x), model(x))


def _block(x, filters, shortcut):
    y = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    y = keras.layers.BatchNormalization()(y)
    y = keras.layers.Activation("relu")(y)
    y = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
    y = keras.layers.BatchNormalization()(y)
    if shortcut:
        x = keras.layers.BatchNormalization()(keras.layers.Conv2D(filters, 1)(x))
    return keras.layers.ReLU()(keras.layers.Add()([x, y]))


@pytest.mark.parametrize("shortcut", [False, True])
def test_residual_block(shortcut):
    inputs = keras.Input((6, 6, 4))
    model = keras.Model(inputs, _block(inputs, 4, shortcut))
    expected = ["FusedConv2D", "FusedBatchNormalization"] * (2 + shortcut)
    converted = layers.convert(model)
    assert sorted(classes(converted)) == sorted(expected)
    with_side = [
        layer
        for layer in converted.layers
        if any("side_input" in node.arguments.kwargs for node in layer._inbound_nodes)
    ]
    assert [layer.activation for layer in with_side] == [keras.activations.relu]
    check(
        model,
        values((2, 6, 6, 4))[0],
        classes(converted),
        {CONV: 2 + shortcut, BATCH_NORM: 2 + shortcut},
    )


def test_separable_convolutions():
    inputs = keras.Input((6, 6, 4))
    y = keras.layers.ReLU()(keras.layers.SeparableConv2D(8, 3, padding="same")(inputs))
    y = keras.layers.SeparableConv2D(4, 3, padding="same", use_bias=False)(y)
    y = keras.layers.BatchNormalization()(y)
    y = keras.layers.SeparableConv2D(4, 5, padding="same", depth_multiplier=2)(y)
    model = keras.Model(inputs, keras.layers.Add()([y, inputs]))
    separable = "FusedSeparableConv2D"
    check(
        model,
        values((2, 6, 6, 4))[0],
        [separable, separable, "FusedBatchNormalization", separable],
        {CONV: 6, BATCH_NORM: 1},
    )


def test_operators_and_functions():
    """Sums and activations written as Python code are operations, not layers."""
    inputs = keras.Input((6, 4))
    x = keras.activations.gelu(keras.layers.Dense(4)(inputs))
    x = keras.ops.relu(keras.layers.Dense(4)(x) + inputs)
    model = keras.Model(inputs, keras.ops.gelu(keras.layers.Dense(4)(x)))
    converted = check(model, values((2, 6, 4))[0], ["FusedDense"] * 3, {DENSE: 3})
    activations = [layer.activation for layer in converted.layers[1:]]
    assert activations == [keras.activations.gelu, keras.activations.relu, layers.gelu_tanh]


def test_sum_without_activation():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Add()([inputs, keras.layers.Dense(4)(inputs)]))
    check(model, values((2, 4))[0], ["FusedDense"], {DENSE: 1})


def _shared_value():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4)(inputs)
    return keras.Model(inputs, keras.layers.Concatenate()([x, keras.layers.ReLU()(x)]))


def _leaving_value():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4)(inputs)
    return keras.Model(inputs, {"before": x, "after": keras.layers.ReLU()(x)})


def _shared_layer():
    inputs = keras.Input((4,))
    dense = keras.layers.Dense(4)
    return keras.Model(inputs, dense(keras.layers.ReLU()(dense(inputs))))


def _regularized():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, activity_regularizer="l2")(inputs)
    return keras.Model(inputs, keras.layers.ReLU()(x))


def _two_types():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, dtype="float64")(inputs)
    return keras.Model(inputs, keras.layers.ReLU(dtype="float32")(x))


def _unknown_activation():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.ReLU(threshold=0.5)(keras.layers.Dense(4)(inputs)))


def _sigmoid():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Activation("sigmoid")(keras.layers.Dense(4)(inputs)))


def _active_already():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.ReLU()(keras.layers.Dense(4, "tanh")(inputs)))


@pytest.mark.parametrize(
    "make",
    [
        _shared_value,
        _leaving_value,
        _shared_layer,
        _regularized,
        _two_types,
        _unknown_activation,
        _sigmoid,
        _active_already,
    ],
)
def test_layers_that_stay_apart(make):
    model = make()
    (x,) = values((2, 4))
    converted = check(model, x, [name.replace("Dense", "FusedDense") for name in classes(model)])
    assert [layer.name for layer in converted.layers] == [layer.name for layer in model.layers]


def test_sum_that_broadcasts():
    inputs = keras.Input((4, 3)), keras.Input((1, 3))
    model = keras.Model(inputs, keras.layers.Add()([keras.layers.Dense(3)(inputs[0]), inputs[1]]))
    check(model, values((2, 4, 3), (2, 1, 3)), ["FusedDense", "Add"])


def test_sum_of_unknown_size_is_told(told):
    inputs = keras.Input((None, 3))
    model = keras.Model(inputs, keras.layers.Add()([keras.layers.Dense(3)(inputs), inputs]))
    check(model, values((2, 4, 3))[0], ["FusedDense", "Add"])
    assert "are not known to be equal" in told[0]


def test_masks_stay():
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    y = keras.layers.Add()([keras.layers.Dense(4)(x), x])
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(y))
    tokens = tf.constant([[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]])
    check(model, tokens, ["Embedding", "FusedDense", "Add", "GlobalAveragePooling1D"])


def test_fallbacks_stay_stock(told):
    model = keras.Sequential(
        [
            keras.Input((6, 6, 4)),
            keras.layers.Conv2D(4, 3, lora_rank=1, name="adapted"),
            keras.layers.BatchNormalization(renorm=True, name="renormed"),
            keras.layers.ReLU(),
            keras.layers.Dense(3, lora_rank=1, name="low_rank"),
            keras.layers.Dense(2, name="quantized"),
        ]
    )
    model.layers[-1].quantize("int8")
    converted = layers.convert(model)
    assert classes(converted) == classes(model)
    (x,) = values((2, 6, 6, 4))
    assert_same(converted(x), model(x))
    assert sorted(told) == [
        "Not fused: layer adapted: LoRA changes the kernel",
        "Not fused: layer low_rank: LoRA changes the kernel",
        "Not fused: layer quantized: it is quantised (int8)",
        "Not fused: layer renormed: renorm is on",
    ]


def test_nested_and_shared_models():
    tower = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4), keras.layers.ReLU()], name="tower"
    )
    inside = keras.Input((4,))
    head = keras.Model(inside, keras.layers.Activation("gelu")(keras.layers.Dense(2)(inside)))
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    joined = keras.layers.Subtract()([tower(left), tower(right)])
    model = keras.Model({"left": left, "right": right}, {"result": head(joined)})
    a, b = values((3, 6), (3, 6))
    x = {"left": a, "right": b}
    converted = check(model, x, ["Sequential", "Subtract", "Functional"], {DENSE: 3})
    assert classes(converted.get_layer("tower")) == ["FusedDense"]
    assert len(converted.weights) == len(model.weights) == 4


def test_layer_shared_with_a_model_inside():
    dense = keras.layers.Dense(4)
    inside = keras.Input((4,))
    inner = keras.Model(inside, keras.layers.ReLU()(dense(inside)))
    inputs = keras.Input((4,))
    model = keras.Model(inputs, inner(dense(inputs)))
    converted = check(model, values((2, 4))[0], ["FusedDense", "Functional"], {DENSE: 2})
    assert len(converted.weights) == 2


def _towers(dense):
    """Two outputs of two inputs, with a layer that is used twice and a residual between them."""
    left, right = keras.Input((4,)), keras.Input((4,))
    x = keras.layers.ReLU()(keras.layers.Dense(4)(left))
    y = keras.layers.Add()([keras.layers.Dense(4)(right), x])
    return keras.Model([left, right], [dense(keras.layers.Activation("gelu")(y)), dense(x)])


def test_several_inputs_and_outputs():
    converted = check(
        _towers(keras.layers.Dense(3, activation="relu")),
        values((2, 4), (2, 4)),
        ["FusedDense"] * 3,
        {DENSE: 4},
    )
    assert len(converted.weights) == 6
    x = values((8, 4), (8, 4))
    converted.compile("sgd", ["mse", "mae"])
    converted.fit(x, [x[0][:, :3], x[1][:, :3]], verbose=0)


def test_time_distributed():
    """The layer inside is converted, be it shared with the outside or a model."""
    dense = keras.layers.Dense(4, activation="relu")
    tower = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
        ]
    )
    inputs = keras.Input((3, 4))
    x = keras.layers.TimeDistributed(dense)(dense(inputs))
    x = keras.layers.TimeDistributed(tower, name="towers")(x)
    model = keras.Model(inputs, x)
    converted = check(
        model,
        values((2, 3, 4))[0],
        ["FusedDense", "TimeDistributed", "TimeDistributed"],
        {DENSE: 1 + 3 + 3, BATCH_NORM: 3},
    )
    assert classes(converted.get_layer("towers").layer) == ["FusedDense", "FusedBatchNormalization"]
    assert len(converted.weights) == len(model.weights)


def test_time_distributed_in_a_sequence():
    model = keras.Sequential(
        [
            keras.Input((3, 4)),
            keras.layers.TimeDistributed(keras.layers.Dense(4)),
            keras.layers.ReLU(),
        ]
    )
    check(model, values((2, 3, 4))[0], ["TimeDistributed", "ReLU"], {DENSE: 3})


def test_fused_batch_norm_in_time_distributed():
    """There it becomes two layers again."""
    inputs = keras.Input((3, 4))
    normalization = layers.FusedBatchNormalization(activation="relu")
    model = keras.Model(inputs, keras.layers.TimeDistributed(normalization)(inputs))
    randomize(normalization)
    (x,) = values((2, 3, 4))
    back = layers.revert(model)
    assert classes(back.layers[1].layer) == ["BatchNormalization", "Activation"]
    assert_same(back(x), model(x))


def test_unknown_number_of_time_steps(told):
    inputs = keras.Input((None, 4))
    dense = keras.layers.Dense(4, name="inner")
    model = keras.Model(inputs, keras.layers.TimeDistributed(dense, name="outer")(inputs))
    converted = layers.convert(model)
    assert type(converted.layers[1].layer) is keras.layers.Dense
    assert told == [
        "Not fused: layer inner: the number of time steps of outer is not known",
    ]
    (x,) = values((2, 3, 4))
    assert_same(converted(x), model(x))


@keras.saving.register_keras_serializable()
class Holder(keras.layers.Layer):
    """Holds a dense layer."""

    def __init__(self, dense, **kwargs):
        super().__init__(**kwargs)
        self.dense = dense

    def build(self, shape):
        if not self.dense.built:
            self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "dense": keras.saving.serialize_keras_object(self.dense)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("dense")), **config)


def test_layers_that_others_hold(told):
    """They stay, and with them their weights."""
    inputs = keras.Input((3, 4))
    x = keras.layers.MultiHeadAttention(2, 2)(inputs, inputs)
    x = keras.layers.Bidirectional(keras.layers.GRU(2))(x)
    x = keras.layers.SpectralNormalization(keras.layers.Dense(4, name="in"), name="out")(x)
    x = Holder(keras.layers.Dense(4, name="inner"), name="outer")(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    names = ["MultiHeadAttention", "Bidirectional", "SpectralNormalization", "Holder"]
    # But for those of `Bidirectional`.
    counts = {DENSE: 3, FUSED["recurrent"]: 2}
    check(model, values((2, 3, 4))[0], [*names, "FusedDense"], counts)
    reaches = "holds it; tf_fused_ops.accelerate reaches it"
    assert told == [
        f"Not fused: layer in: out of class SpectralNormalization {reaches}",
        f"Not fused: layer inner: outer of class Holder {reaches}",
    ]


@pytest.mark.parametrize("outside", ["called", "held"])
def test_layer_shared_with_a_holder(outside):
    dense = keras.layers.Dense(4, name="shared")
    inputs = keras.Input((4,))
    other = dense if outside == "called" else Holder(dense)
    model = keras.Model(inputs, other(Holder(dense)(inputs)))
    with pytest.raises(ValueError, match=r"layer shared shared, .*tf_fused_ops\.accelerate"):
        layers.convert(model)


def test_activation_that_has_no_name():
    """Keras saves its operation gelu under the name of another function, and the tanh form not."""
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, activation=keras.ops.gelu)(inputs)
    model = keras.Model(inputs, keras.ops.gelu(keras.layers.Dense(4)(x)))
    converted = check(model, values((2, 4))[0], ["FusedDense"] * 2, {DENSE: 2})
    assert converted.layers[2].activation is layers.gelu_tanh
    back = layers.revert(converted)
    assert back.layers[2].activation is keras.activations.linear


def test_arguments_by_name_and_by_place():
    inputs, mask = keras.Input((5, 4)), keras.Input((5,), dtype="bool")
    x = keras.layers.Dense(4)(inputs=inputs)
    x = keras.layers.BatchNormalization()(x, None, mask)
    model = keras.Model([inputs, mask], x)
    given = [*values((2, 5, 4)), tf.constant([[True] * 5, [False] * 5])]
    check(model, given, ["FusedDense", "FusedBatchNormalization"])


def test_twice_is_once():
    inputs = keras.Input((6, 6, 4))
    once = layers.convert(keras.Model(inputs, _block(inputs, 4, True)))
    twice = layers.convert(once)
    (x,) = values((2, 6, 6, 4))
    assert_same(twice(x), once(x))
    assert classes(twice) == classes(once)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def test_subclassed_model():
    for function in (layers.convert, layers.revert):
        with pytest.raises(ValueError, match=r"class Subclassed is .*tf_fused_ops\.accelerate"):
            function(Subclassed())
    inputs = keras.Input((3,))
    with pytest.raises(ValueError, match=r"tf_fused_ops\.accelerate"):
        layers.convert(keras.Model(inputs, Subclassed()(inputs)))


def test_same_curve_as_stock():
    """A seed gives the same training curve, stock and converted."""
    curves = []
    for change in (lambda model: model, layers.convert):
        keras.utils.set_random_seed(7)
        inputs = keras.Input((8, 8, 3))
        x = keras.layers.Flatten()(_block(_block(inputs, 6, True), 6, False))
        model = change(keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(x)))
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        (images,) = values((32, 8, 8, 3))
        labels = np.asarray(images).mean((1, 2, 3)) > 0
        keras.utils.set_random_seed(7)
        history = model.fit(images, labels, batch_size=8, epochs=4, verbose=0)
        curves.append(history.history["loss"])
        evaluated = model.evaluate(images, labels, verbose=0)[0]
        curves[-1].append(evaluated)
    np.testing.assert_allclose(*curves, rtol=2e-3)
    assert curves[0][3] < 0.6 * curves[0][0]
