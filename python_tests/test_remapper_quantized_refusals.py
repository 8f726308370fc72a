"""Near relatives of products of quantized rows, which are left to stock, and why."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from remapping import assert_same, check, plain, reasons, rule_counts
from test_remapper_quantized_forms import (
    BIASED,
    DENSE,
    OP,
    PRODUCT,
    ROWS,
    SHAPES,
    behind,
    chain,
    einsum,
    inputs,
    matmul,
    onto_heads,
    rounded,
    without,
)

from tf_fused_ops import function

SQUARE = [(8, 8), (8, 8), (8,)]
CUBE = [(3, 3, 8), (8, 5), (5,)]


def ein(equation, *moves, **options):
    """Returns the code of a product by an einsum, and of moves of the scale one after the other."""

    def move(scale):
        for one in moves:
            scale = one(scale)
        return scale

    return chain(functools.partial(einsum, equation), move, **options)


def transposed(*order):
    return lambda scale: tf.transpose(scale, order)


def turned(shape, multiply=matmul):
    """Multiplies integers that are brought to another shape."""
    return lambda a, b: multiply(tf.reshape(a, shape), b)


def reshaped(shape, multiply=matmul):
    """Brings the product to another shape."""
    return lambda a, b: tf.reshape(multiply(a, b), shape)


def biased(x, w, w_scale, bias):
    return DENSE(x, w, w_scale) + bias


def no_scale(shape, of="w_scale"):
    return f"{of}:0 of shape {shape} is no scale of w:0's columns"


MIXED = "multiplies in other shapes than rows and columns"
EMPTY = "is not known to have elements"
OTHER_ROWS = "the scale of x:0 is not that of the result's rows"
# The code, the shapes of its arguments, why it is not fused.
LEFT = {
    "scaled over rows": (chain(axes=0), SQUARE, "is scaled over dimensions [0], not those of"),
    "scaled over all dimensions": (chain(axes=(0, 1)), SHAPES, None),
    "scaled over two dimensions, one of them contracted": (
        ein("abcd,def->abcef", behind(4), axes=(2, 3)),
        [(2, 3, 4, 8), (8, 2, 5), (2, 5)],
        MIXED,
    ),
    "scaled over one dimension of two that are contracted": (
        ein("abcd,cde->abe", without(3), axes=3),
        [(2, 3, 1, 8), (1, 8, 5), (5,)],
        MIXED,
    ),
    "scales of other rows": (chain(move=transposed(1, 0, 2)), CUBE, OTHER_ROWS),
    "scales of rows as those of columns": (
        chain(move=transposed(1, 0)),
        SQUARE,
        OTHER_ROWS,
    ),
    "scales of rows as those of heads": (
        chain(onto_heads, behind(1)),
        [(2, 4, 8), (8, 4, 5), (4, 5)],
        OTHER_ROWS,
    ),
    "one scale of all weights": (DENSE, [*SHAPES[:2], (1,)], no_scale("(1,)")),
    "one scale that is a number": (DENSE, [*SHAPES[:2], ()], "b_scale w_scale:0 has rank 0"),
    "scales of weights' rows": (DENSE, [(5, 5), (5, 5), (5, 1)], no_scale("(5, 1)")),
    "scales of results' rows": (DENSE, [*SHAPES[:2], (6, 1)], no_scale("(6, 1)")),
    "a scale of each number": (DENSE, [*SHAPES[:2], (6, 5)], no_scale("(6, 5)")),
    "scales of heads": (
        chain(onto_heads, behind(3)),
        [(2, 3, 8), (8, 4, 5), (4, 1)],
        no_scale("(4, 1)"),
    ),
    "scales within heads": (
        chain(onto_heads, behind(3)),
        [(2, 3, 8), (8, 4, 5), (5,)],
        no_scale("(5,)"),
    ),
    "one vector": (ein("a,ab->b"), [(8,), *SHAPES[1:]], "a x:0 has rank 1, not 2 or"),
    "more dimensions than six": (DENSE, [(1, 2, 1, 2, 1, 3, 8), *SHAPES[1:]], "has rank 7, not"),
    "rows transposed": (
        chain(functools.partial(matmul, transpose_a=True)),
        SQUARE,
        "attribute adj_x of MatMul differs",
    ),
    "rows that are mixed": (
        chain(turned([3, 2, 8], reshaped([2, 3, 5]))),
        ROWS,
        MIXED,
    ),
    "rows in one list": (chain(turned([-1, 8], reshaped([2, 3, 5]))), ROWS, MIXED),
    "heads in another order": (
        chain(reshaped([-1, 5, 4], lambda a, b: matmul(a, tf.reshape(b, [8, 20]))), behind(2)),
        [(6, 8), (8, 4, 5), (5, 4)],
        MIXED,
    ),
    "weights that are mixed": (
        chain(lambda a, b: matmul(a, tf.reshape(b, [8, 5]))),
        [(6, 8), (5, 8), (5,)],
        MIXED,
    ),
    "weights of each batch": (DENSE, [ROWS[0], (2, 8, 5), (5,)], MIXED),
    "weights of one batch": (DENSE, [ROWS[0], (1, 8, 5), (5,)], MIXED),
    "range of seven bits": (chain(high=7.0), SHAPES, "constant clip_by_value/Minimum/y is 7, not"),
    "one integer more": (chain(low=-128.0), SHAPES, "constant clip_by_value/y is -128, not -127"),
    "of 128 integers": (chain(largest=128.0), SHAPES, "constant truediv/x is 128, not 127"),
    "range of four bits": (chain(low=-8.0, high=7.0, largest=7.0), SHAPES, None),
    "negative epsilon": (chain(epsilon=-0.5), SHAPES, "-0.5 is added to magnitudes of x:0"),
    "a vector of epsilon": (chain(epsilon=[1e-7]), SHAPES, None),
    "epsilon that is computed": (
        lambda x, w, w_scale: chain(epsilon=w_scale[0])(x, w, w_scale),
        SHAPES,
        None,
    ),
    "range that is computed": (
        lambda x, w, w_scale: chain(low=-w_scale[0], high=w_scale[0])(x, w, w_scale),
        SHAPES,
        None,
    ),
    "einsum with the rows last": (
        ein("abc,cd->adb", transposed(0, 2, 1)),
        [*ROWS[:2], (5, 1)],
        None,
    ),
    "einsum over another dimension": (
        ein("abc,bd->acd", transposed(0, 2, 1), axes=1),
        [(2, 8, 3), *SHAPES[1:]],
        None,
    ),
    "einsum of batches": (ein("abc,bcd->abd"), [(2, 3, 8), (3, 8, 5), (5,)], None),
    "einsum of a diagonal": (
        ein("aab,bc->ac", lambda s: tf.reduce_max(s, 1)),
        CUBE,
        None,
    ),
    "einsum with dots": (ein("...a,ab->...b"), ROWS, None),
    "weights multiplied by rows": (
        chain(lambda a, b: matmul(b, a)),
        SQUARE,
        None,
    ),
    "rows multiplied by themselves": (
        chain(lambda a, b: matmul(a, a)),
        SQUARE,
        "is a value inside",
    ),
    "einsum of rows with themselves": (
        chain(lambda a, b: einsum("ab,bc->ac", a, a)),
        SQUARE,
        "is a value inside",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    code, shapes, reason = LEFT[name]
    compiled = check(code, inputs(shapes), {})
    if reason:
        assert reason in reasons(compiled)[PRODUCT]
    else:
        assert not reasons(compiled)


def test_double_precision():
    """The op has none."""
    compiled = check(DENSE, inputs(SHAPES, "float64"), {})
    assert reasons(compiled)[PRODUCT] == f"{OP} has no float64 kernel on CPU"


@pytest.mark.parametrize("epsilon", [np.inf, np.nan])
def test_epsilon_that_is_no_number(epsilon):
    compiled = function(chain(epsilon=epsilon))
    args = inputs(SHAPES)
    np.testing.assert_array_equal(compiled(*args), chain(epsilon=epsilon)(*args))
    assert rule_counts(compiled) == {}
    assert reasons(compiled)[PRODUCT] == f"{epsilon} is added to magnitudes of x:0"


# The shapes of rows, weights and what is added, and why it is no bias.
NO_BIAS = {
    "one number": ([*SHAPES[:2], (1,)], "b:0 of shape (1,) may not be a bias of"),
    "more columns": ([(6, 8), (8, 1), (5,)], "b:0 of shape (5,) may not be a bias of"),
    "a scalar": ([*SHAPES[:2], ()], None),
    "a column": ([*SHAPES[:2], (6, 1)], None),
    "a row": ([*SHAPES[:2], (1, 5)], None),
    "another product": ([*SHAPES[:2], (6, 5)], None),
    "more rows": ([(1, 8), (8, 5), (6, 5)], None),
}


@pytest.mark.parametrize("activation", [tf.identity, tf.nn.relu], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NO_BIAS)
def test_no_bias(name, activation):
    (*shapes, added), reason = NO_BIAS[name]

    def code(x, w, w_scale, b):
        return activation(DENSE(x, w, w_scale) + b)

    compiled = check(code, inputs([*shapes, shapes[1][-1:], added]), {PRODUCT: 1})
    if reason:
        assert all(reason in words for words in reasons(compiled).values())
        assert BIASED in reasons(compiled)
    else:
        assert not reasons(compiled)


def test_bias_of_other_dimensions():
    """Heads have one bias each, or share one."""
    for shape, reason in (((4, 1), "b:0 of shape (4, 1) may not be"), ((5,), None)):
        code = chain(onto_heads, behind(3))
        args = inputs([(2, 3, 8), (8, 4, 5), (4, 5), shape])
        compiled = check(lambda x, w, w_scale, b, c=code: c(x, w, w_scale) + b, args, {PRODUCT: 1})
        assert reason in reasons(compiled)[BIASED] if reason else not reasons(compiled)


# What is not known of which argument, the fusions, why there are no others.
UNKNOWN = {
    "rank of rows": (0, None, {}, None),
    "rank of weights": (1, None, {}, None),
    "rank of scales": (2, None, {}, "b_scale w_scale:0 has rank None, not 1 or"),
    "rank of bias": (3, None, {PRODUCT: 1}, None),
    "depth of weights": (1, (None, 5), {}, f"w:0 of shape (None, 5) {EMPTY}"),
    "columns of weights": (1, (8, None), {}, f"w:0 of shape (8, None) {EMPTY}"),
    "sizes of scales": (2, (None,), {}, no_scale("(None,)")),
    "sizes of bias": (3, (None,), {PRODUCT: 1}, "bias:0 of shape (None,) may not be a bias of"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_sizes(name):
    place, shape, rules, reason = UNKNOWN[name]
    args = inputs([*SHAPES, (5,)])
    signature = [tf.TensorSpec(t.shape, t.dtype) for t in args]
    signature[place] = tf.TensorSpec(shape, args[place].dtype)
    compiled = function(biased, input_signature=signature)
    assert_same(compiled(*args), biased(*args))
    assert rule_counts(compiled) == rules
    assert reason in reasons(compiled)[BIASED] if reason else not reasons(compiled)


def parts(x, w, w_scale):
    """Returns what is between the rows and the result, and that."""
    integers, scale = rounded(x)
    product = matmul(integers, w)
    both = scale * w_scale
    quotient = tf.cast(product, x.dtype) / both
    return {
        "integers": integers,
        "scale": scale,
        "product": product,
        "both scales": both,
    }, quotient


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "read"])
@pytest.mark.parametrize("name", ["integers", "scale", "product", "both scales"])
def test_value_inside_that_is_used(name, returned):
    def code(*args):
        inside, quotient = parts(*args)
        return quotient, inside[name] if returned else tf.cast(inside[name], tf.float64) + 1

    args, compiled = inputs(SHAPES), function(code)
    for found, expected in zip(compiled(*args), tf.function(code)(*args), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert rule_counts(compiled) == {}
    reason = "is an output of the graph" if returned else "is also used by"
    assert reason in reasons(compiled)[PRODUCT]


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "read"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_argument_of_the_activation_that_is_used(activation, returned):
    """It is fused without that."""
    fn, kind = getattr(tf.nn, activation), activation.replace("gelu", "gelu_erf")

    def code(*args):
        z = biased(*args)
        return fn(z), z if returned else tf.exp(z)

    alone = {"act_gelu_erf": 1} if activation == "gelu" else {}
    compiled = check(code, inputs([*SHAPES, (5,)]), {BIASED: 1} | alone)
    reason = "is an output of the graph" if returned else "is also used by"
    assert reason in reasons(compiled)[f"{BIASED}_{kind}"]


def test_sum_with_a_bias_of_a_product_that_is_used():
    def code(*args):
        z = DENSE(*args[:3])
        return z + args[3], tf.exp(z)

    compiled = check(code, inputs([*SHAPES, (5,)]), {PRODUCT: 1})
    assert "is also used by" in reasons(compiled)[BIASED]


def test_integers_that_two_products_share():
    """As where somebody has rounded the input of two layers once."""

    def code(x, w, w_scale):
        integers, scale = rounded(x)
        return [tf.cast(matmul(integers, v), x.dtype) / (scale * w_scale) for v in (w, -w)]

    compiled = check(code, inputs(SHAPES), {})
    assert "is also used by" in reasons(compiled)[PRODUCT]


def doubled(x, w, w_scale):
    """Has the form of the gradient of Keras's layers, but another value."""

    @tf.custom_gradient
    def product(x, w, w_scale):
        def grad_fn(dy):
            weights = tf.cast(w, dy.dtype) / w_scale
            return 2 * tf.matmul(dy, weights, transpose_b=True), None, None

        return DENSE(x, w, w_scale), grad_fn

    return product(x, w, w_scale)


def of_rows_alone(x, w, w_scale):
    @tf.custom_gradient
    def product(x):
        return DENSE(x, w, w_scale), lambda dy: tf.zeros_like(x) + tf.reduce_sum(dy)

    return product(x)


def passed_on(x, w, w_scale):
    """Has no gradient of its own at all."""
    return tf.identity_n([DENSE(x, w, w_scale), x, w, w_scale])[0]


@pytest.mark.parametrize("code", [doubled, of_rows_alone, passed_on])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_other_gradients(code, inside):
    """They stay around what is fused, between that and a bias."""
    x, w, w_scale, bias = inputs([*SHAPES, (5,)])
    sources = [x, w_scale, bias]

    def forward(x, w_scale, bias):
        return tf.nn.relu(code(x, w, w_scale) + bias)

    def differentiated(fn):
        def step(*sources):
            with tf.GradientTape() as tape:
                tape.watch(sources)
                y = fn(*sources)
            return y, tape.gradient(y, sources, output_gradients=y)

        return step

    def both(decorator):
        fn = decorator(differentiated(forward) if inside else forward)
        return fn, (fn if inside else differentiated(fn))(*sources)

    with plain():
        _, expected = both(tf.function)
        compiled, found = both(function)
    assert_same(found, expected)
    if inside and code is passed_on:
        # Its gradient is that of what is inside.
        assert rule_counts(compiled) == {}
        assert "is also used by" in reasons(compiled)[PRODUCT]
    else:
        assert rule_counts(compiled) == {PRODUCT: 1}
        graph = compiled.get_concrete_function(*sources).graph
        (op,) = (op for op in graph.get_operations() if op.type == OP)
        assert not op.get_attr("straight_through")
        assert "IdentityN" in {user.type for user in op.outputs[0].consumers()}
