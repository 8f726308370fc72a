"""Layer and RMS normalization: the ways to write them, what is fused, what is left to stock."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    check_training,
    gradient_count,
    op_counts,
    reasons,
    rule_counts,
    step_of,
)
from remapping import values as random_values

from tf_fused_ops import function
from tf_fused_ops.remapper import RemapOptions, convert

EPSILON = 1e-5
X, SCALE, OFFSET = random_values((3, 5, 17), (17,), (17,))


def moments(x, axes=-1):
    return tf.nn.moments(x, axes, keepdims=True)


def centred(x, variance):
    return x * tf.math.rsqrt(variance + EPSILON)


def by_keras(x, scale, offset):
    return keras.ops.layer_normalization(x, scale, offset, epsilon=EPSILON)


def by_batch_normalization(x, scale, offset, axes=-1):
    return tf.nn.batch_normalization(x, *moments(x, axes), offset, scale, EPSILON)


def by_moments(x, scale, offset):
    mean, variance = moments(x)
    return scale * centred(x - mean, variance) + offset


def by_squares(x, scale, offset):
    x = x - tf.reduce_mean(x, -1, keepdims=True)
    return centred(x, tf.reduce_mean(tf.square(x), -1, keepdims=True)) * scale + offset


def by_squares_anew(x, scale, offset):
    mean = tf.reduce_mean(x, [-1], keepdims=True)
    variance = tf.reduce_mean(tf.square(x - mean), [-1], keepdims=True)
    return centred(x - mean, variance) * scale + offset


def by_reduce_variance(x, scale, offset):
    mean, variance = (f(x, 2, True) for f in (tf.reduce_mean, tf.math.reduce_variance))
    return centred(x - mean, variance) * scale + offset


def by_root(x, scale, offset):
    mean, variance = moments(x)
    return (x - mean) / tf.sqrt(variance + EPSILON) * scale + offset


def by_root_scale_first(x, scale, offset):
    mean, variance = (f(x, -1, True) for f in (tf.reduce_mean, tf.math.reduce_variance))
    return scale * (x - mean) / tf.sqrt(variance + EPSILON) + offset


def by_squares_scale_first(x, scale, offset):
    x = x - tf.reduce_mean(x, -1, keepdims=True)
    return centred(scale * x, tf.reduce_mean(tf.square(x), -1, keepdims=True)) + offset


def by_reciprocal(x, scale, offset):
    mean, variance = moments(x)
    return (x - mean) * tf.math.reciprocal(tf.sqrt(variance + EPSILON)) * scale + offset


def by_reciprocal_scale_first(x, scale, offset):
    x = x - tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(x), -1, keepdims=True)
    return scale * x * tf.math.reciprocal(tf.sqrt(variance + EPSILON)) + offset


FORMS = [
    by_keras,
    by_batch_normalization,
    by_moments,
    by_squares,
    by_squares_anew,
    by_reduce_variance,
    by_root,
    by_root_scale_first,
    by_squares_scale_first,
    by_reciprocal,
    by_reciprocal_scale_first,
]


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, unknown_batch):
    unknown = [0] if unknown_batch else []
    operands = [X, SCALE, OFFSET]
    check(step_of(form), operands, {"layer_norm": 1}, gradients=1, unknown_batch=unknown)
    check(form, operands, {"layer_norm": 1}, unknown_batch=unknown)


@pytest.mark.parametrize("present", ["scale", "offset", "neither"])
@pytest.mark.parametrize("form", [by_keras, by_batch_normalization])
def test_without_scale_or_offset(form, present):
    def chain(x, *vector):
        return form(
            x,
            vector[0] if present == "scale" else None,
            vector[0] if present == "offset" else None,
        )

    operands = [X, SCALE][: 1 if present == "neither" else 2]
    check(step_of(chain), operands, {"layer_norm": 1}, gradients=1)


def rms_of_difference(x, scale):
    x = x - scale
    return centred(x, tf.reduce_mean(tf.square(x), -1, keepdims=True))


def over(x):
    return tf.sqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + EPSILON)


def gemma(x, scale):
    """As KerasHub's Gemma."""
    square = tf.reduce_mean(tf.square(x), -1, keepdims=True)
    return x * tf.math.reciprocal(tf.sqrt(square + EPSILON)) * (1.0 + scale)


RMS = {
    "keras": lambda x, scale: keras.ops.rms_normalization(x, scale, epsilon=EPSILON),
    "power": lambda x, scale: centred(x, tf.reduce_mean(tf.pow(x, 2), -1, keepdims=True)) * scale,
    "product": lambda x, scale: scale * centred(x, tf.reduce_mean(x * x, [2], keepdims=True)),
    "alone": lambda x: centred(x, tf.reduce_mean(tf.square(x), -1, keepdims=True)),
    "difference": rms_of_difference,
    "root": lambda x, scale: scale * (x / over(x)),
    "root alone": lambda x: x / over(x),
    "root, scale first": lambda x, scale: scale * x / over(x),
    "reciprocal": lambda x, scale: scale * (x * tf.math.reciprocal(over(x))),
    "reciprocal alone": lambda x: x * tf.math.reciprocal(over(x)),
    "reciprocal, scale first": lambda x, scale: x * scale * tf.math.reciprocal(over(x)),
    "gemma": gemma,
}


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("name", RMS)
def test_rms(name, unknown_batch):
    unknown = [0] if unknown_batch else []
    operands = [X] if name.endswith("alone") else [X, SCALE]
    check(RMS[name], operands, {"rms_norm": 1}, unknown_batch=unknown)
    step = step_of(RMS[name])
    check(step, operands, {"rms_norm": 1}, gradients=1, unknown_batch=unknown)


# Of which one size of x is the product of others, with another operand of a sum or product.
PRODUCTS = {
    # As KerasHub's T5.
    "a sum": (lambda x, y: RMS["alone"](x) + tf.reshape(y, [2, 12, 32]), (2, 12, 32), (24, 32)),
    "a factor": (
        lambda x, y: tf.reshape(y, [2, 12, 1]) * RMS["alone"](x),
        (2, 12, 32),
        (24,),
    ),
    "a factor of layer norm": (
        lambda x, y: tf.reshape(y, [2, 12, 1]) * by_batch_normalization(x, None, None),
        (2, 12, 32),
        (24,),
    ),
    "a factor of as many": (
        lambda x, y: RMS["alone"](x) * tf.reshape(y, [2, 3, 6]),
        (2, 3, 6),
        (36,),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_sizes_that_are_products_of_others(name):
    chain, *shapes = PRODUCTS[name]
    rules = {"layer_norm" if "layer norm" in name else "rms_norm": 1}
    check(step_of(chain), random_values(*shapes), rules, gradients=1)
    check(chain, random_values(*shapes), rules)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "float64"])
def test_keras_rms_layer(policy):
    layer = keras.layers.RMSNormalization(dtype=policy)
    layer.build((2, 3, 21))
    (x,) = random_values((2, 3, 21), dtype=layer.compute_dtype)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(tf.cast(y, "float32") ** 3)
        return y, tape.gradient(loss, [x, layer.scale.value])

    check(step, [x], {"rms_norm": 1}, gradients=1)


@pytest.mark.parametrize("shape", [(4, 7), (2, 3, 2, 9), (2, 2, 3, 2, 5)])
def test_ranks(shape):
    operands = random_values(shape, *[shape[-1:]] * 2)
    for form in (by_keras, by_moments):
        check(step_of(form), operands, {"layer_norm": 1}, gradients=1)


def test_float64():
    operands = random_values((3, 5, 17), (17,), (17,), dtype="float64")
    for form in FORMS[1:]:
        check(step_of(form), operands, {"layer_norm": 1}, gradients=1)
    check(step_of(gemma), operands[:2], {"rms_norm": 1}, gradients=1)


@pytest.mark.parametrize("options", [{}, {"scale": False}, {"center": False}], ids=str)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("shape", [(4, 21), (2, 3, 21), (2, 3, 2, 21)], ids=str)
def test_keras_layer(shape, policy, options):
    layer = keras.layers.LayerNormalization(dtype=policy, **options)
    layer.build(shape)
    (x,) = random_values(shape, dtype=layer.compute_dtype)
    variables = [v.value for v in layer.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(tf.cast(y, "float32") ** 3)
        return y, tape.gradient(loss, [x, *variables])

    check(step, [x], {"layer_norm": 1}, gradients=1)


def test_model_trains_as_stock():
    """Pre-norm blocks with residual branches, whose gradients meet before each norm."""

    def model():
        inputs = keras.Input((6, 16))
        x = inputs
        for _ in range(3):
            y = keras.layers.LayerNormalization(epsilon=1e-6)(x)
            x = x + keras.layers.Dense(16)(keras.layers.Dense(32, activation="gelu")(y))
        return keras.Model(inputs, keras.layers.LayerNormalization()(x))

    compiled = check_training(model, (4, 6, 16))
    assert rule_counts(compiled)["layer_norm"] == 4
    assert gradient_count(compiled) >= 4


REFUSED = {
    "two dimensions": (
        lambda x, *vectors: by_batch_normalization(x, None, None, [1, 2]),
        "dimensions",
    ),
    "a broadcast scale": (
        lambda x, scale, offset: by_batch_normalization(x, scale[:1], offset),
        "does not fit",
    ),
    "a broadcast offset": (
        lambda x, scale, offset: by_batch_normalization(x, scale, offset[:1]),
        "does not fit",
    ),
    "another shape": (
        lambda x, scale, offset: by_batch_normalization(x[..., :5], *[
            tf.reshape(v[:5], [1, 5, 1]) for v in (scale, offset)
        ]),
        "reshaped|does not fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", [by_batch_normalization, by_squares, RMS["power"]])
def test_half_precision_throughout(form):
    """Stock rounds what the op keeps in float32."""
    operands = random_values(X.shape, SCALE.shape, OFFSET.shape, dtype="bfloat16")
    operands = operands[:2] if form is RMS["power"] else operands
    compiled = check(step_of(form), operands, {})
    rule = "rms_norm" if form is RMS["power"] else "layer_norm"
    assert "normalized in bfloat16, not in float32" in reasons(compiled)[rule]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_with_casts(dtype):
    """Keras's function casts."""
    operands = random_values(X.shape, SCALE.shape, OFFSET.shape, dtype=dtype)
    check(step_of(by_keras), operands, {"layer_norm": 1}, gradients=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_of_gemma(dtype):
    def chain(x, scale):
        return tf.cast(gemma(tf.cast(x, tf.float32), scale), dtype)

    operands = [tf.cast(X, dtype), SCALE]
    check(step_of(chain), operands, {"rms_norm": 1}, gradients=1)


def test_vectors_of_more_dimensions():
    """The result has theirs."""

    def chain(x, *vectors):
        return by_batch_normalization(x, *(tf.reshape(v, [1, 1, 1, 17]) for v in vectors))

    compiled = check(chain, [X, SCALE, OFFSET], {})
    assert "reshaped to [1, 1, 1, 17]" in reasons(compiled)["layer_norm"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    chain, reason = REFUSED[name]
    compiled = check(chain, [X, SCALE, OFFSET], {})
    assert any(word in reasons(compiled)["layer_norm"] for word in reason.split("|"))


def test_epsilon_beside_the_root():
    """Another function."""

    def chain(x, scale, offset):
        mean, variance = moments(x)
        return scale * (x - mean) / (tf.sqrt(variance) + EPSILON) + offset

    def by_reciprocal(x):
        return x * tf.math.reciprocal(tf.sqrt(moments(x)[1]) + EPSILON)

    check(step_of(chain), [X, SCALE, OFFSET], {})
    check(step_of(by_reciprocal), [X], {})


def test_epsilon_with_more_digits_than_an_attribute():
    def chain(x):
        return tf.nn.batch_normalization(x, *moments(x), None, None, 1.23456789e-5)

    compiled = check(chain, random_values((3, 7), dtype="float64"), {})
    assert "digits" in reasons(compiled)["layer_norm"]


def test_unknown_depth():
    @function(input_signature=[tf.TensorSpec([None, None])])
    def chain(x):
        return tf.nn.batch_normalization(x, *moments(x), None, None, EPSILON)

    chain(X[0])
    assert rule_counts(chain) == {}
    assert "not known" in reasons(chain)["layer_norm"]


def test_values_inside_are_used():
    def chain(x):
        mean, variance = moments(x)
        y = tf.nn.batch_normalization(x, mean, variance, None, None, EPSILON)
        return y, variance

    check(chain, [X], {})

    def root_is_used(x):
        root = over(x)
        return x * tf.math.reciprocal(root), root

    compiled = check(root_is_used, [X], {})
    assert "is an output of the graph" in reasons(compiled)["rms_norm"]


def test_switched_off():
    compiled = function(by_keras, remap=RemapOptions(disable=["layer_norm"]))
    compiled(X, SCALE, OFFSET)
    assert rule_counts(compiled) == {}


def test_portable_conversion(tmp_path):
    """Stock ops stand for both ops where the package is not installed, and are fused again."""
    paths = [str(tmp_path / name) for name in ("fused", "portable", "again")]
    module = tf.Module()
    signature = [tf.TensorSpec([None, 5, 17]), tf.TensorSpec([17]), tf.TensorSpec([17])]
    module.forward = function(by_keras, input_signature=signature)
    module.step = function(step_of(by_keras), input_signature=signature)
    tf.saved_model.save(module, paths[0])
    convert(*paths[:2], to_stock=True)
    convert(*paths[1:])
    found = {path: tf.saved_model.load(path) for path in paths}
    ops = [op_counts(model.forward.concrete_functions[0]) for model in found.values()]
    assert [counts["TfFusedOps>LayerNorm"] for counts in ops] == [1, 0, 1]
    steps = [op_counts(model.step.concrete_functions[0]) for model in found.values()]
    assert [counts["TfFusedOps>LayerNormGrad"] for counts in steps[:2]] == [1, 0]
    expected = step_of(by_keras)(X, SCALE, OFFSET)
    for model in found.values():
        assert_same(model.forward(X, SCALE, OFFSET), expected[0])
        assert_same(model.step(X, SCALE, OFFSET), expected)
