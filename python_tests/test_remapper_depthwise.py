"""Depthwise convolutions are fused as convolutions in groups of a channel."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import assert_same, check, op_counts, plain, rule_counts, values

from tf_fused_ops import function
from tf_fused_ops.remapper import RemapOptions, convert
from tf_fused_ops.remapper.attributes import KEEP

OPS = tuple(f"DepthwiseConv2dNative{what}" for what in ("", "BackpropInput", "BackpropFilter"))
X, W, B = values((2, 9, 8, 6), (3, 3, 6, 1), (6,))


def depthwise(x, w, strides=1, padding="SAME", **more):
    return tf.nn.depthwise_conv2d(x, w, [1, strides, strides, 1], padding, **more)


def left(compiled, *args):
    """Counts the depthwise ops that were not replaced."""
    counts = op_counts(compiled.get_concrete_function(*args))
    return {name.removeprefix(OPS[0]): counts[name] for name in OPS if counts[name]}


def step_of(chain):
    """A forward and a backward pass."""

    def step(x, *others):
        with tf.GradientTape() as tape:
            tape.watch([x, *others])
            y = chain(x, *others)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return y, tape.gradient(loss, [x, *others])

    return step


CASES = {
    "same": ((2, 9, 8, 6), (3, 3, 6, 1), {}),
    "valid": ((2, 9, 8, 6), (3, 2, 6, 1), {"padding": "VALID"}),
    "strides": ((2, 9, 8, 6), (3, 3, 6, 1), {"strides": 2}),
    "explicit": ((2, 9, 8, 6), (3, 3, 6, 1), {"padding": [[0, 0], [2, 1], [0, 1], [0, 0]]}),
    "multiplier": ((2, 7, 8, 5), (3, 3, 5, 3), {}),
    "5x5": ((1, 13, 17, 33), (5, 5, 33, 1), {"strides": 2}),
    "1x1": ((3, 5, 4, 7), (1, 1, 7, 2), {}),
}


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_alone(name, unknown_batch):
    shape, filters, options = CASES[name]
    if name == "strides":  # stock's ops take square images and strides
        shape = (2, 8, 8, 6)
    unknown = [0] if unknown_batch else []
    operands = values(shape, filters)
    chain = step_of(lambda x, w: depthwise(x, w, **options))
    compiled = check(
        chain, operands, {"grouped_conv2d": 1}, gradients=1, unknown_batch=unknown, units=256
    )
    assert left(compiled) == {}
    inference = check(
        lambda x, w: depthwise(x, w, **options),
        operands,
        {"grouped_conv2d": 1},
        unknown_batch=unknown,
    )
    assert left(inference) == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    chain = step_of(lambda x, w, b: tf.nn.relu6(tf.nn.bias_add(depthwise(x, w), b)))
    operands = values(X.shape, W.shape, B.shape, dtype=dtype)
    compiled = check(chain, operands, {"conv2d_bias_relu6": 1}, gradients=1)
    assert left(compiled) == {}


CHAINS = {
    "conv2d_bias_silu": (lambda x, w, b: tf.nn.silu(tf.nn.bias_add(depthwise(x, w), b)), 3),
    "conv2d_relu": (lambda x, w: tf.nn.relu(depthwise(x, w)), 2),
    "conv2d_bias_add_relu": (
        lambda x, w, b: tf.nn.relu(tf.nn.bias_add(depthwise(x, w), b) + x),
        3,
    ),
    "pad_conv2d": (
        lambda x, w: depthwise(
            tf.pad(x, [[0, 0], [0, 1], [0, 1], [0, 0]]), w, padding="VALID"
        ),
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name):
    chain, count = CHAINS[name]
    operands = [X, W, B][:count]
    compiled = check(step_of(chain), operands, {name: 1}, gradients=1, units=256)
    assert left(compiled) == {}
    assert left(check(chain, operands, {name: 1})) == {}


def test_one_after_the_other():
    """The second one reads what took the place of the first."""
    operands = [X, *values(W.shape, W.shape, seed=1)]

    def chain(x, first, second):
        return tf.nn.relu(depthwise(depthwise(x, first), second))

    compiled = check(chain, operands, {"grouped_conv2d": 1, "conv2d_relu": 1}, units=256)
    assert left(compiled) == {}
    rules = {"grouped_conv2d": 1, "conv2d_relu": 1}
    compiled = check(step_of(chain), operands, rules, gradients=2, units=512)
    assert left(compiled) == {}


def outer(fn, args):
    with tf.GradientTape() as tape:
        tape.watch(args)
        y = fn(*args)
    return y, tape.gradient(y, args)


def test_outer_tape():
    chain, _ = CHAINS["conv2d_bias_silu"]
    compiled = function(chain)
    expected = outer(tf.function(chain), [X, W, B])
    assert_same(outer(compiled, [X, W, B]), expected)
    assert rule_counts(compiled) == {"conv2d_bias_silu": 1}


def test_second_order():
    def penalty(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.tanh(depthwise(x, w)))
            loss = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return tape.gradient(loss, [x, w])

    assert_same(function(penalty)(X, W), tf.function(penalty)(X, W), units=512)


def layer_of(kind, **options):
    return {
        "depthwise": lambda: keras.layers.DepthwiseConv2D(3, padding="same", **options),
        "separable": lambda: keras.layers.SeparableConv2D(5, 3, padding="same", **options),
        "1d": lambda: keras.layers.DepthwiseConv1D(3, padding="same", **options),
    }[kind]()


@pytest.mark.parametrize("options", [{}, {"dilation_rate": 2}, {"depth_multiplier": 2}], ids=str)
@pytest.mark.parametrize("kind", ["depthwise", "separable", "1d"])
def test_keras_layers(kind, options):
    layer = layer_of(kind, activation="relu", **options)
    (x,) = values((2, 8, 6) if kind == "1d" else (2, 8, 8, 6))
    layer(x)
    variables = [v.value for v in layer.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, [x, *variables])

    compiled = function(step)
    assert_same(compiled(x), tf.function(step)(x), units=256)
    assert left(compiled, x) == {}
    convolutions = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
    counts = op_counts(compiled.get_concrete_function(x))
    assert not any(counts[name] for name in convolutions)


def block(x):
    x = keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.layers.ReLU(6.0)(x)


def test_batch_norm_behind():
    """In inference it is part of the convolution, in training that takes the moments."""
    inputs = keras.Input((8, 8, 16))
    model = keras.Model(inputs, block(block(inputs)))
    (x,) = values((4, 8, 8, 16))
    inference = function(model)
    assert_same(inference(x), model(x), units=256)
    assert rule_counts(inference) == {"conv2d_given_batch_norm_relu6": 2}

    def step(x):
        with tf.GradientTape() as tape:
            y = model(x, training=True)
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, [v.value for v in model.trainable_variables])

    weights = model.get_weights()
    with plain():
        expected = tf.function(step)(x)
    model.set_weights(weights)
    training = function(step)
    assert_same(training(x), expected, units=1024)
    counts = rule_counts(training)
    assert counts["grouped_conv2d"] == counts["moments_batch_norm_relu6"] == 2
    assert counts["conv2d_moments"] == 2
    assert left(training, x) == {}


def test_one_gradient_alone():
    """Of the other operand the gradient op knows the shape only."""
    for source in (0, 1):

        def step(x, w, source=source):
            operand = (x, w)[source]
            with tf.GradientTape() as tape:
                tape.watch(operand)
                y = depthwise(x, w)
            return y, tape.gradient(y, operand, output_gradients=x)

        compiled = check(step, [X, W], {"grouped_conv2d": 1}, gradients=1)
        assert left(compiled) == {}


def test_incoming_gradient_of_two():
    """Which gradients belong together is not known by what comes in; all are right."""

    def step(x, w, other):
        with tf.GradientTape() as tape:
            tape.watch([x, w, other])
            y = depthwise(x, w) + depthwise(tf.tanh(x), other)
        return tape.gradient(y, [x, w, other], output_gradients=x)

    operands = [X, *values(W.shape, W.shape, seed=1)]
    assert_same(function(step)(*operands), tf.function(step)(*operands), units=256)


def test_one_input_of_two():
    def step(x, w, other):
        with tf.GradientTape() as tape:
            tape.watch([w, other])
            y = (
                depthwise(x, w)
                * depthwise(x, other, 2, padding=[[0, 0], [9, 9], [8, 7], [0, 0]])[:, :9, :8]
            )
        return tape.gradient(y, [w, other], output_gradients=x)

    operands = [X, *values(W.shape, W.shape, seed=1)]
    assert_same(function(step)(*operands), tf.function(step)(*operands), units=256)


def test_left_alone():
    (one,) = values((2, 6, 6, 1))
    # A single channel is no group.
    check(lambda x, w: depthwise(x, w), [one, W[:, :, :1]], {})

    @function(input_signature=[tf.TensorSpec([None, None, None, None]), tf.TensorSpec(W.shape)])
    def unknown_channels(x, w):
        return depthwise(x, w)

    @function
    def kept(x, w):
        y = depthwise(x, w)
        y.op._set_attr(KEEP, tf.compat.v1.AttrValue(b=True))
        return y

    @tf.RegisterGradient("TfoTestDepthwise")
    def doubled(op, dy):
        return dy, dy

    @function
    def overridden(x, w):
        with tf.compat.v1.get_default_graph().gradient_override_map({OPS[0]: "TfoTestDepthwise"}):
            return depthwise(x, w)

    off = function(depthwise, remap=RemapOptions(disable=["grouped_*"]))
    for compiled in (unknown_channels, kept, overridden, off):
        assert_same(compiled(X, W), depthwise(X, W))
        assert rule_counts(compiled) == {}
        concrete = compiled.get_concrete_function(X, W)
        assert op_counts(concrete)[OPS[0]] == 1


def test_saved_model(tmp_path):
    """A frozen-like graph is converted, and back to stock ops."""
    inputs = keras.Input((8, 8, 16))
    model = keras.Model(inputs, block(inputs))
    (x,) = values((2, 8, 8, 16))
    expected = model(x)
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable")]
    model.export(paths[0], verbose=False)
    convert(*paths[:2])
    convert(*paths[1:], to_stock=True)
    for path in paths:
        loaded = tf.saved_model.load(path)
        np.testing.assert_allclose(loaded.serve(x), expected, rtol=1e-5, atol=1e-5)
    assert op_counts(tf.saved_model.load(paths[1]).signatures["serving_default"])[OPS[0]] == 0
