"""The Keras layers compute what stock layers compute, and do it with the fused ops."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_cases import CASES, call, fused_counts, pair
from remapping import assert_same, values

from tf_fused_ops import layers

ACTIVATIONS = {
    "relu": "relu",
    "relu6": "relu6",
    "elu": "elu",
    "selu": "selu",
    "leaky_relu": "leaky_relu",
    "tanh": "tanh",
    "softplus": "softplus",
    "hard_sigmoid": "hard_sigmoid",
    "silu": "silu",
    "hard_silu": "hard_silu",
    "mish": "mish",
    "gelu": "gelu",
    "gelu_tanh": layers.gelu_tanh,
    "leaky_layer": keras.layers.LeakyReLU(0.3),
    "relu6_layer": keras.layers.ReLU(6.0),
    "tf_relu": tf.nn.relu,
    "ops_gelu": keras.ops.gelu,
}
FAMILIES = ("conv", "batch_norm", "dense")


def step(function, variables, x, side):
    """Returns the output with its gradients in x, side and the variables."""
    with tf.GradientTape() as tape:
        tape.watch([x, *([] if side is None else [side])])
        y = function(x, side, training=True)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
    return y, tape.gradient(loss, [x, side, *variables] if side is not None else [x, *variables])


def one_each_way(case):
    """Returns the fused ops of a layer and its gradients: the operands of a product have one op
    each."""
    gradients = 1 if "BatchNorm" in case.op else 2
    return {case.op: case.count, f"{case.op}Grad": gradients * case.count}


def check(case, activation, with_side=False, units=64):
    """Asserts equal outputs, gradients and statistics, and one fused op each way."""
    fused, stock, reference = pair(case, activation)
    x, side = values(case.shape, case.output_shape)
    side = side if with_side else None

    def run(x):
        return step(
            lambda *a, **k: call(fused, *a, **k),
            [v.value for v in fused.trainable_weights],
            x,
            side,
        )

    assert fused_counts(run, x) == one_each_way(case)
    found = tf.function(run)(x)
    expected = tf.function(
        lambda x: step(reference, [v.value for v in stock.trainable_weights], x, side)
    )(x)
    assert_same(found, expected, units)
    assert_same([v.value for v in fused.weights], [v.value for v in stock.weights])
    assert_same(call(fused, x, side), reference(x, side))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_activation(family, activation):
    check(CASES[family], ACTIVATIONS[activation])


@pytest.mark.parametrize("with_side", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equals_stock(name, with_side):
    check(CASES[name], "relu", with_side)


@pytest.mark.parametrize("activation", ["gelu", "tanh"])
@pytest.mark.parametrize("family", FAMILIES)
def test_side_input_with_activation(family, activation):
    check(CASES[family], activation, with_side=True)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax", "softsign"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_activation_follows_the_fused_op(family, activation):
    check(CASES[family], activation)


def test_losses_find_the_logits_of_sigmoid():
    x = tf.constant([[200.0]])
    layer = layers.FusedDense(1, activation="sigmoid", kernel_initializer="ones")
    loss = keras.losses.binary_crossentropy([[0.0]], layer(x))
    np.testing.assert_allclose(loss, [200.0])


@pytest.mark.parametrize("name", CASES)
def test_symbolic_shape_is_the_eager_one(name):
    case = CASES[name]
    layer = case.fused(activation="relu", **case.options)
    inputs, side = keras.Input(case.shape[1:]), keras.Input(case.output_shape[1:])
    symbolic = layer(inputs, side)
    assert symbolic.shape == (None, *case.output_shape[1:])
    x, s = values(case.shape, case.output_shape)
    y = layer(x, s)
    assert tuple(y.shape) == tuple(layer.compute_output_shape(case.shape)) == case.output_shape
    assert_same(keras.Model([inputs, side], symbolic)([x, s]), y)


@pytest.mark.parametrize("policy", ["float32", "float64", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_step_in_policy(family, policy):
    """One step of SGD; variables keep their type."""
    case = CASES[family]
    fused, stock, reference = pair(case, "relu", policy)
    half = policy.startswith("mixed")
    assert {v.dtype for v in fused.variables} == {"float32" if half else policy}
    x, side = values(case.shape, case.output_shape)

    def train(function, layer):
        variables = [v.value for v in layer.trainable_weights]
        y, (_, _, *gradients) = step(function, variables, x, side)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(tf.cast(1e-2 * gradient, variable.dtype))
        return y

    found = tf.function(lambda: train(lambda *a, **k: call(fused, *a, **k), fused))
    counts = fused_counts(lambda: train(lambda *a, **k: call(fused, *a, **k), fused))
    assert counts == one_each_way(case)
    y, expected = found(), train(reference, stock)
    assert y.dtype == fused.compute_dtype
    scale = np.abs(tf.cast(expected, tf.float64)).max()
    unit = {"mixed_float16": 2.0**-9, "mixed_bfloat16": 2.0**-6}.get(policy, 1e-6)
    difference = tf.cast(y, tf.float64) - tf.cast(expected, tf.float64)
    assert np.abs(difference).max() <= unit * scale
    for a, b in zip(fused.weights, stock.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=8 * unit, atol=unit)


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_learns_only_in_training(training, trainable):
    fused, stock, reference = pair(CASES["batch_norm"], "relu")
    fused.trainable = stock.trainable = trainable
    before = [v.numpy() for v in fused.non_trainable_weights]
    (x,) = values(CASES["batch_norm"].shape)
    assert_same(fused(x, training=training), reference(x, training=training))
    assert_same([v.value for v in fused.weights], [v.value for v in stock.weights])
    after = [v.numpy() for v in fused.non_trainable_weights]
    moved = any(np.any(a != b) for a, b in zip(before, after, strict=True))
    assert moved == (training and trainable)
    assert len(fused.trainable_weights) == (2 if trainable else 0)


@pytest.mark.parametrize("name", CASES)
def test_weights_go_both_ways(name):
    fused, stock, _ = pair(CASES[name])
    assert [v.name for v in fused.weights] == [v.name for v in stock.weights]
    assert [v.shape for v in fused.weights] == [v.shape for v in stock.weights]
    for source, target in ((fused, stock), (stock, fused)):
        store = {}
        source.save_own_variables(store)
        target.load_own_variables({key: value.numpy() for key, value in store.items()})
    assert_same([v.value for v in fused.weights], [v.value for v in stock.weights])


@pytest.mark.parametrize("name", CASES)
def test_arguments_of_call_take_arrays(name):
    """NumPy arrays, of another type too, are cast as stock layers cast them."""
    case = CASES[name]
    fused, _, reference = pair(case, "relu")
    x, side = (v.numpy().astype("float64") for v in values(case.shape, case.output_shape))
    assert_same(call(fused, x, side), reference(tf.cast(x, "float32"), side))
