"""Products without bias, sums with them, and their neighbours."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    check_left,
    check_training,
    in_training,
    reasons,
    rule_counts,
    step_of,
    values,
)

from tf_fused_ops.function import function

ROWS = [(2, 3, 7), (7, 5), (5,)]
# The activation goes alone.
GELU = {"act_gelu_erf": 1}


def multiplied(activation, equation=None, **transposed):
    def fn(x, w):
        return activation(tf.einsum(equation, x, w) if equation else tf.matmul(x, w, **transposed))

    return fn


def added(activation, multiply=tf.matmul, add=tf.add):
    return lambda x, w, side: activation(add(multiply(x, w), side))


def tensordot(x, w):
    return tf.tensordot(x, w, 1)


def add_n(z, side):
    return tf.add_n([side, z])


MATRICES, SIDE = [(6, 7), (7, 5)], (2, 3, 5)
WITHOUT_BIAS = {
    "matrices": (multiplied(tf.nn.relu), MATRICES, "matmul_relu"),
    "matrices_a": (
        multiplied(tf.nn.gelu, transpose_a=True),
        [(7, 6), (7, 5)],
        "matmul_gelu_erf",
    ),
    "one_row": (multiplied(tf.nn.silu), [(1, 7), (7, 5)], "matmul_silu"),
    "one_column": (multiplied(tf.nn.relu), [(6, 7), (7, 1)], "matmul_relu"),
    "batch": (multiplied(tf.nn.relu), ROWS[:2], "batch_matmul_relu"),
    "batch_rank_4": (multiplied(tf.nn.gelu), [(2, 1, 3, 7), (7, 5)], "batch_matmul_gelu_erf"),
    "batch_a": (
        multiplied(tf.nn.relu, transpose_a=True),
        [(2, 7, 3), (7, 5)],
        "batch_matmul_relu",
    ),
    "batch_b": (
        multiplied(tf.nn.gelu, transpose_b=True),
        [ROWS[0], (5, 7)],
        "batch_matmul_gelu_erf",
    ),
    "tensordot": (lambda x, w: tf.nn.relu(tensordot(x, w)), ROWS[:2], "dense_relu"),
    "tensordot_of_a_transposition": (
        lambda x, w: tf.nn.silu(tensordot(tf.transpose(x, [0, 2, 1]), w)),
        [(2, 7, 3), (7, 5)],
        "dense_silu",
    ),
    "tensordot_rank_4": (
        lambda x, w: tf.nn.gelu(tensordot(x, w)),
        [(2, 1, 3, 7), (7, 5)],
        "dense_gelu_erf",
    ),
    "einsum": (multiplied(tf.nn.relu, "abc,cd->abd"), ROWS[:2], "einsum_relu"),
    "einsum_onto_heads": (
        multiplied(tf.nn.gelu, "abc,cde->abde"),
        [ROWS[0], (7, 2, 5)],
        "einsum_gelu_erf",
    ),
    "einsum_from_heads": (
        multiplied(tf.nn.silu, "abcd,cde->abe"),
        [(2, 3, 4, 7), (4, 7, 5)],
        "einsum_silu",
    ),
}
WITH_SIDE = {
    "matrices": (added(tf.identity), [*MATRICES, (6, 5)], "matmul_add"),
    "matrices_relu": (added(tf.nn.relu), [*MATRICES, (6, 5)], "matmul_add_relu"),
    "matrices_gelu_n": (
        added(tf.nn.gelu, add=add_n),
        [*MATRICES, (6, 5)],
        "matmul_add_gelu_erf",
    ),
    "batch": (added(tf.identity), [*ROWS[:2], SIDE], "batch_matmul_add"),
    "batch_relu": (added(tf.nn.relu), [*ROWS[:2], SIDE], "batch_matmul_add_relu"),
    "batch_gelu": (added(tf.nn.gelu), [*ROWS[:2], SIDE], "batch_matmul_add_gelu_erf"),
    "batch_n": (added(tf.identity, add=add_n), [*ROWS[:2], SIDE], "batch_matmul_add"),
    "tensordot": (added(tf.identity, tensordot), [*ROWS[:2], SIDE], "dense_add"),
    "tensordot_relu": (added(tf.nn.relu, tensordot), [*ROWS[:2], SIDE], "dense_add_relu"),
    "tensordot_gelu_n": (
        added(tf.nn.gelu, tensordot, add_n),
        [*ROWS[:2], SIDE],
        "dense_add_gelu_erf",
    ),
}


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("name", WITHOUT_BIAS)
def test_without_bias(name, unknown_batch):
    fn, shapes, rule = WITHOUT_BIAS[name]
    unknown = [0] if unknown_batch else []
    check(fn, values(*shapes), {rule: 1}, unknown_batch=unknown)
    check(step_of(fn), values(*shapes), {rule: 1}, 1, unknown, units=256)


@pytest.mark.parametrize("side_first", [False, True])
@pytest.mark.parametrize("name", WITH_SIDE)
def test_side_input_without_bias(name, side_first):
    fn, shapes, rule = WITH_SIDE[name]

    def swapped(x, w, side):
        multiply = tensordot if "tensordot" in name else tf.matmul
        total = side + multiply(x, w)
        activation = rule.rpartition("add")[2].split("_")[-1]
        return {"": tf.identity, "relu": tf.nn.relu, "erf": tf.nn.gelu}[activation](total)

    chain = swapped if side_first else fn
    check(chain, values(*shapes), {rule: 1})
    check(step_of(chain), values(*shapes), *in_training(rule), units=256)


UNKNOWN = {
    "matrices": (tf.matmul, [(6, 7), (7, 5)], "matmul_add_silu"),
    "batch": (tf.matmul, ROWS[:2], "batch_matmul_add_silu"),
    "tensordot": (tensordot, ROWS[:2], "dense_add_silu"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_side_input_of_unknown_batch(name):
    """Is one only where it comes from the product's operand, as in residual connections."""
    multiply, shapes, rule = UNKNOWN[name]

    def chain(x, w, side):
        return tf.nn.silu(multiply(x, w) + side)

    args = values(*shapes, (*shapes[0][:-1], 5))
    compiled = check(chain, args, {"act_silu": 1}, unknown_batch=[0, 2])
    assert "may broadcast" in reasons(compiled)[rule]


def recurrent(x, w, h, u):
    """A cell of a recurrent network."""
    return tf.tanh(tf.matmul(x, w) + tf.matmul(h, u))


def gated(x, w, u):
    """As in transformers' feed-forward blocks."""
    return tf.nn.gelu(tf.matmul(x, w)) * tf.matmul(x, u)


TWO_PRODUCTS = {
    "recurrent": (recurrent, [(3, 7), (7, 5), (3, 5), (5, 5)], {"matmul_add_tanh": 1}),
    "recurrent_with_bias": (
        lambda x, w, h, u, b: tf.tanh(tf.matmul(x, w) + b + tf.matmul(h, u)),
        [(3, 7), (7, 5), (3, 5), (5, 5), (5,)],
        {"matmul_bias": 1, "matmul_add_tanh": 1},
    ),
    "recurrent_with_bias_behind": (
        lambda x, w, h, u, b: tf.nn.bias_add(tf.matmul(x, w) + tf.matmul(h, u), b),
        [(3, 7), (7, 5), (3, 5), (5, 5), (5,)],
        {"matmul_add": 1},
    ),
    "batches": (
        lambda x, w, u: tf.nn.relu(tf.matmul(x, w) + tf.matmul(x, u)),
        [ROWS[0], (7, 5), (7, 5)],
        {"batch_matmul_add_relu": 1},
    ),
    "gated": (gated, [(6, 7), (7, 5), (7, 5)], {"matmul_gelu_erf": 1}),
    "gated_batch": (gated, [ROWS[0], (7, 5), (7, 5)], {"batch_matmul_gelu_erf": 1}),
    "of_itself": (lambda x: tf.nn.relu(tf.matmul(x, x)), [(5, 5)], {"matmul_relu": 1}),
    "added_to_itself": (
        lambda x, w: tf.nn.relu(tf.matmul(x, w) + x),
        [(6, 5), (5, 5)],
        {"matmul_add_relu": 1},
    ),
    "one_after_the_other": (
        lambda x, w, u: tf.nn.relu(tf.matmul(tf.nn.relu(tf.matmul(x, w)), u) + x),
        [(6, 7), (7, 5), (5, 7)],
        {"matmul_relu": 1, "matmul_add_relu": 1},
    ),
}


@pytest.mark.parametrize("name", TWO_PRODUCTS)
def test_two_products(name):
    fn, shapes, rules = TWO_PRODUCTS[name]
    check(fn, values(*shapes), rules)
    gradients = sum(in_training(rule)[1] * count for rule, count in rules.items())
    check(step_of(fn), values(*shapes), rules, gradients, units=256)


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("name", WITHOUT_BIAS)
def test_layers_on_one_input_without_bias(name, of_input):
    fn, shapes, rule = WITHOUT_BIAS[name]

    def step(x, *factors):
        with tf.GradientTape() as tape:
            tape.watch([x, *factors] if of_input else factors)
            ys = [fn(x, w) for w in factors]
            loss = tf.reduce_sum(ys[0] * ys[1] + ys[2] ** 2)
        return loss, tape.gradient(loss, [x, *factors] if of_input else factors)

    check(step, values(shapes[0], *shapes[1:] * 3), {rule: 3}, 3, unknown_batch=[0], units=256)


NEGATIVE = {
    "product_of_two_batches_without_bias": (
        multiplied(tf.nn.gelu),
        [ROWS[0], (2, 7, 5)],
        GELU,
        "batch",
        None,
    ),
    "product_used_without_activation": (
        lambda x, w: (lambda z: (tf.nn.relu(z), tf.exp(z)))(tf.matmul(x, w)),
        MATRICES,
        {},
        "matmul_relu",
        "also used by Exp",
    ),
    "einsum_without_bias_in_another_order": (
        multiplied(tf.nn.gelu, "abc,cde->abed"),
        [ROWS[0], (7, 2, 5)],
        GELU,
        "einsum",
        None,
    ),
    "heads_without_bias": (
        lambda x, w: tf.nn.gelu(tf.reshape(tf.matmul(x, w), [-1, 3, 2, 5])),
        [ROWS[0], (7, 10)],
        GELU,
        "heads",
        None,
    ),
    "product_plus_itself": (
        lambda x, w: (lambda z: tf.nn.relu(z + z))(tf.matmul(x, w)),
        MATRICES,
        {},
        "matmul_add_relu",
        "is a value inside",
    ),
    "biased_product_plus_itself": (
        lambda x, w, b: (lambda z: tf.nn.relu(tf.add_n([z, z])))(tf.matmul(x, w) + b),
        [*MATRICES, (5,)],
        {"matmul_bias": 1},
        "matmul_bias_add_relu",
        "is a value inside",
    ),
    "product_plus_a_vector": (
        added(tf.nn.relu),
        [*MATRICES, (5,)],
        {"matmul_bias_relu": 1},
        "matmul_add",
        None,
    ),
    "product_plus_a_row": (
        added(tf.nn.relu),
        [*MATRICES, (1, 5)],
        {},
        "matmul_add_relu",
        "may broadcast",
    ),
    "product_plus_a_column": (
        added(tf.nn.gelu),
        [*MATRICES, (6, 1)],
        GELU,
        "matmul_add_gelu_erf",
        "may broadcast",
    ),
    "product_of_one_row_plus_more": (
        added(tf.nn.relu),
        [(1, 7), (7, 5), (6, 5)],
        {},
        "matmul_add_relu",
        "may broadcast",
    ),
    "product_plus_a_batch": (
        added(tf.nn.relu),
        [*MATRICES, (2, 6, 5)],
        {},
        "matmul_add_relu",
        "has rank 3",
    ),
    "product_plus_two": (
        lambda x, w, side: tf.nn.relu(tf.add_n([tf.matmul(x, w), side, side])),
        [*MATRICES, (6, 5)],
        {},
        "matmul_add",
        None,
    ),
    "batch_plus_a_vector": (
        added(tf.nn.relu),
        ROWS,
        {"batch_matmul_bias_relu": 1},
        "batch_matmul_add",
        None,
    ),
    "batch_plus_a_row": (
        added(tf.nn.relu),
        [*ROWS[:2], (1, 5)],
        {},
        "batch_matmul_add_relu",
        "has rank 2",
    ),
    "batch_plus_one_of_them": (
        added(tf.nn.relu),
        [*ROWS[:2], (1, 3, 5)],
        {},
        "batch_matmul_add_relu",
        "may broadcast",
    ),
    "batch_of_one_plus_more": (
        added(tf.nn.relu),
        [(1, 3, 7), (7, 5), SIDE],
        {},
        "batch_matmul_add_relu",
        "may broadcast",
    ),
    "biased_batch_plus_one_of_them": (
        lambda x, w, b, side: tf.nn.relu(tf.matmul(x, w) + b + side),
        [*ROWS, (1, 3, 5)],
        {"batch_matmul_bias": 1},
        "batch_matmul_bias_add_relu",
        "may broadcast",
    ),
    "tensordot_plus_a_vector": (
        added(tf.nn.relu, tensordot),
        ROWS,
        {"dense_bias_relu": 1},
        "dense_add",
        None,
    ),
    "tensordot_plus_a_row": (
        added(tf.nn.relu, tensordot),
        [*ROWS[:2], (1, 3, 5)],
        {},
        "dense_add_relu",
        "may broadcast",
    ),
    "tensordot_of_one_plus_more": (
        added(tf.nn.relu, tensordot),
        [(1, 3, 7), (7, 5), SIDE],
        {},
        "dense_add_relu",
        "may broadcast",
    ),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_must_not_fuse(name):
    check_left(*NEGATIVE[name])


@pytest.mark.parametrize("use_bias", [False, True])
def test_recurrent_cell(use_bias):
    """Both products of Keras's cell, unrolled by the layer that takes any cell."""
    layer = keras.layers.RNN(keras.layers.SimpleRNNCell(5, use_bias=use_bias), unroll=True)
    layer.build((2, 3, 7))
    variables = [v.value for v in layer.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y**3)
        return y, tape.gradient(loss, [x, *variables])

    rules = {"matmul_add_tanh": 3} | ({"matmul_bias": 3} if use_bias else {})
    check(step, values((2, 3, 7)), rules, sum(rules.values()))


# Side inputs of the product's shape that are made from it.
OF_SHAPE = {
    "reshape": lambda z, v: tf.reshape(v, tf.shape(z)),
    "fill": lambda z, v: tf.fill(tf.shape(z), 2.0),
    "zeros": lambda z, v: tf.zeros(tf.shape(z)),
}


@pytest.mark.parametrize("activation", [tf.identity, tf.nn.relu])
@pytest.mark.parametrize("name", OF_SHAPE)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
def test_side_input_made_from_the_shape_of_the_product(shape, name, activation):
    def chain(x, w, v):
        z = tf.matmul(x, w)
        return activation(z + OF_SHAPE[name](z, v))

    operands = values(shape, (4, 5), (*shape[:-1], 5))
    signature = [tf.TensorSpec([None, *x.shape[1:]]) for x in operands]
    signature[1] = tf.TensorSpec([4, 5])
    compiled = function(step_of(chain), input_signature=signature)
    assert_same(compiled(*operands), step_of(chain)(*operands))
    family = "matmul_add" if len(shape) == 2 else "batch_matmul_add"
    # The sizes of what is reshaped are told by its own.
    assert name == "reshape" or any(rule.startswith(family) for rule in rule_counts(compiled))


@pytest.mark.parametrize("unknown", range(2))
def test_factors_of_unknown_rank(unknown):
    """Stay as they are: what the equation sums over is not known."""

    def einsum(a, b):
        return tf.nn.relu(tf.einsum("abc,cd->abd", a, b))

    def heads(a, b):
        bias = tf.ones([2, 3])
        return tf.nn.relu(tf.reshape(tf.matmul(a, b), [-1, 3, 2, 3]) + bias)

    for chain, shapes in ((einsum, [(2, 3, 4), (4, 5)]), (heads, [(2, 3, 4), (4, 6)])):
        operands = values(*shapes)
        signature = [tf.TensorSpec(x.shape) for x in operands]
        signature[unknown] = tf.TensorSpec(None)
        compiled = function(chain, input_signature=signature)
        assert_same(compiled(*operands), chain(*operands))
        assert not rule_counts(compiled)


@pytest.mark.parametrize("sizes", [(2, 3, 4, 0), (2, 3, 0, 4), (0, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_einsum_of_no_elements(biased, sizes):
    a, b, c, d = sizes

    def chain(x, w, v):
        y = tf.einsum("abc,cd->abd", x, w)
        return tf.nn.gelu(y + v if biased else y)

    rule = "einsum_bias_gelu_erf" if biased else "einsum_gelu_erf"
    check(chain, values((a, b, c), (c, d), (d,)), {rule: 1})


@pytest.mark.parametrize("transpose", [(False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("front", [(), (2,)], ids=str)
def test_shape_of_a_transposed_product(front, transpose):
    """Is made of those of its factors."""

    def chain(x, w, v):
        z = tf.matmul(x, w, *transpose)
        return z + tf.reshape(v, tf.shape(z))

    a, b = (
        shape[::-1] if t else shape for shape, t in zip(((3, 4), (4, 5)), transpose, strict=True)
    )
    operands = values((*front, *a), b, (*front, 3, 5))
    signature = [tf.TensorSpec([None] * x.shape.rank) for x in operands]
    compiled = function(step_of(chain), input_signature=signature)
    assert_same(compiled(*operands), step_of(chain)(*operands))
    assert rule_counts(compiled) == {"batch_matmul_add" if front else "matmul_add": 1}


def mixer():
    """A block of an MLP-Mixer: dense layers over channels, and over places by transposing."""
    inputs = keras.Input((6, 8))
    y = keras.layers.Permute((2, 1))(keras.layers.LayerNormalization()(inputs))
    y = keras.layers.Dense(6)(keras.layers.Dense(10, activation="gelu")(y))
    x = keras.layers.Add()([keras.layers.Permute((2, 1))(y), inputs])
    y = keras.layers.Dense(12, activation="gelu")(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, keras.layers.Add()([keras.layers.Dense(8)(y), x]))


def test_mixer():
    compiled = check_training(mixer, (4, 6, 8))
    counts = rule_counts(compiled)
    found = {rule: n for rule, n in counts.items() if rule.startswith(("dense", "act"))}
    assert found == {"dense_bias_gelu_erf": 2, "dense_bias": 1, "dense_bias_add": 1}
