"""Leaky relus with a learned slope: what is fused, with which neighbours, what is left to stock."""

import keras
import pytest
import tensorflow as tf
from remapping import check, check_portable, reasons, rule_counts, step_of, values
from test_remapper_refusals import CONV, conv

from tf_fused_ops.function import function


def keras_code(x, alpha):
    return tf.nn.relu(x) + -alpha * tf.nn.relu(-x)


SPELLINGS = {
    "keras": keras_code,
    "subtracted": lambda x, alpha: tf.nn.relu(x) - alpha * tf.nn.relu(-x),
    "commuted": lambda x, alpha: tf.nn.relu(-x) * -alpha + tf.nn.relu(x),
}
SHAPES = {
    "channels": ((2, 5, 4, 6), (1, 1, 6)),
    "vector": ((2, 5, 4, 6), (6,)),
    "places": ((2, 5, 4, 6), (5, 4, 6)),
    "one": ((2, 5, 6), (1, 1)),
    "rows": ((3, 7), (7,)),
}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_training(spelling, shapes):
    chain = step_of(SPELLINGS[spelling])
    check(chain, values(*SHAPES[shapes]), {"prelu": 1}, gradients=1)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("spelling", ["keras", "subtracted"])
def test_unknown_batch(spelling, shapes):
    chain = step_of(SPELLINGS[spelling])
    args = values(*SHAPES[shapes])
    check(chain, args, {"prelu": 1}, gradients=1, unknown_batch=[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_inference(dtype):
    check(keras_code, values((2, 5, 4, 6), (6,), dtype=dtype), {"prelu": 1})


@pytest.mark.parametrize("axes", [None, [1, 2], [1], [1, 2, 3]], ids=str)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_keras_layer(policy, axes):
    layer = keras.layers.PReLU("random_uniform", shared_axes=axes, dtype=policy)
    (x,) = values((2, 5, 4, 6), dtype=layer.compute_dtype)
    layer(x)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(tf.cast(y * y, tf.float32))
        gradients = tape.gradient(loss, [x, *layer.trainable_variables])
        return y, [tf.cast(gradient, y.dtype) for gradient in gradients]

    check(step, [x], {"prelu": 1}, gradients=1)


def test_behind_a_convolution():
    x, w, b = values(*CONV)
    (alpha,) = values(b.shape)
    chain = step_of(lambda x, w, b, alpha: keras_code(conv(x, w, b), alpha))
    check(chain, [x, w, b, alpha], {"conv2d_bias": 1, "prelu": 1}, gradients=2)


def test_residual_sum_with_an_unknown_batch():
    """Its shape is known to be that of x."""

    def chain(x, w, alpha):
        return tf.nn.relu(tf.nn.conv2d(keras_code(x, alpha), w, 1, "SAME") + x)

    args = values((2, 5, 4, 6), (3, 3, 6, 6), (6,))
    check(chain, args, {"conv2d_add_relu": 1, "prelu": 1}, unknown_batch=[0])


@pytest.mark.parametrize("shapes", SHAPES)
def test_portable_conversion(shapes, tmp_path):
    check_portable(step_of(keras_code), values(*SHAPES[shapes]), tmp_path)


def test_slope_alone_is_trained():
    def step(x, alpha):
        with tf.GradientTape() as tape:
            tape.watch(alpha)
            loss = tf.reduce_sum(keras_code(x, alpha) ** 2)
        return tape.gradient(loss, alpha)

    check(step, values((2, 5, 6), (6,)), {"prelu": 1}, gradients=1)


ELSEWHERE = {
    "other_sign": lambda x, alpha: tf.nn.relu(x) + alpha * tf.nn.relu(-x),
    "other_argument": lambda x, alpha: tf.nn.relu(x) + -alpha * tf.nn.relu(-(x + 1)),
    "relu6": lambda x, alpha: tf.nn.relu6(x) + -alpha * tf.nn.relu(-x),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_code_stays(name):
    check(ELSEWHERE[name], values((2, 5, 6), (6,)), {})


@pytest.mark.parametrize("slopes", [(2, 1, 1), (5, 1), (1, 2, 5, 6)])
def test_slopes_of_other_dimensions(slopes):
    compiled = check(step_of(keras_code), values((2, 5, 6), slopes), {})
    assert "is not of the last dimensions of" in reasons(compiled)["prelu"]


def test_unknown_shapes():
    compiled = function(keras_code, input_signature=[tf.TensorSpec(None), tf.TensorSpec([6])])
    compiled(*values((2, 6), (6,)))
    assert rule_counts(compiled) == {}
    assert "are not known" in reasons(compiled)["prelu"]
