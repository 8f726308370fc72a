"""Transposed convolutions: spellings, geometries, gradients, models, and what looks like them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import (
    FUSED,
    asked_for,
    assert_same,
    check,
    check_portable,
    gradient_count,
    op_counts,
    plain,
    reasons,
    rule_counts,
    step_of,
    taped,
    values,
)
from test_remapper_graph_def import counts, run
from test_remapper_refusals import after, guided_relu, keep
from test_remapper_saved_model import fused_ops

import tf_fused_ops as tfo
from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions, Report, convert, remap, shapes, spellings

OP = FUSED["transposed convolution"]
GRAD = f"{OP}Grad"
# Of input, filters, bias and output.
IMAGE = [(2, 3, 4, 3), (3, 3, 5, 3), (5,), (2, 6, 8, 5)]
LINE = [(2, 4, 3), (3, 5, 3), (5,), (2, 8, 5)]
X, W, B, S = values(*IMAGE)


def transposed(x, w, shape=IMAGE[-1], strides=2, padding="SAME", **options):
    return tf.nn.conv2d_transpose(x, w, shape, strides, padding, **options)


def line(x, w, shape=LINE[-1], strides=2, padding="SAME", **options):
    return tf.nn.conv1d_transpose(x, w, shape, strides, padding, **options)


def biased(x, w, b, *args, **options):
    return tf.nn.bias_add(transposed(x, w, *args, **options), b)


def batched(x, inner=IMAGE[-1][1:]):
    """Returns the shape of an output whose batch is that of x."""
    return [tf.shape(x)[0], *inner]


def found(compiled, op_type, *args):
    """Returns the ops of a type in the graph of a decorated function."""
    graph = compiled.get_concrete_function(*args).graph
    return [op for op in graph.get_operations() if op.type == op_type]


def static(concrete):
    """Returns the static shapes of the outputs of a ConcreteFunction."""
    outputs = tf.nest.flatten(concrete.structured_outputs)
    return [y.shape for y in outputs]


def compare(fn, args, known, rules, gradients=0, units=64):
    """Asserts that a function of tensors of which some sizes are not known computes what stock
    does, that as much is known of its outputs, and what was fused.

    Args:
        fn: The function.
        args: Its arguments.
        known: What is known of their shapes while the function is traced.
        rules: {rule name: number of fusions}.
        gradients: The number of fused backward passes.
        units: Tolerance in units in the last place.

    Returns:
        The decorated function.
    """
    signature = [tf.TensorSpec(shape, a.dtype) for shape, a in zip(known, args, strict=True)]
    stock, fused = (f(fn, input_signature=signature) for f in (tf.function, function))
    with plain():
        assert_same(fused(*args), stock(*args), units)
    told = "\n".join(map(str, fused.remap_reports))
    assert rule_counts(fused) == rules, told
    assert gradient_count(fused) == gradients, told
    pair = [static(f.get_concrete_function()) for f in (stock, fused)]
    for expected, known in zip(*pair, strict=True):
        assert known.is_subtype_of(expected)
    return fused


ACTS = [
    (act, spelling)
    for act in spellings.ACTIVATIONS
    for spelling in act.spellings
    if act is not spellings.NONE
]
ADDITIONS = {
    "plus": lambda z, side: z + side,
    "side first": lambda z, side: side + z,
    "add_n": lambda z, side: tf.add_n([z, side]),
    "add_n, side first": lambda z, side: tf.add_n([side, z]),
}
# Each spelling meets one of them, each activation of several spellings more.
ADDITION_OF = {pair: list(ADDITIONS)[i % len(ADDITIONS)] for i, pair in enumerate(ACTS)}


def act_id(pair):
    act, spelling = pair
    return f"{act.name}-{act.spellings.index(spelling)}"


@pytest.mark.parametrize("family", ["", "_bias", "_bias_add"])
@pytest.mark.parametrize("pair", ACTS, ids=act_id)
def test_spellings(pair, family):
    """Of every activation, forward and backward."""
    act, spelling = pair
    rule = f"conv2d_transpose{family}_{act.name}"

    def chain(x, w, *others):
        z = transposed(x, w)
        if others:
            z = tf.nn.bias_add(z, others[0])
        if others[1:]:
            z = ADDITIONS[ADDITION_OF[pair]](z, others[1])
        return spelling(z)

    args = [X, W, B, S][: {"": 2, "_bias": 3, "_bias_add": 4}[family]]
    compiled = check(step_of(chain), args, {rule: 1}, gradients=1, units=1024)
    ops = op_counts(compiled.get_concrete_function())
    assert not ops.keys() & {"Conv2DBackpropInput", "Conv2DBackpropFilter", "Conv2D", "BiasAdd"}


@pytest.mark.parametrize("side", ADDITIONS)
@pytest.mark.parametrize("act", ["", "_tanh"])
def test_summands(act, side):
    """In both orders, alone, where their gradient is what comes in, and before an activation."""

    def chain(x, w, b, s):
        y = ADDITIONS[side](biased(x, w, b), s)
        return tf.tanh(y) if act else y

    compiled = check(step_of(chain), [X, W, B, S], {f"conv2d_transpose_bias_add{act}": 1}, 1)
    assert asked_for(
        compiled.get_concrete_function(), GRAD, ["input", "filters", "bias", "side_input"]
    ) == {"input": 1, "filters": 1, "bias": 1, "side_input": int(bool(act))}


BIASES = {
    "bias_add": tf.nn.bias_add,
    "plus": lambda z, b: z + b,
    "bias first": lambda z, b: b + z,
    "raw add": lambda z, b: tf.raw_ops.Add(x=z, y=b),
    "raw add, bias first": lambda z, b: tf.raw_ops.Add(x=b, y=z),
}


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("form", BIASES)
@pytest.mark.parametrize("dims", [1, 2])
def test_biases(dims, form, unknown_batch):
    shapes_of, code = {1: (LINE, line), 2: (IMAGE, transposed)}[dims]

    def chain(x, w, b):
        shape = batched(x, shapes_of[-1][1:]) if unknown_batch else shapes_of[-1]
        return tf.nn.silu(BIASES[form](code(x, w, shape), b))

    args, rule = values(*shapes_of[:3]), {f"conv{dims}d_transpose_bias_silu": 1}
    unknown = [0] if unknown_batch else []
    check(step_of(chain), args, rule, 1, unknown_batch=unknown, units=512)
    without = {f"conv{dims}d_transpose_bias": 1}

    def linear(x, w, b):
        return BIASES[form](code(x, w, batched(x, shapes_of[-1][1:])), b)

    check(step_of(linear), args, without, 1, unknown_batch=unknown, units=512)


# The image of the output, filters' height and width, strides, padding, further options.
GEOMETRIES = {
    "points": ((3, 4), (1, 1), 1, "SAME", {}),
    "no strides": ((5, 6), (3, 3), 1, "SAME", {}),
    "no strides, valid": ((5, 6), (3, 2), 1, "VALID", {}),
    "even kernel": ((6, 8), (4, 4), 2, "SAME", {}),
    "kernel of the strides": ((6, 8), (2, 2), 2, "VALID", {}),
    "odd image": ((5, 7), (3, 3), 2, "SAME", {}),
    "valid": ((9, 11), (5, 5), 2, "VALID", {}),
    "valid and more": ((10, 12), (5, 5), 2, "VALID", {}),
    "strides of three": ((9, 11), (5, 5), 3, "SAME", {}),
    "strides of three, valid": ((9, 8), (3, 5), 3, "VALID", {}),
    "unequal strides": ((5, 9), (3, 5), [2, 3], "SAME", {}),
    "strides of one axis": ((5, 9), (3, 3), [1, 2], "SAME", {}),
    "four strides": ((5, 9), (3, 3), [1, 1, 3, 1], "VALID", {}),
    "padded": ((6, 7), (3, 3), 1, [[0, 0], [1, 2], [0, 1], [0, 0]], {}),
    "padded, strides": ((6, 9), (5, 5), 2, [[0, 0], [2, 1], [0, 2], [0, 0]], {}),
    "dilated": ((7, 8), (3, 3), 1, "SAME", {"dilations": 2}),
    "dilated unequally": ((8, 9), (3, 2), 1, "VALID", {"dilations": [2, 3]}),
}


def input_image(image, window, strides, padding, dilations=1):
    """Returns height and width of the input of which a transposed convolution makes an image."""
    x = tf.zeros([1, *image, 1])
    filters = tf.zeros([*window, 1, 1])
    return tf.nn.conv2d(x, filters, strides, padding, dilations=dilations).shape[1:3]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name):
    unknown_batch = list(GEOMETRIES).index(name) % 2 == 0
    image, window, strides, padding, options = GEOMETRIES[name]
    inner = input_image(image, window, strides, padding, **options)
    args = values((2, *inner, 3), (*window, 5, 3), (5,))

    def chain(x, w, b):
        shape = batched(x, (*image, 5)) if unknown_batch else [2, *image, 5]
        return tf.nn.elu(biased(x, w, b, shape, strides, padding, **options))

    unknown = [0] if unknown_batch else []
    compiled = check(
        *(step_of(chain), args, {"conv2d_transpose_bias_elu": 1}, 1), unknown, units=1024
    )
    (op,) = found(compiled, OP)
    (stock,) = (
        op
        for op in tf.function(chain).get_concrete_function(*args).graph.get_operations()
        if op.type == "Conv2DBackpropInput"
    )
    for attribute in ("strides", "padding", "explicit_paddings", "dilations", "data_format"):
        assert op.get_attr(attribute) == stock.get_attr(attribute)


LINES = {
    "strides": (8, 3, 2, "SAME", {}),
    "odd": (7, 4, 2, "SAME", {}),
    "valid": (9, 5, 2, "VALID", {}),
    "strides of three": (10, 4, 3, "VALID", {}),
    "no strides": (6, 3, 1, "SAME", {}),
    "dilated": (9, 3, 1, "SAME", {"dilations": 2}),
}


@pytest.mark.parametrize("unknown", [(0,), (0, 1)], ids=str)
@pytest.mark.parametrize("name", LINES)
def test_lines(name, unknown):
    length, taps, stride, padding, options = LINES[name]
    inner = tf.nn.conv1d(
        *(tf.zeros([1, length, 1]), tf.zeros([taps, 1, 1]), stride, padding), **options
    ).shape[1]
    args = values((2, inner, 3), (taps, 5, 3), (5,))
    known = [
        [None if i in unknown else size for i, size in enumerate(args[0].shape)],
        *(a.shape for a in args[1:]),
    ]

    def chain(x, w, b):
        sizes = [tf.shape(x)[0] if 0 in unknown else 2, length, 5]
        if 1 in unknown:
            sizes[1] = tf.shape(x)[1] + (length - inner)
        return tf.nn.gelu(tf.nn.bias_add(line(x, w, sizes, stride, padding, **options), b))

    rule = {"conv1d_transpose_bias_gelu_erf": 1}
    compare(step_of(chain), args, known, rule, 1, units=1024)


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("dims", [1, 2])
def test_channels_first(dims, unknown_batch):
    """Compared with channels last: stock has no kernel for channels first on every processor."""
    shapes_of, code = {1: (LINE, line), 2: (IMAGE, transposed)}[dims]
    format = {1: "NCW", 2: "NCHW"}[dims]
    there, back = ([0, dims + 1, *range(1, dims + 1)], [0, *range(2, dims + 2), 1])

    def first(x, w, b):
        shape = [shapes_of[-1][i] for i in there]
        shape = batched(x, shape[1:]) if unknown_batch else shape
        return tf.nn.silu(tf.nn.bias_add(code(x, w, shape, data_format=format), b, "NC..."))

    def last(x, w, b):
        return tf.nn.silu(tf.nn.bias_add(code(x, w), b))

    x, w, b = values(*shapes_of[:3])
    y, (dx, dw, db) = step_of(last)(x, w, b)
    expected = tf.transpose(y, there), [tf.transpose(dx, there), dw, db]
    given = tf.transpose(x, there)
    assert_same(tf.transpose(given, back), x)
    signature = [tf.TensorSpec(a.shape) for a in (given, w, b)]
    if unknown_batch:
        signature[0] = tf.TensorSpec([None, *given.shape[1:]])
    compiled = function(step_of(first), input_signature=signature)
    assert_same(compiled(given, w, b), expected, units=512)
    assert rule_counts(compiled) == {f"conv{dims}d_transpose_bias_silu": 1}
    assert gradient_count(compiled) == 1
    (op,) = found(compiled, OP)
    assert op.get_attr("data_format") == b"NCHW"


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("act", "name"), [(tf.nn.relu6, "relu6"), (tf.nn.silu, "silu")])
def test_dtypes(act, name, dtype, dims):
    shapes_of, code = {1: (LINE, line), 2: (IMAGE, transposed)}[dims]
    args = values(*shapes_of[:3], dtype=dtype)

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = act(code(x, w) + b)
        return y, tape.gradient(y, [x, w, b])

    compiled = check(step, args, {f"conv{dims}d_transpose_bias_{name}": 1}, 1, units=256)
    (op,) = found(compiled, OP)
    assert op.get_attr("T") == tf.as_dtype(dtype)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.5, -0.5])
def test_leaky_slope_is_kept(alpha):
    def chain(x, w, b):
        return tf.nn.leaky_relu(biased(x, w, b), alpha)

    args = [X, W, B]
    check(step_of(chain), args, {"conv2d_transpose_bias_leaky_relu": 1}, 1, units=512)


def mish(z):
    return z * tf.tanh(tf.math.softplus(z))


SUBSETS = [("input",), ("filters",), ("bias",), ("input", "bias"), ("filters", "bias")]


@pytest.mark.parametrize("by", ["tape", "tf.gradients"])
@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_wanted_gradients(wanted, by):
    """No others are computed."""

    def step(*args):
        named = dict(zip(("input", "filters", "bias"), args, strict=True))
        sources = [named[name] for name in wanted]
        if by == "tf.gradients":
            y = mish(biased(*args))
            return y, tf.gradients(y, sources, tf.sin(y))
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = mish(biased(*args))
        return y, tape.gradient(y, sources, output_gradients=tf.sin(y))

    args = [X, W, B]
    compiled = check(step, args, {"conv2d_transpose_bias_mish": 1}, 1, units=512)
    asked = asked_for(compiled.get_concrete_function(), GRAD, ["input", "filters", "bias"])
    assert asked == {name: int(name in wanted) for name in asked}


@pytest.mark.parametrize("act", [tf.nn.relu, tf.nn.silu, tf.identity])
@pytest.mark.parametrize("unknown_batch", [False, True])
def test_outer_tape(act, unknown_batch):
    def chain(x, w, b, s):
        shape = tf.shape(s) if unknown_batch else IMAGE[-1]
        return act(biased(x, w, b, shape) + s)

    args = [X, W, B, S]
    signature = [tf.TensorSpec(a.shape) for a in args]
    if unknown_batch:
        signature = [tf.TensorSpec([None, *s.shape[1:]]) if i in (0, 3) else s
                     for i, s in enumerate(signature)]  # fmt: skip
    compiled = function(chain, input_signature=signature)
    with plain():
        assert_same(taped(compiled, args), taped(chain, args), units=512)
    name = {tf.nn.relu: "_relu", tf.nn.silu: "_silu"}.get(act, "")
    assert rule_counts(compiled) == {f"conv2d_transpose_bias_add{name}": 1}


def test_outer_tape_around_a_line():
    def chain(x, w, b):
        return tf.nn.silu(tf.nn.bias_add(line(x, w), b))

    args = values(*LINE[:3])
    compiled = function(chain)
    assert_same(taped(compiled, args), taped(chain, args), units=512)
    assert rule_counts(compiled) == {"conv1d_transpose_bias_silu": 1}


def scaled(found, expected, units=512):
    """Asserts that gradients agree, given how large each of them is."""
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        scale = max(1.0, np.abs(b).max())
        assert_same(a / scale, b / scale, units)


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


@pytest.mark.parametrize("pfor", [False, True])
def test_jacobian(pfor):
    def chain(x, w, b):
        return tf.nn.silu(biased(x, w, b, (1, 3, 4, 5)))

    def jacobian(f, args):
        with tf.GradientTape(persistent=not pfor) as tape:
            tape.watch(args)
            y = f(*args)
        return tape.jacobian(y, args, experimental_use_pfor=pfor)

    args = values((1, 2, 2, 3), *IMAGE[1:3])
    compiled = function(chain)
    scaled(jacobian(compiled, args), jacobian(chain, args))
    assert rule_counts(compiled) == {"conv2d_transpose_bias_silu": 1}


def test_shared_filters():
    """Of three layers on one input, two of which are the same; and those of a convolution."""

    def chain(x, w, b, v):
        first = tf.nn.relu(biased(x, w, b))
        again = tf.nn.relu(biased(tf.sin(x), w, b))
        other = tf.nn.relu(biased(x, v, b))
        return first * again + other

    args = [X, W, B, *values(IMAGE[1], seed=3)]
    rules = {"conv2d_transpose_bias_relu": 3}
    check(step_of(chain), args, rules, 3, units=2048)

    def tied(x, w, b, c):
        code = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 2, "SAME"), c))
        return tf.nn.sigmoid(biased(code, w, b, tf.shape(x)))

    args = [S, W, B, *values((3,))]
    rules = {"conv2d_bias_relu": 1, "conv2d_transpose_bias_sigmoid": 1}
    check(step_of(tied), args, rules, 2, unknown_batch=[0], units=2048)


def test_one_layer_called_twice():
    """The second call reads the first one's output."""

    def chain(x, w, b):
        y = tf.nn.relu(biased(x, w, b, (2, 6, 8, 3)))
        return tf.nn.relu(biased(y, w, b, (2, 12, 16, 3)))

    args = values(IMAGE[0], (3, 3, 3, 3), (3,))
    rules = {"conv2d_transpose_bias_relu": 2}
    compiled = check(step_of(chain), args, rules, 2, units=4096)
    stock = ("Conv2DBackpropInput", "Conv2DBackpropFilter", "Conv2D", "Relu", "ReluGrad", "BiasAdd")
    assert not op_counts(compiled.get_concrete_function()).keys() & set(stock)


def test_layers_on_one_input():
    def step(x, *variables):
        with tf.GradientTape() as tape:
            tape.watch(variables)
            pairs = zip(variables[::2], variables[1::2], strict=True)
            ys = [tf.nn.tanh(biased(x, w, b)) for w, b in pairs]
            loss = tf.reduce_sum(ys[0] * ys[1] + ys[2] ** 2)
        return loss, tape.gradient(loss, variables)

    args = [X, *values(*IMAGE[1:3] * 3)]
    check(step, args, {"conv2d_transpose_bias_tanh": 3}, 3, unknown_batch=[], units=1024)


# How the output's shape is made of x and of a vector of four, what is known of x's, and whether the
# chain fuses.
NO_SIZES = (None, None, None, 3)
SIZES = {
    "constants": (lambda x, v: IMAGE[-1], IMAGE[0], True),
    "batch": (lambda x, v: batched(x), (None, 3, 4, 3), True),
    "batch that the constants tell": (lambda x, v: IMAGE[-1], (None, 3, 4, 3), True),
    "height": (lambda x, v: [2, 2 * tf.shape(x)[1], 8, 5], (2, None, 4, 3), True),
    "all": (
        lambda x, v: [tf.shape(x)[0], 2 * tf.shape(x)[1], 2 * tf.shape(x)[2], 5],
        NO_SIZES,
        True,
    ),
    "joined": (
        lambda x, v: tf.concat([tf.shape(x)[:1], 2 * tf.shape(x)[1:3], [5]], 0),
        NO_SIZES,
        True,
    ),
    "elements": (lambda x, v: tf.stack([v[0], v[1], v[2], 5]), NO_SIZES, True),
    "vector": (lambda x, v: v, NO_SIZES, False),
}


@pytest.mark.parametrize("bias", [tf.nn.bias_add, tf.add])
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name, bias):
    make, known, fuses = SIZES[name]

    def chain(x, w, b, v):
        return tf.nn.silu(bias(transposed(x, w, make(x, v)), b))

    def step(x, w, b, v):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = chain(x, w, b, v)
        return y, tape.gradient(y, [x, w, b], output_gradients=tf.sin(y))

    args = [X, W, B, tf.constant(IMAGE[-1])]
    shapes_of = [known, *(a.shape for a in args[1:])]
    rule = {"conv2d_transpose_bias_silu": 1} if fuses else {"act_silu": 1}
    compare(chain, args, shapes_of, rule)
    compiled = compare(step, args, shapes_of, rule, 1, units=512)
    if not fuses:
        told = reasons(compiled)["conv2d_transpose_bias_silu"]
        assert "channels are not known or do not fit: None in the output" in told


def test_one_trace_for_several_sizes():
    @function(input_signature=[tf.TensorSpec(NO_SIZES), tf.TensorSpec(W.shape)])
    def upsample(x, w):
        shape = tf.shape(x)
        return tf.nn.relu(transposed(x, w, [shape[0], 2 * shape[1], 2 * shape[2] - 1, 5]))

    for shape in (IMAGE[0], (1, 1, 1, 3), (3, 5, 2, 3), (0, 2, 2, 3)):
        (x,) = values(shape)
        n, h, w, _ = shape
        expected = tf.nn.relu(transposed(x, W, [n, 2 * h, 2 * w - 1, 5])) if n else None
        y = upsample(x, W)
        assert y.shape == (n, 2 * h, 2 * w - 1, 5)
        assert_same(y, y if expected is None else expected)
    assert rule_counts(upsample) == {"conv2d_transpose_relu": 1}


def test_sizes_that_do_not_fit():
    """Are told of when the function runs."""
    signature = [tf.TensorSpec(NO_SIZES), tf.TensorSpec(W.shape), tf.TensorSpec([3], tf.int32)]

    @function(input_signature=signature)
    def upsample(x, w, sizes):
        return tf.nn.relu(transposed(x, w, tf.concat([sizes, [5]], 0)))

    assert_same(upsample(X, W, tf.constant([2, 6, 8])), tf.nn.relu(transposed(X, W)))
    for sizes in ([2, 7, 8], [1, 6, 8], [2, 6, 0], [2, -6, 8]):
        with pytest.raises(tf.errors.InvalidArgumentError):
            upsample(X, W, tf.constant(sizes))
    assert rule_counts(upsample) == {"conv2d_transpose_relu": 1}


OUT = (None, None, None, 5)
# The output's shape of x and the side input s, how s is used, what is known of both, the reason if
# it stays.
SIDES = {
    "shape of the side": (lambda x, s: tf.shape(s), tf.identity, NO_SIZES, OUT, None),
    "shape of what it is made of": (
        *(lambda x, s: tf.shape(s), lambda s: tf.nn.relu(s) + s),
        *(NO_SIZES, OUT, None),
    ),
    "shape of what is made of it": (
        *(lambda x, s: tf.shape(tf.nn.relu(s)), tf.identity),
        *(NO_SIZES, OUT, None),
    ),
    "its sizes": (
        *(lambda x, s: [*(tf.shape(s)[i] for i in range(3)), 5], tf.identity),
        *(NO_SIZES, OUT, None),
    ),
    "joined": (
        *(lambda x, s: tf.concat([tf.shape(s)[:-1], [5]], 0), tf.identity),
        *(NO_SIZES, OUT, None),
    ),
    "batch of the side": (
        *(lambda x, s: batched(s), tf.identity),
        *((None, 3, 4, 3), (None, 6, 8, 5), None),
    ),
    "batch of the input": (
        *(lambda x, s: batched(x), tf.identity),
        *((None, 3, 4, 3), (None, 6, 8, 5), "may broadcast"),
    ),
    "sizes of the input": (
        lambda x, s: [tf.shape(x)[0], 2 * tf.shape(x)[1], 2 * tf.shape(x)[2], 5],
        *(tf.identity, NO_SIZES, OUT, "may broadcast"),
    ),
    "sizes in another order": (
        *(lambda x, s: [*(tf.shape(s)[i] for i in (0, 2, 1)), 5], tf.identity),
        *(NO_SIZES, OUT, "may broadcast"),
    ),
    "known": (lambda x, s: IMAGE[-1], tf.identity, IMAGE[0], IMAGE[-1], None),
    "unknown channels": (
        *(lambda x, s: batched(s), tf.identity),
        *((None, 3, 4, 3), (None, 6, 8, None), "may broadcast"),
    ),
}


@pytest.mark.parametrize("act", [tf.nn.relu, tf.identity])
@pytest.mark.parametrize("name", SIDES)
def test_sides(name, act):
    make, use, *known, reason = SIDES[name]
    square = name == "sizes in another order"
    x, s = values((2, 3, 3, 3), (2, 6, 6, 5)) if square else (X, S)

    def chain(x, w, b, s):
        return act(biased(x, w, b, make(x, s)) + use(s))

    known = [known[0], W.shape, B.shape, known[1]]
    rule = f"conv2d_transpose_bias_add{'_relu' if act is tf.nn.relu else ''}"
    rules = {"conv2d_transpose_bias": 1} if reason else {rule: 1}
    args = [x, W, B, s]
    compiled = compare(chain, args, known, rules)
    compare(step_of(chain), args, known, rules, 1, units=4096)
    if reason:
        assert reason in reasons(compiled)[rule]


def test_two_sizes_are_no_shape():
    """Of an output that is told but height and width, neither is the batch."""

    def chain(q, v, b, x, w):
        z = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=tf.shape(q)[:2], filter=w, out_backprop=x, strides=[1, 2, 2, 1],
            padding="SAME",
        )  # fmt: skip
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(q, v, 1, "SAME"), b) + z)

    args = values((8, 8, 8, 3), (3, 3, 3, 5), (5,), (1, 4, 4, 3), (3, 3, 5, 3))
    known = [(None, 8, 8, 3), (3, 3, 3, 5), (5,), (None, None, 4, 3), (3, 3, 5, 3)]
    compiled = compare(chain, args, known, {"conv2d_bias": 1})
    assert "may broadcast" in reasons(compiled)["conv2d_bias_add_relu"]


@pytest.mark.parametrize("fused", [False, True])
def test_proofs(fused):
    """What is known of the size of an output is what is known of the vector that tells it."""

    def make(x, w, sizes):
        if fused:
            return tfo.conv2d_transpose_bias_act(x, w, sizes, strides=2)
        return transposed(x, w, sizes)

    with tf.Graph().as_default():
        x, s = (tf.compat.v1.placeholder(tf.float32, shape) for shape in (NO_SIZES, OUT))
        w = tf.compat.v1.placeholder(tf.float32, W.shape)
        same = make(x, w, tf.shape(s))
        other = make(x, w, [tf.shape(t)[i] for i, t in enumerate((x, s, s))] + [5])
        turned = make(x, w, tf.gather(tf.shape(s), [0, 2, 1, 3]))
        assert shapes.same_shape(same, s)
        assert not shapes.same_shape(other, s)
        assert not shapes.same_shape(turned, s)
        names = [shapes.dimension(other, axis) for axis in range(4)]
        assert names == [shapes.dimension(t, axis) for axis, t in enumerate((x, s, s, s))]


def upscale(filters, kernel=4, **options):
    options = {"strides": 2, "padding": "same", **options}
    return keras.layers.Conv2DTranspose(filters, kernel, **options)


def u_net():
    """With skips joined and added; the sizes are not known."""
    inputs = keras.Input((None, None, 2))
    high = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    low = keras.layers.Conv2D(6, 3, 2, padding="same", activation="relu")(high)
    lowest = keras.layers.Conv2D(8, 3, 2, padding="same", activation="relu")(low)
    up = upscale(6, activation="relu")(lowest)
    up = upscale(4, 3)(keras.layers.Concatenate()([up, low]))
    up = keras.layers.ReLU()(keras.layers.Add()([up, high]))
    return keras.Model(inputs, keras.layers.Conv2D(2, 1, activation="sigmoid")(up))


def dcgan():
    inputs = keras.Input((6,))
    y = keras.layers.Reshape((4, 4, 8))(keras.layers.Dense(128, use_bias=False)(inputs))
    for filters in (8, 4):
        y = upscale(filters, use_bias=False)(y)
        y = keras.layers.LeakyReLU(0.2)(keras.layers.BatchNormalization()(y))
    return keras.Model(inputs, upscale(3, activation="tanh")(y))


def autoencoder():
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            keras.layers.Conv2D(4, 3, 2, padding="same", activation="relu"),
            keras.layers.Conv2D(8, 3, 2, padding="same", activation="relu"),
            upscale(4, 3, activation="relu"),
            upscale(4, 3, use_bias=False, activation="relu"),
            upscale(2, 3, strides=1, activation="sigmoid"),
        ]
    )


def wave_u_net():
    inputs = keras.Input((16, 2))
    high = keras.layers.Conv1D(4, 5, padding="same", activation="relu")(inputs)
    low = keras.layers.Conv1D(6, 5, 2, padding="same", activation="relu")(high)
    up = keras.layers.Conv1DTranspose(4, 4, 2, padding="same", activation="relu")(low)
    up = keras.layers.Concatenate()([up, high])
    up = keras.layers.Conv1DTranspose(3, 3, padding="valid", activation="tanh")(up)
    return keras.Model(inputs, keras.layers.Conv1D(2, 3, activation="sigmoid")(up))


# Model, shapes of input and target, rules in training.
MODELS = {
    "u_net": (
        *(u_net, (2, 8, 12, 2), (2, 8, 12, 2)),
        {
            "conv2d_bias_relu": 3,
            "conv2d_transpose_bias_relu": 1,
            "conv2d_transpose_bias_add_relu": 1,
            "conv2d_bias_sigmoid": 1,
        },
    ),
    "dcgan": (
        *(dcgan, (4, 6), (4, 32, 32, 3)),
        {"moments_batch_norm_leaky_relu": 2, "conv2d_transpose_bias_tanh": 1},
    ),
    "autoencoder": (
        *(autoencoder, (3, 8, 8, 2), (3, 8, 8, 2)),
        {
            "conv2d_bias_relu": 2,
            "conv2d_transpose_bias_relu": 1,
            "conv2d_transpose_relu": 1,
            "conv2d_transpose_bias_sigmoid": 1,
        },
    ),
    "wave_u_net": (
        *(wave_u_net, (2, 16, 2), (2, 16, 2)),
        {
            "conv1d_bias_relu": 2,
            "conv1d_transpose_bias_relu": 1,
            "conv1d_transpose_bias_tanh": 1,
            "conv1d_bias_sigmoid": 1,
        },
    ),
}


def trained(decorator, name, policy="float32", steps=4):
    """Returns the decorated step of a model and the losses and gradients of some steps."""
    make, shape, target, _ = MODELS[name]
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = make()
    finally:
        keras.config.set_dtype_policy(before)
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def step(x, target):
        with tf.GradientTape() as tape:
            y = model(x, training=True)
            loss = tf.reduce_mean((tf.cast(y, tf.float32) - target) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss, gradients

    signature = [tf.TensorSpec([None, *s[1:]]) for s in (shape, target)]
    compiled = decorator(step, input_signature=signature)
    x, target = values(shape, target)
    return compiled, [compiled(x, target) for _ in range(steps)]


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Batches of a size that is not known."""
    with plain():
        _, expected = trained(tf.function, name)
        compiled, result = trained(function, name)
    scaled(result, expected, units=4096)
    assert expected[-1][0] < expected[0][0]
    rules = MODELS[name][-1]
    ours = {rule: n for rule, n in rule_counts(compiled).items() if rule in rules}
    assert ours == rules, compiled.remap_reports[0]
    fused = [f for r in compiled.remap_reports for f in r.fused if "transpose" in f.rule]
    assert all(f.gradients == 1 for f in fused)


@pytest.mark.parametrize("name", ["autoencoder", "wave_u_net"])
def test_mixed_precision(name):
    with plain():
        _, expected = trained(tf.function, name)
        compiled, result = trained(function, name, "mixed_bfloat16")
    losses = [[loss for loss, _ in steps] for steps in (result, expected)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)
    rules = {rule: n for rule, n in MODELS[name][-1].items() if "transpose" in rule}
    assert {r: n for r, n in rule_counts(compiled).items() if r in rules} == rules
    (concrete,) = {compiled.get_concrete_function()}
    types = {op.get_attr("T") for op in concrete.graph.get_operations() if op.type == OP}
    assert types == {tf.bfloat16}


def test_skip_that_is_added():
    """Of an image whose sizes are not known, told by the shape of the skip."""

    def chain(x, w, b, w2, b2):
        low = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 2, "SAME"), b))
        up = tf.nn.bias_add(transposed(low, w2, tf.shape(x)), b2)
        return tf.nn.relu(up + x)

    args = [S, *values((3, 3, 5, 4), (4,), (3, 3, 5, 4), (5,))]
    rules = {"conv2d_bias_relu": 1, "conv2d_transpose_bias_add_relu": 1}
    known = [OUT, *(a.shape for a in args[1:])]
    compare(step_of(chain), args, known, rules, 2, units=4096)


@pytest.mark.parametrize("name", MODELS)
def test_accelerated_fit(name):
    """The layers are converted, or their chains are found."""
    make, shape, target, _ = MODELS[name]
    x, y = (v.numpy() for v in values(shape, target))
    losses, outputs = [], []
    for accelerate in (False, True):
        keras.utils.set_random_seed(0)
        model = make()
        if accelerate:
            model = tfo.accelerate(model) or model
        model.compile(keras.optimizers.SGD(0.01), "mse")
        history = model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
        outputs.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-3, atol=1e-4)
    assert losses[0][-1] < losses[0][0]


KERAS = {
    "same": (upscale(4, activation="relu"), (2, 3, 4, 2), "conv2d_transpose_bias_relu"),
    "valid": (
        upscale(4, 3, padding="valid", activation="gelu"),
        *((2, 3, 4, 2), "conv2d_transpose_bias_gelu_erf"),
    ),
    "padded": (
        upscale(4, 3, output_padding=1, activation="silu"),
        *((2, 3, 4, 2), "conv2d_transpose_bias_silu"),
    ),
    "without bias": (
        upscale(4, use_bias=False, activation="elu"),
        *((2, 3, 4, 2), "conv2d_transpose_elu"),
    ),
    "dilated": (
        upscale(4, 3, strides=1, dilation_rate=2, activation="relu"),
        *((2, 5, 6, 2), "conv2d_transpose_bias_relu"),
    ),
    "line": (
        keras.layers.Conv1DTranspose(4, 4, 2, padding="same", activation="tanh"),
        *((2, 5, 2), "conv1d_transpose_bias_tanh"),
    ),
    "padded line": (
        keras.layers.Conv1DTranspose(4, 4, 3, output_padding=2, activation="relu6"),
        *((2, 5, 2), "conv1d_transpose_bias_relu6"),
    ),
}


@pytest.mark.parametrize("unknown", ["batch", "sizes"])
@pytest.mark.parametrize("name", KERAS)
def test_keras_layers(name, unknown):
    like, shape, rule = KERAS[name]
    layer = type(like).from_config(like.get_config())
    layer.build(shape)
    layer.set_weights([v.numpy() for v in values(*(w.shape for w in layer.weights))])

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, [x, *layer.trainable_variables])

    known = {
        "batch": (None, *shape[1:]),
        "sizes": (*[None] * (len(shape) - 1), shape[-1]),
    }[unknown]
    compare(step, values(shape), [known], {rule: 1}, 1, units=1024)


def none_fused(compiled):
    """Asserts that nothing was taken for a transposed convolution, nor for a gradient of one."""
    assert not any("transpose" in rule for rule in rule_counts(compiled)), compiled.remap_reports
    for concrete in compiled._list_all_concrete_functions():
        assert not op_counts(concrete).keys() & {OP, GRAD}


def residual(x):
    """A block with a skip, a projection and one convolution whose input has no activation."""
    y = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
    y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
    y = keras.layers.ReLU()(keras.layers.Conv2D(4, 3, padding="same")(y) + x)
    z = keras.layers.Conv2D(6, 1, 2, use_bias=False)(y)
    return keras.layers.Conv2D(6, 3, 2, padding="same", activation="tanh")(y) + z


def squeezed(x):
    y = keras.layers.Conv2D(8, 3, padding="same", groups=2, activation="relu")(x)
    y = keras.layers.DepthwiseConv2D(3, padding="same", activation="relu6")(y)
    return keras.layers.SeparableConv2D(5, 3, 2, padding="same", activation="silu")(y)


def plain_chain(x):
    y = keras.layers.Conv2D(4, 3, use_bias=False, activation="relu")(x)
    y = keras.layers.Conv2D(4, (2, 3), strides=2, use_bias=False)(y)
    return keras.layers.Conv2D(3, 2, dilation_rate=2, activation="gelu")(keras.layers.ReLU()(y))


BLOCKS = {"residual": residual, "groups": squeezed, "chain": plain_chain}


def block_model(name):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12, 12, 4))
    return keras.Model(inputs, BLOCKS[name](inputs))


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_of_convolutions(name):
    """By the image, too: no ops are more like those of a transposed convolution."""
    model = block_model(name)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x) ** 2)
        return loss, tape.gradient(loss, [x, *model.trainable_variables])

    signature = [tf.TensorSpec([None, 12, 12, 4])]
    compiled = function(step, input_signature=signature)
    (x,) = values((2, 12, 12, 4))
    with plain():
        scaled(compiled(x), tf.function(step, input_signature=signature)(x), units=1024)
    none_fused(compiled)
    assert gradient_count(compiled) >= 2


def critic(x, w, b, v):
    y = tf.nn.leaky_relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 2, "SAME"), b))
    return tf.reduce_sum(tf.tanh(tf.nn.conv2d(y, v, 2, "SAME")), [1, 2, 3])


CRITIC = values((2, 8, 8, 3), (3, 3, 3, 4), (4,), (3, 3, 4, 5))


@pytest.mark.parametrize("norm", ["square", "root"])
def test_gradient_penalty(norm):
    """As of WGAN-GP: stock gradients of the gradients by the image."""

    def step(x, *weights):
        with tf.GradientTape() as outer:
            outer.watch(weights)
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = critic(x, *weights)
            slope = inner.gradient(score, x)
            size = tf.reduce_sum(slope**2, [1, 2, 3])
            size = tf.sqrt(size + 1e-6) if norm == "root" else size
            loss = tf.reduce_mean(score) + 10.0 * tf.reduce_mean((size - 1.0) ** 2)
        return loss, outer.gradient(loss, weights)

    compiled = function(step)
    with plain():
        scaled(compiled(*CRITIC), tf.function(step)(*CRITIC), units=1024)
    none_fused(compiled)


def test_gradients_of_a_generator_and_a_critic():
    """What the critic's convolutions tell the generator are no transposed convolutions of it."""

    def step(z, g, c, h, x, w, b, v):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([g, c, h, w, b, v])
            y = tf.nn.relu(biased(z, g, c, (2, 4, 4, 4)))
            made = tf.tanh(transposed(y, h, (2, 8, 8, 3)))
            fooled = -tf.reduce_mean(critic(made, w, b, v))
            judged = -fooled - tf.reduce_mean(critic(x, w, b, v))
        return tape.gradient(fooled, [g, c, h]), tape.gradient(judged, [w, b, v])

    args = [*values((2, 2, 2, 3), (3, 3, 4, 3), (4,), (4, 4, 3, 4)), *CRITIC]
    compiled = function(step)
    with plain():
        scaled(compiled(*args), tf.function(step)(*args), units=4096)
    ours = {r: n for r, n in rule_counts(compiled).items() if "transpose" in r}
    assert ours == {"conv2d_transpose_bias_relu": 1, "conv2d_transpose_tanh": 1}


AFTER_GRADIENTS = {
    "relu": tf.nn.relu,
    "tanh": tf.tanh,
    "silu": tf.nn.silu,
    "sum with a vector": lambda dx: dx + tf.constant([1.0, 2.0, 3.0]),
    "scaled": lambda dx: 2.0 * dx,
}


@pytest.mark.parametrize("name", AFTER_GRADIENTS)
@pytest.mark.parametrize("bias", [False, True])
def test_activations_of_gradients(name, bias):
    """As of guided backpropagation. Either chain may have the op; the gradients stay together."""

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            z = tf.nn.conv2d(x, w, 2, "SAME")
            y = tf.nn.relu(tf.nn.bias_add(z, b)) if bias else z + 0.0 * b
        dx, *others = tape.gradient(y, [x, w, b], output_gradients=tf.sin(y))
        return y, AFTER_GRADIENTS[name](dx), others

    args = CRITIC[:3]
    compiled = function(step)
    with plain():
        scaled(compiled(*args), tf.function(step)(*args))
    if bias:
        assert rule_counts(compiled).get("conv2d_bias_relu") == 1
        assert gradient_count(compiled) == 1
        none_fused(compiled)


def test_guided_backpropagation():
    """Of relus whose gradient is another one."""

    @tf.custom_gradient
    def guided(x):
        y = tf.nn.relu(x)
        return y, lambda dy: tf.nn.relu(dy) * tf.cast(y > 0, dy.dtype)

    def saliency(x, w, b, v):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = guided(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))
            y = guided(tf.nn.conv2d(y, v, 1, "SAME"))
        return tape.gradient(y, x, output_gradients=tf.sin(y))

    compiled = function(saliency)
    with plain():
        scaled(compiled(*CRITIC), tf.function(saliency)(*CRITIC))


def test_grouped_gradients_and_an_activation():
    """Filters of groups are not those of a transposed convolution."""

    def by_hand(dy, w):
        return tf.nn.relu(
            tf.raw_ops.Conv2DBackpropInput(
                input_sizes=[2, 6, 5, 4], filter=w, out_backprop=dy, strides=[1] * 4,
                padding="SAME",
            )
        )  # fmt: skip

    def depthwise(dy, w):
        return tf.nn.relu(
            tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
                input_sizes=[2, 6, 5, 4], filter=w, out_backprop=dy, strides=[1] * 4,
                padding="SAME",
            )
        )  # fmt: skip

    dy, w, v = values((2, 6, 5, 6), (3, 3, 2, 6), (3, 3, 4, 1))
    compiled = function(by_hand)
    concrete = compiled.get_concrete_function(dy, w)
    assert (
        "do not fit: 4 in the output and 6 in the input, 2 and 6"
        in (reasons(compiled)["conv2d_transpose_relu"])
    )
    assert not op_counts(concrete)[OP]
    compiled = check(depthwise, [dy[..., :4], v], {})
    none_fused(compiled)


def linear_and(use):
    def code(x, w, b):
        z = transposed(x, w)
        return tf.nn.relu(tf.nn.bias_add(z, b)), use(z, x)

    return code


def pre_activation_and(use):
    def code(x, w, b):
        z = biased(x, w, b)
        return tf.nn.relu(z), use(z, x)

    return code


def raw(sizes, x, w):
    return tf.raw_ops.Conv2DBackpropInput(
        input_sizes=sizes, filter=w, out_backprop=x, strides=[1, 2, 2, 1], padding="SAME"
    )


def elsewhere(x, w, b):
    z = transposed(x, w)
    with tf.device("CPU:0"):
        z = tf.nn.bias_add(z, b)
    return tf.nn.relu(z)


def on_another_device(x, w, b):
    with tf.device("GPU:0"):
        return tf.nn.relu(biased(x, w, b))


RELU, LINEAR = "conv2d_transpose_bias_relu", {"conv2d_transpose_bias": 1}
# Code, shapes, what fuses, the rule that must not, and why.
NEIGHBOURS = {
    "used": (linear_and(lambda z, x: tf.exp(z)), IMAGE[:3], {}, RELU, "is also used by Exp"),
    "fetched": (linear_and(lambda z, x: z), IMAGE[:3], {}, RELU, "is an output of the graph"),
    "control edge": (linear_and(after), IMAGE[:3], {}, RELU, "has a control edge from"),
    "kept": (
        *(lambda x, w, b: tf.nn.relu(tf.nn.bias_add(keep(transposed(x, w)), b)), IMAGE[:3]),
        *({}, RELU, "is marked _grappler_do_not_remove"),
    ),
    "pre-activation used": (
        *(pre_activation_and(lambda z, x: tf.exp(z)), IMAGE[:3]),
        *(LINEAR, RELU, "is also used by Exp"),
    ),
    "pre-activation fetched": (
        *(pre_activation_and(lambda z, x: z), IMAGE[:3]),
        *(LINEAR, RELU, "is an output of the graph"),
    ),
    "pre-activation waited for": (
        *(pre_activation_and(after), IMAGE[:3]),
        *(LINEAR, RELU, "has a control edge from"),
    ),
    "guided": (
        *(lambda x, w, b: guided_relu(biased(x, w, b)), IMAGE[:3]),
        *(LINEAR, RELU, "the gradient of Relu is overridden"),
    ),
    "two devices": (elsewhere, IMAGE[:3], {}, RELU, "the nodes are on different devices"),
    "two sizes": (
        *(lambda x, w, b: tf.nn.relu(tf.nn.bias_add(raw([6, 8], x, w), b)), IMAGE[:3]),
        *({}, RELU, "of shape (2,) is not the shape of an image"),
    ),
    "two sizes without bias": (
        *(lambda x, w: tf.nn.relu(raw([6, 8], x, w)), IMAGE[:2]),
        *({}, "conv2d_transpose_relu", "of shape (2,) is not the shape of an image"),
    ),
    "bias of one": (
        *(lambda x, w, b: tf.nn.relu(transposed(x, w) + b), [*IMAGE[:2], (1,)]),
        *({}, RELU, "may not be a bias"),
    ),
    "bias that broadcasts": (
        lambda x, w, b: tf.nn.relu(transposed(x, w, (2, 6, 8, 1)) + b),
        *([IMAGE[0], (3, 3, 1, 3), (5,)], {}, RELU, "may not be a bias"),
    ),
    "bias of four dimensions": (
        *(lambda x, w, b: tf.nn.relu(transposed(x, w) + b), [*IMAGE[:2], (1, 1, 1, 5)]),
        *({}, RELU, ""),
    ),
    "bias of columns": (
        *(lambda x, w, b: tf.nn.relu(transposed(x, w) + b), [*IMAGE[:2], (8, 1)]),
        *({}, RELU, ""),
    ),
    "bias of a line's two dimensions": (
        *(lambda x, w, b: tf.nn.relu(line(x, w) + b), [*LINE[:2], (1, 5)]),
        *({}, "conv1d_transpose_bias_relu", ""),
    ),
    "side that broadcasts": (
        lambda x, w, b, s: tf.nn.relu(biased(x, w, b) + s),
        [*IMAGE[:3], (2, 6, 1, 5)],
        *(LINEAR, "conv2d_transpose_bias_add_relu", "may broadcast"),
    ),
    "side that is larger": (
        lambda x, w, b, s: tf.nn.relu(biased(x, w, b, (1, 6, 8, 5)) + s),
        [(1, 3, 4, 3), *IMAGE[1:]],
        *(LINEAR, "conv2d_transpose_bias_add_relu", "may broadcast"),
    ),
    "sum used": (
        lambda x, w, b, s: (lambda z: (tf.nn.relu(z), tf.exp(z)))(biased(x, w, b) + s),
        *(IMAGE, {"conv2d_transpose_bias_add": 1}),
        *("conv2d_transpose_bias_add_relu", "is also used by Exp"),
    ),
    "sum of three": (
        lambda x, w, b, s: tf.nn.relu(tf.add_n([biased(x, w, b), s, s])),
        *(IMAGE, LINEAR, "conv2d_transpose_bias_add_relu", ""),
    ),
    "sum without bias": (
        lambda x, w, s: tf.nn.relu(transposed(x, w) + s),
        [*IMAGE[:2], IMAGE[-1]],
        *({}, "conv2d_transpose", ""),
    ),
    "alone": (lambda x, w: transposed(x, w), IMAGE[:2], {}, "conv2d_transpose", ""),
    "scaled": (
        lambda x, w, b: tf.nn.relu(2.0 * biased(x, w, b)),
        *(IMAGE[:3], LINEAR, RELU, ""),
    ),
    "line squeezed is used": (
        lambda x, w, b: (lambda z: (tf.nn.relu(tf.nn.bias_add(z, b)), z))(line(x, w)),
        *(LINE[:3], {}, "conv1d_transpose_bias_relu", "is an output of the graph"),
    ),
    "line without bias": (
        lambda x, w: tf.nn.relu(line(x, w)),
        *(LINE[:2], {}, "conv1d_transpose", ""),
    ),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_must_not_fuse(name):
    code, shapes_of, rules, rule, reason = NEIGHBOURS[name]
    compiled = check(code, values(*shapes_of), rules)
    told = reasons(compiled)
    if reason:
        assert reason in told[rule]
    else:
        assert not any(refused.startswith(rule) for refused in told)


def test_no_kernel_on_a_gpu():
    compiled = function(on_another_device)
    compiled.get_concrete_function(X, W, B)
    assert rule_counts(compiled) == {}
    assert f"{OP} has no float32 kernel on GPU" in reasons(compiled)[RELU]


# What is known of input and filters, and why the chain stays.
UNKNOWN = {
    "channels of the input": (
        (2, 3, 4, None),
        W.shape,
        "None in the input, 5 and 3 in the filters",
    ),
    "channels of the filters": (X.shape, (3, 3, 5, None), "5 and None in the filters"),
    "channels of the output": (X.shape, (3, 3, None, 3), "None and 3 in the filters"),
    "rank of the input": (None, W.shape, "has rank None, not 4"),
    "rank of the filters": (X.shape, None, "has rank None, not 4"),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_shapes(name, bias):
    *known, reason = UNKNOWN[name]

    def chain(x, w, b):
        return tf.nn.relu(biased(x, w, b) if bias else transposed(x, w)), b

    compiled = compare(chain, [X, W, B], [*known, B.shape], {})
    assert reason in reasons(compiled)[RELU if bias else "conv2d_transpose_relu"]


def test_unknown_rank_of_the_output():
    def chain(x, w, b, sizes):
        return tf.nn.relu(tf.nn.bias_add(raw(sizes, x, w), b))

    args = [X, W, B, tf.constant(IMAGE[-1])]
    for known in ((None,), None):
        compare(chain, args, [*IMAGE[:3], known], {})


def test_integers():
    """Which TensorFlow has no transposed convolution of, though it multiplies them."""

    def chain(x, w, b):
        y = raw(IMAGE[-1], tf.cast(x, tf.float32), tf.cast(w, tf.float32))
        return tf.nn.relu(tf.nn.bias_add(tf.cast(y, tf.int32), b))

    args = [tf.cast(4 * v, tf.int32) for v in (X, W, B)]
    compiled = function(chain)
    np.testing.assert_array_equal(compiled(*args), chain(*args))
    assert rule_counts(compiled) == {}

    @function
    def of_integers(x, w):
        return tf.nn.relu(raw(IMAGE[-1], x, w))

    of_integers.get_concrete_function(*args[:2])
    assert rule_counts(of_integers) == {}


def test_compiled_functions_stay():
    inner = tf.function(lambda x, w, b: tf.nn.relu(biased(x, w, b)), jit_compile=True)
    compiled = function(lambda *args: inner(*args))
    assert_same(compiled(X, W, B), inner(X, W, B))
    assert rule_counts(compiled) == {}
    whole = function(lambda x, w, b: tf.nn.relu(biased(x, w, b)), jit_compile=True)
    assert_same(whole(X, W, B), inner(X, W, B))
    none_fused(whole)


@pytest.mark.parametrize("pattern", ["conv2d_transpose_bias*", "*transpose*", "*_relu", "*"])
def test_switched_off(pattern):
    compiled = function(
        lambda x, w, b: tf.nn.relu(biased(x, w, b)), remap=RemapOptions(disable=[pattern])
    )
    assert_same(compiled(X, W, B), tf.nn.relu(biased(X, W, B)))
    assert rule_counts(compiled) == (LINEAR if pattern == "*_relu" else {})


@pytest.mark.parametrize("form", ["while_loop", "cond", "autograph", "call"])
def test_other_functions(form):
    """Chains in the bodies of loops, branches and calls."""

    def layer(x, w, b):
        return tf.nn.tanh(biased(x, w, b, tf.shape(x), 1))

    def code(x, w, b):
        if form == "while_loop":
            return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, layer(x, w, b)), (0, x))[
                1
            ]
        if form == "cond":
            return tf.cond(tf.reduce_sum(x) < 1e6, lambda: layer(x, w, b), lambda: x)
        if form == "call":
            return tf.function(layer)(x, w, b)
        for _ in tf.range(3):
            x = layer(x, w, b)
        return x

    args = values((2, 5, 6, 3), (3, 3, 3, 3), (3,))
    args[1] /= 5
    compiled = function(code)
    with plain():
        assert_same(compiled(*args), tf.function(code)(*args), units=512)
    assert rule_counts(compiled) == {"conv2d_transpose_bias_tanh": 1}
    assert op_counts(compiled.get_concrete_function(*args))[OP] == 1


def test_gradient_through_a_loop():
    """Which may be stock's."""

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = tf.while_loop(
                lambda i, x: i < 3,
                lambda i, x: (i + 1, tf.nn.tanh(biased(x, w, b, tf.shape(x), 1))),
                (0, x),
            )[1]
        return y, tape.gradient(y, [x, w, b])

    args = values((2, 5, 6, 3), (3, 3, 3, 3), (3,))
    args[1] /= 5
    compiled = function(step)
    with plain():
        scaled(compiled(*args), tf.function(step)(*args), units=1024)


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
    (op,) = found(compiled, OP, X, W, B)
    assert [other.type for other in op.control_inputs] == ["AssignAddVariableOp"]
    assert op.graph.get_operation_by_name("Identity").control_inputs == [op]
    assert state.numpy() == 1.0


def test_shape_that_is_made_of_another_chain():
    """The vector that tells the shape may itself depend on what is fused."""

    def chain(x, w, b):
        y = tf.nn.relu(biased(x, w, b, batched(x)))
        factor = tf.cast(tf.reduce_max(y) > -1.0, tf.int32)
        shape = factor * tf.shape(y)
        return tf.nn.tanh(biased(x, w, b, tf.stack([shape[0], shape[1], shape[2], 5])))

    rules = {RELU: 1, "conv2d_transpose_bias_tanh": 1}
    compare(chain, [X, W, B], [(None, 3, 4, 3), *IMAGE[1:3]], rules)


def test_ports_are_kept():
    """Operands that are second outputs of their ops."""

    def chain(x, w, b, s):
        x = tf.split(tf.concat([x, -x], 0), 2)[1]
        w = tf.unstack(tf.stack([w, -w]))[1]
        b = tf.split(tf.concat([b, -b], 0), 2)[1]
        shape = tf.split(tf.concat([tf.shape(x), tf.shape(s)], 0), 2)[1]
        return tf.nn.relu(biased(x, w, b, tf.ensure_shape(shape, [4])) + tf.split(s, 1)[0])

    check(chain, [X, W, B, S], {"conv2d_transpose_bias_add_relu": 1})


PORTABLE = {
    "image": lambda x, w, b: tf.nn.relu(biased(x, w, b)),
    "pre-activation is kept": lambda x, w, b: tf.nn.silu(biased(x, w, b)),
    "sizes": lambda x, w, b: tf.nn.elu(biased(x, w, b, batched(x))),
    "no bias": lambda x, w, b: tf.nn.sigmoid(transposed(x, w)) * b,
    "side": lambda x, w, b: tf.tanh(biased(x, w, b) + tf.sin(biased(x, 2.0 * w, b))),
    "padded": lambda x, w, b: tf.nn.relu6(
        biased(x, w, b, (2, 5, 6, 5), 2, [[0, 0], [1, 1], [2, 1], [0, 0]])
    ),
    "leaky": lambda x, w, b: tf.nn.leaky_relu(biased(x, w, b), -0.3),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", PORTABLE)
def test_portable(name, gradient, tmp_path):
    code = PORTABLE[name]
    check_portable(step_of(code) if gradient else code, [X, W, B], tmp_path)
    kinds = {OP.removeprefix("TfFusedOps>"): 1 + (name == "side")}
    found_ops = fused_ops(tmp_path / "fused")
    assert {kind: found_ops[kind] for kind in kinds} == kinds
    assert any(kind.endswith("TransposeBiasActGrad") for kind in found_ops) == gradient
    assert fused_ops(tmp_path / "portable") == {}
    assert {kind: fused_ops(tmp_path / "again")[kind] for kind in kinds} == kinds


def test_portable_line(tmp_path):
    def chain(x, w, b):
        return tf.nn.silu(tf.nn.bias_add(line(x, w), b))

    check_portable(step_of(chain), values(*LINE[:3]), tmp_path)
    assert fused_ops(tmp_path / "portable") == {}


LOAD_WITHOUT_US = """
import sys
import numpy as np, tensorflow as tf
path, given = sys.argv[1:]
x, y = (tf.constant(v) for v in np.load(given).values())
model = tf.saved_model.load(path)
found = model.serve(x)
np.testing.assert_allclose(found, y, rtol=1e-4, atol=1e-5)
assert not any(name.startswith("tf_fused_ops") for name in sys.modules)
"""


def test_keras_export(tmp_path, run_python):
    """Rewritten, made portable and read without this package, and rewritten again."""
    keras.utils.set_random_seed(0)
    model = u_net()
    (x,) = values((2, 8, 12, 2))
    expected = model(x)
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable", "again")]
    model.export(paths[0], verbose=False)
    # Sizes that are not known: those of what is added may be others.
    rules = {
        "conv2d_bias_relu": 3,
        "conv2d_transpose_bias_relu": 1,
        "conv2d_transpose_bias": 1,
        "conv2d_bias_sigmoid": 1,
    }
    assert Report.of_all(convert(*paths[:2])).counts() == rules
    convert(*paths[1:3], to_stock=True)
    assert Report.of_all(convert(*paths[2:])).counts() == rules
    transposes = [fused_ops(path).get("Conv2DTransposeBiasAct", 0) for path in paths]
    assert transposes == [0, 2, 0, 2]
    for path in paths:
        loaded = tf.saved_model.load(path)
        assert_same(loaded.serve(x), expected, units=256)
    np.savez(tmp_path / "given.npz", x=x, y=expected)
    run_python(LOAD_WITHOUT_US, paths[2], str(tmp_path / "given.npz"), PYTHONPATH="")


def test_outer_tape_after_loading(tmp_path):
    """Of the stock, the fused and the portable one."""
    module = tf.Module()
    signature = [tf.TensorSpec([None, *IMAGE[0][1:]]), *map(tf.TensorSpec, IMAGE[1:3])]
    module.fn = tf.function(
        lambda x, w, b: (
            tf.nn.mish(biased(x, w, b, batched(x)))
            if hasattr(tf.nn, "mish")
            else tf.nn.elu(biased(x, w, b, batched(x)))
        ),
        input_signature=signature,
    )
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable")]
    tf.saved_model.save(module, paths[0])
    convert(*paths[:2])
    convert(*paths[1:], to_stock=True)
    results = [taped(tf.saved_model.load(path).fn, [X, W, B]) for path in paths]
    assert_same(results[1:], [results[0]] * 2, units=512)
    assert fused_ops(paths[1]) == {"Conv2DTransposeBiasAct": 1}


def test_graph_def():
    """Rewritten offline, and twice; the outputs keep their names."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, *IMAGE[0][1:]], name="x")
        w, b = W.numpy(), B.numpy()
        y = tf.nn.relu(biased(x, w, b, batched(x)))
        tf.nn.tanh(transposed(y, w.transpose(0, 1, 3, 2), [2, 12, 16, 3]), name="end")
    source = graph.as_graph_def()
    untouched = source.SerializeToString()
    result = remap(source)
    assert source.SerializeToString() == untouched
    assert result.report.counts() == {RELU: 1, "conv2d_transpose_tanh": 1}
    assert counts(result.graph_def)[OP] == 2
    assert not counts(result.graph_def).keys() & {"Conv2DBackpropInput", "BiasAdd", "Tanh"}
    assert result.outputs == ("end:0",)
    given = {"x:0": X.numpy()}
    assert_same(run(result.graph_def, given, ["end:0"]), run(source, given, ["end:0"]), units=512)
    twice = remap(result.graph_def)
    assert twice.report.fused == []
    assert counts(twice.graph_def) == counts(result.graph_def)
    assert remap(source, options=RemapOptions(disable=["*transpose*"])).report.fused == []


def test_concrete_function():
    """With gradients, traced without the decorator."""

    @tf.function
    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = tf.nn.silu(biased(x, w, b))
        return y, tape.gradient(y, [x, w, b])

    concrete = step.get_concrete_function(X, W, B)
    result = remap(concrete)
    assert result.report.counts() == {"conv2d_transpose_bias_silu": 1}
    assert counts(result.graph_def)[GRAD] >= 1
    given = dict(zip((t.name for t in concrete.inputs), (X, W, B), strict=True))
    found_values = run(result.graph_def, given, result.outputs)
    assert_same(found_values, tf.nest.flatten(step(X, W, B)), units=512)


class Program:
    """A random program of convolutions, transposed ones and what may be around them.

    Attributes:
        lines: What the program does, one step each.
        args: Its arguments: an image, and the filters and biases in the order of their use.
    """

    ACTS = (tf.nn.relu, tf.tanh, tf.nn.silu, tf.nn.elu, tf.nn.gelu, tf.identity, tf.exp)

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.lines, self.steps = [], []
        self.sizes, self.channels = [(3, 4)], [3]
        self.shapes = [(2, 3, 4, 3)]
        for _ in range(self.random.integers(2, 6)):
            self.add_layer()
        self.penalty = bool(self.random.integers(4) == 0)
        self.known_batch = bool(self.random.integers(2))

    def choose(self, *options):
        return options[self.random.integers(len(options))]

    def add_layer(self):
        source = self.choose(*range(len(self.sizes)))
        size, inner = self.sizes[source], self.channels[source]
        up = self.random.integers(4) > 0
        stride, window = self.choose((1, 1), (1, 3), (2, 3), (2, 4), (3, 5))
        outer = self.choose(2, 3, 5)
        if up:
            image = tuple(n * stride - int(self.random.integers(stride)) for n in size)
            filters = (window, window, outer, inner)
        else:
            image = tuple(-(-n // stride) for n in size)
            filters = (window, window, inner, outer)
        if max(image) > 14:
            return
        alike = [
            i
            for i, other in enumerate(zip(self.sizes, self.channels, strict=True))
            if other == (image, outer)
        ]
        step = {
            "up": bool(up),
            "source": source,
            "image": image,
            "outer": outer,
            "stride": stride,
            "filters": self.place(filters),
            "bias": self.place((outer,)) if self.random.integers(4) else None,
            "bias_op": self.choose("bias_add", "plus", "bias first", "raw add"),
            "side": self.choose(*alike, None) if alike else None,
            "sum": self.choose(*ADDITIONS),
            "act": int(self.random.integers(len(self.ACTS))),
            "sizes": self.choose("constants", "batch", "of the side", "two"),
            "leak": self.choose(*[None] * 5, "product", "sum", "shape"),
        }
        self.steps.append(step)
        self.lines.append(repr(step))
        self.sizes.append(image)
        self.channels.append(outer)

    def place(self, shape):
        """Returns the place of an argument: a new one, or an old one of the same shape."""
        old = [i for i, other in enumerate(self.shapes) if other == shape and i]
        if old and self.random.integers(2):
            return self.choose(*old)
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def args(self):
        return [v / 3 if len(v.shape) == 4 and i else v for i, v in enumerate(values(*self.shapes))]

    def signature(self):
        known = self.shapes[0] if self.known_batch else (None, *self.shapes[0][1:])
        return [tf.TensorSpec(known), *map(tf.TensorSpec, self.shapes[1:])]

    def product(self, step, x, w, side):
        if not step["up"]:
            return tf.nn.conv2d(x, w, step["stride"], "SAME")
        sizes = (*step["image"], step["outer"])
        shape = {
            "constants": [2, *sizes] if self.known_batch else batched(x, sizes),
            "batch": batched(x, sizes),
            "of the side": batched(x, sizes) if side is None else tf.shape(side),
            "two": step["image"],
        }[step["sizes"]]
        strides = [1, step["stride"], step["stride"], 1]
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=shape, filter=w, out_backprop=x, strides=strides, padding="SAME"
        )

    def __call__(self, *args):
        values_of, leaked = [args[0]], []
        for step in self.steps:
            side = None if step["side"] is None else values_of[step["side"]]
            z = self.product(step, values_of[step["source"]], args[step["filters"]], side)
            if step["leak"] == "product":
                leaked.append(tf.reduce_sum(z))
            if step["bias"] is not None:
                z = BIASES[step["bias_op"]](z, args[step["bias"]])
            if side is not None:
                z = ADDITIONS[step["sum"]](z, side)
            if step["leak"] == "sum":
                leaked.append(tf.reduce_max(z))
            if step["leak"] == "shape":
                leaked.append(tf.cast(tf.reduce_sum(tf.shape(z)), z.dtype))
            act = self.ACTS[step["act"]]
            values_of.append(
                tf.tanh(z) * act(tf.clip_by_value(z, -2, 2)) if act is tf.exp else act(z)
            )
        return values_of[1:], leaked

    def loss(self, *args):
        outputs, leaked = self(*args)
        return sum(tf.reduce_mean(tf.sin(y)) for y in outputs) + 0.01 * sum(leaked)

    def step(self, *args):
        with tf.GradientTape() as outer:
            outer.watch(args)
            with tf.GradientTape() as inner:
                inner.watch(args[0])
                loss = self.loss(*args)
            if self.penalty:
                loss += tf.reduce_mean(inner.gradient(loss, args[0]) ** 2)
        return loss, outer.gradient(loss, args, unconnected_gradients="zero")


@pytest.mark.parametrize("block", range(4))
def test_random_programs(block):
    fused = 0
    for seed in range(block * 7, block * 7 + 7):
        program = Program(seed)
        if not program.steps:
            continue
        again = f"python -c 'from test_remapper_conv_transpose import *; reproduce({seed})'"
        text = "\n".join([f"reproduce with: {again}", *program.lines])
        try:
            fused += reproduce(seed)
        except Exception as error:
            raise AssertionError(text) from error
    assert fused > 5


def reproduce(seed):
    """Compares a random program with stock, and returns how often it has a transposed one fused."""
    program = Program(seed)
    args, fused = program.args(), 0
    for code in (program, program.step):
        signature = program.signature()
        with plain():
            expected = tf.function(lambda *a, c=code: c(*a), input_signature=signature)(*args)
            compiled = function(lambda *a, c=code: c(*a), input_signature=signature)
            scaled(compiled(*args), expected, units=4096)
        rules = rule_counts(compiled)
        fused += sum(n for rule, n in rules.items() if "transpose" in rule)
    with plain():
        compiled = function(lambda *a: program.loss(*a), input_signature=program.signature())
        results = [taped(f, args) for f in (compiled, program.loss)]
    scaled([g for g in tf.nest.flatten(results[0]) if g is not None],
           [g for g in tf.nest.flatten(results[1]) if g is not None], units=4096)  # fmt: skip
    return fused
