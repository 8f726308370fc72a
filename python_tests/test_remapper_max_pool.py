"""Relu and max pooling in training: what is fused, with which neighbours, what is left to stock."""

import keras
import pytest
import tensorflow as tf
from remapping import check, op_counts, reasons, rule_counts, values
from test_remapper_refusals import CONV, after, conv, keep, norm

from tf_fused_ops.function import function

(X,) = values((2, 6, 5, 3))


def pool(x, ksize=2, strides=2, padding="VALID", **more):
    return tf.nn.max_pool2d(x, ksize, strides, padding, **more)


def step_of(chain):
    """A forward and a backward pass."""

    def step(x, *others):
        with tf.GradientTape() as tape:
            tape.watch([x, *others])
            y = chain(x, *others)
            loss = tf.reduce_sum(y * y)
        return y, tape.gradient(loss, [x, *others])

    return step


WINDOWS = {
    "2x2": {},
    "3x3 s2": {"ksize": 3, "padding": "SAME"},
    "overlapping": {"ksize": [3, 2], "strides": 1},
    "apart": {"ksize": 1, "strides": [2, 3]},
}


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name, unknown_batch):
    chain = step_of(lambda x: pool(tf.nn.relu(x), **WINDOWS[name]))
    unknown = [0] if unknown_batch else []
    check(chain, [X], {"relu_max_pool": 1}, gradients=1, unknown_batch=unknown)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    chain = step_of(lambda x: pool(tf.nn.relu(x)))
    check(chain, values(X.shape, dtype=dtype), {"relu_max_pool": 1}, gradients=1)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_keras_layers(padding):
    layers = [keras.layers.MaxPooling2D(padding=padding), keras.layers.MaxPooling1D(2)]
    for layer, (x,) in zip(layers, ([X], values((2, 6, 3))), strict=True):
        # One dimension gets another between relu and pooling.
        rules = {"relu_max_pool": 1} if x is X else {}
        chain = keras.Sequential([keras.layers.ReLU(), layer])
        check(step_of(chain), [x], rules, gradients=len(rules))


def test_convolution_before_keeps_nothing_for_relu():
    compiled = check(
        step_of(lambda x, w, b: pool(tf.nn.relu(conv(x, w, b)))),
        values(*CONV),
        {"conv2d_bias": 1, "relu_max_pool": 1},
        gradients=2,
    )
    operations = compiled.get_concrete_function().graph.get_operations()
    for op in operations:
        if op.type == "TfFusedOps>Conv2DBiasActGrad":
            assert op.get_attr("num_saved") == 0
    (y,) = (op.outputs[0] for op in operations if op.type == "TfFusedOps>Conv2DBiasAct")
    assert [user.type for user in y.consumers()] == ["TfFusedOps>MaxPoolAct"]


def test_batch_norm_before_takes_the_relu():
    compiled = check(
        step_of(lambda *args: pool(tf.nn.relu(norm(*args)[0]))),
        values((4, 5, 3, 6), (6,), (6,)),
        {"batch_norm_relu": 1},
        gradients=1,
    )
    assert reasons(compiled)["relu_max_pool"] == "the batch norm before it takes the relu"


NOT_THE_RELU = {
    "used twice": lambda x: [pool(z := tf.nn.relu(x)), z],
    "kept": lambda x: pool(keep(tf.nn.relu(x))),
    "relu6": lambda x: pool(tf.nn.relu6(x)),
    "control edge": lambda x: after(z := tf.nn.relu(x), pool(z)),
}


@pytest.mark.parametrize("name", NOT_THE_RELU)
def test_relu_stays(name):
    def chain(x):
        results = NOT_THE_RELU[name](x)
        results = results if isinstance(results, list) else [results]
        return tf.concat([tf.reshape(y, [-1]) for y in results], 0)

    check(step_of(chain), [X], {})


def test_relu_on_the_other_side():
    compiled = check(step_of(lambda x: tf.nn.relu(pool(x))), [X], {})
    assert op_counts(compiled.get_concrete_function())["Relu"] == 1


REFUSED = {
    "explicit": (
        {"padding": [[0, 0], [1, 0], [0, 1], [0, 0]]},
        "max pooling is fused channels last and without explicit paddings",
    ),
    "large": (
        {"ksize": 16, "padding": "SAME"},
        "a window of 16 x 16 is of more than 255 pixels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    attributes, reason = REFUSED[name]
    compiled = check(step_of(lambda x: pool(tf.nn.relu(x), **attributes)), [X], {})
    assert reasons(compiled)["relu_max_pool"] == reason


def test_windows_over_channels():
    """Whose gradient stock cannot compute on a CPU."""
    window = [1, 1, 1, 3]
    compiled = function(step_of(lambda x: tf.nn.max_pool(tf.nn.relu(x), window, window, "VALID")))
    compiled.get_concrete_function(X)
    assert reasons(compiled)["relu_max_pool"] == "a window over images or channels"


def test_inference_is_left_to_stock():
    compiled = function(lambda x: pool(tf.nn.relu(x)))
    compiled(X)
    assert rule_counts(compiled) == {}
    assert "no gradient of it is in the graph" in reasons(compiled)["relu_max_pool"]


def test_second_order_in_a_function():
    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(pool(tf.nn.relu(x)) ** 3)
            dx = inner.gradient(loss, x)
        return dx, outer.gradient(dx, x)

    compiled = function(step)
    for found, expected in zip(compiled(X), tf.function(step)(X), strict=True):
        tf.debugging.assert_near(found, expected)
