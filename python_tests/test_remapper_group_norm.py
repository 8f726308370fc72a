"""Group and instance normalization: the ways to write them, what is fused, what is not."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    check_training,
    gradient_count,
    op_counts,
    plain,
    reasons,
    rule_counts,
    step_of,
)
from remapping import values as random_values

from tf_fused_ops import function
from tf_fused_ops.remapper import RemapOptions, convert

EPSILON = 1e-5
GROUPS, CHANNELS = 3, 12
X, SCALE, OFFSET = random_values((4, 5, 6, CHANNELS), (CHANNELS,), (CHANNELS,))


def moments(x, axes):
    return tf.nn.moments(x, axes, keepdims=True)


def grouped(x, groups=GROUPS):
    """x as [images, pixels.., groups, channels]."""
    return tf.reshape(x, [-1, *x.shape[1:-1], groups, x.shape[-1] // groups])


def centred(x, axes, epsilon=EPSILON):
    mean, variance = moments(x, axes)
    return (x - mean) * tf.math.rsqrt(variance + epsilon)


def by_moments(x, scale, offset):
    return tf.reshape(centred(grouped(x), [1, 2, 4]), tf.shape(x)) * scale + offset


def by_batch_normalization(x, scale, offset):
    g = grouped(x)
    y = tf.nn.batch_normalization(g, *moments(g, [1, 2, 4]), None, None, EPSILON)
    return scale * tf.reshape(y, [-1, *x.shape[1:]]) + offset


def by_squares(x, scale, offset):
    g = grouped(x)
    g -= tf.reduce_mean(g, [1, 2, 4], keepdims=True)
    g /= tf.sqrt(tf.reduce_mean(tf.square(g), [1, 2, 4], keepdims=True) + EPSILON)
    return tf.reshape(g, tf.shape(x)) * scale + offset


def by_few_dimensions(x, scale, offset):
    """Pixels are one dimension."""
    g = tf.reshape(x, [tf.shape(x)[0], 30, GROUPS, CHANNELS // GROUPS])
    return tf.reshape(centred(g, [1, 3]), tf.shape(x)) * scale + offset


def vectors_before(x, scale, offset):
    """As Keras has it."""
    g = grouped(x)
    shape = [1, 1, 1, GROUPS, CHANNELS // GROUPS]
    vectors = (tf.reshape(v, shape) for v in (offset, scale))
    y = tf.nn.batch_normalization(g, *moments(g, [1, 2, 4]), *vectors, EPSILON)
    return tf.reshape(y, tf.shape(x))


def instance_norm(x, scale, offset):
    return tf.nn.batch_normalization(x, *moments(x, [1, 2]), offset, scale, EPSILON)


def instance_norm_by_root(x, scale, offset):
    mean, variance = moments(x, [1, 2])
    return scale * ((x - mean) / tf.sqrt(variance + EPSILON)) + offset


def by_reciprocal(x, scale, offset):
    g = grouped(x)
    mean, variance = moments(g, [1, 2, 4])
    y = (g - mean) * tf.math.reciprocal(tf.sqrt(variance + EPSILON))
    return tf.reshape(y, tf.shape(x)) * scale + offset


def instance_norm_by_reciprocal(x, scale, offset):
    mean, variance = moments(x, [1, 2])
    return scale * ((x - mean) * tf.math.reciprocal(tf.sqrt(variance + EPSILON))) + offset


def instance_norm_by_keras(x, scale, offset):
    return keras.ops.layer_normalization(x, axis=[1, 2], epsilon=EPSILON) * scale + offset


def columns(*vectors):
    return [tf.reshape(v, [1, -1, 1, 1]) for v in vectors]


def channels_first(x, scale, offset):
    """As in the paper."""
    shape = tf.shape(x)
    g = tf.reshape(x, [-1, GROUPS, x.shape[1] // GROUPS, *x.shape[2:]])
    mean, variance = moments(g, [2, 3, 4])
    y = tf.reshape((g - mean) / tf.sqrt(variance + EPSILON), shape)
    scale, offset = columns(scale, offset)
    return y * scale + offset


def channels_first_in_rows(x, scale, offset):
    g = tf.reshape(x, [-1, GROUPS, x.shape[1] // GROUPS * 30])
    scale, offset = columns(scale, offset)
    return tf.reshape(centred(g, [2]), [-1, *x.shape[1:]]) * scale + offset


def instance_norm_channels_first(x, scale, offset):
    vectors = columns(offset, scale)
    return tf.nn.batch_normalization(x, *moments(x, [2, 3]), *vectors, EPSILON)


LAST = [
    by_moments,
    by_batch_normalization,
    by_squares,
    by_few_dimensions,
    vectors_before,
    instance_norm,
    instance_norm_by_root,
    by_reciprocal,
    instance_norm_by_reciprocal,
    instance_norm_by_keras,
]
FIRST = [channels_first, channels_first_in_rows, instance_norm_channels_first]
FORMS = [*LAST, *FIRST]


def operands(form, dtype="float32"):
    x = tf.transpose(X, [0, 3, 1, 2]) if form in FIRST else X
    return [tf.cast(v, dtype) for v in (x, SCALE, OFFSET)]


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, unknown_batch):
    unknown = [0] if unknown_batch else []
    check(form, operands(form), {"group_norm": 1}, unknown_batch=unknown)
    compiled = check(
        step_of(form), operands(form), {"group_norm": 1}, gradients=1, unknown_batch=unknown
    )
    ops = compiled.get_concrete_function().graph.get_operations()
    (op,) = (op for op in ops if op.type == "TfFusedOps>GroupNormAct")
    assert op.get_attr("groups") == (CHANNELS if "instance" in form.__name__ else GROUPS)
    assert [op.inputs[i].op.type for i in (1, 2)] == ["Placeholder"] * 2
    assert op.get_attr("data_format") == (b"NCHW" if form in FIRST else b"NHWC")


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("form", [by_moments, vectors_before, instance_norm, channels_first])
def test_activations(form, activation, unknown_batch):
    def chain(*values):
        return getattr(tf.nn, activation)(form(*values))

    unknown = [0] if unknown_batch else []
    rules = {f"group_norm_{'gelu_erf' if activation == 'gelu' else activation}": 1}
    check(chain, operands(form), rules, unknown_batch=unknown)
    check(step_of(chain), operands(form), rules, gradients=1, unknown_batch=unknown)


def test_slope_of_leaky_relu():
    def chain(*values):
        return tf.nn.leaky_relu(instance_norm(*values), 0.05)

    check(step_of(chain), operands(instance_norm), {"group_norm_leaky_relu": 1}, gradients=1)


@pytest.mark.parametrize("form", FORMS[:-1])
def test_float64(form):
    if form is not instance_norm_by_keras:  # which computes in float32
        check(step_of(form), operands(form, "float64"), {"group_norm": 1}, gradients=1)


@pytest.mark.parametrize("present", ["scale", "offset", "neither"])
@pytest.mark.parametrize("form", ["group", "instance"])
def test_without_scale_or_offset(form, present):
    def chain(x, *vector):
        if form == "group":
            y = tf.reshape(centred(grouped(x), [1, 2, 4]), tf.shape(x))
        else:
            y = centred(x, [1, 2])
        return y * vector[0] if present == "scale" else y + vector[0] if vector else y

    values = [X, SCALE][: 1 if present == "neither" else 2]
    check(step_of(chain), values, {"group_norm": 1}, gradients=1)


@pytest.mark.parametrize("shape", [(3, 7, 12), (2, 3, 2, 5, 12)])
def test_ranks(shape):
    def group_norm(x, scale, offset):
        g = grouped(x)
        axes = [*range(1, len(shape) - 1), len(shape)]
        return tf.reshape(centred(g, axes), tf.shape(x)) * scale + offset

    def instance_norm(x, scale, offset):
        return centred(x, [*range(1, len(shape) - 1)]) * scale + offset

    x, scale, offset = random_values(shape, (12,), (12,))
    for form in (group_norm, instance_norm):
        check(step_of(form), [x, scale, offset], {"group_norm": 1}, gradients=1)


# Options, shape.
LAYERS = {
    "images": ({}, (4, 5, 6, 12)),
    "no scale": ({"scale": False}, (4, 5, 6, 12)),
    "no offset": ({"center": False}, (4, 5, 6, 12)),
    "neither": ({"center": False, "scale": False}, (4, 5, 6, 12)),
    "sequence": ({}, (4, 5, 12)),
    "features": ({}, (4, 12)),
    "volume": ({}, (2, 3, 4, 2, 12)),
    "channels first": ({"axis": 1}, (4, 12, 5, 6)),
    "instances": ({"groups": -1}, (4, 5, 6, 12)),
    "one group": ({"groups": 1}, (4, 5, 6, 12)),
}


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "float64"])
@pytest.mark.parametrize("name", LAYERS)
def test_keras_layer(name, policy):
    options, shape = LAYERS[name]
    layer = keras.layers.GroupNormalization(**{"groups": GROUPS, "dtype": policy, **options})
    layer.build(shape)
    (x,) = random_values(shape, dtype=layer.compute_dtype)
    variables = [v.value for v in layer.trainable_variables]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            # Stock rounds between the two.
            y = y if policy.startswith("mixed") else tf.nn.silu(y)
            loss = tf.reduce_sum(tf.cast(y, "float32") ** 3)
        return y, tape.gradient(loss, [x, *variables])

    rule = "group_norm" if policy.startswith("mixed") else "group_norm_silu"
    for unknown in ([], [0]):
        check(step, [x], {rule: 1}, gradients=1, unknown_batch=unknown)


def test_activation_in_half_precision():
    layer = keras.layers.GroupNormalization(GROUPS, dtype="mixed_bfloat16")
    layer.build(X.shape)
    x = tf.cast(X, "bfloat16")
    compiled = function(lambda x: tf.nn.silu(layer(x)))
    assert_same(compiled(x), tf.nn.silu(layer(x)), units=2)
    assert rule_counts(compiled) == {"group_norm_silu": 1}


def test_keras_layer_on_images_of_any_size():
    layer = keras.layers.GroupNormalization(GROUPS)
    layer.build((None, None, None, CHANNELS))

    @function(input_signature=[tf.TensorSpec([None, None, None, CHANNELS])])
    def chain(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.nn.silu(layer(x)) ** 3)
        return tape.gradient(loss, x)

    for x in (X, X[:2, :3], X[:0], X[:, :0]):
        assert_same(chain(x), chain.python_function(x))
    assert rule_counts(chain) == {"group_norm_silu": 1}
    assert gradient_count(chain) == 1


def test_model_trains_as_stock():
    """Residual blocks of a diffusion model."""

    def model():
        inputs = x = keras.Input((8, 8, 16))
        for _ in range(2):
            y = keras.activations.silu(keras.layers.GroupNormalization(4)(x))
            y = keras.layers.Conv2D(16, 3, padding="same")(y)
            y = keras.activations.silu(keras.layers.GroupNormalization(4)(y))
            x = x + keras.layers.Conv2D(16, 3, padding="same")(y)
        return keras.Model(inputs, keras.layers.GroupNormalization(4)(x))

    compiled = check_training(model, (4, 8, 8, 16))
    counts = rule_counts(compiled)
    assert (counts["group_norm_silu"], counts["group_norm"]) == (4, 1)


def of_images_together(x, scale, offset):
    return centred(x, [0, 1, 2]) * scale + offset


def of_one_dimension(x, scale, offset):
    return centred(x, [1]) * scale + offset


def of_groups_in_the_middle(x, scale, offset):
    g = tf.reshape(x, [-1, 5, 2, 3, CHANNELS])
    return tf.reshape(centred(g, [1, 3, 4]), tf.shape(x)) * scale + offset


def to_other_channels(x, scale, offset):
    g = grouped(x)
    y = tf.reshape(centred(g, [1, 2, 4]), [-1, 5, CHANNELS, 6])
    return y * scale[:6] + offset[:6]


def to_other_images(x, scale, offset):
    g = tf.reshape(x, [4, GROUPS, 4, 30])
    y = tf.reshape(centred(g, [2, 3]), [2, CHANNELS, 60])
    return y * tf.reshape(scale, [12, 1]) + tf.reshape(offset, [12, 1])


def scale_of_a_group(x, scale, offset):
    g = grouped(x)
    y = tf.nn.batch_normalization(g, *moments(g, [1, 2, 4]), None, scale[:4], EPSILON)
    return tf.reshape(y, tf.shape(x)) + offset


def scale_of_pixels(x, scale, offset):
    y = centred(x, [1, 2])
    return y * tf.reshape(scale[:6], [6, 1]) + tf.reshape(offset[:6], [6, 1])


def scale_of_more_dimensions(x, scale, offset):
    shape = [1, 1, 1, 1, CHANNELS]
    return centred(x, [1, 2]) * tf.reshape(scale, shape) + tf.reshape(offset, shape)


# What stays as it is, or in part: the normalization without the vectors.
REFUSED = {
    of_one_dimension: {},
    of_groups_in_the_middle: {},
    to_other_channels: {"group_norm": 1},
    to_other_images: {"group_norm": 1},
    scale_of_pixels: {"group_norm": 1},
}


@pytest.mark.parametrize("form", REFUSED)
def test_refused(form):
    sliced = {to_other_channels: 2, scale_of_pixels: 2}.get(form, 0)
    rules = REFUSED[form] | ({"slice_gradient": sliced} if sliced else {})
    check(step_of(form), operands(form), rules, gradients=len(REFUSED[form]), units=256)


def test_other_normalizations_are_not_taken_for_it():
    with plain():
        compiled = function(of_images_together)
        assert_same(compiled(X, SCALE, OFFSET), of_images_together(X, SCALE, OFFSET))
    assert "group_norm" not in rule_counts(compiled)


def test_scale_of_a_group_is_no_scale_of_channels():
    compiled = check(scale_of_a_group, operands(scale_of_a_group), {})
    assert "does not fit 12 channels" in reasons(compiled)["group_norm"]


def test_vectors_of_more_dimensions():
    """The result has theirs."""
    form = scale_of_more_dimensions
    compiled = check(form, operands(form), {"group_norm": 1})
    assert "is not a value a channel" in reasons(compiled)["group_norm"]


@pytest.mark.parametrize("form", [by_moments, instance_norm])
def test_half_precision_throughout(form):
    """Stock rounds what the op keeps in float32."""
    check(step_of(form), operands(form, "bfloat16"), {}, units=256)
    compiled = check(form, operands(form, "bfloat16"), {}, units=256)
    assert "normalized in bfloat16, not in float32" in reasons(compiled)["group_norm"]


def test_epsilon_with_more_digits_than_an_attribute():
    def chain(x):
        return centred(x, [1, 2], 1.23456789e-5)

    compiled = check(chain, random_values((2, 3, 4, 5), dtype="float64"), {})
    assert "digits" in reasons(compiled)["group_norm"]


def test_unknown_channels():
    @function(input_signature=[tf.TensorSpec([None, None, None, None])])
    def chain(x):
        return centred(x, [1, 2])

    chain(X)
    assert rule_counts(chain) == {}
    assert "not known" in reasons(chain)["group_norm"]


def test_values_inside_are_used():
    def chain(x):
        mean, variance = moments(x, [1, 2])
        return tf.nn.batch_normalization(x, mean, variance, None, None, EPSILON), variance

    check(chain, [X], {})


@pytest.mark.parametrize("axes", [[1, 2], [1, 2, 3], -1])
def test_root_of_what_is_no_variance(axes):
    """The mean is that of an argument, which no op makes."""

    def chain(x):
        return x * tf.math.rsqrt(tf.reduce_mean(x, axes, keepdims=True) + 9.0)

    check(step_of(chain), [X], {}, units=256)


def test_switched_off():
    compiled = function(by_moments, remap=RemapOptions(disable=["group_norm"]))
    compiled(X, SCALE, OFFSET)
    assert rule_counts(compiled) == {}


def test_portable_conversion(tmp_path):
    """Stock ops stand for both ops where the package is not installed."""
    paths = [str(tmp_path / name) for name in ("fused", "portable")]
    module = tf.Module()
    signature = [tf.TensorSpec([None, *X.shape[1:]]), *[tf.TensorSpec([CHANNELS])] * 2]
    module.forward = function(by_moments, input_signature=signature)
    module.step = function(step_of(by_moments), input_signature=signature)
    tf.saved_model.save(module, paths[0])
    convert(*paths, to_stock=True)
    expected = step_of(by_moments)(X, SCALE, OFFSET)
    for path, count in zip(paths, (1, 0), strict=True):
        model = tf.saved_model.load(path)
        counts = op_counts(model.step.concrete_functions[0])
        assert counts["TfFusedOps>GroupNormAct"] == counts["TfFusedOps>GroupNormActGrad"] == count
        assert_same(model.forward(X, SCALE, OFFSET), expected[0])
        assert_same(model.step(X, SCALE, OFFSET), expected)
