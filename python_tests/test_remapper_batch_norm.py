"""Batch normalization made of elementary ops, as Keras and tf.nn emit it."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    gradient_count,
    op_counts,
    plain,
    reasons,
    rule_counts,
    values,
)

from tf_fused_ops.function import function

NHWC = (4, 5, 3, 6)
LAYERS = {
    "last": ({}, NHWC),
    "axis_3": ({"axis": 3}, NHWC),
    "axis_1": ({"axis": 1}, NHWC),
    "no_scale": ({"scale": False}, NHWC),
    "no_offset": ({"center": False, "axis": 3}, NHWC),
    "no_scale_no_offset": ({"scale": False, "center": False}, NHWC),
    "epsilon": ({"epsilon": 0.1, "momentum": 0.6}, NHWC),
    "rank_2": ({}, (4, 6)),
    "rank_3": ({}, (4, 5, 6)),
    "rank_3_first": ({"axis": 1}, (4, 6, 5)),
    "rank_5": ({}, (2, 2, 3, 2, 6)),
    "one_channel": ({"axis": 3}, (4, 5, 3, 1)),
}


def layer_of(options, shape, dtype=None):
    """Returns a built layer with random positive weights."""
    layer = keras.layers.BatchNormalization(dtype=dtype, **options)
    layer.build(shape)
    for seed, weight in enumerate(layer.weights):
        weight.assign(tf.abs(values(weight.shape, seed=seed)[0]) + 0.5)
    return layer


def compare(call, layer, args, rule, unknown_batch=False, units=64):
    """Asserts that outputs, gradients and moving averages of a layer in a step agree."""

    def step(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = call(*args)
            loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32)))
        return y, tape.gradient(loss, [*args, *layer.trainable_variables])

    signature = [
        tf.TensorSpec([None, *a.shape[1:]] if unknown_batch else a.shape, a.dtype) for a in args
    ]
    start = [tf.identity(weight) for weight in layer.weights]
    results = []
    for decorate in (tf.function, function):
        for weight, value in zip(layer.weights, start, strict=True):
            weight.assign(value)
        compiled = decorate(step, input_signature=signature)
        with plain():
            found = compiled(*args)
        results.append((found, [tf.identity(weight) for weight in layer.weights]))
    told = "\n".join(map(str, compiled.remap_reports))
    assert rule_counts(compiled) == {rule: 1}, told
    assert gradient_count(compiled) == 1, told
    counts = op_counts(compiled.get_concrete_function())
    assert not counts.keys() & {"Rsqrt", "SquaredDifference", "RsqrtGrad"}
    assert_same(results[1], results[0], units)


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, training, unknown_batch):
    options, shape = LAYERS[name]
    layer = layer_of(options, shape)
    rule = "moments_batch_norm" if training else "given_batch_norm"
    compare(lambda x: layer(x, training=training), layer, values(shape), rule, unknown_batch, 256)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", "hard_silu", "gelu"])
def test_activation(activation, training):
    layer = layer_of({"axis": 3}, NHWC)
    act = keras.activations.get(activation)
    name = {"gelu": "gelu_erf", "hard_silu": "hard_swish"}.get(activation, activation)
    rule = f"{'moments' if training else 'given'}_batch_norm_{name}"
    compare(lambda x: act(layer(x, training=training)), layer, values(NHWC), rule, False, 256)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("training", [True, False])
def test_mixed_precision(training, dtype):
    layer = layer_of({"axis": 3}, NHWC, dtype)
    (x,) = values(NHWC, dtype=dtype.removeprefix("mixed_"))
    rule = f"{'moments' if training else 'given'}_batch_norm_relu"
    compare(lambda x: tf.nn.relu(layer(x, training=training)), layer, [x], rule)


@pytest.mark.parametrize("side_first", [False, True])
@pytest.mark.parametrize("form", ["add", "add_n"])
@pytest.mark.parametrize("training", [True, False])
def test_side_input(training, form, side_first):
    layer = layer_of({}, NHWC)

    def call(x, side):
        operands = [layer(x, training=training), side]
        operands = operands[::-1] if side_first else operands
        return tf.nn.relu(tf.add_n(operands) if form == "add_n" else operands[0] + operands[1])

    rule = f"{'moments' if training else 'given'}_batch_norm_add_relu"
    compare(call, layer, values(NHWC, NHWC), rule, False, 256)


def test_plain_tensorflow():
    """tf.nn.moments and tf.nn.batch_normalization, in inference and under an outer tape."""

    def forward(x, scale, offset):
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        y = tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-5)
        return tf.nn.relu(y), mean, variance

    args = values(NHWC, (6,), (6,))
    check(forward, args, {"moments_batch_norm_relu": 1})

    def gradients(fn):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y, mean, variance = fn(*args)
            loss = tf.reduce_sum(y * y) + tf.reduce_sum(mean + variance**2)
        return tape.gradient(loss, args)

    assert_same(gradients(function(forward)), gradients(tf.function(forward)), units=256)


@pytest.mark.parametrize("unknown_batch", [False, True])
def test_input_with_other_uses(unknown_batch):
    """Pre-activation networks: the gradients of both uses are added."""
    layer = layer_of({}, NHWC)

    def call(x):
        z = tf.sin(x)
        return tf.nn.relu(layer(z, training=True)) + z * tf.cos(z)

    compare(call, layer, values(NHWC), "moments_batch_norm_relu", unknown_batch, 256)


@pytest.mark.parametrize("watched", ["x", "weights"])
@pytest.mark.parametrize("training", [True, False])
def test_part_of_the_gradients(training, watched):
    """A frozen layer, and a layer that is fed data."""
    layer = layer_of({"axis": 3}, NHWC)

    def step(x):
        sources = [x] if watched == "x" else [v.value for v in layer.trainable_variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            y = tf.nn.relu(layer(x, training=training))
        return y, tape.gradient(y, sources)

    name = f"{'moments' if training else 'given'}_batch_norm_relu"
    start = [tf.identity(weight) for weight in layer.weights]
    args = values(NHWC)
    expected = tf.function(step)(*args)
    for weight, value in zip(layer.weights, start, strict=True):
        weight.assign(value)
    compiled = function(step)
    assert_same(compiled(*args), expected, units=256)
    assert (rule_counts(compiled), gradient_count(compiled)) == ({name: 1}, 1)


def moments_norm(x, scale, offset, axes=(0, 1, 2)):
    mean, variance = tf.nn.moments(x, axes)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)


def given_norm(x, mean, variance, offset):
    return tf.nn.batch_normalization(x, mean, tf.abs(variance), offset, None, 1e-3)


def loss_of_variance(x, scale, offset):
    with tf.GradientTape() as tape:
        tape.watch(x)
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        y = tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)
        loss = tf.reduce_sum(tf.sin(y)) + tf.reduce_sum(variance**2)
    return tape.gradient(loss, x)


def normalized_is_used(x, scale, offset):
    """The product of x and the scale is used otherwise."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    inv = tf.math.rsqrt(variance + 1e-3) * scale
    product = x * inv
    return product + (offset - mean * inv), tf.exp(product)


def statistics_of_another(x, other, scale, offset):
    mean, variance = tf.nn.moments(other, [0, 1, 2])
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)


REFUSED = {
    "instance_norm": (
        lambda x, scale, offset: moments_norm(x, scale, offset, [1, 2]),
        [(6, 5, 6, 6), (6,), (6,)],
        None,
        None,
    ),
    "broadcast_scale": (
        moments_norm,
        [NHWC, (1,), (6,)],
        "moments_batch_norm",
        "scale scale:0 of 1 elements does not fit",
    ),
    "other_axis": (
        lambda x, scale, offset: moments_norm(x, scale, offset, [0, 2, 3]),
        [(4, 6, 3, 6), (6,), (6,)],
        "moments_batch_norm",
        "neither its last dimension",
    ),
    "variance_in_loss": (
        loss_of_variance,
        [NHWC, (6,), (6,)],
        "moments_batch_norm",
        "also used by",
    ),
    "normalized_is_used": (
        normalized_is_used,
        [NHWC, (6,), (6,)],
        "moments_batch_norm",
        "also used by Exp",
    ),
    "statistics_of_another": (statistics_of_another, [NHWC, NHWC, (6,), (6,)], None, None),
    "broadcast_x": (
        given_norm,
        [(4, 5, 3, 1), (6,), (6,), (6,)],
        "given_batch_norm",
        "does not fit",
    ),
    "scalar_mean": (
        given_norm,
        [NHWC, (), (6,), (6,)],
        "given_batch_norm",
        "has rank 0, not 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_fuse(name):
    fn, shapes, rule, reason = REFUSED[name]
    compiled = check(fn, values(*shapes), {}, units=256)
    found = reasons(compiled)
    if rule:
        assert reason in found[rule]
    else:
        assert found == {}


def test_broadcast_side_input():
    layer = layer_of({}, NHWC)

    def forward(x, side):
        return tf.nn.relu(layer(x) + side)

    compiled = check(forward, values(NHWC, (4, 5, 1, 6)), {"given_batch_norm": 1})
    assert "may broadcast" in reasons(compiled)["given_batch_norm_add_relu"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["given_batch_norm", "moments_batch_norm"])
def test_half_precision_throughout(rule, dtype):
    """The op takes its vectors in float32."""

    def forward(x, *vectors):
        mean, variance, offset, scale = vectors
        variance = tf.abs(variance)
        if rule == "moments_batch_norm":
            mean, variance = tf.nn.moments(x, [0, 1, 2])
        return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)

    compiled = check(forward, values(NHWC, *[NHWC[-1:]] * 4, dtype=dtype), {})
    # Of moments of float16 stock has casts inside.
    if (rule, dtype) != ("moments_batch_norm", "float16"):
        assert "not in float32" in reasons(compiled)[rule]


@pytest.mark.parametrize("epsilon", [1e-3, 1.001e-5, 2**-11, 1 / 3000])
def test_epsilon_in_double_precision(epsilon):
    """An epsilon that the op's attribute cannot hold would cost half of the digits."""

    def forward(x):
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        return tf.nn.batch_normalization(x, mean, variance, None, None, epsilon)

    (x,) = values(NHWC, dtype="float64")
    x *= 1e-2  # a variance as small as epsilon
    fits = epsilon != 1 / 3000
    compiled = check(forward, [x], {"moments_batch_norm": 1} if fits else {})
    assert fits or "more digits" in reasons(compiled)["moments_batch_norm"]
    (x,) = values(NHWC)
    check(forward, [x], {"moments_batch_norm": 1})


def test_cast_to_another_dtype():
    """Only a round trip from half precision and back is part of the op."""
    layer = layer_of({}, NHWC)

    def forward(x):
        return tf.cast(layer(tf.cast(x, tf.float32)), tf.float16)

    args = values(NHWC, dtype="bfloat16")
    compiled = check(forward, args, {"given_batch_norm": 1}, units=256)
    assert op_counts(compiled.get_concrete_function())["Cast"] == 2
