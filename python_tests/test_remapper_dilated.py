"""Dilated convolutions that stock code makes of convolutions of many small images."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    check_portable,
    check_training,
    given,
    op_counts,
    plain,
    reasons,
    rule_counts,
    step_of,
    taped,
    values,
)
from test_remapper_refusals import keep

from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions, convert

# What is gone in the end.
STOCK = {
    *("SpaceToBatchND", "BatchToSpaceND"),
    *("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"),
    *("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"),
}
# Of input, filters and bias.
LINE = [(2, 11, 5), (3, 5, 4), (4,)]
IMAGE = [(2, 9, 8, 5), (3, 2, 5, 4), (4,)]
VOLUME = [(2, 5, 7, 6, 3), (2, 3, 2, 3, 4), (4,)]
SHAPES = {1: LINE, 2: IMAGE, 3: VOLUME}
# Dimensions, padding, dilations.
CASES = {
    "line": (1, "SAME", 2),
    "line, valid": (1, "VALID", 4),
    "image": (2, "SAME", 2),
    "image, valid": (2, "VALID", 3),
    "image, rows": (2, "SAME", [3, 1]),
    "image, columns": (2, "VALID", [1, 2]),
    "image, more than it has pixels": (2, "SAME", [16, 5]),
    "volume": (3, "SAME", 2),
    "volume, valid": (3, "VALID", [3, 2, 2]),
    "volume, planes": (3, "SAME", [2, 1, 1]),
}
EACH = pytest.mark.parametrize("name", CASES)
ACT = {1: "conv1d_bias_relu", 2: "conv2d_bias_relu", 3: "conv3d_bias_relu"}


def conv(x, w, padding="SAME", dilations=2, **options):
    """As `keras.ops.conv` has it."""
    return tf.nn.convolution(x, w, padding=padding, dilations=dilations, **options)


def chain_of(padding, dilations):
    return lambda x, w, b: tf.nn.relu(tf.nn.bias_add(conv(x, w, padding, dilations), b))


def none_stock(compiled, *args):
    """Asserts that nothing of stock's convolutions is left, and that nothing was refused."""
    counts = op_counts(compiled.get_concrete_function(*args))
    assert not counts.keys() & STOCK, counts
    assert reasons(compiled) == {}


@pytest.mark.parametrize("sizes", ["known", "unknown batch"])
@EACH
def test_training(name, sizes):
    rank, padding, dilations = CASES[name]
    rules = {f"dilated_conv{rank}d": 1, ACT[rank]: 1}
    unknown = [0] if sizes == "unknown batch" else []
    step = step_of(chain_of(padding, dilations))
    none_stock(check(step, values(*SHAPES[rank]), rules, 2, unknown_batch=unknown, units=512))


@EACH
def test_inference(name):
    rank, padding, dilations = CASES[name]
    rules = {f"dilated_conv{rank}d": 1, ACT[rank]: 1}
    none_stock(check(chain_of(padding, dilations), values(*SHAPES[rank]), rules))


@pytest.mark.parametrize("mode", ["inference", "training"])
@EACH
def test_images_of_any_size(name, mode):
    """Of which stock code computes the paddings when it runs."""
    rank, padding, dilations = CASES[name]
    chain = chain_of(padding, dilations)
    code = step_of(chain) if mode == "training" else chain
    x, *others = values(*SHAPES[rank])
    signature = [tf.TensorSpec([None] * (rank + 1) + [x.shape[-1]])]
    signature += [tf.TensorSpec(t.shape) for t in others]
    with plain():
        compiled = function(code, input_signature=signature)
        stock = tf.function(code, input_signature=signature)
        for size in (None, 13, 16):
            image = x if size is None else values((1, *[size] * rank, x.shape[-1]))[0]
            assert_same(compiled(image, *others), stock(image, *others), units=2048)
    assert rule_counts(compiled) == {f"dilated_conv{rank}d": 1, ACT[rank]: 1}
    none_stock(compiled)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("rank", SHAPES)
def test_other_dtypes(rank, dtype):
    rules = {f"dilated_conv{rank}d": 1, ACT[rank]: 1}
    step = step_of(chain_of("SAME", 2))
    none_stock(check(step, values(*SHAPES[rank], dtype=dtype), rules, 2, units=512))


@pytest.mark.parametrize("rank", SHAPES)
def test_alone(rank):
    """In training a rule for that takes it; in inference none, and yet no stock op is left, since
    TensorFlow may have no kernel for that, or for its gradient by a tape outside."""
    operands = values(*SHAPES[rank][:2], dtype="float64")
    name, trained = f"dilated_conv{rank}d", "trained_conv3d" if rank == 3 else "trained_conv2d"
    none_stock(check(step_of(conv), operands, {name: 1, trained: 1}, 2, units=512))
    none_stock(check(conv, operands, {name: 1, f"{name}_alone": 1}))
    compiled = function(conv)
    assert_same(taped(compiled, operands), taped(tf.function(conv), operands), units=512)
    assert rule_counts(compiled) == {name: 1, f"{name}_alone": 1}


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("wanted", ["x", "w"])
def test_one_gradient(rank, wanted):
    def step(x, w, b):
        source = {"x": x, "w": w}[wanted]
        with tf.GradientTape() as tape:
            tape.watch(source)
            y = chain_of("SAME", 2)(x, w, b)
        return y, tape.gradient(y, source, output_gradients=tf.sin(y))

    rules = {f"dilated_conv{rank}d": 1, ACT[rank]: 1}
    none_stock(check(step, values(*SHAPES[rank]), rules, 2, units=512))


@pytest.mark.parametrize("rank", SHAPES)
def test_gradients_that_no_rule_takes(rank):
    """Where those are switched off."""
    operands = values(*SHAPES[rank][:2], dtype="float64")
    code = step_of(conv)
    options = RemapOptions(disable=["trained_*", "conv*"])
    compiled = function(code, remap=options)
    assert_same(compiled(*operands), tf.function(code)(*operands), units=512)
    name = f"dilated_conv{rank}d"
    assert rule_counts(compiled) == {name: 1, f"{name}_alone": 1, f"{name}_alone_grad": 2}
    none_stock(compiled, *operands)


@pytest.mark.parametrize("sizes", ["known", "unknown"])
@pytest.mark.parametrize("rank", [1, 2])
def test_channels_first(rank, sizes):
    """Compared with channels last: stock has no kernel for channels first on a CPU."""
    layout = {1: "NCW", 2: "NCHW"}[rank]
    last, first = [0, *range(2, rank + 2), 1], [0, rank + 1, *range(1, rank + 1)]

    def channels_first(x, w, b):
        z = conv(x, w, data_format=layout)
        return tf.nn.relu(tf.nn.bias_add(z, b, layout))

    def channels_last(x, w, b):
        return tf.transpose(chain_of("SAME", 2)(tf.transpose(x, last), w, b), first)

    x, w, b = values(*SHAPES[rank])
    operands = [tf.transpose(x, first), w, b]
    signature = [tf.TensorSpec(t.shape) for t in operands]
    if sizes == "unknown":
        signature[0] = tf.TensorSpec([None, x.shape[-1], *[None] * rank])
    compiled = function(step_of(channels_first), input_signature=signature)
    expected = tf.function(step_of(channels_last))(*operands)
    assert_same(compiled(*operands), expected, units=512)
    assert rule_counts(compiled) == {f"dilated_conv{rank}d": 1, ACT[rank]: 1}
    none_stock(compiled)


LAYERS = {
    "causal": (
        lambda **kw: keras.layers.Conv1D(4, 3, padding="causal", **kw),
        (2, 9, 3),
        {"dilated_conv1d": 1, "pad_conv1d_bias_gelu_erf": 1},
    ),
    "conv1d": (
        lambda **kw: keras.layers.Conv1D(4, 3, **kw),
        (2, 9, 3),
        {"dilated_conv1d": 1, "conv1d_bias_gelu_erf": 1},
    ),
    "conv2d": (
        lambda **kw: keras.layers.Conv2D(4, 3, padding="same", **kw),
        (2, 9, 8, 3),
        {"dilated_conv2d": 1, "conv2d_bias_gelu_erf": 1},
    ),
    "groups": (
        lambda **kw: keras.layers.Conv2D(6, 3, padding="same", groups=3, **kw),
        (2, 9, 8, 3),
        {"dilated_conv2d": 1, "conv2d_bias_gelu_erf": 1},
    ),
    "depthwise": (
        lambda **kw: keras.layers.DepthwiseConv2D(3, padding="same", **kw),
        (2, 9, 8, 3),
        {"dilated_conv2d": 1, "conv2d_bias_gelu_erf": 1},
    ),
    "separable": (
        lambda **kw: keras.layers.SeparableConv2D(4, 3, **kw),
        (2, 9, 8, 3),
        {"dilated_conv2d": 1, "grouped_conv2d": 1, "conv2d_bias_gelu_erf": 1},
    ),
    "depthwise of a line": (
        lambda **kw: keras.layers.DepthwiseConv1D(3, padding="same", **kw),
        (2, 9, 3),
        {"dilated_conv2d": 1, "row_conv2d_bias_gelu_erf": 1},
    ),
    "conv3d": (
        lambda **kw: keras.layers.Conv3D(4, 2, padding="same", **kw),
        (2, 4, 6, 5, 3),
        {"dilated_conv3d": 1, "conv3d_bias_gelu_erf": 1},
    ),
}


@pytest.mark.parametrize("mode", ["inference", "inner tape", "outer tape"])
@pytest.mark.parametrize("name", LAYERS)
def test_keras_layer(name, mode):
    make, shape, rules = LAYERS[name]
    layer = make(dilation_rate=2, activation="gelu")
    layer.build(shape)

    def forward(x):
        return layer(x)

    def step(code, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = code(x)
        variables = layer.trainable_variables
        return y, tape.gradient(y, [x, *variables], output_gradients=tf.sin(y))

    def inner(x):
        return step(forward, x)

    code = inner if mode == "inner tape" else forward
    signature = [tf.TensorSpec([None, *shape[1:]])]
    (x,) = values(shape)
    with plain():
        stock = tf.function(code, input_signature=signature)
        compiled = function(code, input_signature=signature)
        if mode == "outer tape":
            assert_same(step(compiled, x), step(stock, x), units=512)
        else:
            assert_same(compiled(x), stock(x), units=512)
    assert rule_counts(compiled) == rules


def test_batch_norm_in_inference():
    """Which becomes part of the convolution."""

    def chain(x, w, *vectors):
        return tf.nn.relu(given(conv(x, w), *vectors))

    operands = values(*IMAGE[:2], *[(4,)] * 4)
    rules = {"dilated_conv2d": 1, "conv2d_given_batch_norm_relu": 1}
    none_stock(check(chain, operands, rules, units=256))


def pyramid():
    """The head of DeepLab: convolutions of several dilations on one input, with batch norm."""
    layers = keras.layers
    inputs = layers.Input((12, 12, 3))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    branches = [layers.Conv2D(16, 1, use_bias=False)(x)]
    for rate in (2, 4, 6):
        branches.append(layers.Conv2D(16, 3, padding="same", dilation_rate=rate, use_bias=False)(x))
    branches = [layers.ReLU()(layers.BatchNormalization()(y)) for y in branches]
    y = layers.SeparableConv2D(8, 3, padding="same", dilation_rate=2)(
        layers.Concatenate()(branches)
    )
    return keras.Model(inputs, layers.Conv2D(2, 1, activation="sigmoid")(y))


def temporal_net():
    """Causal convolutions of growing dilation with residual sums, as of speech and of series."""
    inputs = x = keras.Input((32, 4))
    for dilation in (1, 2, 4, 8):
        y = keras.layers.Conv1D(6, 2, padding="causal", dilation_rate=dilation)(x)
        y = keras.layers.Activation("tanh")(y)
        x = keras.layers.Add()([keras.layers.Conv1D(6, 1)(x), y])
    return keras.Model(inputs, keras.layers.Conv1D(2, 1)(x))


@pytest.mark.parametrize(
    ("make", "target", "rules"),
    [
        (
            pyramid,
            (4, 12, 12, 2),
            {"dilated_conv2d": 4, "trained_conv2d": 4, "conv2d_moments": 4},
        ),
        (
            temporal_net,
            (4, 32, 2),
            {"dilated_conv1d": 3, "pad_conv1d_bias_tanh": 4, "conv1d_bias_add": 4},
        ),
    ],
)
def test_networks(make, target, rules):
    compiled = check_training(make, target)
    counts = rule_counts(compiled)
    assert {rule: counts.get(rule) for rule in rules} == rules, counts
    args = values((4, *make().input_shape[1:]), target)
    assert not op_counts(compiled.get_concrete_function(*args)).keys() & STOCK


def apart(x, w, paddings, crops, block=(2, 2), **options):
    """As written by hand."""
    images = tf.space_to_batch(x, block, paddings)
    options = {"strides": 1, "padding": "VALID", **options}
    return tf.batch_to_space(tf.nn.conv2d(images, w, **options), block, crops)


@pytest.mark.parametrize(
    ("paddings", "crops"),
    [
        ([[2, 3], [1, 3]], [[0, 1], [1, 0]]),
        ([[4, 3], [0, 2]], [[1, 0], [0, 1]]),
    ],
)
def test_other_paddings(paddings, crops):
    """Those of a convolution with explicit paddings."""
    chain = lambda x, w: tf.nn.relu(apart(x, w, paddings, crops))  # noqa: E731
    operands = values(*IMAGE[:2])
    none_stock(check(chain, operands, {"dilated_conv2d": 1, "conv2d_relu": 1}))
    rules = {"dilated_conv2d": 1, "conv2d_relu": 1}
    none_stock(check(step_of(chain), operands, rules, gradients=2, units=512))


SAME = ([[2, 3], [1, 3]], [[0, 1], [0, 2]])
REFUSED = {
    "crops what is no padding": (
        lambda x, w: apart(x, w, [[0, 1], [0, 2]], [[1, 0], [0, 0]]),
        "are not those of a convolution",
    ),
    "strides": (lambda x, w: apart(x, w, *SAME, strides=2), "attribute strides"),
    "pads again": (lambda x, w: apart(x, w, *SAME, padding="SAME"), "attribute padding"),
    "images are read": (
        lambda x, w: (lambda images: (
            tf.batch_to_space(tf.nn.conv2d(images, w, 1, "VALID"), [2, 2], SAME[1]), images
        ))(tf.space_to_batch(x, [2, 2], SAME[0])),
        "is an output of the graph",
    ),
    "kept": (
        lambda x, w: tf.batch_to_space(
            keep(tf.nn.conv2d(tf.space_to_batch(x, [2, 2], SAME[0]), w, 1, "VALID")),
            [2, 2],
            SAME[1],
        ),
        "_grappler_do_not_remove",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    code, reason = REFUSED[name]
    operands = values(*IMAGE[:2])
    compiled = check(code, operands, {})
    assert reason in reasons(compiled)["dilated_conv2d"]


def test_blocks_that_differ_are_left():
    def code(x, w):
        images = tf.space_to_batch(x, [2, 2], [[2, 3], [1, 3]])
        return tf.batch_to_space(tf.nn.conv2d(images, w, 1, "VALID"), [4, 1], [[0, 1], [0, 0]])

    compiled = check(code, values(*IMAGE[:2]), {})
    assert "block_shape is [4, 1], not [2, 2]" in reasons(compiled)["dilated_conv2d"]


@pytest.mark.parametrize("batch", [2, None])
def test_volumes_of_different_dilations_are_left(batch):
    """The shape that TensorFlow tells of its own op is wrong."""
    chain = chain_of("SAME", [1, 2, 3])
    unknown = [] if batch else [0]
    compiled = check(chain, values(*VOLUME), {}, unknown_batch=unknown)
    assert "takes the dilations of height and width" in reasons(compiled)["dilated_conv3d"]


def test_volumes_with_other_paddings_are_left():
    def code(x, w):
        images = tf.space_to_batch(x, [2, 2, 2], [[1, 0], [3, 2], [0, 2]])
        return tf.batch_to_space(tf.nn.conv3d(images, w, [1] * 5, "VALID"), [2] * 3, [[0, 0]] * 3)

    compiled = check(code, values(*VOLUME[:2]), {})
    assert "neither SAME nor VALID" in reasons(compiled)["dilated_conv3d"]


def test_images_of_channels_are_left():
    def code(x, w):
        images = tf.space_to_batch(x, [1, 1, 2], [[0, 0], [0, 0], [0, 1]])
        return tf.batch_to_space(tf.nn.conv2d(images, w, 1, "VALID"), [1, 1, 2], [[0, 0]] * 3)

    compiled = check(code, values(IMAGE[0], (3, 2, 3, 4)), {})
    assert "makes images of channels" in reasons(compiled)["dilated_conv2d"]


def test_blocks_of_ones_are_left():
    """Also if nobody knows what is padded."""

    def code(x, w, paddings):
        return apart(x, w, paddings, [[0, 0], [0, 0]], block=(1, 1))

    operands = [*values(*IMAGE[:2]), tf.constant([[1, 0], [2, 1]])]
    assert reasons(check(code, operands, {})) == {}


def test_blocks_of_an_unknown_image_are_left():
    """Of more dimensions than an image has, which cannot be run."""

    def code(x, w):
        images = tf.space_to_batch(x, [2, 2, 2, 2], [[0, 0]] * 4)
        return tf.nn.conv2d(images, w, 1, "VALID")

    compiled = function(code)
    compiled.get_concrete_function(tf.TensorSpec(None), tf.TensorSpec(IMAGE[1]))
    assert rule_counts(compiled) == {}


@pytest.mark.parametrize("pattern", ["dilated_*", "*"])
def test_switched_off(pattern):
    compiled = function(chain_of("SAME", 2), remap=RemapOptions(disable=[pattern]))
    operands = values(*IMAGE)
    assert_same(compiled(*operands), chain_of("SAME", 2)(*operands))
    assert rule_counts(compiled) == {}


def test_other_devices():
    """Where there is no kernel for what would take its place."""

    def there(x, w, b):
        with tf.device("GPU:0"):
            return chain_of("SAME", 2)(x, w, b)

    compiled = function(there)
    compiled.get_concrete_function(*values(*VOLUME))
    assert rule_counts(compiled) == {}
    assert "has no float32 kernel on GPU" in reasons(compiled)["dilated_conv3d"]


@pytest.mark.parametrize("rank", SHAPES)
def test_portable(rank, tmp_path):
    check_portable(chain_of("SAME", 2), values(*SHAPES[rank]), tmp_path)


def test_saved_step(tmp_path):
    """A SavedModel of a train step is converted."""
    module = tf.Module()
    operands = values(*IMAGE)
    signature = [tf.TensorSpec(t.shape) for t in operands]
    module.step = tf.function(step_of(chain_of("SAME", 2)), input_signature=signature)
    expected = module.step(*operands)
    paths = [str(tmp_path / name) for name in ("stock", "fused")]
    tf.saved_model.save(module, paths[0])
    convert(*paths)
    loaded = tf.saved_model.load(paths[1]).step
    assert_same(loaded(*operands), expected, units=512)
    assert not op_counts(loaded.concrete_functions[0]).keys() & STOCK
