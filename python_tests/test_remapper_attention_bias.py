"""Attention whose scores get a bias: relative positions, ALiBi, masks that are added."""

import numpy as np
import pytest
import tensorflow as tf
from remapping import assert_same, check, check_portable, reasons, rule_counts, step_of, values

from tf_fused_ops import function

# Batch, length, heads, depth; and batch, heads, length, depth.
BESIDE = ((2, 5, 3, 4), (2, 6, 3, 4), (2, 6, 3, 7))
FIRST = ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7))
MASK = tf.constant(np.random.default_rng(0).uniform(size=(1, 1, 5, 6)) < 0.7)
FUSED = ("TfFusedOps>Attention", "TfFusedOps>AttentionGrad")


def einsums(scores):
    """Returns a chain, given what makes scores of products and a bias."""

    def chain(query, key, value, bias):
        z = scores(tf.einsum("bqhd,bkhd->bhqk", query, key), bias)
        return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(z), value)

    return chain


def products(query, key, value, bias):
    return tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 2.5 + bias) @ value


def of_windows(query, key, value, bias):
    """As Swin scales the query."""
    scores = (query * 0.5) @ tf.linalg.matrix_transpose(key)
    return tf.nn.softmax(scores + bias) @ value


def transposed(query, key, value, bias):
    """As Keras spells the einsum of T5 and BLOOM."""
    columns = tf.transpose(key, [0, 2, 3, 1])
    z = tf.transpose(query, [0, 2, 1, 3]) @ columns * 0.5 + bias
    weights = tf.where(MASK, tf.nn.softmax(tf.where(MASK, z, -1e9)), 0.0)
    return tf.transpose(weights @ tf.transpose(value, [0, 2, 1, 3]), [0, 2, 1, 3])


def flipped(query, key, value, bias):
    """As Keras spells the einsum of its attention layers."""
    keys, columns = (tf.transpose(x, p) for x, p in ((key, [0, 2, 1, 3]), (query, [0, 2, 3, 1])))
    weights = tf.nn.softmax(tf.transpose(keys @ columns, [0, 1, 3, 2]) + bias)
    return tf.transpose(weights @ tf.transpose(value, [0, 2, 1, 3]), [0, 2, 1, 3])


def dropping(query, key, value, bias):
    weights = tf.nn.softmax(tf.einsum("bqhd,bkhd->bhqk", query, key) + bias)
    weights = tf.nn.experimental.stateless_dropout(weights, 0.2, seed=[1, 2])
    return tf.einsum("bhqk,bkhd->bqhd", weights, value)


# The chain, shapes of query, key and value, that of the bias, scale and number of masks.
FORMS = {
    "einsum": (einsums(lambda z, bias: z + bias), BESIDE, (2, 3, 5, 6), (1.0, 0)),
    "scaled": (einsums(lambda z, bias: z * 0.25 + bias), BESIDE, (3, 5, 6), (0.25, 0)),
    "bias first": (einsums(lambda z, bias: bias + z / 8), BESIDE, (1, 3, 1, 6), (0.125, 0)),
    "a bias a key": (einsums(lambda z, bias: bias + z), BESIDE, (6,), (1.0, 0)),
    "masked": (
        einsums(lambda z, bias: tf.where(MASK, z * 0.5 + bias, -1e9)),
        BESIDE,
        (2, 1, 5, 6),
        (0.5, 1),
    ),
    "matmul": (products, FIRST, (1, 3, 5, 6), (0.4, 0)),
    "windows": (of_windows, FIRST, (3, 5, 6), (1.0, 0)),
    "transposed": (transposed, BESIDE, (1, 3, 1, 6), (0.5, 1)),
    "flipped": (flipped, BESIDE, (2, 3, 5, 6), (1.0, 0)),
    "dropout": (dropping, BESIDE, (3, 1, 6), (1.0, 0)),
}


def only(compiled, op_type):
    """Returns the one op of a type."""
    graph = compiled.get_concrete_function().graph
    (op,) = (op for op in graph.get_operations() if op.type == op_type)
    return op


def assert_biased(compiled, op_type, expected):
    op = only(compiled, op_type)
    found = op.get_attr("scale"), op.get_attr("num_masks"), op.get_attr("num_bias")
    np.testing.assert_allclose(found, (*expected, 1), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, dtype):
    chain, shapes, bias, expected = FORMS[name]
    operands = values(*shapes, bias, dtype=dtype)
    assert_biased(check(chain, operands, {"attention": 1}), FUSED[0], expected)
    compiled = check(step_of(chain), operands, {"attention": 1}, gradients=1)
    for op_type in FUSED:
        assert_biased(compiled, op_type, expected)
    assert only(compiled, FUSED[1]).get_attr("bias_gradient")
    types = {op.type for op in compiled.get_concrete_function().graph.get_operations()}
    assert not types & {"Einsum", "BatchMatMulV2", "Softmax", "SelectV2"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_before_a_cast(dtype):
    """As BLOOM has it: scaled and biased in half precision, masked in float32."""

    def chain(query, key, value, bias):
        z = tf.cast(tf.einsum("bqhd,bkhd->bhqk", query, key) * 0.5 + bias, tf.float32)
        weights = tf.cast(tf.nn.softmax(tf.where(MASK, z, -1e9)), dtype)
        return tf.einsum("bhqk,bkhd->bqhd", weights, value)

    operands = values(*BESIDE, (3, 1, 6), dtype=dtype)
    compiled = check(step_of(chain), operands, {"attention": 1}, gradients=1)
    assert_biased(compiled, FUSED[1], (0.5, 1))


def test_bias_after_a_cast_is_left():
    """The op takes one of the query's type."""

    def chain(query, key, value, bias):
        z = tf.cast(tf.einsum("bqhd,bkhd->bhqk", query, key), tf.float32) + bias
        return tf.einsum("bhqk,bkhd->bqhd", tf.cast(tf.nn.softmax(z), tf.bfloat16), value)

    operands = [*values(*BESIDE, dtype="bfloat16"), *values((3, 1, 6))]
    check(step_of(chain), operands, {"softmax": 1}, gradients=1)


@pytest.mark.parametrize("name", FORMS)
def test_bias_without_gradient(name):
    """Of constants no gradient is computed, for which the scores would be in memory."""
    chain, shapes, size, _ = FORMS[name]
    (bias,) = values(size)

    def given(query, key, value):
        return chain(query, key, value, bias)

    compiled = check(step_of(given), values(*shapes), {"attention": 1}, gradients=1)
    assert not only(compiled, FUSED[1]).get_attr("bias_gradient")


def test_bias_that_is_an_operand():
    """One tensor for all four, and one that is the query."""

    def of_one(x):
        return FORMS["matmul"][0](x, x, x, x)

    def of_query(query, key, value):
        return FORMS["matmul"][0](query, key, value, query)

    check(step_of(of_one), values((2, 3, 5, 5)), {"attention": 1}, gradients=1)
    operands = values((2, 3, 5, 6), (2, 3, 6, 6), (2, 3, 6, 7))
    check(step_of(of_query), operands, {"attention": 1}, gradients=1)


def test_gradient_of_the_bias_alone():
    operands = values(*BESIDE, (3, 5, 6))

    def step(*operands):
        bias = operands[3]
        with tf.GradientTape() as tape:
            tape.watch(bias)
            y = FORMS["scaled"][0](*operands)
        return y, tape.gradient(y, bias)

    compiled = check(step, operands, {"attention": 1}, gradients=1)
    (fusion,) = compiled.remap_reports[-1].fused
    graph = compiled.get_concrete_function().graph
    assert [graph.get_operation_by_name(name).type for name in fusion.fused] == list(FUSED)


@pytest.mark.parametrize("front", [(), (2, 3, 2)], ids=str)
def test_dimensions_in_front(front):
    shapes = [(*front, 5, 4), (*front, 6, 4), (*front, 6, 7)]
    shapes = shapes if front else [(3, *shape) for shape in shapes]
    bias = (1, *front[1:], 5, 6) if front else (5, 6)
    check(step_of(products), values(*shapes, bias), {"attention": 1}, gradients=1)


@pytest.mark.parametrize("order", [lambda a, b: a + b, lambda a, b: b + a])
def test_bias_that_is_a_product(order):
    """Scores of content and of positions: that of the batch is the scores."""

    def chain(query, key, value, positions, table):
        content = tf.matmul(query, key, transpose_b=True)
        of_positions = tf.matmul(positions, table, transpose_b=True)
        return tf.nn.softmax(order(content, of_positions)) @ value

    operands = values(*FIRST, (1, 3, 5, 4), (1, 3, 6, 4))
    check(step_of(chain), operands, {"attention": 1}, gradients=1)


def test_shape_of_scores_that_code_outside_reads():
    def chain(query, key, value, bias):
        z = tf.transpose(query, [0, 2, 1, 3]) @ tf.transpose(key, [0, 2, 3, 1])
        y = tf.nn.softmax(z + bias) @ tf.transpose(value, [0, 2, 1, 3])
        return tf.transpose(y, [0, 2, 1, 3]), tf.cast(tf.shape(z), tf.float32)

    operands = values(*BESIDE, (3, 5, 6))
    signature = [tf.TensorSpec([2, None, *x.shape[2:]]) for x in operands[:3]]
    signature[2] = signature[1] = tf.TensorSpec([2, 6, 3, None])
    signature.append(tf.TensorSpec([3, 5, 6]))
    signature[0] = tf.TensorSpec([2, 5, 3, None])
    compiled = function(chain, input_signature=signature)
    assert_same(compiled(*operands), chain(*operands))
    assert rule_counts(compiled) == {"attention": 1}


def test_bias_that_is_shared():
    """By two layers, as T5's positions; gradients of both are added up."""

    def chain(query, key, value, bias):
        return FORMS["einsum"][0](query, key, value, bias) + FORMS["scaled"][0](
            key[:, :5], query, value[:, :5], bias[0, ..., :5]
        )

    operands = values(*BESIDE, (2, 3, 5, 6))
    check(step_of(chain), operands, {"attention": 2, "slice_gradient": 3}, gradients=2)


def test_positions_and_padding_of_unknown_sizes():
    """As T5 adds them, for batches and sentences of any size."""

    def chain(tokens, table):
        lengths = tf.range(tf.shape(tokens)[1])
        distances = tf.clip_by_value(lengths[None] - lengths[:, None], -3, 3) + 3
        positions = tf.transpose(tf.gather(table * 1.0, distances), [2, 0, 1])[None]
        padding = (1 - tf.cast(tokens[:, None, None, :, 0, 0] > -1, tf.float32)) * -1e9
        scores = tf.einsum("bqhd,bkhd->bhqk", tokens, tokens)
        weights = tf.nn.softmax(scores + (positions + padding))
        return tf.einsum("bhqk,bkhd->bqhd", weights, tokens)

    tokens, table = values((2, 5, 3, 4), (7, 3))
    signature = [tf.TensorSpec([None, None, 3, 4]), tf.TensorSpec([7, 3])]
    compiled = function(step_of(chain), input_signature=signature)
    assert_same(compiled(tokens, table), step_of(chain)(tokens, table))
    assert sorted(rule_counts(compiled)) == ["slice_gradient", "softmax"]


# The bias, and what the reason says.
REFUSED = {
    "one number for all keys": ((1, 3, 5, 1), "may not be broadcast"),
    "one number": ((), "does not fit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    shape, reason = REFUSED[name]
    operands = values(*BESIDE, shape)
    compiled = check(step_of(FORMS["einsum"][0]), operands, {"softmax": 1}, gradients=1)
    assert reason in reasons(compiled)["attention"]


def test_scores_that_are_broadcast_to_the_bias():
    operands = values(*((1, *shape[1:]) for shape in BESIDE[:2]), BESIDE[2], (2, 3, 5, 6))

    def chain(query, key, value, bias):
        weights = tf.nn.softmax(tf.einsum("bqhd,bkhd->bhqk", query, key) + bias)
        return tf.einsum("bhqk,bkhd->bqhd", weights, value)

    check(step_of(chain), operands, {"softmax": 1}, gradients=1)


def test_bias_after_the_mask_is_left():
    chain = einsums(lambda z, bias: tf.where(MASK, z, -1e9) + bias)
    check(step_of(chain), values(*BESIDE, (3, 5, 6)), {"softmax": 1}, gradients=1)


def test_portable_conversion(tmp_path):
    chain, shapes, size, _ = FORMS["scaled"]
    check_portable(step_of(chain), values(*shapes, size), tmp_path)
