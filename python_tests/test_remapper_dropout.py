"""Dropout: which code is fused, to the same bits; what is left as it is, and why."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import (
    DROPOUT,
    assert_same,
    check_training,
    gradient_count,
    op_counts,
    reasons,
    rule_counts,
    step_of,
    values,
)

from tf_fused_ops import function
from tf_fused_ops.remapper import RemapOptions, convert

SEED = (1, 2)
RATE = 0.2
(X,) = values((4, 6, 5))


def stateless(**options):
    def chain(x):
        return tf.nn.experimental.stateless_dropout(x, RATE, seed=SEED, **options)

    return chain


def stateful(x):
    return tf.nn.dropout(x, RATE)


def by_hand(x):
    random = tf.raw_ops.StatelessRandomGetKeyCounter(seed=SEED)
    uniform = tf.raw_ops.StatelessRandomUniformV2(
        shape=tf.shape(x), key=random.key, counter=random.counter, alg=1, dtype=x.dtype
    )
    return tf.where(uniform >= RATE, 1.25 * x, 0.0)


def of_another_shape(x):
    other = tf.nn.relu(x)
    return stateless(noise_shape=tf.shape(other))(x)


FORMS = {
    "stateless": stateless(),
    "philox": stateless(rng_alg="philox"),
    "its own shape": stateless(noise_shape=X.shape),
    "that of another": of_another_shape,
    "by hand": by_hand,
    "stateful": stateful,
    "stateful with a seed": lambda x: tf.nn.dropout(x, RATE, seed=7),
    "twice": lambda x: stateless()(stateless()(x)),
}


def assert_same_bits(compiled, stock, *args):
    for found, expected in zip(*map(tf.nest.flatten, (compiled(*args), stock(*args))), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("name", "unknown"),
    # A shape that is known is not that of what has an unknown one.
    [*((name, False) for name in FORMS), *((n, True) for n in FORMS if n != "its own shape")],
)
def test_forms(name, unknown, dtype):
    chain, x, count = FORMS[name], tf.cast(X, dtype), 2 if name == "twice" else 1
    for code, gradients in ((chain, 0), (step_of(chain), count)):
        signature = [tf.TensorSpec([None, *X.shape[1:]] if unknown else X.shape, dtype)]
        runs = []
        for decorator in (function, tf.function):
            tf.random.set_seed(1)
            compiled = decorator(code, input_signature=signature, autograph=False)
            runs.append([compiled, compiled(x), compiled(x)])
        (compiled, *found), (_, *expected) = runs
        for ours, theirs in zip(*map(tf.nest.flatten, (found, expected)), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert rule_counts(compiled) == {"dropout": count}
        assert gradient_count(compiled) == gradients
        types = {op.type for op in compiled.get_concrete_function().graph.get_operations()}
        drawing = {"StatelessRandomUniformV2", "RandomUniform"}
        assert not types & {*drawing, "SelectV2", "GreaterEqual"}


def broadcast(x):
    return stateless(noise_shape=[4, 1, 5])(x)


def used_mask(x):
    random = tf.random.stateless_uniform(tf.shape(x), SEED)
    kept = random >= RATE
    return tf.where(kept, x * 1.25, 0.0) + tf.cast(kept, tf.float32)


def another_range(x):
    random = tf.random.stateless_uniform(tf.shape(x), SEED, maxval=2.0)
    return tf.where(random >= RATE, x * 1.25, 0.0)


def another_value(x):
    random = tf.random.stateless_uniform(tf.shape(x), SEED)
    return tf.where(random >= RATE, x * 1.25, -1.0)


OTHERS = {
    "broadcast numbers": broadcast,
    "a mask used elsewhere": used_mask,
    "another range": another_range,
    "another value": another_value,
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    compiled = function(OTHERS[name], input_signature=[tf.TensorSpec(X.shape)])
    assert_same_bits(compiled, OTHERS[name], X)
    assert "dropout" not in rule_counts(compiled)


def broadcast_gradient(x, z):
    """What looks like a gradient, but has the mask broadcast to it."""
    kept = tf.random.stateless_uniform(tf.shape(x), SEED) >= 0.5
    return tf.where(kept, x * 2.0, 0.0), tf.where(kept, z, 0.0) * 2.0


def test_what_looks_like_a_gradient():
    args = values((8,), (3, 8))
    compiled = function(broadcast_gradient)
    assert_same_bits(compiled, broadcast_gradient, *args)
    assert rule_counts(compiled) == {}


@pytest.mark.parametrize("chain", [stateless(), lambda x: tf.nn.gelu(x)], ids=["dropout", "gelu"])
def test_jacobian(chain):
    """Whose gradients come in many at a time."""

    def jacobian(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x)
        return tape.jacobian(y, x)

    (x,) = values((8,))
    np.testing.assert_allclose(function(jacobian)(x), jacobian(x), rtol=1e-5, atol=1e-6)


def test_sizes_behind_a_transposition_are_not_mistaken():
    """Of a dimension that is counted from the end."""

    def chain(a, b):
        y = tf.transpose(a @ b, [-1, 0])
        shape = tf.shape(tf.transpose(a, [-1, 0]))
        return tf.nn.experimental.stateless_dropout(y, 0.5, seed=SEED, noise_shape=shape)

    compiled = function(chain, input_signature=[tf.TensorSpec([None, None])] * 2)
    args = values((6, 1), (1, 5))
    assert_same_bits(compiled, chain, *args)
    assert rule_counts(compiled) == {}


def test_sizes_of_unknown_ranks():
    def chain(a, b):
        return stateless()(tf.transpose(a @ b, [0, 2, 1]))

    compiled = function(chain, input_signature=[tf.TensorSpec(None)] * 2)
    assert_same_bits(compiled, chain, *values((2, 4, 3), (2, 3, 5)))


def test_reasons():
    """Those that the log tells."""
    compiled = function(broadcast, input_signature=[tf.TensorSpec(X.shape)])
    compiled(X)
    assert "may be broadcast" in reasons(compiled)["dropout"]
    compiled = function(
        lambda x: tf.nn.experimental.stateless_dropout(x, 0.1, seed=SEED),
        input_signature=[tf.TensorSpec(X.shape, tf.float64)],
    )
    compiled(tf.cast(X, tf.float64))
    assert "more digits" in reasons(compiled)["dropout"]


def test_outer_tape():
    """The backward pass, a function of its own, has the numbers of the forward pass."""
    compiled = function(stateful, input_signature=[tf.TensorSpec([None, 6, 5])])
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = compiled(X)
    np.testing.assert_array_equal(tape.gradient(y, X), tf.where(y == 0, 0.0, 1.25))
    assert rule_counts(compiled) == {"dropout": 1}


def test_attention_with_a_generator_of_its_own():
    """Draws what stock draws, and other numbers in every call."""
    operands = values((2, 5, 3, 4), (2, 6, 3, 4), (2, 6, 3, 7))

    def chain(query, key, value):
        weights = tf.nn.softmax(tf.einsum("bqhd,bkhd->bhqk", query, key))
        return tf.einsum("bhqk,bkhd->bqhd", tf.nn.dropout(weights, RATE), value)

    for unknown in (False, True):
        specs = [tf.TensorSpec([None, *x.shape[1:]] if unknown else x.shape) for x in operands]
        runs = []
        for decorator in (function, tf.function):
            tf.random.set_seed(1)
            compiled = decorator(step_of(chain), input_signature=specs)
            runs.append([compiled, compiled(*operands), compiled(*operands)])
        (compiled, *found), (_, *expected) = runs
        assert_same(found, expected)
        assert not np.array_equal(found[0][0], found[1][0])
        assert (rule_counts(compiled), gradient_count(compiled)) == ({"attention": 1}, 1)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_keras_layer(policy):
    """Every call draws other numbers, those that stock draws."""
    steps = []
    for decorator in (function, tf.function):
        keras.utils.set_random_seed(0)
        layer = keras.layers.Dropout(0.1, seed=5, dtype=policy)
        x = tf.cast(X, layer.compute_dtype)

        def step(x, layer=layer):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
            return y, tape.gradient(y, x)

        steps.append(decorator(step, input_signature=[tf.TensorSpec([None, 6, 5], x.dtype)]))
    first = steps[0](x)[0]
    np.testing.assert_array_equal(first, steps[1](x)[0])
    assert_same_bits(*steps, x)
    assert not np.array_equal(first, steps[0](x)[0])
    assert (rule_counts(steps[0]), gradient_count(steps[0])) == ({"dropout": 1}, 1)


def test_model_trains_as_stock():
    def model():
        inputs = keras.Input((6, 16))
        y = keras.layers.MultiHeadAttention(2, 8, dropout=0.1, seed=3)(inputs, inputs)
        y = keras.layers.Dropout(0.1, seed=4)(y) + inputs
        y = keras.layers.LayerNormalization()(y)
        return keras.Model(inputs, keras.layers.Dense(5)(keras.layers.Dropout(0.2, seed=5)(y)))

    compiled = check_training(model, (4, 6, 5))
    assert (rule_counts(compiled)["attention"], rule_counts(compiled)["dropout"]) == (1, 2)


def test_portable_conversion(tmp_path):
    """Stock ops stand for the op where the package is not installed, and are fused again."""
    paths = [str(tmp_path / name) for name in ("fused", "portable", "again")]
    module = tf.Module()
    signature = [tf.TensorSpec(X.shape)]
    module.forward = function(step_of(stateless()), input_signature=signature)
    tf.saved_model.save(module, paths[0])
    convert(paths[0], paths[1], to_stock=True)
    convert(paths[1], paths[2])
    loaded = [tf.saved_model.load(path) for path in paths]
    for model, count in zip(loaded, (2, 0, 2), strict=True):
        assert_same_bits(model.forward, module.forward, X)
        (concrete,) = model.forward.concrete_functions
        assert op_counts(concrete)[DROPOUT] == count


def test_portable_conversion_of_a_generator(tmp_path):
    """Draws anew in every call."""
    module = tf.Module()
    module.forward = function(step_of(stateful), input_signature=[tf.TensorSpec(X.shape)])
    tf.saved_model.save(module, str(tmp_path / "fused"))
    convert(str(tmp_path / "fused"), str(tmp_path / "portable"), to_stock=True)
    forward = tf.saved_model.load(str(tmp_path / "portable")).forward
    (concrete,) = forward.concrete_functions
    assert not [name for name in op_counts(concrete) if name.startswith("TfFusedOps>")]
    first, second = (forward(X)[0].numpy() for _ in range(2))
    assert not np.array_equal(first, second)
    for y in (first, second):
        np.testing.assert_array_equal(y, np.where(y == 0, 0, np.float32(1.25) * X))


def test_switched_off():
    compiled = function(stateless(), remap=RemapOptions(disable=["dropout"]))
    assert_same_bits(compiled, stateless(), X)
    assert rule_counts(compiled) == {}
