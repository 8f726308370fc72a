"""Products of a few rows with a large matrix, and matrices that are transposed before a product."""

import itertools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import (
    FUSED,
    assert_same,
    check,
    check_portable,
    gradient_count,
    op_counts,
    plain,
    rule_counts,
    step_of,
    taped,
    values,
)
from tolerances import assert_as_exact

from tf_fused_ops import _library
from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions

OP = FUSED["MatMul"]
MATRIX, BATCH = {"few_rows_matmul": 1}, {"few_rows_batch_matmul": 1}
# 1 MiB and 256 KiB of float32.
LARGE, MEDIUM = (512, 512), (256, 256)
SWITCHES = list(itertools.product([False, True], repeat=2))


def tensordot(a, b):
    return tf.tensordot(a, b, 1)


def the_op(compiled, *args):
    """Returns the one fused product of a decorated function."""
    graph = compiled.get_concrete_function(*args).graph
    (op,) = (op for op in graph.get_operations() if op.type == OP)
    return op


def transpositions(compiled, *args):
    """Returns transpose_a, transpose_b and the number of ops that transpose."""
    op = the_op(compiled, *args)
    left = op_counts(compiled.get_concrete_function(*args))["Transpose"]
    return op.get_attr("transpose_a"), op.get_attr("transpose_b"), left


# Product, shapes, dtype, and what fuses it.
SIZES = {
    "no rows": (tf.matmul, (0, 512), LARGE, "float32", MATRIX),
    "one row": (tf.matmul, (1, 512), LARGE, "float32", MATRIX),
    "16 rows": (tf.matmul, (16, 512), LARGE, "float32", MATRIX),
    "17 rows": (tf.matmul, (17, 512), LARGE, "float32", {}),
    "too small": (tf.matmul, (1, 512), (512, 511), "float32", {}),
    "deep": (tf.matmul, (16, 8192), (8192, 32), "float32", MATRIX),
    "broad": (tf.matmul, (16, 1), (1, 1 << 18), "float32", MATRIX),
    "no depth": (tf.matmul, (3, 0), (0, 1 << 18), "float32", {}),
    "half": (tf.matmul, (16, 512), (512, 1024), "float16", MATRIX),
    "half, too small": (tf.matmul, (16, 512), (512, 1023), "float16", {}),
    "bfloat16": (tf.matmul, (2, 1024), (1024, 512), "bfloat16", MATRIX),
    "bfloat16, too small": (tf.matmul, (2, 1023), (1023, 512), "bfloat16", {}),
    "double": (tf.matmul, (3, 256), (256, 512), "float64", MATRIX),
    "double, too small": (tf.matmul, (3, 256), (256, 511), "float64", {}),
    "batch of one": (tf.matmul, (1, 1, 256), MEDIUM, "float32", BATCH),
    "batch of none": (tf.matmul, (0, 20, 256), MEDIUM, "float32", BATCH),
    "batch of 16": (tf.matmul, (4, 4, 256), MEDIUM, "float32", BATCH),
    "batch of 17": (tf.matmul, (17, 1, 256), MEDIUM, "float32", {}),
    "batch of 18": (tf.matmul, (3, 6, 256), MEDIUM, "float32", {}),
    "batch, too small": (tf.matmul, (2, 1, 256), (256, 255), "float32", {}),
    "batch, half": (tf.matmul, (2, 1, 256), (256, 512), "float16", BATCH),
    "batch, half, too small": (tf.matmul, (2, 1, 256), (256, 511), "float16", {}),
    "batch, double": (tf.matmul, (2, 1, 256), (256, 128), "float64", BATCH),
    "batch, double, too small": (tf.matmul, (2, 1, 256), (256, 127), "float64", {}),
    "rank 4": (tf.matmul, (2, 2, 4, 256), MEDIUM, "float32", BATCH),
    "rank 5": (tf.matmul, (2, 1, 2, 4, 256), MEDIUM, "float32", BATCH),
    "rank 6": (tf.matmul, (2, 1, 2, 1, 4, 256), MEDIUM, "float32", BATCH),
    "rank 6, 17 rows": (tf.matmul, (1, 1, 1, 1, 17, 256), MEDIUM, "float32", {}),
    "tensordot": (tensordot, (4, 4, 512), LARGE, "float32", MATRIX),
    "tensordot, 18 rows": (tensordot, (3, 6, 512), LARGE, "float32", {}),
    "tensordot, too small": (tensordot, (4, 4, 512), (512, 511), "float32", {}),
    "tensordot of a vector": (tensordot, (512,), LARGE, "float32", MATRIX),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    product, a, b, dtype, rules = SIZES[name]
    check(lambda a, b: product(a, b), values(a, b, dtype=dtype), rules)


UNKNOWN = {
    "rows": (tf.matmul, [None, 512], LARGE),
    "columns": (tf.matmul, [3, 512], [512, None]),
    "depth of the matrix": (tf.matmul, [3, 512], [None, 512]),
    "a rank": (tf.matmul, None, LARGE),
    "the matrix's rank": (tf.matmul, [3, 512], None),
    "batch": (tf.matmul, [None, 2, 512], LARGE),
    "rows of a batch": (tf.matmul, [2, None, 512], LARGE),
    "columns in a batch": (tf.matmul, [2, 1, 512], [512, None]),
    "batch of a tensordot": (tensordot, [None, 2, 512], LARGE),
    "rows of a tensordot": (tensordot, [2, None, 512], LARGE),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_sizes(name):
    """Stay as they are: there may be many rows, or few columns."""
    product, *known = UNKNOWN[name]
    a = [2 if size is None else size for size in known[0] or (3, 512)]
    args = values(a, LARGE)
    signature = [tf.TensorSpec(shape) for shape in known]
    compiled = function(lambda a, b: product(a, b), input_signature=signature)
    assert_same(compiled(*args), product(*args))
    assert rule_counts(compiled) == {}
    assert not op_counts(compiled.get_concrete_function())[OP]


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("batch", [False, True])
def test_as_exact_as_stock(batch, dtype, rows, isa):
    a, b = values((rows, 1, 600) if batch else (rows, 600), (600, 1000))
    args = [tf.cast(x, dtype) for x in (a, b / 25)]
    compiled = function(lambda a, b: tf.matmul(a, b))
    found = compiled(*args)
    assert rule_counts(compiled) == (BATCH if batch else MATRIX)
    assert the_op(compiled, *args).get_attr("T") == tf.as_dtype(dtype)
    assert found.dtype == tf.as_dtype(dtype) and _library.isa() == isa
    reference = tf.matmul(*(tf.cast(x, tf.float64) for x in args))
    assert_as_exact("y", found, tf.matmul(*args), reference, dtype)


def transposed_operands(transpose_a, transpose_b, apart, batch=(), k=512, n=600):
    """Returns a product and its factors; `apart` says that b is transposed by an op before it."""
    a = (*batch, k, 5) if transpose_a else (*batch, 5, k)
    b = (n, k) if transpose_b != apart else (k, n)

    def product(a, b):
        b = tf.transpose(b) if apart else b
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)

    return product, values(a, b)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("transpose_a", "transpose_b"), SWITCHES)
@pytest.mark.parametrize("batch", [(), (3,), (1, 3)], ids=str)
def test_transposes(batch, transpose_a, transpose_b, apart):
    rule = BATCH if batch else MATRIX
    product, args = transposed_operands(transpose_a, transpose_b, apart, batch)
    compiled = check(product, args, rule, units=256)
    assert transpositions(compiled) == (transpose_a, transpose_b != apart, 0)
    # The gradients are stock's.
    check(step_of(product), args, rule, units=4096)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize(("transpose_a", "transpose_b"), SWITCHES)
def test_outer_tape(transpose_a, transpose_b, batch):
    product, args = transposed_operands(transpose_a, transpose_b, True, batch)
    compiled = function(product)

    assert_same(taped(compiled, args), taped(product, args), units=512)
    assert rule_counts(compiled) == (BATCH if batch else MATRIX)
    assert transpositions(compiled, *args)[1] != transpose_b


def biased(z, v, side):
    return tf.nn.gelu(tf.nn.bias_add(z, v))


def residual(z, v, side):
    return tf.nn.relu(tf.nn.bias_add(z, v) + side)


# What follows a product z, given a vector and what has its shape; the rule; its fused gradients.
CHAINS = {
    "bias": (lambda z, v, side: tf.nn.bias_add(z, v), "_bias", 1),
    "sum with a bias": (lambda z, v, side: z + v, "_bias", 1),
    "bias and activation": (biased, "_bias_gelu_erf", 1),
    "bias, side input and activation": (residual, "_bias_add_relu", 1),
    "activation": (lambda z, v, side: tf.nn.silu(z), "_silu", 1),
    "side input": (lambda z, v, side: z + side, "_add", 0),
    "side input and activation": (lambda z, v, side: tf.nn.tanh(z + side), "_add_tanh", 1),
}


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["matmul", "batch_matmul"])
@pytest.mark.parametrize("name", CHAINS)
def test_transposes_before_chains(name, batch, transpose_b):
    """Of any size; where gradients of the transposed matrix are needed it stays."""
    finish, rule, gradients = CHAINS[name]
    rules = {f"{'batch_' * bool(batch)}matmul{rule}": 1}
    product, factors = transposed_operands(False, transpose_b, True, batch, 6, 7)
    args = [*factors, *values((7,), (*batch, 5, 7), seed=1)]

    def chain(a, b, v, side):
        return finish(product(a, b), v, side)

    def of_weights(a, b, v, side):
        with tf.GradientTape() as tape:
            tape.watch([b, v])
            y = chain(a, b, v, side)
        zero = tf.UnconnectedGradients.ZERO
        return y, tape.gradient(y, [b, v], unconnected_gradients=zero)

    assert transpositions(check(chain, args, rules)) == (False, not transpose_b, 0)
    compiled = check(of_weights, args, rules, gradients)
    if gradients:
        assert transpositions(compiled)[:2] == (False, transpose_b)
        assert transpositions(compiled)[2] >= 1


@pytest.mark.parametrize("units", [512, 8])
def test_transposes_before_chains_under_an_outer_tape(units):
    def chain(a, b, v):
        return tf.nn.gelu(tf.nn.bias_add(tf.matmul(a, tf.transpose(b)), v))

    args = values((3, 512), (units, 512), (units,))
    compiled = function(chain)

    assert_same(taped(compiled, args), taped(chain, args), units=256)
    assert rule_counts(compiled) == {"matmul_bias_gelu_erf": 1}
    assert transpositions(compiled, *args) == (False, True, 0)


def also_used(a, b):
    columns = tf.transpose(b)
    return tf.matmul(a, columns), columns + 1


def twice(a, b):
    return tf.matmul(a, tf.transpose(tf.transpose(b)))


# Code that transposes, whether the product does, and how many ops still do.
LEFT = {
    "used elsewhere": (also_used, True, 1),
    "twice": (twice, True, 1),
    "in place": (lambda a, b: tf.matmul(a, tf.transpose(b, [0, 1])), False, 1),
}


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("name", LEFT)
def test_what_transposes_and_stays(name, batch):
    code, transpose_b, left = LEFT[name]
    args = values((3, 1, 512) if batch else (3, 512), LARGE)
    compiled = check(code, args, BATCH if batch else MATRIX, units=256)
    assert transpositions(compiled) == (False, transpose_b, left)


def test_an_order_that_is_not_known():
    a, b = values((3, 5), (5, 5))
    compiled = function(lambda a, b, order: tf.nn.relu(tf.matmul(a, tf.transpose(b, order))))
    for order in map(tf.constant, ([1, 0], [0, 1])):
        assert_same(compiled(a, b, order), tf.nn.relu(tf.matmul(a, tf.transpose(b, order))))
    assert rule_counts(compiled) == {"matmul_relu": 1}
    assert transpositions(compiled, a, b, order) == (False, False, 1)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "int64", "complex64", "complex128"])
def test_other_dtypes(dtype, batch):
    """Integers and complex numbers are TensorFlow's, and what is transposed stays that."""

    def code(a, b):
        return tf.matmul(a, b), tf.matmul(a, tf.transpose(b)), tf.matmul(a, b, adjoint_b=True)

    args = [tf.cast(x * 9, dtype) for x in values((3, 1, 512) if batch else (3, 512), LARGE)]
    compiled = function(code)
    for found, expected in zip(compiled(*args), code(*args), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-1)
    assert rule_counts(compiled) == {}
    assert not op_counts(compiled.get_concrete_function(*args))[OP]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 1, 256), (3, 256, 256)),
        ((3, 1, 256), (1, 256, 256)),
        ((1, 1, 256), (1, 256, 256)),
        ((3, 256), (3, 256, 256)),
        ((2, 3, 1, 256), (3, 256, 256)),
    ],
    ids=str,
)
def test_several_matrices(a, b):
    """Or what may be several."""
    compiled = check(lambda a, b: tf.matmul(a, b), values(a, b), {})
    assert op_counts(compiled.get_concrete_function())["BatchMatMulV2"] == 1


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shape", [(3, 600), (3, 1, 600), (1, 2, 2, 600)], ids=str)
def test_keras_dense(shape, mixed):
    """Without bias; in every rank it multiplies matrices."""
    keras.utils.set_random_seed(0)
    policy = "mixed_bfloat16" if mixed else "float32"
    layer = keras.layers.Dense(1000, use_bias=False, dtype=policy)
    (x,) = values(shape, dtype=layer.compute_dtype)
    layer.build(x.shape)
    compiled = function(lambda x: layer(x))
    assert_same(compiled(x), layer(x))
    assert rule_counts(compiled) == MATRIX
    assert the_op(compiled, x).get_attr("T") == x.dtype


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("batch", [False, True])
def test_reversed_embedding(batch, mixed):
    """As decoders make logits: the table is not transposed in memory."""
    keras.utils.set_random_seed(0)
    policy = "mixed_bfloat16" if mixed else "float32"
    layer = keras.layers.Embedding(3000, 256, dtype=policy)
    layer.build()
    (x,) = values((2, 1, 256) if batch else (2, 256), dtype=layer.compute_dtype)
    table = layer.embeddings

    def logits(x):
        return tf.matmul(x, tf.transpose(tf.cast(table, x.dtype)))

    compiled = function(logits)
    assert_same(compiled(x), logits(x))
    assert rule_counts(compiled) == (BATCH if batch else MATRIX)
    assert transpositions(compiled, x) == (False, True, 0)


def decode(loop):
    def code(x, w, u):
        def body(i, x):
            hidden = tf.matmul(x, w)
            return i + 1, x + tf.tanh(tf.matmul(hidden[:, None], tf.transpose(u))[:, 0])

        return loop(lambda i, x: i < 4, body, (tf.constant(0), x))[1]

    return code


def by_autograph(x, w, u):
    for _ in tf.range(4):
        x += tf.tanh(tf.matmul(tf.matmul(x, w)[:, None], tf.transpose(u))[:, 0])
    return x


@pytest.mark.parametrize(
    "code",
    [decode(tf.while_loop), decode(keras.ops.while_loop), by_autograph],
    ids=["tf", "keras", "autograph"],
)
def test_loops(code):
    x, w, u = values((2, 512), LARGE, LARGE)
    args = [x, w / 20, u / 20]
    compiled = function(code)
    with plain():
        expected, found = tf.function(code)(*args), compiled(*args)
    assert_same(found, expected, units=1024)
    assert rule_counts(compiled) == MATRIX | BATCH
    counts = op_counts(compiled.get_concrete_function(*args))
    assert counts[OP] == 2
    assert not counts.keys() & {"MatMul", "BatchMatMulV2", "Transpose"}


def test_gradient_through_a_loop():
    """Which stock computes."""
    x, w, u = values((2, 512), LARGE, LARGE)
    args = [x, w / 20, u / 20]

    def step(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = decode(tf.while_loop)(*args)
        return y, tape.gradient(y, args)

    compiled = function(step)
    with plain():
        expected, found = tf.function(step)(*args), compiled(*args)
    assert_same(found, expected, units=4096)
    assert gradient_count(compiled) == 0


@pytest.mark.parametrize("disabled", ["few_rows_matmul", "few_rows_batch_matmul", "few_rows_*"])
def test_switched_off(disabled):
    def code(a, b):
        return tf.matmul(a, b), tf.matmul(a[:, None], b)

    args = values((3, 512), LARGE)
    compiled = function(code, remap=RemapOptions(disable=[disabled]))
    assert_same(compiled(*args), code(*args))
    left = {} if "*" in disabled else (MATRIX | BATCH)
    left.pop(disabled, None)
    assert rule_counts(compiled) == left


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_constant_weights(dtype, rows, transposed, isa):
    """In every call the same, and told so to the op."""
    a, b = (tf.cast(x, dtype) for x in values((rows, 512), (512, 1024)))
    b /= tf.cast(23, dtype)
    weights = tf.transpose(b).numpy() if transposed else b.numpy()

    def code(a):
        w = tf.constant(weights)
        return tf.matmul(a, tf.transpose(w) if transposed else w)

    compiled = function(code)
    reference = tf.matmul(tf.cast(a, tf.float64), tf.cast(b, tf.float64))
    for _ in range(2):
        assert_as_exact("y", compiled(a), tf.matmul(a, b), reference, dtype)
    assert rule_counts(compiled) == MATRIX
    assert the_op(compiled, a).get_attr("constant_b")
    assert transpositions(compiled, a) == (False, transposed, 0)
    assert _library.isa() == isa


def test_variable_weights():
    """May change from call to call."""
    a, b = values((3, 512), LARGE)
    w = tf.Variable(b)
    compiled = function(lambda a: tf.matmul(a, w))
    assert_same(compiled(a), tf.matmul(a, b))
    w.assign(b * 2)
    assert_same(compiled(a), tf.matmul(a, b * 2))
    assert rule_counts(compiled) == MATRIX
    assert not the_op(compiled, a).get_attr("constant_b")


# What follows has rules of its own, which come first.
TAKEN = {
    "bias": (lambda a, b: tf.matmul(a, b) + tf.ones([512]), {"matmul_bias": 1}),
    "activation": (lambda a, b: tf.nn.relu(tf.matmul(a, b)), {"matmul_relu": 1}),
    "side input": (lambda a, b: tf.matmul(a, b) + a, {"matmul_add": 1}),
    "several": (
        lambda a, b: tf.matmul(tf.nn.relu(tf.matmul(tf.matmul(a, b), b)), b),
        {"few_rows_matmul": 2, "matmul_relu": 1},
    ),
    "used twice": (
        lambda a, b: (lambda z: (tf.nn.relu(z), tf.exp(z)))(tf.matmul(a, b)),
        MATRIX,
    ),
    "softmax": (lambda a, b: tf.nn.softmax(tf.matmul(a, b) * 0.5), MATRIX | {"softmax": 1}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_beside_other_rules(name):
    code, rules = TAKEN[name]
    a, b = values((3, 512), LARGE)
    check(code, [a, b / 23], rules, units=512)


def test_on_a_gpu():
    """A product alone is TensorFlow's there."""

    def code(a, b):
        with tf.device("GPU:0"):
            return tf.matmul(a, b)

    compiled = function(code)
    compiled.get_concrete_function(*values((3, 512), LARGE))
    assert rule_counts(compiled) == {}


@pytest.mark.parametrize("batch", [False, True])
def test_portable_conversion(batch, tmp_path):
    product, args = transposed_operands(False, False, True, (2,) if batch else ())
    check_portable(product, args, tmp_path)
