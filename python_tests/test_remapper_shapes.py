"""Side inputs of unknown size: fused where both sizes provably come from the same place."""

import sys

import keras
import pytest
import tensorflow as tf
from remapping import assert_same, check, plain, reasons, rule_counts, values

from tf_fused_ops.function import function
from tf_fused_ops.remapper import shapes


def norm(x, scale, offset):
    return tf.raw_ops.FusedBatchNormV3(
        x=x, scale=scale, offset=offset, mean=[], variance=[], is_training=True
    ).y


def residual_block(x, w, b, scale, offset):
    """relu(bn(conv(x)) + x), as ResNets have it."""
    y = tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)
    return tf.nn.relu(norm(y, scale, offset) + tf.nn.relu(x))


def projection_block(x, w, b, scale, offset):
    """Two normalised convolutions are added, both with a stride."""
    branches = [
        norm(tf.nn.bias_add(tf.nn.conv2d(tf.nn.relu(x), f, 2, "SAME"), b), scale, offset)
        for f in (w, w * 0.5)
    ]
    return tf.nn.relu(branches[0] + branches[1])


ARGS = values((2, 6, 6, 4), (3, 3, 4, 4), (4,), (4,), (4,))
BLOCKS = {
    residual_block: {"batch_norm_add_relu": 1, "conv2d_bias": 1},
    projection_block: {"batch_norm_add_relu": 1, "conv2d_bias": 2},
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("tape", [False, True])
def test_blocks_of_unknown_batch(block, tape):
    def step(*args):
        with tf.GradientTape() as recording:
            recording.watch(args)
            y = block(*args)
        return y, recording.gradient(y, args) if tape else None

    count = sum(BLOCKS[block].values())
    check(step, ARGS, BLOCKS[block], gradients=count if tape else 0, unknown_batch=[0], units=512)


def test_unrelated_sizes_are_refused():
    def forward(x, scale, offset, side):
        return tf.nn.relu(norm(x, scale, offset) + side)

    args = values((2, 3, 3, 4), (4,), (4,), (2, 3, 3, 4))
    compiled = check(forward, args, {}, unknown_batch=[0, 3])
    assert "may broadcast" in reasons(compiled)["batch_norm_add_relu"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda x, y: tf.nn.relu(x), True),
        (lambda x, y: tf.identity(x) + x, True),
        (lambda x, y: x * tf.ones([3]) + tf.ones([1, 1, 1, 3]), True),
        (lambda x, y: tf.nn.silu(x), True),
        (lambda x, y: tf.add_n([x, x]), True),
        (lambda x, y: tf.nn.max_pool2d(x, 1, 1, "SAME"), True),
        (lambda x, y: tf.pad(x, [[0, 0], [1, 1], [0, 0], [0, 0]]), False),
        (lambda x, y: tf.pad(x, [[0, 0]] * 4), True),
        (lambda x, y: y, False),
        (lambda x, y: x + y, False),
        (lambda x, y: tf.maximum(x, y), False),
        (lambda x, y: x - tf.reduce_mean(x, -1, keepdims=True), True),
        (lambda x, y: x - tf.reduce_mean(y, -1, keepdims=True), False),
        (lambda x, y: tf.math.squared_difference(x, tf.reduce_max(x, [1, -2], True)), True),
        (lambda x, y: x * tf.reduce_sum(x, tf.cast(y[0, 0, 0, :1], tf.int32), True), False),
        (lambda x, y: tf.reduce_min(tf.expand_dims(x, 2) * tf.ones([5, 1, 1]), 2), True),
        (lambda x, y: tf.reduce_prod(tf.expand_dims(x, 1), 2), False),
        (lambda x, y: tf.squeeze(tf.expand_dims(x, -2), [-2]), True),
        (lambda x, y: tf.squeeze(tf.expand_dims(x, 1)), False),
        (lambda x, y: tf.where(tf.random.uniform(tf.shape(x)) > 0.5, x, 0.0), True),
        (lambda x, y: tf.where(tf.random.uniform(tf.shape(y)) > 0.5, x, 0.0), False),
        (lambda x, y: tf.raw_ops.ZerosLike(x=x) + tf.ones_like(x), True),
        (lambda x, y: tf.nn.max_pool2d(x, 2, 2, "SAME"), False),
        (lambda x, y: x[1:], False),
        (lambda x, y: tf.reshape(x, [-1, 4, 4, 3]), False),
        (lambda x, y: tf.reshape(tf.reshape(x, [-1, 9]), tf.shape(x)), True),
        (lambda x, y: tf.reshape(x, tf.shape(y)), False),
        (lambda x, y: tf.repeat(x, 1, -1), True),
        (lambda x, y: tf.repeat(x, 1, 2), False),
        (lambda x, y: tf.fill(tf.concat([tf.shape(x)[:-1], [3]], 0), 1.0), True),
        (lambda x, y: tf.fill(tf.concat([tf.shape(x)[-4:2], tf.shape(x)[2:]], 0), 1.0), True),
        (lambda x, y: tf.fill(tf.concat([tf.shape(x)[1:3], tf.shape(x)[-2:]], 0), 1.0), False),
        (lambda x, y: tf.fill(tf.concat([tf.shape(x)[:1], tf.shape(x)[::2], [3]], 0), 1.0), False),
    ],
)
def test_dimension(change, same):
    graph = tf.Graph()
    with graph.as_default():
        x, y = (tf.compat.v1.placeholder(tf.float32, [None, None, None, 3]) for _ in range(2))
        assert shapes.same_shape(x, change(x, y)) == same


def test_windows():
    """One after another, and in another order of their sizes."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, None, None, 3])

        def pooled(*sizes):
            y = x
            for size in sizes:
                y = tf.nn.max_pool2d(y, size, 2, "VALID")
            return y

        assert shapes.same_shape(pooled(2, 3), pooled(2, 3))
        assert not shapes.same_shape(pooled(2, 3), pooled(3, 2))
        assert not shapes.same_shape(pooled(2, 2), pooled(2))


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("convolve", [tf.nn.conv2d, tf.nn.depthwise_conv2d])
def test_filters_decide_the_channels(convolve, data_format):
    graph = tf.Graph()
    with graph.as_default():
        channels = data_format.index("C")
        shape = [None] * 4
        shape[channels] = 4
        x = tf.compat.v1.placeholder(tf.float32, shape)
        w = tf.compat.v1.placeholder(tf.float32, [3, 3, 4, None])
        y = convolve(x, w, [1] * 4, "SAME", data_format=data_format)
        same = [shapes.dimension(x, axis) == shapes.dimension(y, axis) for axis in range(4)]
        assert same == [axis != channels for axis in range(4)]


def test_one_output_channel_that_is_not_known_broadcasts():
    def forward(x, w, b):
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b) + x)

    x, w, b = values((2, 6, 6, 4), (3, 3, 4, 1), (1,))
    signature = [
        tf.TensorSpec([None, 6, 6, 4]),
        tf.TensorSpec([3, 3, 4, None]),
        tf.TensorSpec([None]),
    ]
    fused = function(forward, input_signature=signature)
    assert_same(fused(x, w, b), forward(x, w, b))
    assert rule_counts(fused) == {"conv2d_bias": 1}
    assert "may broadcast" in reasons(fused)["conv2d_bias_add_relu"]


def test_dimensions_of_more_ops_than_python_calls():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, None, None, 3])
        y = x
        for _ in range(sys.getrecursionlimit()):
            y = tf.nn.relu(y) + tf.nn.avg_pool2d(y, 2, 1, "SAME")
        assert shapes.same_shape(x, y)
        for _ in range(sys.getrecursionlimit()):
            y = tf.nn.avg_pool2d(y, 2, 1, "VALID")
        assert shapes.same_shape(y, tf.nn.relu(y))
        assert not shapes.same_shape(x, y)


@pytest.mark.parametrize("transposed", [False, True])
def test_dimension_of_a_product(transposed):
    graph = tf.Graph()
    with graph.as_default():
        a = tf.compat.v1.placeholder(tf.float32, [None, 3] if not transposed else [3, None])
        product = tf.matmul(a, tf.ones([3, 5]), transpose_a=transposed)
        assert shapes.dimension(product, 0) == shapes.dimension(a, int(transposed))


# Makes one size of those of x and y, and names it.
ELEMENTS = {
    "last": (lambda x, y: tf.shape(x)[-1], ("x", 2)),
    "last of a slice": (lambda x, y: tf.shape(x)[1:][-1], ("x", 2)),
    "of a slice from behind": (lambda x, y: tf.shape(x)[-2:][0], ("x", 1)),
    "last of joined ones": (
        lambda x, y: tf.concat([tf.shape(x)[:2], tf.shape(y)], 0)[-1],
        ("y", 1),
    ),
    "of joined ones": (lambda x, y: tf.concat([tf.shape(x)[:2], tf.shape(y)], 0)[2], ("y", 0)),
    "chosen": (lambda x, y: tf.gather(tf.shape(x), [2, 0])[1], ("x", 0)),
    "cut": (lambda x, y: tf.slice(tf.shape(x), [1], [2])[1], ("x", 2)),
    "cut from behind": (
        lambda x, y: tf.slice(tf.shape(x), [tf.constant(3) - 1], [1])[0],
        ("x", 2),
    ),
    "cut anywhere": (lambda x, y: tf.slice(tf.shape(x), [tf.shape(y)[0]], [1])[0], None),
    "of every second": (lambda x, y: tf.shape(x)[::2][1], None),
    "of another axis": (lambda x, y: tf.gather(tf.shape(x), tf.shape(y))[0], None),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_of_shapes(name):
    make, expected = ELEMENTS[name]
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None] * 3)
        y = tf.compat.v1.placeholder(tf.float32, [None] * 2)
        made = tf.zeros(tf.stack([make(x, y), 3]))
        sizes = {
            shapes.dimension(tensor, axis): (place, axis)
            for place, tensor in (("x", x), ("y", y))
            for axis in range(tensor.shape.rank)
        }
        assert sizes.get(shapes.dimension(made, 0)) == expected


def test_sizes_that_elements_tell_first():
    """A proof by numbers of elements goes before what is asked of another tensor."""
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 6])
        ids = tf.compat.v1.placeholder(tf.float32, [None])
        y = tf.reshape(x, [tf.shape(ids)[0], 2, 3])
        assert shapes.dimension(y, 0) == shapes.dimension(x, 0)


def test_dimensions_of_repeated_heads():
    """All but the repeated one are known again, as for queries that share keys."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, None, 2, None])
        y = tf.repeat(x, 3, 2)
        same = [shapes.dimension(x, axis) == shapes.dimension(y, axis) for axis in range(4)]
        assert same == [True, True, False, True]
        assert y.shape[2] == 6


def test_dimensions_of_a_concatenation():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, None])
        joined = tf.concat([x, tf.nn.relu(x)], 1)
        assert shapes.dimension(joined, 0) == shapes.dimension(x, 0)
        assert shapes.dimension(joined, 1) != shapes.dimension(x, 1)


def transformer():
    """A block of a vision transformer, with dropout."""
    layers = keras.layers
    inputs = x = layers.Input((6, 16))
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(2, 8, dropout=0.1, seed=1)(y, y)
    x = layers.Add()([x, y])
    y = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Add()([x, layers.Dense(16)(y)]))


def lines():
    """A block of a residual network of lines."""
    layers = keras.layers
    inputs = layers.Input((12, 8))
    y = layers.ReLU()(layers.BatchNormalization()(layers.Conv1D(8, 3, padding="same")(inputs)))
    y = layers.BatchNormalization()(layers.Conv1D(8, 3, padding="same")(y))
    return keras.Model(inputs, layers.ReLU()(layers.Add()([y, inputs])))


NETWORKS = {
    transformer: {"batch_matmul_bias_add": 1, "dense_bias_add": 1},
    lines: {"moments_batch_norm_add_relu": 1},
}


@pytest.mark.parametrize("make", NETWORKS)
def test_networks_of_unknown_batch(make):
    """What Keras traces in `fit`: residual sums are fused."""
    keras.utils.set_random_seed(0)
    model = make()
    (x,) = values((3, *model.input_shape[1:]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 3)
        return loss, tape.gradient(loss, model.trainable_variables)

    signature = [tf.TensorSpec([None, *x.shape[1:]])]
    seeds = [v for layer in model._flatten_layers() for v in layer.variables if "seed" in v.path]
    start = [v.numpy() for v in seeds]
    with plain():
        expected = tf.function(step, input_signature=signature)(x)
        for seed, value in zip(seeds, start, strict=True):
            seed.assign(value)
        compiled = function(step, input_signature=signature)
        assert_same(compiled(x), expected, units=4096)
    counts = rule_counts(compiled)
    assert {rule: counts.get(rule) for rule in NETWORKS[make]} == NETWORKS[make], counts
