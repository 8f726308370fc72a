"""Products with weights of few bits in plain TensorFlow code: how the fused op has them."""

import functools

import pytest
import tensorflow as tf
from remapping import (
    FUSED,
    assert_same,
    check,
    check_portable,
    op_counts,
    plain,
    rule_counts,
    taped,
    values,
)
from test_remapper_graph_def import run

from tf_fused_ops import function
from tf_fused_ops.remapper import RemapOptions, remap

OP = FUSED["weight-only product"]
PRODUCT, BIASED = "weight_only_matmul", "weight_only_matmul_bias"
ROWS, DEPTH, COLUMNS, GROUPS = 4, 9, 6, 3


def inputs(dtype="float32", shape=(ROWS, DEPTH), packed=(-(-DEPTH // 2), COLUMNS)):
    """Returns rows, bytes, scales and zeros, and each row's group, which may count from behind."""
    x, numbers, scale, zero = values(shape, packed, (GROUPS, COLUMNS), (GROUPS, COLUMNS))
    packed = tf.cast(tf.clip_by_value(tf.round(numbers * 60), -128, 127), tf.int8)
    group = tf.constant([0, 2, 1, -1, -3, 1, 2, -2, 0])
    return [
        *(tf.cast(x, dtype), packed),
        *(tf.cast(t, dtype) for t in (tf.abs(scale) / 8 + 0.125, tf.round(zero * 2))),
        group,
    ]


def halves(packed, mask=15, shift=4):
    """Returns the lower and the upper bits of bytes."""
    mask, shift = (tf.cast(t, packed.dtype) for t in (mask, shift))
    upper = tf.bitwise.bitwise_and(tf.bitwise.right_shift(packed, shift), mask)
    return tf.bitwise.bitwise_and(packed, mask), upper


def signed(half, eight=8, other=None, minus=tf.subtract):
    eight, other = (tf.cast(t, half.dtype) for t in (eight, other or eight))
    return minus(tf.bitwise.bitwise_xor(half, eight), other)


def cut(both, size=DEPTH):
    return both[:size]


def interleaved(lower, upper, cut=cut, axis=1, as_type=None):
    """Returns the rows of both in turn."""
    as_type = as_type or lower.dtype
    both = tf.stack([tf.cast(lower, as_type), tf.cast(upper, as_type)], axis)
    return cut(tf.reshape(both, [-1, lower.shape[1]]))


def integers_of(packed, size=DEPTH):
    """Returns the integers of which two are in a byte, one below the other."""
    both = halves(packed)
    both = map(signed, both) if packed.dtype == tf.int8 else both
    return interleaved(*both, functools.partial(cut, size=size))


def beside(packed, size=DEPTH):
    """Returns the integers of which two are in a byte, one beside the other."""
    return tf.transpose(integers_of(tf.transpose(packed), size))


def wrapped(group):
    """Returns groups of which negative ones count from behind, as `keras.ops.take` has them."""
    return tf.where(group < 0, group + GROUPS, group)


def dequantized(q, scale, zero, group, axis=0):
    group = wrapped(group)
    s, z = (tf.gather(t, group, axis=axis) for t in (scale, zero))
    return (q - z) * s


def chain(integers=integers_of, numbers=dequantized, multiply=tf.matmul):
    """Returns the code of a product with numbers made of integers that are made of bytes."""

    def code(x, packed, scale, zero, group):
        q = tf.cast(integers(packed), scale.dtype)
        return multiply(x, numbers(q, scale, zero, group))

    return code


def columnwise(integers=integers_of, multiply=tf.matmul, divide=tf.divide):
    """Returns the code of a product with integers that is divided by the columns' scales."""

    def code(x, packed, scale):
        return divide(multiply(x, tf.cast(integers(packed), x.dtype)), scale)

    return code


def the_bits(concrete):
    """Returns the `bits` of all fused ops of a ConcreteFunction."""
    ops = (op for op in concrete.graph.get_operations() if op.type == OP)
    return [op.get_attr("bits") for op in ops]


def the_op(compiled):
    graph = compiled.get_concrete_function().graph
    (op,) = (op for op in graph.get_operations() if op.type == OP)
    return op


def behind(q, scale, zero, group):
    """Transposes numbers, as GPTQ has them."""
    return tf.transpose(dequantized(q, *map(tf.transpose, (scale, zero)), group, axis=-1))


def dense(tensors):
    """Returns tensors where gradients are slices."""
    return tf.nest.map_structure(lambda t: t if t is None else tf.convert_to_tensor(t), tensors)


def as_bytes(packed):
    return packed


def in_heads(x, w):
    return tf.reshape(tf.matmul(x, w), [-1, 2, 2, 3])


def tensordot(x, w):
    return tf.tensordot(x, w, 1)


def by_rows(q, scale, zero, group):
    """Divides by what rows of inputs would be multiplied with."""
    divisor = tf.gather(scale[:, 0], wrapped(group))
    return dequantized(q, scale, zero, group) / tf.expand_dims(divisor, -1)


def identities(packed):
    """Has ops between that do nothing."""
    return tf.transpose(integers_of(tf.transpose(packed, [0, 1])), [0, 1])


BATCH = (2, 2, DEPTH)
SIDE = {"packed": (DEPTH, COLUMNS // 2)}
# The code, the sizes of its arguments, the rule; the op's transpose_b, packed_axis and bits.
FORMS = {
    "one below the other": (chain(), {}, PRODUCT, (False, 0, 4)),
    "one beside the other": (
        chain(functools.partial(beside, size=COLUMNS)),
        SIDE,
        PRODUCT,
        (False, 1, 4),
    ),
    "transposed before": (
        chain(lambda p: tf.transpose(integers_of(p, COLUMNS))),
        {"packed": (COLUMNS // 2, DEPTH)},
        PRODUCT,
        (True, 0, 4),
    ),
    "transposed before, one beside the other": (
        chain(lambda p: integers_of(tf.transpose(p))),
        {"packed": (COLUMNS, 5)},
        PRODUCT,
        (True, 1, 4),
    ),
    "transposed behind": (
        chain(lambda p: integers_of(p, COLUMNS), behind),
        {"packed": (COLUMNS // 2, DEPTH)},
        PRODUCT,
        (True, 0, 4),
    ),
    "in their own order": (chain(identities), {}, PRODUCT, (False, 0, 4)),
    "bytes": (chain(as_bytes), {"packed": (DEPTH, COLUMNS)}, PRODUCT, (False, 0, 8)),
    "bytes transposed": (
        chain(tf.transpose),
        {"packed": (COLUMNS, DEPTH)},
        PRODUCT,
        (True, 0, 8),
    ),
    "divided by rows": (chain(numbers=by_rows), {}, PRODUCT, (False, 0, 4)),
    "batches": (chain(), {"shape": BATCH}, "weight_only_batch_matmul", (False, 0, 4)),
    "tensordot": (
        chain(multiply=tensordot),
        {"shape": BATCH},
        "weight_only_dense",
        (False, 0, 4),
    ),
    "heads": (chain(multiply=in_heads), {"shape": BATCH}, "weight_only_heads", (False, 0, 4)),
    "rank 6": (
        chain(),
        {"shape": (2, 1, 1, 2, 1, DEPTH)},
        "weight_only_batch_matmul",
        (False, 0, 4),
    ),
    "no rows": (chain(), {"shape": (0, DEPTH)}, PRODUCT, (False, 0, 4)),
}


def with_bias(code, activation):
    return lambda *args: activation(code(*args[:-1]) + args[-1])


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    code, sizes, rule, told = FORMS[name]
    args = inputs(**sizes)
    compiled = check(code, args, {rule: 1}, unknown_batch=[0])
    op = the_op(compiled)
    assert tuple(map(op.get_attr, ("transpose_b", "packed_axis", "bits"))) == told
    assert op.inputs[1].op.type == "Placeholder"
    assert op.get_attr("num_zero") == op.get_attr("num_group") == 1
    (bias,) = values((2, 3) if name == "heads" else (COLUMNS,), seed=1)
    added = with_bias(code, tf.nn.gelu)
    check(added, [*args, bias], {f"{rule}_bias_gelu_erf": 1}, unknown_batch=[0])


@pytest.mark.parametrize("name", FORMS)
def test_gradients(name):
    """Those of stock: of inputs, scales and zeros; also where the pass is traced with the rest."""
    code, sizes, rule, _ = FORMS[name]
    (bias,) = values((2, 3) if name == "heads" else (COLUMNS,), seed=1)
    x, packed, scale, zero, group = inputs(**sizes)
    sources = [x, scale, zero, bias]

    def forward(x, scale, zero, bias):
        return tf.nn.relu(code(x, packed, scale, zero, group) + bias)

    compiled = function(forward)
    inside = function(lambda *args: dense(taped(forward, args)))
    with plain():
        expected = dense(taped(tf.function(forward), sources))
        for found in (dense(taped(compiled, sources)), inside(*sources)):
            assert_same(found, expected, units=256)
    assert rule_counts(compiled) == {f"{rule}_bias_relu": 1}
    # That of tensordot reads what is inside.
    assert (f"{rule}_bias_relu" in rule_counts(inside)) == (name != "tensordot")


def inverse(x, packed, scale):
    """Divides the numbers instead."""
    return tf.matmul(x, tf.cast(integers_of(packed), x.dtype) / scale)


def bytes_in_heads(packed):
    return tf.reshape(packed, [DEPTH, COLUMNS])


# The code, the sizes of its arguments, the rule, the op's bits.
COLUMNWISE = {
    "matrices": (columnwise(), {}, PRODUCT, 4),
    "bytes": (columnwise(as_bytes), {"packed": (DEPTH, COLUMNS)}, PRODUCT, 8),
    "bytes of heads": (columnwise(bytes_in_heads), {"packed": (DEPTH, 2, 3)}, PRODUCT, 8),
    "divided before": (inverse, {}, PRODUCT, 4),
    "batches": (columnwise(), {"shape": BATCH}, "weight_only_batch_matmul", 4),
    "tensordot": (
        columnwise(multiply=tensordot),
        {"shape": BATCH},
        "weight_only_dense",
        4,
    ),
}


def columnwise_inputs(dtype="float32", **sizes):
    x, packed, scale, *_ = inputs(dtype, **sizes)
    return x, packed, scale[0] * 4


@pytest.mark.parametrize("name", COLUMNWISE)
def test_scales_of_columns(name):
    code, sizes, rule, bits = COLUMNWISE[name]
    args = columnwise_inputs(**sizes)
    compiled = check(code, args, {rule: 1}, unknown_batch=[0])
    assert the_bits(compiled.get_concrete_function()) == [bits]
    x, packed, scale = args
    (bias,) = values((COLUMNS,), seed=1)
    added = with_bias(code, tf.nn.silu)
    check(added, [*args, bias], {f"{rule}_bias_silu": 1}, unknown_batch=[0])

    def forward(x, scale, bias):
        return added(x, packed, scale, bias)

    sources = [x, scale, bias]
    assert_same(taped(function(forward), sources), taped(forward, sources), units=256)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["matrices", "bytes", "batches", "tensordot"])
def test_half_precision(name, dtype):
    code, sizes, rule, _ = COLUMNWISE[name]
    check(code, columnwise_inputs(dtype, **sizes), {rule: 1}, units=4)
    code, sizes, rule, _ = FORMS[name.replace("matrices", "one below the other")]
    check(code, inputs(dtype, **sizes), {rule: 1}, units=4)


@pytest.mark.parametrize("name", ["one below the other", "one beside the other", "bytes"])
def test_constant_weights(name):
    code, sizes, rule, told = FORMS[name]
    x, *others = inputs(**sizes)
    constants = [t.numpy() for t in others]
    compiled = check(lambda x: code(x, *map(tf.constant, constants)), [x], {rule: 1})
    assert the_bits(compiled.get_concrete_function()) == [told[2]]


def test_one_table_for_two_products():
    def code(x, packed, scale, zero, group):
        w = dequantized(tf.cast(integers_of(packed), x.dtype), scale, zero, group)
        return tf.nn.relu(tf.matmul(x, w)), tf.matmul(x + 1, w), tf.reduce_sum(w)

    rules = {"weight_only_matmul_relu": 1, PRODUCT: 1, "dequantized_weights": 1}
    compiled = check(code, inputs(), rules)
    assert the_bits(compiled.get_concrete_function()) == [4, 4]


def in_a_loop(x, packed, scale, zero, group):
    code = chain()
    return tf.while_loop(
        lambda i, x: i < 3,
        lambda i, x: (i + 1, x + tf.pad(code(x, packed, scale, zero, group), [[0, 0], [0, 3]]) / 9),
        (tf.constant(0), x),
    )[1]


def test_loop():
    compiled = check(in_a_loop, inputs(), {PRODUCT: 1})
    assert not op_counts(compiled.get_concrete_function())["MatMul"]


def test_switched_off():
    x, *others = inputs()
    for disabled, rules in (
        (["weight_only*"], {"matmul_bias_relu": 1, "dequantized_weights": 1}),
        (["weight_only_matmul_bias*", "dequantized*"], {"matmul_bias_relu": 1}),
        (["matmul*"], {"weight_only_matmul_bias_relu": 1}),
    ):
        code = with_bias(chain(), tf.nn.relu)
        compiled = function(code, remap=RemapOptions(disable=disabled))
        args = [x, *others, *values((COLUMNS,))]
        assert_same(compiled(*args), code(*args))
        assert rule_counts(compiled) == rules


@pytest.mark.parametrize("name", ["one beside the other", "tensordot", "heads"])
def test_portable_conversion(name, tmp_path):
    code, sizes, *_ = FORMS[name]
    check_portable(code, inputs(**sizes), tmp_path)


def test_graph_def():
    code, args = with_bias(chain(), tf.nn.relu), [*inputs(), *values((COLUMNS,))]
    concrete = tf.function(code).get_concrete_function(*args)
    result = remap(concrete)
    assert result.report.counts() == {f"{BIASED}_relu": 1}
    given = dict(zip((t.name for t in concrete.inputs), args, strict=True))
    assert_same(run(result.graph_def, given, result.outputs), [code(*args)])


def lookup(packed, indices, dtype=tf.float32):
    return tf.cast(tf.gather(beside(packed, COLUMNS), indices), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("indices", [3, [8, 0, 3], [[1, 1], [7, 2]], [], [[]]], ids=str)
def test_lookup(indices, dtype):
    _, packed, *_ = inputs(**SIDE)
    indices = tf.constant(indices, tf.int64)
    code = functools.partial(lookup, dtype=dtype)
    for spec in (indices.shape, [None] * indices.shape.rank):
        signature = [tf.TensorSpec(packed.shape, tf.int8), tf.TensorSpec(spec, tf.int64)]
        compiled = function(code, input_signature=signature)
        found, expected = compiled(packed, indices), lookup(packed, indices, dtype)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        tf.debugging.assert_equal(found, expected)
        assert rule_counts(compiled) == {"packed_lookup": 1}
        gathers = op_counts(compiled.get_concrete_function())["GatherV2"]
        assert gathers == 1
