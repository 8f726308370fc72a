"""Convolution and batch normalization in inference: spellings, layouts, dtypes, and gradients."""

import keras
import pytest
import remapping
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

IMAGE, FILTERS = (2, 6, 5, 3), (3, 3, 3, 4)
VECTORS = [(4,)] * 4


def conv(x, w, bias=None, **attributes):
    z = tf.nn.conv2d(x, w, **{"strides": 1, "padding": "SAME", **attributes})
    return z if bias is None else tf.nn.bias_add(z, bias)


def given_op(*args):
    return remapping.given_op(*args).y


PADDINGS = [[0, 0], [1, 2], [0, 3], [0, 0]]


def pad_conv(x, w, bias=None, paddings=PADDINGS, pad=tf.pad, **attributes):
    return conv(pad(x, paddings), w, bias, **{"padding": "VALID", **attributes})


def add(first, second):
    return tf.nn.relu(first + second)


SPELLINGS = {
    "op": (lambda x, w, *v: given_op(conv(x, w), *v), "conv2d_batch_norm"),
    "op_relu6": (lambda x, w, *v: tf.nn.relu6(given_op(conv(x, w), *v)), "conv2d_batch_norm_relu6"),
    "op_bias": (
        lambda x, w, *v: tf.nn.silu(given_op(conv(x, w, v[0]), *v)),
        "conv2d_batch_norm_silu",
    ),
    "op_sum": (lambda x, w, *v: given_op(v[0] + conv(x, w), *v), "conv2d_batch_norm"),
    "ops": (lambda x, w, *v: given(conv(x, w), *v), "conv2d_given_batch_norm"),
    "ops_bias": (
        lambda x, w, *v: tf.nn.relu(given(conv(x, w, v[0]), *v)),
        "conv2d_given_batch_norm_relu",
    ),
    "ops_sum": (lambda x, w, *v: given(conv(x, w) + v[0], *v), "conv2d_given_batch_norm"),
    "no_scale": (
        lambda x, w, scale, *v: given(conv(x, w, scale), None, *v),
        "conv2d_given_batch_norm",
    ),
    "no_offset": (
        lambda x, w, scale, offset, *v: given(conv(x, w, offset), scale, None, *v),
        "conv2d_given_batch_norm",
    ),
    "neither": (
        lambda x, w, scale, offset, *v: tf.tanh(given(conv(x, w), None, None, *v)),
        "conv2d_given_batch_norm_tanh",
    ),
    "strides": (
        lambda x, w, *v: given(conv(x, w, strides=2), *v),
        "conv2d_given_batch_norm",
    ),
    "dilations": (
        lambda x, w, *v: given(conv(x, w, dilations=2, padding="VALID"), *v),
        "conv2d_given_batch_norm",
    ),
    "explicit_padding": (
        lambda x, w, *v: given(conv(x, w, padding=[[0, 0], [1, 2], [0, 3], [0, 0]]), *v),
        "conv2d_given_batch_norm",
    ),
    "pad_op": (lambda x, w, *v: given_op(pad_conv(x, w), *v), "conv2d_batch_norm"),
    "pad_ops": (
        lambda x, w, *v: tf.nn.elu(given(pad_conv(x, w, strides=2), *v)),
        "conv2d_given_batch_norm_elu",
    ),
    "pad_ops_no_scale": (
        lambda x, w, scale, *v: given(pad_conv(x, w, scale), None, *v),
        "conv2d_given_batch_norm",
    ),
    "pad_ops_sum": (
        lambda x, w, *v: tf.nn.relu(given(v[0] + pad_conv(x, w), *v)),
        "conv2d_given_batch_norm_relu",
    ),
    "pad_of_nothing": (
        lambda x, w, *v: given_op(pad_conv(x, w, paddings=[[0, 0]] * 4), *v),
        "conv2d_batch_norm",
    ),
    "pad_side_input": (
        lambda x, w, *v: add(
            given(pad_conv(x, w, paddings=[[0, 0], [1, 1], [1, 1], [0, 0]]), *v),
            tf.tile(x, [1, 1, 1, 2])[..., :4],
        ),
        "conv2d_given_batch_norm_add_relu",
    ),
    "side_input": (
        lambda x, w, *v: add(given(conv(x, w), *v), tf.tile(x, [1, 1, 1, 2])[..., :4]),
        "conv2d_given_batch_norm_add_relu",
    ),
    "side_input_first": (
        lambda x, w, *v: add(tf.exp(tf.identity(conv(x, w))), given_op(conv(x * 2.0, w), *v)),
        "conv2d_batch_norm_add_relu",
    ),
}


# A side input of unknown batch may broadcast.
UNKNOWN_BATCH = [(name, True) for name in SPELLINGS if "side_input" not in name]


@pytest.mark.parametrize(
    ("name", "unknown_batch"), [*((name, False) for name in SPELLINGS), *UNKNOWN_BATCH]
)
def test_spelling(name, unknown_batch):
    fn, rule = SPELLINGS[name]
    compiled = check(
        fn, values(IMAGE, FILTERS, *VECTORS), {rule: 1}, unknown_batch=[0] if unknown_batch else []
    )
    counts = op_counts(compiled.get_concrete_function())
    assert not counts.keys() & {"FusedBatchNormV3", "BiasAdd", "Pad"}


def earlier(op):
    """Batch norm by an earlier version of TensorFlow's op."""

    def batch_norm(z, scale, offset, mean, variance):
        vectors = {"scale": scale, "offset": offset, "mean": mean, "variance": tf.abs(variance)}
        return op(x=z, **vectors, is_training=False).y

    return batch_norm


VERSIONS = {
    "conv2d_given_batch_norm": given,
    "conv2d_batch_norm": given_op,
    "conv2d_batch_norm_v1": earlier(tf.raw_ops.FusedBatchNorm),
    "conv2d_batch_norm_v2": earlier(tf.raw_ops.FusedBatchNormV2),
}


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("family", VERSIONS)
def test_gradients_through_a_pad(family, inner, side):
    """Those of the image are those of what the pad reads."""

    def forward(x, w, bias, scale, offset, mean, variance, other):
        z = pad_conv(x, w, bias, strides=2)
        y = VERSIONS[family](z, scale, offset, mean, variance)
        return tf.nn.silu(y + other if side else y)

    def gradients(fn, *args):
        sources = args[:5] + args[7:]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = fn(*args)
        return y, tape.gradient(y, sources, output_gradients=tf.cos(y))

    args = values(IMAGE, FILTERS, *[(4,)] * 5, (2, 4, 3, 4))
    if inner:
        expected = tf.function(lambda *args: gradients(forward, *args))(*args)
        compiled = function(lambda *args: gradients(forward, *args))
        found = compiled(*args)
        counts = op_counts(compiled.get_concrete_function(*args))
        assert not counts.keys() & {"Pad", "Slice", "Conv2D", "Conv2DBackpropInput"}
        assert gradient_count(compiled) == 1
    else:
        expected = gradients(tf.function(forward), *args)
        compiled = function(forward)
        found = gradients(compiled, *args)
    assert_same(found, expected, units=256)
    assert rule_counts(compiled) == {f"{family}{'_add' * side}_silu": 1}


def two_readers(x, w, *vectors):
    """The padded image is read by two convolutions, so the Pad stays."""
    wide = tf.pad(x, PADDINGS)
    convs = [conv(wide, f, padding="VALID") for f in (w, 2.0 * w)]
    return [tf.nn.relu(given(z, *vectors)) for z in convs]


def pad_is_output(x, w, *vectors):
    wide = tf.pad(x, PADDINGS)
    return wide, tf.nn.relu(given(conv(wide, w, padding="VALID"), *vectors))


def mirror(x, paddings):
    return tf.pad(x, paddings, "REFLECT")


def pad_with_one(x, paddings):
    return tf.pad(x, paddings, constant_values=1.0)


def padded(**options):
    return lambda x, w, *v: tf.nn.relu(given(pad_conv(x, w, **options), *v))


# Chains of which the pad has to stay: (function, number of fusions, what is said of the pad).
PADS_THAT_STAY = {
    "pads_again": (padded(padding="SAME"), 1, "pads again: SAME"),
    "is_read_twice": (two_readers, 2, "is also used by"),
    "is_output": (pad_is_output, 1, "is an output of the graph"),
    "mirrored": (padded(pad=mirror, paddings=[[0, 0], [1, 1], [0, 1], [0, 0]]), 1, None),
    "with_one": (padded(pad=pad_with_one), 1, None),
    "paddings_not_constant": (
        lambda x, w, *v: padded(paddings=PADDINGS * tf.cast(tf.shape(x)[0] > 0, tf.int32))(
            x, w, *v
        ),
        1,
        None,
    ),
}


@pytest.mark.parametrize("name", PADS_THAT_STAY)
def test_pad_stays(name):
    """The rest of the chain is fused without it."""
    fn, fused, reason = PADS_THAT_STAY[name]
    rule = "conv2d_given_batch_norm_relu"
    compiled = check(fn, values(IMAGE, FILTERS, *VECTORS), {rule: fused})
    counts = op_counts(compiled.get_concrete_function())
    assert sum(counts[op] for op in ("Pad", "PadV2", "MirrorPad")) == 1
    if reason:
        assert reason in reasons(compiled)[rule]
    else:
        assert not reasons(compiled)


@pytest.mark.parametrize("dimension", [0, 3])
def test_padding_of_other_dimensions(dimension):
    """Compared with eager execution: stock graphs get this wrong where oneDNN is on."""
    paddings = [[0, int(i == dimension)] for i in range(4)]
    shape = [size - pad for size, (_, pad) in zip(IMAGE, paddings, strict=True)]
    args = values(shape, FILTERS, *VECTORS)
    compiled = function(padded(paddings=paddings))
    assert_same(compiled(*args), padded(paddings=paddings)(*args))
    rule = "conv2d_given_batch_norm_relu"
    assert rule_counts(compiled) == {rule: 1}
    assert "are not those of a convolution" in reasons(compiled)[rule]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", [given, given_op])
def test_half_precision(form, dtype):
    """The statistics are float32; output and gradients are as exact as stock."""

    def forward(x, w, *vectors):
        z = conv(x, w)
        if form is given:
            return tf.tanh(tf.cast(given(tf.cast(z, tf.float32), *vectors), x.dtype))
        return tf.tanh(given_op(z, *vectors))

    def step(*args):
        sources = args[:4]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = forward(*args)
        return y, *tape.gradient(y, sources)

    args = [*values(IMAGE, FILTERS, dtype=dtype), *values(*VECTORS)]
    compiled = function(step)
    with plain():
        found, stock = compiled(*args), tf.function(step)(*args)
        exact = tf.function(step)(*(tf.cast(value, tf.float32) for value in args))
    family = "conv2d_batch_norm" if form is given_op else "conv2d_given_batch_norm"
    assert (rule_counts(compiled), gradient_count(compiled)) == ({f"{family}_tanh": 1}, 1)
    names = ("y", "dx", "dw", "dscale", "doffset")
    for row in zip(names, found, stock, exact, strict=True):
        assert_as_exact(*row, dtype)


def network(axis=-1, **options):
    """Keras's blocks: two chains and a residual."""
    inputs = keras.Input((6, 5, 4))
    x = inputs
    for activation in ("relu", "silu"):
        x = keras.layers.Conv2D(4, 3, padding="same", **options)(x)
        x = keras.layers.BatchNormalization(axis)(x)
        x = keras.layers.Activation(activation)(x)
    x = keras.layers.Conv2D(4, 1, **options)(x)
    x = keras.layers.BatchNormalization(axis)(x)
    x = keras.layers.ReLU()(keras.layers.Add()([x, inputs]))
    model = keras.Model(inputs, x)
    for seed, weight in enumerate(model.weights):
        weight.assign(tf.abs(values(weight.shape, seed=seed)[0]) * 0.3 + 0.1)
    return model


RULES = {
    "conv2d_given_batch_norm_relu": 1,
    "conv2d_given_batch_norm_silu": 1,
    "conv2d_given_batch_norm_add_relu": 1,
}


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("axis", [-1, 3])
def test_keras(axis, use_bias):
    model = network(axis, use_bias=use_bias)
    check(lambda x: model(x, training=False), values((2, 6, 5, 4)), RULES)


@pytest.mark.parametrize("inner", [False, True])
def test_gradients_of_a_frozen_network(inner):
    """Under a tape the statistics stay, and gamma, beta and filters learn."""
    model = network()
    (x,) = values((2, 6, 5, 4))

    def forward(x):
        return model(x, training=False)

    def gradients(fn, x):
        sources = [x, *(v.value for v in model.trainable_variables)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            loss = tf.reduce_sum(tf.sin(fn(x)))
        return loss, tape.gradient(loss, sources)

    if inner:
        expected = tf.function(lambda x: gradients(forward, x))(x)
        compiled = function(lambda x: gradients(forward, x))
        found = compiled(x)
        assert gradient_count(compiled) == 3
    else:
        expected = gradients(tf.function(forward), x)
        compiled = function(forward)
        found = gradients(compiled, x)
    assert_same(found, expected, units=256)
    assert rule_counts(compiled) == RULES


@pytest.mark.parametrize("inner", [False, True])
def test_gradients_of_the_statistics(inner):
    """Inside a function they need what fusion would remove; outside they pass the vectors."""

    def forward(x, w, *vectors):
        return tf.tanh(given(conv(x, w), *vectors))

    def gradients(fn, *args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = fn(*args)
        return y, tape.gradient(y, args)

    args = values(IMAGE, FILTERS, *VECTORS)
    if inner:
        expected = tf.function(lambda *args: gradients(forward, *args))(*args)
        compiled = function(lambda *args: gradients(forward, *args))
        found, rules = compiled(*args), {"trained_conv2d": 1}
    else:
        expected = gradients(tf.function(forward), *args)
        compiled = function(forward)
        found, rules = gradients(compiled, *args), {"conv2d_given_batch_norm_tanh": 1}
    assert_same(found, expected, units=256)
    assert rule_counts(compiled) == rules


def test_channels_first():
    """Stock TensorFlow may have no kernel for it on a CPU, so it is compared with channels last."""

    def forward(x, w, *vectors):
        z = tf.nn.conv2d(x, w, 1, "SAME", data_format="NCHW")
        z = tf.nn.bias_add(z, vectors[0], data_format="NCHW")
        return given(z, *vectors, shape=[1, 4, 1, 1])

    x, *args = values(IMAGE, FILTERS, *VECTORS)
    compiled = function(forward)
    found = compiled(tf.transpose(x, [0, 3, 1, 2]), *args)
    expected = given(conv(x, *args[:2]), *args[1:])
    assert_same(tf.transpose(found, [0, 2, 3, 1]), expected)
    assert rule_counts(compiled) == {"conv2d_given_batch_norm": 1}
