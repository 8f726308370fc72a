"""What new models take over besides values: names, weights, flags, regularizers, compilation."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_cases import KINDS, classes, randomize
from remapping import assert_same, values

from tf_fused_ops import layers


@pytest.mark.parametrize("nested", [False, True])
def test_new_names_differ_from_those_of_a_file(nested):
    """A new program numbers layers from the start, as if none came from elsewhere."""
    keras.backend.clear_session()
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Activation("softmax"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
        ]
    )
    if nested:
        inputs = keras.Input((4,))
        x = keras.layers.Add()([keras.ops.gelu(model(inputs)), inputs])
        x = keras.layers.Add()([x, keras.layers.Dense(4)(x)])
        model = keras.Model(inputs, keras.ops.gelu(keras.layers.Dense(4)(x)))
    keras.backend.clear_session()
    back = layers.revert(layers.convert(model))
    (x,) = values((2, 4))
    assert_same(back(x), model(x))


@pytest.mark.parametrize(
    "activation", [None, "relu", layers.gelu_tanh, keras.layers.LeakyReLU(0.3)]
)
def test_activity_regularizer_sees_the_end(activation):
    """What it is given are the values after side input and activation, also in stock layers."""
    inputs = keras.Input((4,))
    options = {"activation": activation, "activity_regularizer": "l2"}
    x = layers.FusedDense(4, **options)(inputs)
    x = layers.FusedBatchNormalization(**options)(x)
    x = layers.FusedDense(4, **options)(x, side_input=inputs)
    model = keras.Model(inputs, x)
    for layer in model.layers:
        randomize(layer)
    back = layers.revert(model)
    assert not any(isinstance(layer, KINDS) for layer in back._flatten_layers())
    (x,) = values((6, 4))
    for training in (False, True):
        assert_same(back(x, training=training), model(x, training=training), units=256)
        assert_same(back.losses, model.losses, units=256)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.LeakyReLU(0.3, activity_regularizer="l1"),
        lambda: keras.layers.PReLU("uniform"),
        lambda: keras.layers.PReLU("uniform", activity_regularizer="l1"),
    ],
)
def test_layers_as_activations_keep_what_is_theirs(make):
    """Weights, also those that the first call makes, and regularizers."""
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, activation=make())(inputs)
    x = layers.FusedBatchNormalization(activation=make())(x)
    x = layers.FusedDense(4, activation=make())(x, side_input=inputs)
    model = keras.Model(inputs, x)
    (x,) = values((6, 4))
    layers.revert(layers.convert(model))(x)  # before there are weights
    model(x)
    for other in (layers.convert(model), layers.revert(layers.convert(model))):
        assert_same(other(x), model(x))
        assert len(other.losses) == len(model.losses)
        assert_same(other.losses, model.losses)


def test_new_names_differ_from_those_of_inputs():
    keras.backend.clear_session()
    inputs = keras.Input((4,), name="add"), keras.Input((4,), name="activation")
    x = layers.FusedBatchNormalization(activation="relu")(inputs[0], side_input=inputs[1])
    back = layers.revert(keras.Model(inputs, x))
    assert [layer.name for layer in back.layers[-2:]] == ["add_1", "activation_1"]


class Swish(keras.layers.Layer):
    """An activation that always has the same name."""

    def __init__(self, **_):
        super().__init__(name="swish")

    def call(self, x):
        return x * tf.sigmoid(x)


def test_a_name_that_cannot_be_changed_is_refused():
    inputs = keras.Input((4,))
    x = layers.FusedBatchNormalization(activation=Swish())(Swish()(inputs))
    with pytest.raises(ValueError, match='The name "swish" is used 2 times'):
        layers.revert(keras.Model(inputs, x))


def test_state_and_flags_are_kept():
    """Frozen layers, policies, generators of random numbers, adapted layers, compilation."""
    inputs = keras.Input((4,))
    normalization = keras.layers.Normalization()
    normalization.adapt(np.random.default_rng(0).normal(3, 2, (50, 4)))
    x = normalization(inputs)
    x = keras.layers.Dense(4, dtype="mixed_bfloat16", trainable=False)(x)
    x = keras.layers.Activation("relu", dtype="mixed_bfloat16")(x)
    x = keras.layers.Dropout(0.5, seed=3)(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x), name="kept")
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.fit(*values((8, 4), (8, 1)), verbose=0)
    converted = layers.convert(model)
    assert converted.name == "kept"
    assert classes(converted) == ["Normalization", "FusedDense", "Dropout", "FusedDense"]
    assert len(converted.trainable_weights) == 2
    assert converted.layers[2].compute_dtype == "bfloat16"
    assert converted.optimizer.get_config() == model.optimizer.get_config()
    (x,) = values((8, 4))
    assert_same(converted(x, training=True), model(x, training=True), units=2**17)
    assert set(converted.evaluate(x, x[:, :1], verbose=0, return_dict=True)) == {"loss", "mae"}


def _frozen_but_for_one():
    inputs = keras.Input((4,))
    x = keras.layers.BatchNormalization(name="free")(keras.layers.Dense(4)(inputs))
    base = keras.Model(inputs, x, name="base")
    base.trainable = False
    base.get_layer("free").trainable = True
    return keras.Model(inputs, keras.layers.Dense(1)(base(inputs)))


def _frozen_bias():
    inputs = keras.Input((4,))
    dense = keras.layers.Dense(4)
    model = keras.Model(inputs, keras.layers.ReLU()(dense(inputs)))
    dense.bias.trainable = False
    return model


class Normalizer(keras.layers.Layer):
    """Has a batch norm of which its configuration says nothing."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.normalization = keras.layers.BatchNormalization()

    def build(self, shape):
        self.normalization.build(shape)

    def call(self, x, training=None):
        return self.normalization(x, training=training)


def _frozen_in_a_layer():
    inputs = keras.Input((4,))
    normalizer = Normalizer()
    model = keras.Model(inputs, keras.layers.Dense(1)(normalizer(inputs)))
    normalizer.normalization.trainable = False
    return model


@pytest.mark.parametrize("make", [_frozen_but_for_one, _frozen_bias, _frozen_in_a_layer])
def test_frozen_parts(make):
    """What is trained, and whether batch norms learn, is what it was."""
    model = make()
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
    converted = layers.convert(model)
    models = [model, converted, layers.revert(converted)]
    x, y = values((8, 4), (8, *model.output_shape[1:]))
    for each in models:
        each.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        assert len(each.trainable_weights) == len(model.trainable_weights)
        for new, old in zip(each.get_weights(), model.get_weights(), strict=True):
            assert_same(new, old)
    assert len(converted.optimizer.variables) == 2 + len(model.trainable_weights)


def test_outputs_keep_their_names():
    """Losses, metrics and labels go by them, also where the fused layer has another name."""
    inputs = keras.Input((4,))
    left = keras.layers.ReLU(name="left")(keras.layers.Dense(3)(inputs))
    right = keras.layers.Activation("tanh", name="right")(keras.layers.Dense(2)(inputs))
    model = keras.Model(inputs, [left, right])
    model.compile("sgd", {"left": "mse", "right": "mae"}, metrics={"right": ["mse"]})
    x, y, z = values((8, 4), (8, 3), (8, 2))
    converted = layers.convert(model)
    assert classes(converted) == ["FusedDense"] * 2
    histories = [
        each.fit(x, {"left": y, "right": z}, shuffle=False, verbose=0).history
        for each in (model, converted, layers.revert(layers.convert(model)))
    ]
    assert histories[0].keys() == histories[1].keys() == histories[2].keys()


def test_unknown_loss_leaves_it_uncompiled():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", lambda y, z: keras.ops.mean(y - z))
    with pytest.warns(UserWarning, match="call compile"):
        converted = layers.convert(model)
    assert not converted.compiled


@keras.saving.register_keras_serializable(package="test")
class Counts(keras.layers.Layer):
    """Has what recurrent layers have, under the same names, but for itself."""

    stateful = True
    states = (0,)

    def call(self, x):
        return x


def test_states_that_are_no_recurrent_layers():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Counts()(keras.layers.Dense(3)(inputs)))
    x = tf.ones([2, 4])
    assert_same(layers.convert(model)(x), model(x))
