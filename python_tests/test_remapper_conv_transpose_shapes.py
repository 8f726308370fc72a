"""Transposed convolutions of images whose sizes are not known: what is told of the output."""

import pytest
import tensorflow as tf
from remapping import assert_same, reasons, rule_counts, step_of, taped, values
from transposing import (
    IMAGE,
    NO_SIZES,
    B,
    S,
    W,
    X,
    batched,
    biased,
    compare,
    raw,
    transposed,
)

import tf_fused_ops as tfo
from tf_fused_ops.function import function
from tf_fused_ops.remapper import shapes

BATCHES = (None, 3, 4, 3), (None, 6, 8, 5)


def sizes_of(t, order=(0, 1, 2)):
    """Returns the sizes of images of five channels, one by one."""
    return [*(tf.shape(t)[i] for i in order), 5]


def doubled(x):
    return [tf.shape(x)[0], 2 * tf.shape(x)[1], 2 * tf.shape(x)[2], 5]


# How the output's shape is made of x and of a vector of four, what is known of x's.
SIZES = {
    "constants": (lambda x, v: IMAGE[-1], IMAGE[0]),
    "batch": (lambda x, v: batched(x), BATCHES[0]),
    "batch that the constants tell": (lambda x, v: IMAGE[-1], BATCHES[0]),
    "height": (lambda x, v: [2, 2 * tf.shape(x)[1], 8, 5], (2, None, 4, 3)),
    "all": (lambda x, v: doubled(x), NO_SIZES[0]),
    "joined": (
        lambda x, v: tf.concat([tf.shape(x)[:1], 2 * tf.shape(x)[1:3], [5]], 0),
        NO_SIZES[0],
    ),
    "elements": (lambda x, v: tf.stack([v[0], v[1], v[2], 5]), NO_SIZES[0]),
    "vector": (lambda x, v: v, NO_SIZES[0]),
}


@pytest.mark.parametrize("bias", [tf.nn.bias_add, tf.add])
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name, bias):
    make, known = SIZES[name]

    def step(x, w, b, v):
        def chain(x, w, b):
            return tf.nn.silu(bias(transposed(x, w, make(x, v)), b))

        return taped(chain, [x, w, b])

    args = [X, W, B, tf.constant(IMAGE[-1])]
    rule = "act_silu" if name == "vector" else "conv2d_transpose_bias_silu"
    compiled = compare(step, args, [known, *IMAGE[1:3], (4,)], {rule: 1}, 1, units=512)
    if name == "vector":
        told = reasons(compiled)["conv2d_transpose_bias_silu"]
        assert "channels are not known or do not fit: None in the output" in told


def test_one_trace_for_several_sizes():
    @function(input_signature=[tf.TensorSpec(NO_SIZES[0]), tf.TensorSpec(W.shape)])
    def upsample(x, w):
        shape = tf.shape(x)
        return tf.nn.relu(transposed(x, w, [shape[0], 2 * shape[1], 2 * shape[2] - 1, 5]))

    for shape in (IMAGE[0], (1, 1, 1, 3), (3, 5, 2, 3), (0, 2, 2, 3)):
        (x,) = values(shape)
        n, h, w, _ = shape
        y = upsample(x, W)
        assert y.shape == (n, 2 * h, 2 * w - 1, 5)
        if n:
            assert_same(y, tf.nn.relu(transposed(x, W, y.shape)))
    assert rule_counts(upsample) == {"conv2d_transpose_relu": 1}


def test_sizes_that_do_not_fit():
    """Are told of when the function runs."""
    signature = [tf.TensorSpec(NO_SIZES[0]), tf.TensorSpec(W.shape), tf.TensorSpec([3], tf.int32)]

    @function(input_signature=signature)
    def upsample(x, w, sizes):
        return tf.nn.relu(transposed(x, w, tf.concat([sizes, [5]], 0)))

    assert_same(upsample(X, W, tf.constant([2, 6, 8])), tf.nn.relu(transposed(X, W)))
    for sizes in ([2, 7, 8], [1, 6, 8], [2, 6, 0], [2, -6, 8]):
        with pytest.raises(tf.errors.InvalidArgumentError):
            upsample(X, W, tf.constant(sizes))
    assert rule_counts(upsample) == {"conv2d_transpose_relu": 1}


# The output's shape of x and the side input s, how s is used, what is known of both, whether it
# may broadcast.
SIDES = {
    "shape of the side": (lambda x, s: tf.shape(s), tf.identity, NO_SIZES, False),
    "shape of what it is made of": (
        *(lambda x, s: tf.shape(s), lambda s: tf.nn.relu(s) + s, NO_SIZES, False),
    ),
    "shape of what is made of it": (
        *(lambda x, s: tf.shape(tf.nn.relu(s)), tf.identity, NO_SIZES, False),
    ),
    "its sizes": (lambda x, s: sizes_of(s), tf.identity, NO_SIZES, False),
    "joined": (
        *(lambda x, s: tf.concat([tf.shape(s)[:-1], [5]], 0), tf.identity, NO_SIZES, False),
    ),
    "batch of the side": (lambda x, s: batched(s), tf.identity, BATCHES, False),
    "known": (lambda x, s: IMAGE[-1], tf.identity, (IMAGE[0], IMAGE[-1]), False),
    "batch of the input": (lambda x, s: batched(x), tf.identity, BATCHES, True),
    "sizes of the input": (lambda x, s: doubled(x), tf.identity, NO_SIZES, True),
    "sizes in another order": (
        *(lambda x, s: sizes_of(s, (0, 2, 1)), tf.identity, NO_SIZES, True),
    ),
    "unknown channels": (
        *(lambda x, s: batched(s), tf.identity, (BATCHES[0], (None, 6, 8, None)), True),
    ),
}


@pytest.mark.parametrize("act", ["_relu", ""])
@pytest.mark.parametrize("name", SIDES)
def test_sides(name, act):
    make, use, known, stays = SIDES[name]
    x, s = values((2, 3, 3, 3), (2, 6, 6, 5)) if name == "sizes in another order" else (X, S)

    def chain(x, w, b, s):
        z = biased(x, w, b, make(x, s)) + use(s)
        return tf.nn.relu(z) if act else z

    rule = f"conv2d_transpose_bias_add{act}"
    rules = {"conv2d_transpose_bias": 1} if stays else {rule: 1}
    known = [known[0], *IMAGE[1:3], known[1]]
    compiled = compare(step_of(chain), [x, W, B, s], known, rules, 1, units=4096)
    if stays:
        assert "may broadcast" in reasons(compiled)[rule]


def test_two_sizes_are_no_shape():
    """Of an output that is told but height and width, neither is the batch."""

    def chain(q, v, b, x, w):
        z = tf.nn.bias_add(tf.nn.conv2d(q, v, 1, "SAME"), b)
        return tf.nn.relu(z + raw(tf.shape(q)[:2], x, w))

    args = values((8, 8, 8, 3), (3, 3, 3, 5), (5,), (1, 4, 4, 3), (3, 3, 5, 3))
    known = [(None, 8, 8, 3), (3, 3, 3, 5), (5,), (None, None, 4, 3), (3, 3, 5, 3)]
    compiled = compare(chain, args, known, {"conv2d_bias": 1})
    assert "may broadcast" in reasons(compiled)["conv2d_bias_add_relu"]


@pytest.mark.parametrize("fused", [False, True])
def test_proofs(fused):
    """What is known of the size of an output is what is known of the vector that tells it."""

    def make(x, w, sizes):
        if fused:
            return tfo.conv2d_transpose_bias_act(x, w, sizes, strides=2)
        return transposed(x, w, sizes)

    with tf.Graph().as_default():
        x, s = (tf.compat.v1.placeholder(tf.float32, shape) for shape in NO_SIZES)
        w = tf.compat.v1.placeholder(tf.float32, W.shape)
        same = make(x, w, tf.shape(s))
        other = make(x, w, [tf.shape(t)[i] for i, t in enumerate((x, s, s))] + [5])
        turned = make(x, w, tf.gather(tf.shape(s), [0, 2, 1, 3]))
        assert shapes.same_shape(same, s)
        assert not shapes.same_shape(other, s)
        assert not shapes.same_shape(turned, s)
        names = [shapes.dimension(other, axis) for axis in range(4)]
        assert names == [shapes.dimension(t, axis) for axis, t in enumerate((x, s, s, s))]


# What is known of input, filters and the vector of the sizes, and why the chain stays.
UNKNOWN = {
    "channels of the input": ((2, 3, 4, None), W.shape, 4, "None in the input, 5 and 3 in"),
    "channels of the filters": (X.shape, (3, 3, 5, None), 4, "5 and None in the filters"),
    "channels of the output": (X.shape, (3, 3, None, 3), 4, "None and 3 in the filters"),
    "rank of the input": (None, W.shape, 4, "has rank None, not 4"),
    "rank of the filters": (X.shape, None, 4, "has rank None, not 4"),
    "rank of the output": (X.shape, W.shape, None, "is not the shape of an image"),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_shapes(name, bias):
    x, w, rank, reason = UNKNOWN[name]

    def chain(x, w, b, sizes):
        z = raw(IMAGE[-1] if rank else sizes, x, w)
        return tf.nn.relu(tf.nn.bias_add(z, b) if bias else z), b

    args = [X, W, B, tf.constant(IMAGE[-1])]
    compiled = compare(chain, args, [x, w, B.shape, (rank,)], {})
    rule = "conv2d_transpose_bias_relu" if bias else "conv2d_transpose_relu"
    assert reason in reasons(compiled)[rule]


def test_shape_that_is_made_of_another_chain():
    """The vector that tells the shape may itself depend on what is fused."""

    def chain(x, w, b):
        y = tf.nn.relu(biased(x, w, b, batched(x)))
        factor = tf.cast(tf.reduce_max(y) > -1.0, tf.int32)
        shape = factor * tf.shape(y)
        return tf.nn.tanh(biased(x, w, b, tf.stack([shape[0], shape[1], shape[2], 5])))

    rules = {"conv2d_transpose_bias_relu": 1, "conv2d_transpose_bias_tanh": 1}
    compare(chain, [X, W, B], [BATCHES[0], *IMAGE[1:3]], rules)
