"""Convolution of lines and batch normalization in inference."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    given,
    gradient_count,
    op_counts,
    plain,
    reasons,
    rule_counts,
    values,
)
from tolerances import assert_as_exact

from tf_fused_ops.function import function

LINES, FILTERS = (2, 9, 3), (4, 3, 5)
VECTORS = [(5,)] * 4
RULE = "conv1d_given_batch_norm"


def conv(x, w, bias=None, stride=1, padding="SAME", **attributes):
    z = tf.nn.conv1d(x, w, stride, padding, **attributes)
    return z if bias is None else tf.nn.bias_add(z, bias)


def causal_conv(x, w, bias=None, paddings=((0, 0), (3, 0), (0, 0)), **attributes):
    return conv(tf.pad(x, paddings), w, bias, padding="VALID", **attributes)


def side(x):
    return tf.tile(x, [1, 1, 2])[..., :5]


SPELLINGS = {
    "plain": (lambda x, w, *v: given(conv(x, w), *v), RULE),
    "bias": (lambda x, w, *v: tf.nn.relu(given(conv(x, w, v[0]), *v)), f"{RULE}_relu"),
    "sum": (lambda x, w, *v: tf.nn.silu(given(v[0] + conv(x, w), *v)), f"{RULE}_silu"),
    "no_scale": (lambda x, w, scale, *v: given(conv(x, w, scale), None, *v), RULE),
    "neither": (
        lambda x, w, scale, offset, *v: tf.tanh(given(conv(x, w), None, None, *v)),
        f"{RULE}_tanh",
    ),
    "stride": (lambda x, w, *v: given(conv(x, w, stride=2), *v), RULE),
    "dilation": (lambda x, w, *v: given(conv(x, w, padding="VALID", dilations=2), *v), RULE),
    "causal": (lambda x, w, *v: tf.nn.elu(given(causal_conv(x, w), *v)), f"{RULE}_elu"),
    "causal_bias": (
        lambda x, w, *v: given(causal_conv(x, w, v[0], stride=2), *v),
        RULE,
    ),
    "side_input": (
        lambda x, w, *v: tf.nn.relu(given(conv(x, w, v[0]), *v) + side(x)),
        f"{RULE}_add_relu",
    ),
    "side_input_first": (
        lambda x, w, *v: tf.nn.relu(side(x) + given(causal_conv(x, w), *v)),
        f"{RULE}_add_relu",
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    fn, rule = SPELLINGS[name]
    compiled = check(fn, values(LINES, FILTERS, *VECTORS), {rule: 1})
    counts = op_counts(compiled.get_concrete_function())
    assert counts["TfFusedOps>Conv2DBiasAct"] == 1
    assert not counts.keys() & {"Conv2D", "BiasAdd", "Pad"}


def gradients(fn, sources, *args):
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y = fn(*args)
    return y, tape.gradient(y, sources, output_gradients=tf.cos(y))


@pytest.mark.parametrize("with_side", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_gradients(inner, causal, with_side):
    def forward(x, w, bias, scale, offset, mean, variance, other):
        z = (causal_conv if causal else conv)(x, w, bias, stride=2)
        y = given(z, scale, offset, mean, variance)
        return tf.nn.silu(y + other if with_side else y)

    args = values(LINES, FILTERS, *[(5,)] * 5, (2, 5, 5))
    args[6] = tf.abs(args[6]) + 0.5  # a small variance would magnify rounding errors
    sources = args[:5] + args[7:] * with_side
    if inner:

        def step(*args):
            return gradients(forward, [*args[:5], *args[7:] * with_side], *args)

        expected = tf.function(step)(*args)
        compiled = function(step)
        found = compiled(*args)
        counts = op_counts(compiled.get_concrete_function(*args))
        assert not counts.keys() & {"Pad", "Slice", "Conv2D", "Conv2DBackpropInput"}
        assert gradient_count(compiled) == 1
    else:
        expected = gradients(tf.function(forward), sources, *args)
        compiled = function(forward)
        found = gradients(compiled, sources, *args)
    assert_same(found, expected, units=256)
    assert rule_counts(compiled) == {f"{RULE}{'_add' * with_side}_silu": 1}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    """The statistics are float32; output and gradients are as exact as stock."""

    def step(*args):
        def forward(x, w, *vectors):
            wide = given(tf.cast(conv(x, w), tf.float32), *vectors)
            return tf.tanh(tf.cast(wide, x.dtype))

        y, found = gradients(forward, args[:4], *args)
        return y, *found

    args = [*values(LINES, FILTERS, dtype=dtype), *values(*VECTORS)]
    compiled = function(step)
    with plain():
        found, stock = compiled(*args), tf.function(step)(*args)
        exact = tf.function(step)(*(tf.cast(value, tf.float32) for value in args))
    assert (rule_counts(compiled), gradient_count(compiled)) == ({f"{RULE}_tanh": 1}, 1)
    names = ("y", "dx", "dw", "dscale", "doffset")
    for row in zip(names, found, stock, exact, strict=True):
        assert_as_exact(*row, dtype)


# Chains of which a part stays: (function, shapes, rules, what is said of the chain).
REFUSALS = {
    "another_axis": (
        lambda x, w, *v: given(conv(x, w), *v, shape=(1, 5, 1)),
        [(2, 5, 3), FILTERS, *VECTORS],
        {"given_batch_norm": 1},
        "are not those normalized",
    ),
    "convolution_is_read": (
        lambda x, w, *v: (lambda z: (given(z, *v), tf.exp(z)))(conv(x, w, v[0])),
        [LINES, FILTERS, *VECTORS],
        {"conv1d_bias": 1, "given_batch_norm": 1},
        "is also used by Exp",
    ),
    "pad_of_channels": (
        lambda x, w, *v: given(causal_conv(x, w, paddings=[[0, 0], [3, 0], [0, 1]]), *v),
        [(2, 9, 2), FILTERS, *VECTORS],
        {RULE: 1},
        "are not those of a convolution",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    fn, shapes, rules, reason = REFUSALS[name]
    args = values(*shapes)
    compiled = function(fn)
    assert_same(compiled(*args), fn(*args))
    assert rule_counts(compiled) == rules
    assert reason in reasons(compiled)[RULE]


@pytest.mark.parametrize("use_bias", [True, False])
def test_keras(use_bias):
    """Blocks of a temporal network: a causal convolution, one with a stride, and a residual."""
    inputs = x = keras.Input((12, 4))
    for padding, activation in (("causal", "relu"), ("same", "silu")):
        x = keras.layers.Conv1D(4, 3, padding=padding, use_bias=use_bias)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Activation(activation)(x)
    x = keras.layers.Conv1D(4, 1, use_bias=use_bias)(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.ReLU()(keras.layers.Add()([x, inputs]))
    x = keras.layers.Conv1D(6, 3, strides=2, use_bias=use_bias)(x)
    model = keras.Model(inputs, keras.layers.BatchNormalization()(x))
    for seed, weight in enumerate(model.weights):
        weight.assign(tf.abs(values(weight.shape, seed=seed)[0]) * 0.3 + 0.1)
    rules = {f"{RULE}_relu": 1, f"{RULE}_silu": 1, f"{RULE}_add_relu": 1, RULE: 1}
    check(lambda x: model(x, training=False), values((2, 12, 4)), rules)
