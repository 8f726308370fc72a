"""Transposed convolutions: spellings, geometries, gradients, and where the chains may be."""

import pytest
import tensorflow as tf
from remapping import (
    asked_for,
    assert_same,
    check,
    gradient_count,
    op_counts,
    plain,
    rule_counts,
    specs,
    step_of,
    taped,
    values,
)
from test_remapper_refusals import after
from transposing import (
    ADDITIONS,
    BIASES,
    GRAD,
    IMAGE,
    LINE,
    OP,
    B,
    S,
    W,
    X,
    as_stock,
    batched,
    biased,
    line,
    scaled,
    transposed,
)

from tf_fused_ops.function import function
from tf_fused_ops.remapper import spellings

DIMS = {1: (LINE, line), 2: (IMAGE, transposed)}
STOCK = {"Conv2DBackpropInput", "Conv2DBackpropFilter", "Conv2D", "BiasAdd"}


def the_op(compiled, *args, op_type=OP):
    """Returns the only op of a type in the graph of a decorated function."""
    graph = compiled.get_concrete_function(*args).graph
    (op,) = (op for op in graph.get_operations() if op.type == op_type)
    return op


ACTS = [
    (act, spelling)
    for act in spellings.ACTIVATIONS
    for spelling in act.spellings
    if act is not spellings.NONE
]


@pytest.mark.parametrize("i", range(len(ACTS)), ids=lambda i: ACTS[i][0].name)
def test_spellings(i):
    """Each after one of the chains; test_remapper_rules.py has all chains."""
    act, spelling = ACTS[i]
    family = ("", "_bias", "_bias_add")[i % 3]
    addition = list(ADDITIONS.values())[i // 3 % len(ADDITIONS)]

    def chain(x, w, *others):
        z = transposed(x, w)
        if others:
            z = tf.nn.bias_add(z, others[0])
        if others[1:]:
            z = addition(z, others[1])
        return spelling(z)

    args, rules = [X, W, B, S][: 2 + i % 3], {f"conv2d_transpose{family}_{act.name}": 1}
    compiled = check(step_of(chain), args, rules, gradients=1, units=1024)
    assert not op_counts(compiled.get_concrete_function()).keys() & STOCK


@pytest.mark.parametrize("side", ADDITIONS)
@pytest.mark.parametrize("act", ["", "_tanh"])
def test_summands(act, side):
    """In both orders, alone, where their gradient is what comes in, and before an activation."""

    def chain(x, w, b, s):
        y = ADDITIONS[side](biased(x, w, b), s)
        return tf.tanh(y) if act else y

    compiled = check(step_of(chain), [X, W, B, S], {f"conv2d_transpose_bias_add{act}": 1}, 1)
    asked = {"input": 1, "filters": 1, "bias": 1, "side_input": int(bool(act))}
    assert asked_for(compiled.get_concrete_function(), GRAD, asked) == asked


@pytest.mark.parametrize("form", BIASES)
@pytest.mark.parametrize("dims", DIMS)
def test_biases(dims, form):
    shapes_of, code = DIMS[dims]
    for act, name in ((tf.nn.silu, "_silu"), (tf.identity, "")):

        def chain(x, w, b, act=act):
            return act(BIASES[form](code(x, w, batched(x, shapes_of[-1][1:])), b))

        rules = {f"conv{dims}d_transpose_bias{name}": 1}
        check(step_of(chain), values(*shapes_of[:3]), rules, 1, unknown_batch=[0], units=512)


# Sizes of the output and of the filters, strides, padding, dilations.
GEOMETRIES = {
    "points": ((3, 4), (1, 1), 1, "SAME"),
    "no strides": ((5, 6), (3, 3), 1, "SAME"),
    "no strides, valid": ((5, 6), (3, 2), 1, "VALID"),
    "even kernel": ((6, 8), (4, 4), 2, "SAME"),
    "kernel of the strides": ((6, 8), (2, 2), 2, "VALID"),
    "odd image": ((5, 7), (3, 3), 2, "SAME"),
    "valid": ((9, 11), (5, 5), 2, "VALID"),
    "valid and more": ((10, 12), (5, 5), 2, "VALID"),
    "strides of three": ((9, 8), (3, 5), 3, "VALID"),
    "unequal strides": ((5, 9), (3, 5), [2, 3], "SAME"),
    "strides of one axis": ((5, 9), (3, 3), [1, 2], "SAME"),
    "four strides": ((5, 9), (3, 3), [1, 1, 3, 1], "VALID"),
    "padded": ((6, 7), (3, 3), 1, [[0, 0], [1, 2], [0, 1], [0, 0]]),
    "padded, strides": ((6, 9), (5, 5), 2, [[0, 0], [2, 1], [0, 2], [0, 0]]),
    "dilated": ((7, 8), (3, 3), 1, "SAME", 2),
    "dilated unequally": ((8, 9), (3, 2), 1, "VALID", [2, 3]),
    "line": ((8,), (3,), 2, "SAME"),
    "odd line": ((7,), (4,), 2, "SAME"),
    "valid line": ((9,), (5,), 2, "VALID"),
    "line with strides of three": ((10,), (4,), 3, "VALID"),
    "line without strides": ((6,), (3,), 1, "SAME"),
    "dilated line": ((9,), (3,), 1, "SAME", 2),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name):
    image, window, strides, padding, *dilations = GEOMETRIES[name]
    options = {"dilations": dilations[0]} if dilations else {}
    dims, unknown_batch = len(image), list(GEOMETRIES).index(name) % 2
    y, filters = tf.zeros([2, *image, 1]), tf.zeros([*window, 1, 1])
    convolution = {1: tf.nn.conv1d, 2: tf.nn.conv2d}[dims]
    inner = convolution(y, filters, strides, padding, **options).shape[1:-1]
    args = values((2, *inner, 3), (*window, 5, 3), (5,))

    def chain(x, w, b):
        shape = batched(x, (*image, 5)) if unknown_batch else [2, *image, 5]
        return tf.nn.elu(tf.nn.bias_add(DIMS[dims][1](x, w, shape, strides, padding, **options), b))

    rules = {f"conv{dims}d_transpose_bias_elu": 1}
    op = the_op(check(step_of(chain), args, rules, 1, [0] * unknown_batch, units=1024))
    stock = the_op(tf.function(chain), *args, op_type="Conv2DBackpropInput")
    for attribute in ("strides", "padding", "explicit_paddings", "dilations", "data_format"):
        assert op.get_attr(attribute) == stock.get_attr(attribute)


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("dims", DIMS)
def test_channels_first(dims, unknown_batch):
    """Compared with channels last: stock has no kernel for channels first on every processor."""
    shapes_of, code = DIMS[dims]
    there = [0, dims + 1, *range(1, dims + 1)]

    def first(x, w, b):
        shape = [shapes_of[-1][i] for i in there]
        shape = batched(x, shape[1:]) if unknown_batch else shape
        z = code(x, w, shape, data_format={1: "NCW", 2: "NCHW"}[dims])
        return tf.nn.silu(tf.nn.bias_add(z, b, "NC..."))

    x, w, b = values(*shapes_of[:3])
    y, (dx, *others) = step_of(lambda x, w, b: tf.nn.silu(code(x, w) + b))(x, w, b)
    given = tf.transpose(x, there)
    signature = [*specs([given], unknown_batch), *specs([w, b])]
    compiled = function(step_of(first), input_signature=signature)
    expected = tf.transpose(y, there), [tf.transpose(dx, there), *others]
    assert_same(compiled(given, w, b), expected, units=512)
    assert rule_counts(compiled) == {f"conv{dims}d_transpose_bias_silu": 1}
    assert gradient_count(compiled) == 1
    assert the_op(compiled).get_attr("data_format") == b"NCHW"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("act", "name", "dims"),
    [(tf.nn.relu6, "relu6", 2), (tf.nn.silu, "silu", 2), (tf.tanh, "tanh", 1)],
)
def test_dtypes(act, name, dims, dtype):
    shapes_of, code = DIMS[dims]

    def step(*args):
        return taped(lambda x, w, b: act(code(x, w) + b), args)

    args = values(*shapes_of[:3], dtype=dtype)
    compiled = check(step, args, {f"conv{dims}d_transpose_bias_{name}": 1}, 1, units=256)
    assert the_op(compiled).get_attr("T") == tf.as_dtype(dtype)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.5, -0.5])
def test_leaky_slope_is_kept(alpha):
    def chain(x, w, b):
        return tf.nn.leaky_relu(biased(x, w, b), alpha)

    rules = {"conv2d_transpose_bias_leaky_relu": 1}
    check(step_of(chain), [X, W, B], rules, 1, units=512)


SUBSETS = [("input",), ("filters",), ("bias",), ("input", "bias"), ("filters", "bias")]


@pytest.mark.parametrize("by", ["tape", "tf.gradients"])
@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_wanted_gradients(wanted, by):
    """No others are computed."""

    def chain(x, w, b):
        z = biased(x, w, b)
        return z * tf.tanh(tf.math.softplus(z))

    @tf.function
    def step(*args):
        named = dict(zip(("input", "filters", "bias"), args, strict=True))
        sources = [named[name] for name in wanted]
        if by == "tf.gradients":
            y = chain(*args)
            return y, tf.gradients(y, sources, tf.sin(y))
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = chain(*args)
        return y, tape.gradient(y, sources, output_gradients=tf.sin(y))

    compiled = check(step, [X, W, B], {"conv2d_transpose_bias_mish": 1}, 1, units=512)
    asked = asked_for(compiled.get_concrete_function(), GRAD, ["input", "filters", "bias"])
    assert asked == {name: int(name in wanted) for name in asked}


@pytest.mark.parametrize("act", ["relu", "silu", ""])
def test_outer_tape(act):
    def chain(x, w, b, s):
        z = biased(x, w, b, tf.shape(s)) + s
        return getattr(tf.nn, act)(z) if act else z

    args = [X, W, B, S]
    signature = [*specs([X], True), *specs([W, B]), *specs([S], True)]
    compiled = function(chain, input_signature=signature)
    with plain():
        assert_same(taped(compiled, args), taped(chain, args), units=512)
    rule = f"conv2d_transpose_bias_add_{act}".rstrip("_")
    assert rule_counts(compiled) == {rule: 1}


@pytest.mark.parametrize("act", [tf.tanh, tf.nn.silu, tf.nn.softplus], ids=lambda f: f.__name__)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_second_order(where, act):
    def chain(x, w, b):
        return act(biased(x, w, b))

    def penalty(f, x, w, b):
        with tf.GradientTape() as outer:
            outer.watch([x, w, b])
            with tf.GradientTape() as inner:
                inner.watch([x, w])
                y = tf.reduce_sum(f(x, w, b) ** 2)
            slopes = inner.gradient(y, [x, w])
            loss = sum(tf.reduce_sum(slope**2) for slope in slopes)
        return outer.gradient(loss, [x, w, b])

    if where == "inside":
        compiled = function(lambda *args: penalty(chain, *args))
        result = compiled(X, W, B)
    else:
        compiled = function(chain)
        result = penalty(compiled, X, W, B)
    scaled(result, penalty(chain, X, W, B))
    assert rule_counts(compiled)


def test_jacobian():
    def chain(x, w, b):
        return tf.nn.silu(biased(x, w, b, (1, 2, 3, 5)))

    def jacobian(f, args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = f(*args)
        return tape.jacobian(y, args)

    args = values((1, 1, 2, 3), *IMAGE[1:3])
    compiled = function(chain)
    scaled(jacobian(compiled, args), jacobian(chain, args))
    assert rule_counts(compiled) == {"conv2d_transpose_bias_silu": 1}


@pytest.mark.parametrize("act", [tf.identity, tf.nn.relu, tf.nn.silu])
def test_two_layers_on_one_input(act):
    """The sum of their input gradients is no convolution with a second summand."""

    def chain(x, w, b, v, c):
        return act(biased(x, w, b)) * biased(x, v, c)

    compiled = as_stock(step_of(chain), [X, W, B, 2 * W, 3 * B])
    assert sum(rule_counts(compiled).values()) == gradient_count(compiled) == 2


def test_shared_filters():
    """Of three layers, two of which are the same and two of which read one input; and those of a
    convolution."""

    def chain(x, w, b, v):
        first = tf.nn.relu(biased(x, w, b))
        again = tf.nn.relu(biased(tf.sin(x), w, b))
        other = tf.nn.relu(biased(x, v, b))
        return first * again + other

    args = [X, W, B, *values(IMAGE[1], seed=3)]
    check(step_of(chain), args, {"conv2d_transpose_bias_relu": 3}, 3, units=2048)

    def tied(x, w, b, c):
        code = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 2, "SAME"), c))
        return tf.nn.sigmoid(biased(code, w, b, tf.shape(x)))

    args = [S, W, B, *values((3,))]
    rules = {"conv2d_bias_relu": 1, "conv2d_transpose_bias_sigmoid": 1}
    check(step_of(tied), args, rules, 2, unknown_batch=[0], units=2048)


def layer(x, w, b):
    """One that can be repeated."""
    return tf.nn.tanh(biased(x, w / 5, b, tf.shape(x), 1))


def looped(x, w, b):
    for _ in tf.range(3):
        x = layer(x, w, b)
    return x


def branched(x, w, b):
    return tf.cond(tf.reduce_sum(x) < 1e6, lambda: layer(x, w, b), lambda: x)


SQUARE = (2, 5, 6, 3), (3, 3, 3, 3), (3,)


@pytest.mark.parametrize("code", [looped, branched, tf.function(layer)])
def test_other_functions(code):
    """Chains in the bodies of loops, branches and calls."""
    args = values(*SQUARE)
    compiled = as_stock(lambda *args: code(*args), args)
    assert rule_counts(compiled) == {"conv2d_transpose_bias_tanh": 1}
    assert op_counts(compiled.get_concrete_function(*args))[OP] == 1


def test_gradient_through_a_loop():
    """Which may be stock's."""
    as_stock(lambda *args: taped(looped, args), values(*SQUARE), units=1024)


def test_waits():
    """For what the replaced ops had to wait for; and what waited for them, for the fused op."""
    state = tf.Variable(0.0)

    def chain(x, w, b):
        shape = tf.constant(IMAGE[-1])
        with tf.control_dependencies([state.assign_add(1.0)]):
            z = transposed(x, w, shape)
        y = tf.nn.relu(tf.nn.bias_add(z, b))
        return y, after(y, x)

    compiled = function(chain)
    compiled(X, W, B)
    op = the_op(compiled, X, W, B)
    assert [other.type for other in op.control_inputs] == ["AssignAddVariableOp"]
    assert op.graph.get_operation_by_name("Identity").control_inputs == [op]
    assert state.numpy() == 1.0


def test_ports_are_kept():
    """Operands that are second outputs of their ops."""

    def chain(x, w, b, s):
        x = tf.split(tf.concat([x, -x], 0), 2)[1]
        w = tf.unstack(tf.stack([w, -w]))[1]
        b = tf.split(tf.concat([b, -b], 0), 2)[1]
        shape = tf.split(tf.concat([tf.shape(x), tf.shape(s)], 0), 2)[1]
        return tf.nn.relu(biased(x, w, b, tf.ensure_shape(shape, [4])) + tf.split(s, 1)[0])

    check(chain, [X, W, B, S], {"conv2d_transpose_bias_add_relu": 1})
