"""Products with weights of few bits in unusual places: what reads, writes or surrounds them."""

import functools

import pytest
import tensorflow as tf
from remapping import assert_same, check, op_counts, plain, reasons, rule_counts, taped, values
from test_remapper_weight_only_forms import (
    COLUMNS,
    DEPTH,
    OP,
    PRODUCT,
    beside,
    chain,
    columnwise,
    columnwise_inputs,
    dense,
    dequantized,
    halves,
    inputs,
    integers_of,
    interleaved,
    lookup,
    signed,
    the_bits,
)
from test_remapper_weight_only_refusals import compare

from tf_fused_ops import function


def parts(x, packed, scale, zero, group):
    """Returns what is between the bytes and the result, and that."""
    lower, upper = map(signed, halves(packed))
    q = interleaved(lower, upper)
    w = dequantized(tf.cast(q, x.dtype), scale, zero, group)
    return {"lower halves": lower, "upper halves": upper, "integers": q, "numbers": w}, x @ w


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "read"])
@pytest.mark.parametrize("name", ["lower halves", "upper halves", "integers", "numbers"])
def test_value_of_weights_that_is_used(name, returned):
    """They are made for that, but the product needs none of them."""

    def code(*args):
        inside, y = parts(*args)
        return tf.nn.relu(y), inside[name] if returned else tf.cast(inside[name], tf.float64) + 1

    compiled = function(code)
    for found, expected in zip(compiled(*inputs()), code(*inputs()), strict=True):
        assert_same(tf.cast(found, tf.float32), tf.cast(expected, tf.float32))
    made = {"dequantized_weights": 1} if name == "numbers" else {}
    assert rule_counts(compiled) == {f"{PRODUCT}_relu": 1} | made
    assert the_bits(compiled.get_concrete_function(*inputs())) == [4]


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "read"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_product_that_is_used(activation, returned):
    """Before it is divided it is stock's; before the activation it is fused without that."""

    def code(x, packed, scale, *, after):
        first = []

        def divide(z, scale):
            first.extend([z, z / scale])
            return z / scale

        z = columnwise(divide=divide)(x, packed, scale)
        y, inside = getattr(tf.nn, activation)(z), z if after else first[0]
        return y, inside if returned else tf.exp(inside / 100)

    alone = {"act_gelu_erf": 1} if activation == "gelu" else {}
    args = columnwise_inputs()
    compiled = check(functools.partial(code, after=True), args, {PRODUCT: 1} | alone)
    reason = "is an output of the graph" if returned else "is also used by"
    name = activation.replace("gelu", "gelu_erf")
    assert reason in reasons(compiled)[f"{PRODUCT}_{name}"]
    compiled = check(functools.partial(code, after=False), args, alone)
    assert reason in reasons(compiled)[PRODUCT]


def assigned_between(v, new):
    lower, _ = halves(v)
    v.assign(new)
    return interleaved(signed(lower), signed(halves(v)[1]))


def assigned_between_all(v, new):
    """Reads the variable thrice."""
    mask, four = (tf.constant(i, tf.int8) for i in (15, 4))
    lower = tf.bitwise.bitwise_and(v.read_value(), mask)
    v.assign_add(new)
    upper = tf.bitwise.bitwise_and(tf.bitwise.right_shift(v.read_value(), four), mask)
    v.assign(new)
    return interleaved(signed(lower), signed(upper))


def assigned_if(v, new):
    lower, _ = halves(v)
    tf.cond(new[0, 0] < 100, lambda: v.assign(new), lambda: v)
    return interleaved(signed(lower), signed(halves(v)[1]))


def assigned_in_a_loop(v, new):
    lower, _ = halves(v)
    for _ in tf.range(2):
        v.assign_add(new)
    return interleaved(signed(lower), signed(halves(v)[1]))


def assigned_in_a_function(v, new):
    inner = tf.function(lambda: v.assign(new))
    lower, _ = halves(v)
    inner()
    return interleaved(signed(lower), signed(halves(v)[1]))


def assigned_in_part(v, new):
    lower, _ = halves(v)
    v.scatter_nd_update([[0], [2]], new[:2])
    return interleaved(signed(lower), signed(halves(v)[1]))


def assigned_by_another_name(v, new):
    handle = tf.identity(v.handle)
    lower, _ = halves(v)
    tf.raw_ops.AssignVariableOp(resource=handle, value=new)
    return interleaved(signed(lower), signed(halves(v)[1]))


def assigned_first(v, new):
    lower, _ = halves(v)
    with tf.control_dependencies([lower]):
        v.assign(new)
    with tf.control_dependencies([v.assign_add(new)]):
        _, upper = halves(v)
    return interleaved(signed(lower), signed(upper))


def assigned_before(v, new):
    v.assign(new)
    return interleaved(*map(signed, halves(v)))


def assigned_after(v, new):
    q = interleaved(*map(signed, halves(v)))
    v.assign(new)
    return q


def read_once(v, new):
    """Of which the value of before stays."""
    packed = v.read_value()
    lower, _ = halves(packed)
    v.assign(new)
    return interleaved(signed(lower), signed(halves(packed)[1]))


def waiting(v, new):
    """Reads once more behind something that does not matter."""
    lower, _ = halves(v)
    with tf.control_dependencies([tf.reduce_sum(tf.cast(new, tf.int32))]):
        return interleaved(signed(lower), signed(halves(v)[1]))


# Code that makes integers of a variable, and of how many bits those are that the op gets.
ASSIGNED = {
    assigned_between: 8,
    assigned_between_all: 8,
    assigned_if: 8,
    assigned_in_a_loop: 8,
    assigned_in_a_function: 8,
    assigned_in_part: 8,
    assigned_by_another_name: 8,
    assigned_first: 8,
    assigned_before: 4,
    assigned_after: 4,
    read_once: 4,
    waiting: 8,
}


@pytest.mark.parametrize("integers", ASSIGNED, ids=lambda f: f.__name__)
def test_variable_that_is_assigned(integers):
    x, packed, scale = columnwise_inputs()
    new = tf.roll(packed, 1, 0) // 3
    results = []
    for decorator in (tf.function, function):
        v = tf.Variable(packed)

        @decorator
        def code(x, scale, new, v=v):
            return tf.nn.relu(columnwise(lambda new: integers(v, new))(x, new, scale))

        with plain():
            results.append([code(x, scale, new), code(x, scale, new), tf.cast(v, tf.float32)])
    assert_same(*results[::-1])
    assert rule_counts(code) == {f"{PRODUCT}_relu": 1}
    assert the_bits(code.get_concrete_function(x, scale, new)) == [ASSIGNED[integers]]


def test_two_variables():
    """Whose values happen to be the same."""
    x, packed, scale = columnwise_inputs()
    first, second = tf.Variable(packed), tf.Variable(packed)

    def code(x, scale):
        integers = interleaved(signed(halves(first)[0]), signed(halves(second)[1]))
        return columnwise(lambda _: integers)(x, None, scale)

    compiled = compare(code, [x, scale], [8])
    second.assign(packed + 1)
    assert_same(compiled(x, scale), code(x, scale))


def test_variable_of_a_table():
    """Its rows are those of before."""
    _, packed, *_ = inputs(packed=(DEPTH, COLUMNS // 2))
    indices = tf.constant([1, 8, 1])
    results = []
    for decorator in (tf.function, function):
        v = tf.Variable(packed)

        @decorator
        def code(indices, v=v):
            rows = lookup(v, indices)
            v.assign_add(v)
            return rows, lookup(v, indices)

        results.append([code(indices), code(indices)])
    assert_same(*results)
    assert rule_counts(code) == {"packed_lookup": 2}


@pytest.mark.parametrize("on", ["inputs", "numbers", "product"])
def test_control_dependencies(on):
    """They are kept."""
    x, packed, scale = columnwise_inputs()
    told = tf.Variable(0)

    def code(x, packed, scale):
        x, q = tf.identity(x), tf.cast(integers_of(packed), x.dtype)
        if on == "numbers":
            with tf.control_dependencies([told.assign_add(1)]):
                q = tf.cast(integers_of(packed), x.dtype)
        z = tf.matmul(x, q)
        with tf.control_dependencies([told.assign_add(1) if on == "inputs" else z]):
            z = z / scale
        if on == "product":
            with tf.control_dependencies([z]):
                told.assign_add(1)
        return tf.nn.relu(z)

    compiled = function(code)
    for i in range(1, 3):
        assert_same(compiled(x, packed, scale), tf.nn.relu(columnwise()(x, packed, scale)))
        assert told.numpy() == i
    fused = the_bits(compiled.get_concrete_function(x, packed, scale))
    assert fused == [4] or reasons(compiled)[f"{PRODUCT}_relu"]


# What is not known of which argument, and the bits of the fused ops.
UNKNOWN = {
    "rank of rows": (0, None, []),
    "rows": (0, (None, DEPTH), [4]),
    "depth of rows": (0, (None, None), [4]),
    "depth of weights": (1, (None, COLUMNS), []),
    "rank of scales": (2, None, []),
    "groups of scales": (2, (None, COLUMNS), []),
    "columns of scales": (2, (3, None), []),
    "groups of zeros": (3, (None, COLUMNS), []),
    "columns of zeros": (3, (3, None), []),
    "rank of groups": (4, None, []),
    "groups": (4, (None,), []),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_sizes(name):
    place, shape, bits = UNKNOWN[name]
    args = inputs()
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in args]
    specs[place] = tf.TensorSpec(shape, args[place].dtype)
    code = chain()
    compiled = function(lambda *args: tf.nn.relu(code(*args)), input_signature=specs)
    assert_same(compiled(*args), tf.nn.relu(code(*args)))
    assert the_bits(compiled.get_concrete_function()) == bits, compiled.remap_reports


@pytest.mark.parametrize(
    ("depth", "columns"), [(1, 1), (1, 5), (2, 1), (7, 3), (8, 1), (0, 4), (3, 0)], ids=str
)
@pytest.mark.parametrize("axis", [0, 1])
def test_odd_sizes(axis, depth, columns):
    packed = (-(-depth // 2), columns) if axis == 0 else (depth, -(-columns // 2))
    integers = integers_of if axis == 0 else beside
    unpack = functools.partial(integers, size=columns if axis else depth)
    x, packed, *_ = inputs(shape=(3, depth), packed=packed)
    (scale,) = values((columns,))
    code = columnwise(unpack)
    compiled = function(code)
    assert_same(compiled(x, packed, tf.abs(scale) + 1), code(x, packed, tf.abs(scale) + 1))
    bits = the_bits(compiled.get_concrete_function(x, packed, scale))
    assert bits in ([4], []) if 0 in (depth, columns) else bits == [4]


def doubled(x, packed, scale):
    """Has the form of the gradient of Keras's layers, but another value."""

    @tf.custom_gradient
    def product(x, packed, scale):
        def grad_fn(dy):
            w = tf.cast(integers_of(packed), dy.dtype) / scale
            return 2 * tf.matmul(dy, w, transpose_b=True), None, None

        return columnwise()(x, packed, scale), grad_fn

    return product(x, packed, scale)


def of_rows_alone(x, packed, scale):
    @tf.custom_gradient
    def product(x):
        return columnwise()(x, packed, scale), lambda dy: tf.zeros_like(x) + tf.reduce_sum(dy)

    return product(x)


def of_integers(x, packed, scale):
    """Has the gradient around the product alone, which is divided afterwards."""

    @tf.custom_gradient
    def product(x, packed):
        q = tf.cast(integers_of(packed), x.dtype)
        return tf.matmul(x, q), lambda dy: (tf.matmul(dy, -q, transpose_b=True), None)

    return product(x, packed) / scale


def passed_on(x, packed, scale):
    """Has no gradient of its own at all."""
    return tf.identity_n([columnwise()(x, packed, scale), x, packed, scale])[0]


@pytest.mark.parametrize("code", [doubled, of_rows_alone, of_integers, passed_on])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_other_gradients(code, inside):
    """They stay around what is fused, between that and a bias."""
    x, packed, scale = columnwise_inputs()
    sources = [x, scale, *values((COLUMNS,), seed=1)]

    def forward(x, scale, bias):
        return tf.nn.relu(code(x, packed, scale) + bias)

    def both(decorator):
        if inside:
            fn = decorator(lambda *args: taped(forward, args))
            return fn, fn(*sources)
        fn = decorator(forward)
        return fn, taped(fn, sources)

    with plain():
        _, expected = both(tf.function)
        compiled, found = both(function)
    assert_same(found, expected)
    graph = compiled.get_concrete_function(*sources).graph
    fused = [op for op in graph.get_operations() if op.type == OP]
    for op in fused:
        assert op.get_attr("activation") == b"none" and not op.get_attr("num_bias")
        assert "IdentityN" in {user.type for user in op.outputs[0].consumers()}
    assert len(fused) == (code is not of_integers and not (inside and code is passed_on))


def test_gradient_through_a_loop():
    """Which stock computes."""
    x, packed, scale, *_ = inputs()

    def code(x, scale):
        def body(i, x):
            y = columnwise()(x, packed, scale[0] * 40)
            return i + 1, x + tf.pad(tf.tanh(y), [[0, 0], [0, DEPTH - COLUMNS]])

        return tf.while_loop(lambda i, x: i < 3, body, (tf.constant(0), x))[1]

    def step(*args):
        return taped(code, args)

    compiled = function(code)
    with plain():
        expected = dense(tf.function(step)(x, scale))
        assert_same(dense(function(step)(x, scale)), expected, units=1024)
        assert_same(dense(taped(compiled, [x, scale])), expected, units=1024)
    assert rule_counts(compiled) == {f"{PRODUCT}_tanh": 1}


def test_on_a_gpu():
    """Where there is no fused op."""

    def code(*args):
        with tf.device("GPU:0"):
            return chain()(*args)

    compiled = function(code)
    compiled.get_concrete_function(*inputs())
    assert rule_counts(compiled) == {}
    assert "has no float32 kernel on GPU" in reasons(compiled)[PRODUCT]


# Of tables: code, and what it is fused to.
TABLES = {
    "columns": lambda p, i: tf.cast(tf.gather(beside(p, COLUMNS), i % 6, axis=1), tf.float32),
    "in batches": lambda p, i: tf.cast(
        tf.gather(beside(p, COLUMNS), tf.tile(i[None] % 6, [DEPTH, 1]), batch_dims=1), tf.float32
    ),
    "packed in columns": lambda p, i: tf.cast(
        tf.gather(integers_of(p[:5, :2], DEPTH), i), tf.float32
    ),
    "transposed": lambda p, i: tf.cast(
        tf.gather(tf.transpose(beside(p, COLUMNS)), i % 6), tf.float32
    ),
    "of bytes": lambda p, i: tf.cast(tf.gather(p, i), tf.float32),
    "of integers": lambda p, i: tf.gather(beside(p, COLUMNS), i),
    "of numbers": lambda p, i: tf.gather(tf.cast(beside(p, COLUMNS), tf.float32), i),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(name):
    """Whose rows are no rows of bytes, or are not cast."""
    _, packed, *_ = inputs(packed=(DEPTH, COLUMNS // 2))
    indices = tf.constant([0, 8, 3, 3])
    compiled = function(TABLES[name])
    found, expected = compiled(packed, indices), TABLES[name](packed, indices)
    tf.debugging.assert_equal(found, expected)
    assert rule_counts(compiled) == {}


def test_rows_that_are_used():
    def code(packed, indices):
        table = beside(packed, COLUMNS)
        rows = tf.gather(table, indices)
        return tf.cast(rows, tf.float32), tf.cast(rows, tf.int32)

    _, packed, *_ = inputs(packed=(DEPTH, COLUMNS // 2))
    compiled = function(code)
    for found, expected in zip(compiled(packed, [1, 7]), code(packed, [1, 7]), strict=True):
        tf.debugging.assert_equal(found, expected)
    assert "is also used by" in reasons(compiled)["packed_lookup"]


@pytest.mark.parametrize("index", [DEPTH, -1])
def test_rows_that_are_not_there(index):
    _, packed, *_ = inputs(packed=(DEPTH, COLUMNS // 2))
    compiled = function(lookup)
    for fn in (lookup, compiled):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{index} is not in"):
            fn(packed, tf.constant([0, index]))
    assert rule_counts(compiled) == {"packed_lookup": 1}


def test_a_table_that_is_used():
    """By a product as well."""

    def code(x, packed, scale, indices):
        table = beside(packed, COLUMNS)
        return x @ (tf.cast(table, x.dtype) / scale), tf.cast(tf.gather(table, indices), x.dtype)

    x, packed, scale = columnwise_inputs(packed=(DEPTH, COLUMNS // 2))
    compiled = check(
        code, [x, packed, scale, tf.constant([2, 5])], {PRODUCT: 1, "packed_lookup": 1}
    )
    # What is left unpacks the rows.
    left = op_counts(compiled.get_concrete_function())
    assert left["RightShift"] == 1 and left["BitwiseAnd"] == 2
