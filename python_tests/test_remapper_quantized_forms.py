"""Products of quantized rows in plain TensorFlow code: what is fused, what is left to stock."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    check_portable,
    op_counts,
    plain,
    reasons,
    rule_counts,
    values,
)
from test_remapper_graph_def import run

from tf_fused_ops import function
from tf_fused_ops.remapper import remap

OP = "TfFusedOps>QuantizedMatMulBiasAct"
PRODUCT, BIASED = "quantized_matmul", "quantized_matmul_bias"
SHAPES = [(6, 8), (8, 5), (5,)]
ROWS = [(2, 3, 8), *SHAPES[1:]]
HEADS = [(2, 3, 8), (8, 4, 5), (1, 1, 4, 5)]
FROM_HEADS = [(2, 3, 4, 5), (4, 5, 6), (6,)]


def inputs(shapes, dtype="float32"):
    """Returns x, weights of 8 bits and their scale, then what else there are shapes for."""
    x, w, scale, *others = values(*shapes)
    w = tf.cast(tf.clip_by_value(tf.round(w * 40), -127, 127), tf.int8)
    scale = tf.abs(scale) + 0.5
    return [tf.cast(x, dtype), w, *(tf.cast(t, dtype) for t in (scale * 40, *others))]


def rounded(x, axes=-1, epsilon=1e-7, low=-127.0, high=127.0, largest=127.0):
    """Returns rows of integers, and their scale."""
    scale = largest / (tf.reduce_max(tf.abs(x), axes, keepdims=True) + epsilon)
    return tf.cast(tf.clip_by_value(tf.round(x * scale), low, high), tf.int8), scale


def matmul(a, b, **options):
    return tf.matmul(a, b, output_type=tf.int32, **options)


def einsum(equation, a, b):
    factors = [tf.cast(a, tf.float32), tf.cast(b, tf.float32)]
    return tf.cast(tf.raw_ops.Einsum(inputs=factors, equation=equation), tf.int32)


def as_it_is(scale):
    return scale


def chain(multiply=matmul, move=as_it_is, **options):
    """Returns the code of a product.

    Args:
        multiply: The product of integers.
        move: Gives the scale of rows the shape of the result.
        **options: As for `rounded`.
    """

    def code(x, w, w_scale):
        integers, scale = rounded(x, **options)
        return tf.cast(multiply(integers, w), x.dtype) / (move(scale) * w_scale)

    return code


def behind(axis):
    return lambda scale: tf.expand_dims(scale, axis)


def without(*axes):
    return lambda scale: tf.squeeze(scale, axes)


def onto_heads(a, b, **options):
    y = matmul(a, tf.reshape(b, [8, 20]), **options)
    return tf.reshape(y, [-1, *y.shape[1:-1], 4, 5])


def from_heads(a, b):
    return matmul(tf.reshape(a, [-1, 3, 20]), tf.reshape(b, [20, -1]))


def with_weights(change, multiply=matmul):
    return lambda a, b: multiply(a, change(b))


DENSE = chain()
TRANSPOSED = functools.partial(matmul, transpose_b=True)
FORMS = {
    "matrices": (DENSE, SHAPES),
    "batches": (DENSE, ROWS),
    "rank 6": (DENSE, [(2, 1, 2, 1, 3, 8), *SHAPES[1:]]),
    "one row": (DENSE, [(1, 8), *SHAPES[1:]]),
    "no rows": (DENSE, [(0, 8), *SHAPES[1:]]),
    "one number a row": (DENSE, [(6, 1), (1, 5), (5,)]),
    "one column": (DENSE, [(6, 8), (8, 1), (1,)]),
    "one number": (DENSE, [(1, 1), (1, 1), (1,)]),
    "scale of more dimensions": (DENSE, [ROWS[0], (8, 5), (1, 1, 5)]),
    "axes in a vector": (chain(axes=[1]), SHAPES),
    "transposed": (chain(TRANSPOSED), [SHAPES[0], (5, 8), (5,)]),
    "transposed before": (chain(with_weights(tf.transpose)), [SHAPES[0], (5, 8), (5,)]),
    "transposed twice": (chain(with_weights(tf.transpose, TRANSPOSED)), SHAPES),
    "transposed from behind": (
        chain(with_weights(lambda b: tf.transpose(b, [-1, -2]))),
        [ROWS[0], (5, 8), (5,)],
    ),
    "in their own order": (chain(with_weights(lambda b: tf.transpose(b, [0, 1]))), SHAPES),
    "scale there and back": (
        chain(move=lambda s: tf.transpose(tf.transpose(s, [1, 0, 2]), [-2, -3, -1])),
        [(3, 3, 8), *SHAPES[1:]],
    ),
    "onto heads": (chain(onto_heads, behind(3)), HEADS),
    "onto heads, of any order": (
        chain(with_weights(lambda b: tf.transpose(b, [2, 0, 1]), onto_heads), behind(-1)),
        [HEADS[0], (4, 5, 8), (4, 5)],
    ),
    "from heads": (chain(from_heads, without(3), axes=(2, 3)), FROM_HEADS),
    "from heads, from behind": (chain(from_heads, without(-2), axes=(-1, -2)), FROM_HEADS),
    "from heads, of any order": (
        chain(
            with_weights(lambda b: tf.transpose(b, [1, 2, 0]), from_heads),
            without(3),
            axes=(2, 3),
        ),
        [FROM_HEADS[0], (6, 4, 5), (1, 1, 6)],
    ),
    "einsum": (chain(functools.partial(einsum, "abc,cd->abd")), ROWS),
    "einsum of matrices": (chain(functools.partial(einsum, "xy,zy->xz")), [(6, 8), (5, 8), (5,)]),
    "einsum onto heads": (chain(functools.partial(einsum, "abc,cde->abde"), behind(3)), HEADS),
    "einsum onto heads, of any order": (
        chain(functools.partial(einsum, "abc,dce->abed"), behind(3)),
        [HEADS[0], (4, 8, 5), (5, 4)],
    ),
    "einsum onto three": (
        chain(functools.partial(einsum, "ab,bcde->acde"), lambda s: behind(2)(behind(2)(s))),
        [(6, 8), (8, 2, 1, 3), (2, 1, 3)],
    ),
    "einsum from heads": (
        chain(functools.partial(einsum, "abcd,cde->abe"), without(3), axes=(2, 3)),
        FROM_HEADS,
    ),
    "einsum from heads, of any order": (
        chain(functools.partial(einsum, "abcd,edc->abe"), without(2), axes=(3, 2)),
        [FROM_HEADS[0], (6, 5, 4), (1, 6)],
    ),
    "einsum of all dimensions": (
        chain(functools.partial(einsum, "ab,abc->c"), without(0), axes=(0, 1)),
        [(6, 8), (6, 8, 5), (5,)],
    ),
}
# A bias has the dimensions of the weights that stay.
STAY = {"onto heads": 2, "einsum onto heads": 2, "einsum onto three": 3}
ADDED = {
    "plus": lambda z, b: z + b,
    "first": lambda z, b: b + z,
    "bias_add": tf.nn.bias_add,
}


def with_bias(name, add=ADDED["plus"], activation=tf.identity):
    """Returns the code of a form with a bias, and the shapes of its arguments."""
    code, shapes = FORMS[name]
    stay = STAY.get(name.split(",")[0], 1)
    bias = inputs(shapes)[2].shape[-stay:]
    return lambda x, w, s, b: activation(add(code(x, w, s), b)), [*shapes, bias]


def the_op(compiled):
    graph = compiled.get_concrete_function().graph
    (op,) = (op for op in graph.get_operations() if op.type == OP)
    return op


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    code, shapes = FORMS[name]
    unknown = [0] if "all" not in name else []
    check(code, inputs(shapes), {PRODUCT: 1})
    compiled = check(code, inputs(shapes), {PRODUCT: 1}, unknown_batch=unknown)
    left = op_counts(compiled.get_concrete_function())
    assert not left.keys() & {"Abs", "Max", "Round", "BatchMatMulV3", "Einsum", "RealDiv"}
    assert not the_op(compiled).get_attr("straight_through")
    code, shapes = with_bias(name)
    check(code, inputs(shapes), {BIASED: 1}, unknown_batch=unknown)


@pytest.mark.parametrize("activation", ["relu", "gelu", "leaky_relu"])
@pytest.mark.parametrize("add", ADDED)
def test_biases(add, activation):
    code, shapes = with_bias("batches", ADDED[add], getattr(tf.nn, activation))
    rule = f"{BIASED}_{activation.replace('gelu', 'gelu_erf')}"
    compiled = check(code, inputs(shapes), {rule: 1}, unknown_batch=[0])
    assert the_op(compiled).get_attr("num_bias") == 1


def test_transposed_weights_are_read_as_they_are():
    for name in ("transposed", "transposed before", "transposed from behind"):
        code, shapes = FORMS[name]
        compiled = check(code, inputs(shapes), {PRODUCT: 1})
        transposed = the_op(compiled).get_attr("transpose_b")
        assert transposed == (name != "transposed from behind")


@pytest.mark.parametrize("epsilon", [0.0, 1e-40, 1e-3, 2.5])
def test_epsilon_is_kept(epsilon):
    """Also where there is nothing but zeros in a row."""
    x, w, scale = inputs(SHAPES)
    x *= tf.constant([[1.0], [0], [1], [0], [1], [1]])
    compiled = check(chain(epsilon=epsilon), [x, w, scale], {PRODUCT: 1})
    assert the_op(compiled).get_attr("epsilon") == np.float32(epsilon)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["batches", "transposed before", "onto heads", "einsum"])
def test_half_precision(name, dtype):
    """Stock scales, rounds and divides in it, or in float32 with casts around."""
    code, shapes = with_bias(name, activation=tf.nn.gelu)

    def cast(x, *others):
        return tf.cast(code(tf.cast(x, tf.float32), *others), dtype)

    x, *others = inputs(shapes, dtype)
    check(code, [x, *others], {f"{BIASED}_gelu_erf": 1}, units=4)
    check(cast, [x, *inputs(shapes)[1:]], {f"{BIASED}_gelu_erf": 1}, units=2)


@pytest.mark.parametrize("name", ["matrices", "transposed", "onto heads", "einsum from heads"])
def test_constant_weights(name):
    code, shapes = with_bias(name)
    x, *others = inputs(shapes)
    constants = [t.numpy() for t in others]

    def with_constants(x):
        return code(x, *map(tf.constant, constants))

    compiled = check(with_constants, [x], {BIASED: 1}, unknown_batch=[0])
    # What is done with constants alone is done once.
    assert the_op(compiled).get_attr("transpose_b") == (name == "transposed")


def test_several_products_of_one_input():
    x, w, scale, *others = inputs([*ROWS, (8, 5), (5,)])
    v = tf.cast(others[0] * 40, tf.int8)

    def several(x, w, v, first, second):
        y, z = DENSE(x, w, first), DENSE(x, v, tf.abs(second) + 1)
        return tf.nn.silu(y) * z, DENSE(tf.concat([y, z[..., :3]], -1), w, first)

    args = [x, w, v, scale, others[1]]
    # What is read by two has no activation of its own.
    rules = {PRODUCT: 3, "act_silu": 1}
    compiled = check(several, args, rules, unknown_batch=[0])
    assert "is also used by" in reasons(compiled)["quantized_matmul_silu"]


@pytest.mark.parametrize(
    "activation", [tf.identity, tf.nn.relu, tf.nn.gelu], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["matrices", "batches", "transposed", "onto heads", "einsum"])
def test_gradients(name, activation):
    """Without a custom gradient it is that of stock, of scales alone, as rounding has none."""
    code, shapes = with_bias(name, activation=activation)
    x, w, scale, bias = inputs(shapes)
    sources = [x, scale, bias]

    def loss(x, scale, bias):
        y = code(x, w, scale, bias)
        return tf.reduce_sum(y * y * y)

    def step(*sources):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = loss(*sources)
        return y, tape.gradient(y, sources)

    def outside(decorator):
        fn = decorator(loss)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = fn(*sources)
        return fn, (y, tape.gradient(y, sources))

    kind = {"identity": "", "relu": "_relu", "gelu": "_gelu_erf"}[activation.__name__]
    with plain():
        _, expected = outside(tf.function)
        compiled, found = outside(function)
        inside = function(step)
        assert_same(inside(*sources), expected, units=256)
    assert_same(found, expected, units=256)
    assert rule_counts(compiled) == {BIASED + kind: 1}
    # What is inside is needed there.
    assert PRODUCT not in "".join(rule_counts(inside))
    assert "is also used by" in reasons(inside)[BIASED + kind]


def test_stopped_gradient():
    code, shapes = FORMS["matrices"]
    x, w, scale, bias = inputs([*shapes, (5,)])

    def step(x, w, scale, bias):
        with tf.GradientTape() as tape:
            tape.watch(bias)
            y = tf.reduce_sum((tf.stop_gradient(code(x, w, scale)) + bias) ** 2)
        return y, tape.gradient(y, bias)

    check(step, [x, w, scale, bias], {PRODUCT: 1})


@pytest.mark.parametrize("name", ["batches", "transposed", "onto heads", "einsum from heads"])
def test_portable_conversion(name, tmp_path):
    code, shapes = with_bias(name, activation=tf.nn.gelu)
    check_portable(code, inputs(shapes), tmp_path)


def test_graph_def():
    code, shapes = with_bias("onto heads", activation=tf.nn.relu)
    args = inputs(shapes)
    concrete = tf.function(code).get_concrete_function(*args)
    result = remap(concrete)
    assert result.report.counts() == {f"{BIASED}_relu": 1}
    given = dict(zip((t.name for t in concrete.inputs), args, strict=True))
    assert_same(run(result.graph_def, given, result.outputs), [code(*args)])
