"""Spellings of convolutions and products that are rows of their own, and their neighbours."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    check_left,
    gradient_count,
    plain,
    reasons,
    rule_counts,
    step_of,
    values,
)

from tf_fused_ops.function import function

IMAGE = [(2, 6, 5, 3), (3, 3, 3, 4), (4,)]
SIGNAL = [(2, 7, 3), (3, 3, 4), (4,)]
ROWS = [(2, 3, 7), (7, 5), (5,)]


def padded(paddings, padding="VALID", pad=tf.pad):
    def fn(x, w, b):
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(pad(x, paddings), w, 1, padding), b))

    return fn


def conv1d(stride=1, padding="SAME", dilations=1, data_format="NWC"):
    def fn(x, w, b):
        return tf.nn.silu(
            tf.nn.bias_add(
                tf.nn.conv1d(x, w, stride, padding, data_format, dilations), b
            )
        )  # fmt: skip

    return fn


def causal(paddings=((0, 0), (4, 0), (0, 0)), pad=tf.pad, padding="VALID", strides=1, dilations=2):
    """As Keras's layer."""

    def fn(x, w, b):
        z = tf.nn.conv1d(pad(x, paddings), w, strides, padding, dilations=dilations)
        return tf.nn.relu(tf.nn.bias_add(z, b))

    return fn


def einsum(equation):
    return lambda x, w, b: tf.nn.gelu(tf.nn.bias_add(tf.einsum(equation, x, w), b))


def einsum_sum(equation):
    return lambda x, w, b: tf.nn.gelu(b + tf.einsum(equation, x, w))


def heads(shape, flip=False):
    """What Keras makes of an einsum onto several heads."""

    def fn(x, w, b):
        z = tf.reshape(tf.matmul(x, w), shape)
        return tf.nn.gelu(b + z if flip else z + b)

    return fn


def product(**transposed):
    return lambda x, w, b: tf.nn.tanh(tf.matmul(x, w, **transposed) + b)


SPATIAL = [[0, 0], [1, 2], [0, 3], [0, 0]]
POSITIVE = {
    "pad": (padded(SPATIAL), IMAGE, "pad_conv2d_bias_relu"),
    "pad_without_bias": (
        lambda x, w, b: tf.nn.elu(tf.nn.conv2d(tf.pad(x, SPATIAL), w, 2, "VALID")) + b,
        IMAGE,
        "pad_conv2d_elu",
    ),
    "pad_and_nothing_else": (
        lambda x, w, b: tf.exp(tf.nn.conv2d(tf.pad(x, SPATIAL), w, 1, "VALID")) + b,
        IMAGE,
        "pad_conv2d",
    ),
    "pad_of_nothing": (padded([[0, 0]] * 4), IMAGE, "pad_conv2d_bias_relu"),
    "causal": (causal(), SIGNAL, "pad_conv1d_bias_relu"),
    "causal_strides": (causal(strides=2, dilations=1), SIGNAL, "pad_conv1d_bias_relu"),
    "causal_groups": (causal(), [(2, 7, 6), *SIGNAL[1:]], "pad_conv1d_bias_relu"),
    "conv1d_padded_twice": (
        causal(((0, 0), (1, 3), (0, 0))),
        SIGNAL,
        "pad_conv1d_bias_relu",
    ),
    "conv1d": (conv1d(), SIGNAL, "conv1d_bias_silu"),
    "conv1d_strides": (conv1d(2, "VALID"), SIGNAL, "conv1d_bias_silu"),
    "conv1d_dilations": (conv1d(1, "SAME", 2), SIGNAL, "conv1d_bias_silu"),
    "conv1d_groups": (conv1d(), [(2, 7, 6), *SIGNAL[1:]], "conv1d_bias_silu"),
    "product": (product(), ROWS, "batch_matmul_bias_tanh"),
    "product_rank_4": (product(), [(2, 1, 3, 7), *ROWS[1:]], "batch_matmul_bias_tanh"),
    "product_b": (product(transpose_b=True), [ROWS[0], (5, 7), (5,)], "batch_matmul_bias_tanh"),
    "product_a": (product(transpose_a=True), [(2, 7, 3), *ROWS[1:]], "batch_matmul_bias_tanh"),
    "einsum": (einsum("abc,cd->abd"), ROWS, "einsum_bias_gelu_erf"),
    "einsum_rank_4": (
        einsum("bxyk,kn->bxyn"),
        [(2, 1, 3, 7), *ROWS[1:]],
        "einsum_bias_gelu_erf",
    ),
    "einsum_rank_2": (einsum("ab,bc->ac"), [(6, 7), *ROWS[1:]], "einsum_bias_gelu_erf"),
    "einsum_onto_heads": (
        einsum_sum("abc,cde->abde"),
        [ROWS[0], (7, 2, 5), (2, 5)],
        "einsum_bias_gelu_erf",
    ),
    "einsum_onto_three": (
        einsum_sum("ac,cdef->adef"),
        [(3, 7), (7, 2, 1, 5), (2, 1, 5)],
        "einsum_bias_gelu_erf",
    ),
    "einsum_from_heads": (
        einsum("abcd,cde->abe"),
        [(2, 3, 4, 7), (4, 7, 5), (5,)],
        "einsum_bias_gelu_erf",
    ),
    "heads": (heads([-1, 3, 2, 5]), [ROWS[0], (7, 10), (2, 5)], "heads_bias_gelu_erf"),
    "heads_bias_first": (
        heads([-1, 2, 5], True),
        [ROWS[0], (7, 10), (2, 5)],
        "heads_bias_gelu_erf",
    ),
    "conv_without_bias": (
        lambda x, w, b: tf.nn.elu(tf.nn.conv2d(x, w, 2, "SAME")) + b,
        IMAGE,
        "conv2d_elu",
    ),
}


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("name", POSITIVE)
def test_fused_with_gradient(name, unknown_batch):
    fn, shapes, rule = POSITIVE[name]

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = fn(x, w, b)
        return y, tape.gradient(y, [x, w, b])

    check(step, values(*shapes), {rule: 1}, 1, unknown_batch=[0] if unknown_batch else [])


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("name", POSITIVE)
def test_layers_on_one_input(name, of_input):
    """Each gets its own gradients, though those of the filters have the same form."""
    fn, shapes, rule = POSITIVE[name]

    def step(x, *variables):
        with tf.GradientTape() as tape:
            tape.watch([x, *variables] if of_input else variables)
            layers = zip(variables[::2], variables[1::2], strict=True)
            ys = [fn(x, w, b) for w, b in layers]
            loss = tf.reduce_sum(ys[0] * ys[1] + ys[2] ** 2)
        return loss, tape.gradient(loss, [x, *variables] if of_input else variables)

    check(step, values(*shapes, *shapes[1:] * 2), {rule: 3}, 3, unknown_batch=[0], units=256)


def two_readers(x, w, b):
    """The padded image is read by two convolutions, so the Pad stays."""
    wide = tf.pad(x, SPATIAL)
    convs = [tf.nn.bias_add(tf.nn.conv2d(wide, f, 1, "VALID"), b) for f in (w, 2.0 * w)]
    return [tf.nn.relu(z) for z in convs]


def two_readers_without_bias(x, w, b):
    wide = tf.pad(x, SPATIAL)
    return [tf.exp(tf.nn.conv2d(wide, f, 1, "VALID")) + b for f in (w, 2.0 * w)]


def pad_with_one(x, paddings):
    return tf.pad(x, paddings, constant_values=1.0)


def mirror(x, paddings):
    return tf.pad(x, [[0, 0], [1, 1], [0, 1], [0, 0]], "REFLECT")


PAD, CONV = "pad_conv2d_bias_relu", {"conv2d_bias_relu": 1}
CAUSAL, CONV1D = "pad_conv1d_bias_relu", {"conv1d_bias_relu": 1}
# The activation goes alone.
GELU = {"act_gelu_erf": 1}
NEGATIVE = {
    "pad_twice": (padded(SPATIAL, "SAME"), IMAGE, CONV, PAD, "pads again"),
    "pad_is_read_twice": (two_readers, IMAGE, {"conv2d_bias_relu": 2}, PAD, "also used by"),
    "pad_without_bias_is_read_twice": (
        two_readers_without_bias,
        IMAGE,
        {},
        "pad_conv2d",
        "also used by",
    ),
    "pad_twice_without_bias": (
        lambda x, w, b: tf.exp(tf.nn.conv2d(tf.pad(x, SPATIAL), w, 1, "SAME")) + b,
        IMAGE,
        {},
        "pad_conv2d",
        "pads again",
    ),
    "causal_pads_twice": (causal(padding="SAME"), SIGNAL, CONV1D, CAUSAL, "pads again"),
    "causal_pads_channels": (
        causal(((0, 0), (4, 0), (0, 3))),
        [SIGNAL[0], (3, 6, 4), (4,)],
        CONV1D,
        CAUSAL,
        "are not those of a convolution",
    ),
    "causal_pads_with_one": (causal(pad=pad_with_one), SIGNAL, CONV1D, CAUSAL, None),
    "pad_with_one": (padded(SPATIAL, pad=pad_with_one), IMAGE, CONV, PAD, None),
    "pad_mirrored": (padded(SPATIAL, pad=mirror), IMAGE, CONV, PAD, None),
    "conv1d_squeezed_is_used": (
        lambda x, w, b: (lambda z: (tf.nn.relu(tf.nn.bias_add(z, b)), z))(
            tf.nn.conv1d(x, w, 1, "SAME")
        ),
        SIGNAL,
        {},
        "conv1d_bias_relu",
        "is an output of the graph",
    ),
    "product_of_two_batches": (product(), [ROWS[0], (2, 7, 5), (5,)], {}, "batch", None),
    "product_and_broadcast_bias": (
        product(),
        [ROWS[0], ROWS[1], (1,)],
        {},
        "batch_matmul_bias_tanh",
        "may not be a bias",
    ),
    "einsum_over_the_first_dimension": (
        einsum("kab,kn->abn"),
        [(7, 2, 3), *ROWS[1:]],
        GELU,
        "einsum",
        None,
    ),
    "einsum_of_shared_letters": (
        einsum("abc,cb->ab"),
        [ROWS[0], (7, 3), (3,)],
        GELU,
        "einsum",
        None,
    ),
    "einsum_onto_heads_in_another_order": (
        einsum_sum("abc,cde->abed"),
        [ROWS[0], (7, 2, 5), (5, 2)],
        GELU,
        "einsum",
        None,
    ),
    "einsum_and_the_bias_of_one_head": (
        einsum("abc,cde->abde"),
        [ROWS[0], (7, 2, 5), (5,)],
        GELU,
        "einsum",
        None,
    ),
    "einsum_and_broadcast_bias": (
        einsum_sum("abc,cde->abde"),
        [ROWS[0], (7, 2, 5), (1, 5)],
        GELU,
        "einsum_bias_gelu_erf",
        "may not be a bias",
    ),
    "heads_across_rows": (
        heads([2, 7, 3, 5]),
        [ROWS[0], (7, 35), (3, 5)],
        GELU,
        "heads_bias_gelu_erf",
        "mixes the 35 columns",
    ),
    "heads_and_broadcast_bias": (
        heads([-1, 3, 2, 5]),
        [ROWS[0], (7, 10), (2, 1)],
        GELU,
        "heads_bias_gelu_erf",
        "may not be a bias",
    ),
    "einsum_transposed": (einsum("abc,dc->abd"), [ROWS[0], (5, 7), (5,)], GELU, "einsum", None),
    "conv_used_without_activation": (
        lambda x, w, b: (lambda z: (tf.nn.relu(z), tf.exp(z)))(tf.nn.conv2d(x, w, 1, "SAME")),
        IMAGE,
        {},
        "conv2d_relu",
        "also used by Exp",
    ),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_must_not_fuse(name):
    check_left(*NEGATIVE[name])


PADDINGS = {"channels": [[0, 0], [1, 1], [1, 1], [0, 1]], "batch": [[1, 0], [1, 1], [1, 1], [0, 0]]}


@pytest.mark.parametrize("unknown_batch", [False, True])
def test_conv1d_with_channels_first(unknown_batch):
    """Compared with channels last: stock has no kernel for channels first on every processor."""

    def gradients(fn, x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = fn(x, w, b)
        return y, tape.gradient(y, [x, w, b])

    def channels_first(x, w, b):
        z = tf.nn.conv1d(x, w, 2, "SAME", "NCW")
        return tf.nn.silu(tf.nn.bias_add(z, b, "NCW"))

    def channels_last(x, w, b):
        (y, (dx, dw, db)) = gradients(conv1d(2), tf.transpose(x, [0, 2, 1]), w, b)
        return tf.transpose(y, [0, 2, 1]), [tf.transpose(dx, [0, 2, 1]), dw, db]

    args = values((2, 3, 7), *SIGNAL[1:])
    shapes = [(None if unknown_batch else 2, 3, 7), *SIGNAL[1:]]
    signature = [tf.TensorSpec(shape) for shape in shapes]
    compiled = function(lambda *a: gradients(channels_first, *a), input_signature=signature)
    assert_same(compiled(*args), channels_last(*args))
    assert (rule_counts(compiled), gradient_count(compiled)) == ({"conv1d_bias_silu": 1}, 1)


def test_causal_with_channels_first():
    def channels_first(x, w, b):
        z = tf.nn.conv1d(tf.pad(x, [[0, 0], [0, 0], [2, 0]]), w, 1, "VALID", "NCW")
        return tf.nn.relu(tf.nn.bias_add(z, b, "NCW"))

    x, w, b = values((2, 3, 7), *SIGNAL[1:])
    compiled = function(channels_first)
    expected = causal(((0, 0), (2, 0), (0, 0)), dilations=1)(tf.transpose(x, [0, 2, 1]), w, b)
    assert_same(compiled(x, w, b), tf.transpose(expected, [0, 2, 1]))
    assert rule_counts(compiled) == {CAUSAL: 1}


@pytest.mark.parametrize("known", [(None, None, 7), (None, 3, 7), (2, 3, 7)])
def test_einsum_of_unknown_sizes(known):
    """Of two unknown sizes the shape of the result is computed."""
    fn = einsum_sum("abc,cde->abde")
    args = values(ROWS[0], (7, 2, 5), (2, 5))

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = fn(x, w, b)
        return y, tape.gradient(y, [x, w, b])

    signature = [tf.TensorSpec(known), *(tf.TensorSpec(v.shape) for v in args[1:])]
    compiled = function(step, input_signature=signature)
    assert_same(compiled(*args), tf.function(step, input_signature=signature)(*args))
    assert rule_counts(compiled) == {"einsum_bias_gelu_erf": 1}
    assert gradient_count(compiled) == 1


@pytest.mark.parametrize("name", PADDINGS)
def test_padding_of_other_dimensions(name):
    """Compared with eager execution: stock graphs get this wrong where oneDNN is on."""
    fn = padded(PADDINGS[name])
    args = values((2, 6, 5, 3 - PADDINGS[name][3][1]), *IMAGE[1:])
    compiled = function(fn)
    assert_same(compiled(*args), fn(*args))
    assert rule_counts(compiled) == CONV
    assert "are not those of a convolution" in reasons(compiled)[PAD]


LAYERS = {
    "conv1d": (lambda: keras.layers.Conv1D(4, 3, activation="gelu"), (2, 7, 3), "conv1d_bias"),
    "conv1d_same": (
        lambda: keras.layers.Conv1D(4, 3, 2, padding="same", activation="gelu"),
        (2, 7, 3),
        "conv1d_bias",
    ),
    "causal": (
        lambda: keras.layers.Conv1D(4, 3, padding="causal", activation="gelu"),
        (2, 7, 3),
        "pad_conv1d_bias",
    ),
    "causal_without_bias": (
        lambda: keras.layers.Conv1D(4, 3, padding="causal", use_bias=False, activation="gelu"),
        (2, 7, 3),
        "pad_conv1d",
    ),
    "conv1d_without_bias": (
        lambda: keras.layers.Conv1D(4, 3, use_bias=False, activation="gelu"),
        (2, 7, 3),
        "conv1d",
    ),
    "einsum_dense": (
        lambda: keras.layers.EinsumDense("abc,cd->abd", (None, 4), "gelu", "d"),
        (2, 7, 3),
        "batch_matmul_bias",
    ),
    "einsum_dense_heads": (
        lambda: keras.layers.EinsumDense("abc,cde->abde", (None, 2, 4), "gelu", "de"),
        (2, 7, 3),
        "heads_bias",
    ),
    "einsum_dense_without_bias": (
        lambda: keras.layers.EinsumDense("abc,cd->abd", (None, 4), "gelu"),
        (2, 7, 3),
        "batch_matmul",
    ),
    "dense_without_bias": (
        lambda: keras.layers.Dense(4, "gelu", use_bias=False),
        (2, 7, 3),
        "dense",
    ),
    "conv2d": (
        lambda: keras.layers.Conv2D(4, 3, use_bias=False, activation="gelu"),
        (2, 7, 6, 3),
        "conv2d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_keras_layer(name):
    make, shape, family = LAYERS[name]
    layer = make()
    layer.build(shape)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x) ** 2)
        return loss, tape.gradient(loss, [x, *layer.trainable_variables])

    signature = [tf.TensorSpec([None, *shape[1:]])]
    compiled = function(step, input_signature=signature)
    with plain():
        args = values(shape)
        expected = tf.function(step, input_signature=signature)(*args)
        assert_same(compiled(*args), expected, units=256)
    assert (rule_counts(compiled), gradient_count(compiled)) == ({f"{family}_gelu_erf": 1}, 1)


ATTENTION = {
    7: [("attention", 1), ("batch_matmul_bias", 1), *[("heads_bias", 1)] * 3],
    None: [("attention", 1), *[("einsum_bias", 1)] * 4],
}


@pytest.mark.parametrize("length", ATTENTION)
def test_attention(length):
    """Query, key and value are layers of the same input."""
    inputs = keras.Input([length, 12])
    model = keras.Model(inputs, keras.layers.MultiHeadAttention(2, 5)(inputs, inputs))

    @function(input_signature=[tf.TensorSpec([None, length, 12])])
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x) ** 2)
        return loss, tape.gradient(loss, [x, *model.trainable_variables])

    x = values((2, 7, 12))[0]
    with plain():
        assert_same(step(x), step.python_function(x), units=256)
    gradients = [(f.rule, f.gradients) for f in step.remap_reports[0].fused]
    assert sorted(gradients) == ATTENTION[length]


# Input and filters of convolutions to one channel, of which Keras adds the bias as one number.
ONE_CHANNEL = {
    "conv2d": (lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), (2, 6, 5, 3), (3, 3, 3, 1)),
    "conv1d": (lambda x, w: tf.nn.conv1d(x, w, 2, "VALID"), (2, 7, 3), (3, 3, 1)),
    "conv2d_transpose": (
        lambda x, w: tf.nn.conv2d_transpose(x, w, (2, 6, 8, 1), 2),
        (2, 3, 4, 3),
        (4, 4, 1, 3),
    ),
    "conv1d_transpose": (
        lambda x, w: tf.nn.conv1d_transpose(x, w, (2, 8, 1), 2),
        (2, 4, 3),
        (4, 1, 3),
    ),
}


@pytest.mark.parametrize("act", ["", "_tanh", "_silu"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ONE_CHANNEL)
def test_one_channel(name, first, act):
    layer, *shapes = ONE_CHANNEL[name]
    activation = {"": tf.identity, "_tanh": tf.tanh, "_silu": tf.nn.silu}[act]

    def chain(x, w, b):
        z = layer(x, w)
        return activation(b + z if first else z + b)

    args = values(*shapes, [1] * len(shapes[0]))
    check(step_of(chain), args, {f"{name}_bias{act}": 1}, gradients=1, units=256)


@pytest.mark.parametrize("channels_first", [False, True])
def test_one_number_is_no_bias_of_many_channels(channels_first):
    """Nor is it one of images of one column."""

    def fn(x, w, b):
        if channels_first:
            x = tf.transpose(x, [0, 3, 1, 2])
        return tf.tanh(tf.nn.conv2d(x, w, 1, "VALID", "NCHW" if channels_first else "NHWC") + b)

    compiled = function(fn)
    compiled.get_concrete_function(*values((2, 6, 3, 3), (3, 3, 3, 4), (1, 1, 1, 1)))
    assert not rule_counts(compiled)
    assert "is no bias of 4 channels" in str(reasons(compiled))
