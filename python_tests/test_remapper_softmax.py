"""Softmax, with what attention does before it: what is fused, what is left to stock."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    gradient_count,
    reasons,
    rule_counts,
    step_of,
    values,
)

from tf_fused_ops import function
from tf_fused_ops.remapper import RemapOptions, convert

SHAPE = (2, 3, 6, 10)
(X,) = values(SHAPE)
MASK = tf.constant(np.random.default_rng(0).uniform(size=(1, 1, 6, 10)) < 0.7)

FORMS = {
    "alone": tf.nn.softmax,
    "product": lambda x: tf.nn.softmax(x * 0.125),
    "quotient": lambda x: tf.nn.softmax(x / math.sqrt(10)),
    "mask": lambda x: tf.nn.softmax(tf.where(MASK, x, -1e9)),
    "product and mask": lambda x: tf.nn.softmax(tf.where(MASK, 0.125 * x, x.dtype.min)),
    "quotient and mask": lambda x: tf.nn.softmax(tf.where(MASK, x / 3, -math.inf)),
    "mask and zeros": lambda x: tf.where(MASK, tf.nn.softmax(tf.where(MASK, x, -1e9)), 0.0),
    "mask of a row": lambda x: tf.nn.softmax(tf.where(MASK[0, 0, 0], x, -1e9)),
}


def attributes(compiled, op_type="TfFusedOps>Softmax"):
    """Returns the scale and the number of masks of the one op of a type."""
    graph = compiled.get_concrete_function(X).graph
    (op,) = (op for op in graph.get_operations() if op.type == op_type)
    return op.get_attr("scale"), op.get_attr("num_masks")


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, unknown_batch):
    unknown = [0] if unknown_batch else []
    for chain, gradients in ((FORMS[name], 0), (step_of(FORMS[name]), 1)):
        check(chain, [X], {"softmax": 1}, gradients=gradients, unknown_batch=unknown)


@pytest.mark.parametrize("name", FORMS)
def test_all_of_it_is_fused(name):
    compiled = function(step_of(FORMS[name]))
    compiled(X)
    scale = {"product": 0.125, "quotient": 1 / (3 if "mask" in name else math.sqrt(10))}
    scale = scale.get(name.split()[0], 1.0)
    for op_type in ("TfFusedOps>Softmax", "TfFusedOps>SoftmaxGrad"):
        found, masks = attributes(compiled, op_type)
        assert math.isclose(found, scale, rel_tol=1e-6) and masks == ("mask" in name)
    types = {op.type for op in compiled.get_concrete_function(X).graph.get_operations()}
    assert not types & {"Softmax", "RealDiv", "SelectV2"}


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 2, 3, 2, 5)])
def test_ranks(shape):
    check(step_of(FORMS["product"]), values(shape), {"softmax": 1}, gradients=1)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["alone", "product", "mask"])
def test_dtypes(name, dtype):
    """Without casts around it, too, since TensorFlow's op computes in float32 itself."""
    form = FORMS[name]
    if name == "mask":
        form = lambda x: tf.nn.softmax(tf.where(MASK, x, x.dtype.min))  # noqa: E731
    check(step_of(form), values(SHAPE, dtype=dtype), {"softmax": 1}, gradients=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FORMS)
def test_half_precision_with_casts(name, dtype):
    def chain(x):
        return tf.cast(FORMS[name](tf.cast(x, tf.float32)), dtype)

    operands = values(SHAPE, dtype=dtype)
    check(step_of(chain), operands, {"softmax": 1}, gradients=1)
    compiled = function(chain)
    compiled(operands[0])
    types = [op.type for op in compiled.get_concrete_function(operands[0]).graph.get_operations()]
    assert "Cast" not in types


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_scaled_before_a_cast(dtype, masked):
    """As Keras's softmax layer computes in float32 what attention has scaled."""

    def chain(x):
        z = tf.cast(x * 0.125, tf.float32)
        z = tf.where(tf.constant([[True] * 9 + [False]]), z, -1e9) if masked else z
        return tf.cast(tf.nn.softmax(z), dtype)

    operands = values((3, 4, 10), dtype=dtype)
    check(step_of(chain), operands, {"softmax": 1}, gradients=1)
    compiled = check(chain, operands, {"softmax": 1})
    types = {op.type for op in compiled.get_concrete_function().graph.get_operations()}
    assert not types & {"Mul", "SelectV2", "Softmax"}


def test_softmax_of_a_cast_in_wide_precision():
    """What is not cast back is not half precision."""
    operands = values(SHAPE, dtype="bfloat16")
    check(step_of(lambda x: tf.nn.softmax(tf.cast(x, tf.float32))), operands, {"softmax": 1}, 1)


def test_keras_attention_that_returns_scores():
    """Which need the softmax in memory."""
    layer = keras.layers.MultiHeadAttention(2, 8)
    layer.build((2, 6, 16), (2, 6, 16))
    options = {"use_causal_mask": True, "return_attention_scores": True}
    compiled = function(lambda x: layer(x, x, **options))
    (x,) = values((2, 6, 16))
    compiled(x)
    assert rule_counts(compiled)["softmax"] == 1 and "attention" not in rule_counts(compiled)
    graph = compiled.get_concrete_function(x).graph
    (op,) = (op for op in graph.get_operations() if op.type == "TfFusedOps>Softmax")
    assert op.get_attr("num_masks") == 1


def test_entropy():
    """Its gradient is NaN where the zeros are, which stock leaves out."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = FORMS["mask and zeros"](x)
            loss = tf.reduce_sum(tf.where(MASK, y * tf.math.log(y), 0.0))
        return loss, tape.gradient(loss, x)

    compiled = check(step, [X], {"softmax": 1}, gradients=1)
    assert np.isfinite(compiled(X)[1]).all()


@pytest.mark.parametrize("scale", [11.0, 13.0, 6.0])
def test_scales_that_might_be_sizes(scale):
    (x,) = values((11, 13, 6))
    check(step_of(lambda x: tf.nn.softmax(x * scale)), [x], {"softmax": 1}, gradients=1)


@pytest.mark.filterwarnings("error:overflow")
@pytest.mark.parametrize("divisor", [0.0, 1e-39])
def test_no_number_to_scale_by(divisor):
    compiled = function(lambda x: tf.nn.softmax(x / divisor))
    assert np.isnan(compiled(X)).any()
    assert "is scaled by" in reasons(compiled)["softmax"]
    assert attributes(compiled) == (1.0, 0)


def unfit(*shape):
    return tf.constant(np.random.default_rng(0).uniform(size=shape) < 0.7)


# What is left to stock: the chain, and what the softmax that is fused anyway has.
PARTLY = {
    "x would be broadcast": lambda x: tf.nn.softmax(tf.where(unfit(4, 2, 3, 6, 10), x, -1e9)),
    "one for a row": lambda x: tf.nn.softmax(tf.where(unfit(6, 1), x, -1e9)),
    "another tensor": lambda x: tf.nn.softmax(tf.where(MASK, x, -tf.abs(x))),
    "scale of several numbers": lambda x: tf.nn.softmax(x * tf.reshape(x[0, :, 0, 0], [3, 1, 1])),
}


@pytest.mark.parametrize("name", PARTLY)
def test_partly(name):
    sliced = {"slice_gradient": 1} if name == "scale of several numbers" else {}
    check(step_of(PARTLY[name]), [X], {"softmax": 1} | sliced, gradients=1)
    compiled = function(PARTLY[name])
    compiled(X)
    assert attributes(compiled) == (1.0, 0)


def test_a_mask_of_unknown_sizes():
    """It may be that x is the one that is broadcast."""

    @function(input_signature=[tf.TensorSpec([None, 3, 6, 10]), tf.TensorSpec([None, 1, 1, 10])])
    def chain(x, bits):
        return tf.nn.softmax(tf.where(bits > 0, x, -1e9))

    (bits,) = values((2, 1, 1, 10))
    chain(X, bits)
    assert chain(X[:1], bits).shape == (2, 3, 6, 10)
    assert rule_counts(chain) == {"softmax": 1}
    assert "may not be broadcast to" in reasons(chain)["softmax"]


@pytest.mark.parametrize("scale", [None, 0.125])
def test_a_mask_made_of_x(scale):
    """Its sizes are known to be those of x, whatever they are, also where x has been scaled."""

    def chain(x):
        z = x if scale is None else x * scale
        kept = tf.logical_and(tf.ones_like(z, tf.bool), tf.range(10) < 7)
        return tf.nn.softmax(tf.where(kept, z, -1e9))

    compiled = function(step_of(chain), input_signature=[tf.TensorSpec([None, 3, None, 10])])
    assert_same(compiled(X), step_of(chain)(X))
    assert (rule_counts(compiled), gradient_count(compiled)) == ({"softmax": 1}, 1)
    graph = compiled.get_concrete_function().graph
    for op_type in ("TfFusedOps>Softmax", "TfFusedOps>SoftmaxGrad"):
        (op,) = (op for op in graph.get_operations() if op.type == op_type)
        assert op.get_attr("num_masks") == 1 and op.get_attr("scale") == (scale or 1)


# Masks of sizes that nothing proves, in code that is read for proofs.
UNPROVEN = {
    "letters that dots stand for": lambda x: tf.einsum("...ab,bc->ac", x, x) > 0,
    "an axis in a vector": lambda x: tf.expand_dims(x[0] > 0, [0]),
    "an element behind an ellipsis": lambda x: tf.fill(
        tf.stack([tf.shape(x)[..., 1], tf.shape(x)[1]]), True
    ),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_masks_of_unproven_sizes(name):
    def chain(x):
        return tf.nn.softmax(tf.where(UNPROVEN[name](x), x * 0.5, -1e9))

    compiled = function(chain, input_signature=[tf.TensorSpec([None, None])])
    for shape in ((4, 4), (1, 4)) if "ellipsis" in name else ((4, 4),):
        (x,) = values(shape)
        assert_same(compiled(x), chain(x))


@pytest.mark.parametrize("square", [False, True])
def test_long_computations_of_what_scales(square):
    """They are not constants, and are not followed to their ends."""

    def chain(x):
        scale = x[0, 0, 0, 0]
        for _ in range(30 if square else 1200):
            scale = scale * (scale if square else 0.999)
        return tf.nn.softmax(x * scale)

    check(chain, [X], {"softmax": 1})


def test_code_outside_that_reads_a_shape_inside():
    def chain(x):
        z = x * 0.125
        return tf.nn.softmax(z), *(
            tf.cast(tf.shape(z, t), tf.float32) for t in (tf.int32, tf.int64)
        )

    compiled = check(chain, [X], {"softmax": 1}, unknown_batch=[0])
    assert "Mul" not in {op.type for op in compiled.get_concrete_function().graph.get_operations()}


@pytest.mark.parametrize(
    "chain",
    [
        lambda x: tf.nn.softmax(x * 0.123456789012),
        lambda x: tf.nn.softmax(tf.where(MASK, x, -1.23456789012)),
        lambda x: tf.nn.softmax(tf.where(MASK[..., :1, :] & False, x, x.dtype.min)),
    ],
)
@pytest.mark.filterwarnings("error:overflow")
def test_a_number_with_more_digits_than_an_attribute(chain):
    compiled = check(step_of(chain), values(SHAPE, dtype="float64"), {"softmax": 1}, gradients=1)
    assert "digits" in reasons(compiled)["softmax"]


def test_values_inside_are_used():
    def chain(x):
        scaled = x * 0.125
        return tf.nn.softmax(scaled), scaled

    compiled = check(chain, [X], {"softmax": 1})
    assert attributes(compiled) == (1.0, 0)


def test_other_dimension():
    """TensorFlow transposes."""
    check(step_of(lambda x: tf.nn.softmax(x, axis=1)), [X], {"softmax": 1}, gradients=1)


def test_switched_off():
    compiled = function(FORMS["mask"], remap=RemapOptions(disable=["softmax"]))
    compiled(X)
    assert rule_counts(compiled) == {}


def test_portable_conversion(tmp_path):
    """Stock ops stand for both ops where the package is not installed, and are fused again."""
    paths = [str(tmp_path / name) for name in ("fused", "portable", "again")]
    module = tf.Module()
    step = step_of(FORMS["product and mask"])
    module.forward = function(step, input_signature=[tf.TensorSpec(SHAPE)])
    expected = module.forward(X)
    tf.saved_model.save(module, paths[0])
    convert(paths[0], paths[1], to_stock=True)
    assert_same(tf.saved_model.load(paths[1]).forward(X), expected)
    convert(paths[1], paths[2])
    assert_same(tf.saved_model.load(paths[2]).forward(X), expected)
