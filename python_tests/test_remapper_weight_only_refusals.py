"""Near relatives of products with weights of few bits, which stay stock's or are right anyway."""

import numpy as np
import pytest
import tensorflow as tf
from remapping import assert_same, plain, reasons, values
from test_remapper_weight_only_forms import (
    COLUMNS,
    DEPTH,
    GROUPS,
    ROWS,
    chain,
    columnwise,
    cut,
    dense,
    dequantized,
    halves,
    inputs,
    interleaved,
    signed,
    the_bits,
    wrapped,
)

from tf_fused_ops import function


def compare(code, args, bits, specs=None, taped=True):
    """Runs code eagerly and fused, if asked for with a tape outside of it as well; asserts equal
    results and gradients, and the bits of the fused ops.

    Returns:
        The decorated function.
    """
    floats = [x for x in args if x.dtype.is_floating]

    def results(fn):
        with tf.GradientTape() as tape:
            tape.watch(floats)
            y = tf.nest.flatten(fn(*args))
        dy = tf.sin(tf.range(np.prod(y[0].shape, dtype=np.float32)))
        dy = tf.cast(tf.reshape(dy, y[0].shape), y[0].dtype)
        return dense((y, tape.gradient(y[0], floats, dy)))

    compiled = function(code, input_signature=specs)
    expected = results(code)
    with plain():
        assert_same(tf.nest.flatten(compiled(*args)), expected[0])
        if taped:
            assert_same(results(compiled), expected)
    assert the_bits(compiled.get_concrete_function(*args)) == bits, compiled.remap_reports
    return compiled


def of_halves(change):
    """Returns code that makes integers of what a function returns for both halves."""
    return lambda packed: interleaved(*change(*map(signed, halves(packed))))


def of_other_bytes(packed):
    lower, _ = halves(packed)
    _, upper = halves(tf.roll(packed, 1, 0))
    return interleaved(signed(lower), signed(upper))


def with_upper(packed, upper):
    """Returns integers of which the lower halves are as they should be."""
    return interleaved(signed(halves(packed)[0]), signed(upper))


def signs_behind(packed):
    return signed(interleaved(*halves(packed)))


def turned(packed):
    both = tf.stack([signed(half) for half in halves(packed)], 1)
    return tf.transpose(tf.reshape(both, [COLUMNS, -1]))[:DEPTH]


def in_pairs(packed):
    """Has both halves beside each other first."""
    both = tf.stack([signed(half) for half in halves(packed)], 1)
    return tf.reshape(tf.reshape(both, [-1, 2 * COLUMNS])[::-1], [-1, COLUMNS])[:DEPTH]


def of_three(packed):
    lower, upper = map(signed, halves(packed))
    return cut(tf.reshape(tf.stack([lower, upper, lower], 1), [-1, COLUMNS]))


def of_wider(packed):
    """Leaves out a column."""
    wider = tf.concat([packed, packed[:, :1]], 1)
    both = tf.stack([signed(half) for half in halves(wider)], 1)
    return tf.reshape(both, [-1, COLUMNS + 1])[:DEPTH, :COLUMNS]


def minus(x, y):
    return y - x


def masked(mask, shift=4):
    return lambda packed: interleaved(*map(signed, halves(packed, mask, shift)))


def shifted_twice(packed):
    return with_upper(packed, halves(tf.bitwise.right_shift(packed, tf.cast(1, tf.int8)))[1])


def cut_by(change):
    return of_halves(lambda lower, upper: (lower, upper, change))


def stacked(axis):
    return of_halves(lambda lower, upper: (lower, upper, cut, axis))


# Integers of int8 of which none are unpacked in the op.
INTEGERS = {
    "a smaller mask": masked(7),
    "a larger mask": masked(31),
    "a mask of many": masked(np.full([5, COLUMNS], 15)),
    "a mask for one half": lambda p: with_upper(p, halves(p, 7)[1]),
    "another shift": masked(15, 3),
    "no shift": masked(15, 0),
    "shifted twice": shifted_twice,
    "shifted, not masked": lambda p: with_upper(p, tf.bitwise.right_shift(p, tf.cast(4, p.dtype))),
    "shifted to the left": lambda p: with_upper(p, tf.bitwise.left_shift(halves(p)[0], [1])),
    "or": lambda p: with_upper(p, tf.bitwise.bitwise_or(halves(p)[1], tf.cast(15, p.dtype))),
    "upper halves first": of_halves(lambda lower, upper: (upper, lower)),
    "lower halves twice": of_halves(lambda lower, upper: (lower, lower)),
    "upper halves twice": of_halves(lambda lower, upper: (upper, upper)),
    "halves of other bytes": of_other_bytes,
    "one after the other": stacked(0),
    "side by side": stacked(2),
    "in rows of another length": turned,
    "in rows of another length for a while": in_pairs,
    "three of each": of_three,
    "cut off in front": cut_by(lambda both: both[1:]),
    "in reverse": cut_by(lambda both: both[::-1][:DEPTH]),
    "cut in reverse": cut_by(lambda both: both[-2::-1]),
    "cut into columns": of_wider,
    "not cut, but padded": cut_by(lambda both: tf.pad(both[:7], [[0, 2], [0, 0]])),
    "no signs": lambda packed: interleaved(*halves(packed)),
    "signs of lower halves": lambda p: interleaved(signed(halves(p)[0]), halves(p)[1]),
    "signs of upper halves": lambda p: interleaved(halves(p)[0], signed(halves(p)[1])),
    "signs behind": signs_behind,
    "signs of three bits": lambda p: interleaved(*(signed(half, 4) for half in halves(p))),
    "other signs": lambda p: interleaved(*(signed(half, 8, 7) for half in halves(p))),
    "signs the other way round": lambda p: interleaved(
        *(signed(half, minus=minus) for half in halves(p))
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    """They are integers anyway."""
    x, packed, scale, *_ = inputs()
    compare(columnwise(INTEGERS[name]), [x, packed, scale[0] * 9], [8], taped=False)


def test_integers_without_sign():
    x, packed, *others = inputs()
    args = [x, tf.bitcast(packed, tf.uint8), *others]
    compare(chain(lambda p: interleaved(*halves(p))), args, [4])
    compare(chain(lambda p: interleaved(*map(signed, halves(p)))), args, [8])
    # Those of one type unpacked as those of the other.
    compare(chain(lambda p: interleaved(*halves(p), as_type=tf.int8)), args, [8])
    compare(chain(lambda p: interleaved(*halves(p), as_type=tf.uint8)), inputs(), [8])


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "int64"])
def test_larger_integers(dtype):
    x, packed, *others = inputs()
    args = [x, tf.cast(packed, dtype), *others]
    compiled = compare(chain(), args, [])
    compare(chain(lambda p: p[:1] + tf.constant(np.arange(DEPTH)[:, None], p.dtype)), args, [])
    assert not reasons(compiled)


def test_computed_masks():
    def code(x, packed, scale, zero, group, mask, shift):
        return chain(masked(mask, shift))(x, packed, scale, zero, group)

    for mask, shift in ((15, 4), (7, 3)):
        compare(code, [*inputs(), *(tf.constant(i, tf.int8) for i in (mask, shift))], [8])


def numbers(change):
    """Returns code in which integers become numbers in a changed way."""
    return chain(numbers=change)


def scaled(difference, scale):
    return difference * scale


def gathered(by_scale=wrapped, by_zero=None, combine=None):
    """Returns code that takes scales and zeros by groups that two functions return."""

    def change(q, scale, zero, group):
        first = by_scale(group)
        second = first if by_zero is None else by_zero(group)
        s, z = tf.gather(scale, first), tf.gather(zero, second)
        return combine(q, s, z) if combine else (q - z) * s

    return numbers(change)


def along_columns(q, scale, zero, group):
    """Takes groups of columns: scales are brought to [depth, groups]."""
    scale, zero = (tf.tile(t[:, :GROUPS], [3, 1]) for t in (scale, zero))
    group = wrapped(group[:COLUMNS])
    return (q - tf.gather(zero, group, axis=1)) * tf.gather(scale, group, axis=1)


def in_batches(q, scale, zero, group):
    """Takes one scale for each number, by rows."""
    scale, zero = (tf.tile(t, [3, 1]) for t in (scale, zero))
    group = wrapped(tf.tile(group[:, None], [1, COLUMNS]))
    s, z = (tf.gather(t, group, axis=1, batch_dims=1) for t in (scale, zero))
    return (q - z) * s


def in_a_column(q, scale, zero, group):
    group = wrapped(group[:, None])
    return (q - tf.gather(zero, group)[:, 0]) * tf.gather(scale, group)[:, 0]


def one_a_row(which):
    def change(q, scale, zero, group):
        group = wrapped(group)
        s, z = (
            t[:, :1] if name in which else t for name, t in zip("sz", (scale, zero), strict=True)
        )
        return (q - tf.gather(z, group)) * tf.gather(s, group)

    return numbers(change)


def truncated(q, scale, zero, group):
    group = wrapped(group)
    zero = tf.cast(tf.cast(tf.gather(zero + 0.5, group), tf.int8), q.dtype)
    return (q - zero) * tf.gather(scale, group)


def rounded(q, scale, zero, group):
    """Has numbers of half precision for a while."""
    return tf.cast(tf.cast(dequantized(q, scale, zero, group), tf.bfloat16), q.dtype)


def wrapped_by(negative=lambda g: g < 0, larger=lambda g: g + GROUPS, else_=lambda g: g):
    return lambda g: tf.where(negative(g), larger(g), else_(g))


def bounded(group):
    return tf.clip_by_value(group, 0, GROUPS - 1)


# Numbers that are no integers less a zero times a scale of their group, or that may not be.
NUMBERS = {
    "groups of scales and others of zeros": gathered(by_zero=lambda g: wrapped(g[::-1])),
    "groups of columns": numbers(along_columns),
    "groups of numbers": numbers(in_batches),
    "groups in a column": numbers(in_a_column),
    "groups clipped": gathered(bounded),
    "groups by their remainder": gathered(lambda g: g % GROUPS),
    "groups wrapped with another size": gathered(
        lambda g: wrapped_by(larger=lambda g: g + GROUPS - 1)(tf.maximum(g, -2))
    ),
    "groups wrapped with another limit": gathered(
        lambda g: wrapped_by(lambda g: g < 1)(tf.minimum(g, -1))
    ),
    "groups wrapped elsewhere": gathered(wrapped_by(larger=lambda g: (g + 1) * 0 + GROUPS - 1)),
    "other groups where they are not negative": gathered(wrapped_by(else_=lambda g: bounded(-g))),
    "groups of 64 bits": gathered(lambda g: wrapped(tf.cast(g, tf.int64))),
    "one scale and one zero a group": one_a_row("sz"),
    "one scale a group": one_a_row("s"),
    "one zero a group": one_a_row("z"),
    "zeros less integers": gathered(combine=lambda q, s, z: (z - q) * s),
    "integers and zeros": gathered(combine=lambda q, s, z: (q + z) * s),
    "integers by scales": gathered(combine=lambda q, s, z: (q - z) / s),
    "scales by integers": gathered(combine=lambda q, s, z: s / (q - z + 0.25)),
    "scaled before": gathered(combine=lambda q, s, z: q * s - z),
    "no scales": gathered(combine=lambda q, s, z: q - z),
    "scaled twice": gathered(combine=lambda q, s, z: (q - z) * s * s),
    "scaled by the difference": gathered(combine=lambda q, s, z: (q - z) * (q - z)),
    "scales as zeros": gathered(combine=lambda q, s, z: (q - s) * (s + z)),
    "scaled by columns as well": gathered(combine=lambda q, s, z: (q - z) * s / s[0]),
    "scaled by rows as well": gathered(combine=lambda q, s, z: (q - z) * s * s[:, :1]),
    "divided by rows that are reshaped": gathered(
        combine=lambda q, s, z: (q - z) * s / tf.reshape(s[:, 0], [-1, 1])
    ),
    "divided by a row": gathered(combine=lambda q, s, z: (q - z) * s / s[:1]),
    "divided by numbers": gathered(combine=lambda q, s, z: (q - z) * s / s),
    "rows by numbers": gathered(combine=lambda q, s, z: tf.expand_dims(s[:, 0], 1) / (q - z + 0.5)),
    "zeros cut to integers": numbers(truncated),
    "rounded": numbers(rounded),
    "negative": gathered(combine=lambda q, s, z: -((q - z) * s)),
    "integers twice": gathered(combine=lambda q, s, z: (q - z) * s + q),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    compare(NUMBERS[name], inputs(), [])


# What is like them and fused: another order, code that has no effect, or no zeros.
SAME = {
    "no zeros": gathered(combine=lambda q, s, z: q * s),
    "groups that are wrapped twice": gathered(by_zero=wrapped),
    "scales first": gathered(combine=lambda q, s, z: s * (q - z)),
    "divided by rows": gathered(combine=lambda q, s, z: (q - z) * s / tf.expand_dims(s[:, 0], 1)),
    "gathered by counting from behind": numbers(
        lambda q, s, z, g: (q - tf.gather(z, wrapped(g), axis=-2)) * tf.gather(s, wrapped(g), -2)
    ),
}


def test_scales_of_one_group():
    """Which are taken for each row, whatever it says."""
    x, packed, scale, zero, group = inputs()
    args = [x, packed, scale[:1], zero[:1], tf.zeros_like(group) - group % 2]

    def change(q, s, z, g):
        g = tf.where(g < 0, g + 1, g)
        return (q - tf.gather(z, g)) * tf.gather(s, g)

    compare(numbers(change), args, [4])


@pytest.mark.parametrize("name", SAME)
def test_numbers_that_are_fused(name):
    compare(SAME[name], inputs(), [4])


PRODUCTS = {
    "weights transposed": lambda x, w: tf.matmul(x[:, :COLUMNS], w, transpose_b=True),
    "weights adjoint": lambda x, w: tf.matmul(x[None, :, :COLUMNS], w, adjoint_b=True),
    "rows transposed": lambda x, w: tf.matmul(tf.tile(x, [3, 1])[:DEPTH], w, transpose_a=True),
    "weights of each batch": lambda x, w: tf.matmul(tf.stack([x, -x]), tf.stack([w, w])),
    "weights in one batch": lambda x, w: tf.matmul(x, w[None]),
    "weights by themselves": lambda x, w: tf.matmul(w, w, transpose_a=True) + tf.reduce_sum(x),
    "a part of them": lambda x, w: tf.matmul(x[:, 1:], w[1:]),
    "in another shape": lambda x, w: tf.matmul(x[:, :COLUMNS], tf.reshape(w, [COLUMNS, DEPTH])),
    "einsum of columns": lambda x, w: tf.raw_ops.Einsum(
        inputs=[x[:, :COLUMNS], w], equation="ac,bc->ab"
    ),
    "einsum of both dimensions": lambda x, w: tf.raw_ops.Einsum(
        inputs=[x[:, :, None] * tf.ones(COLUMNS), w], equation="abc,bc->a"
    ),
    "einsum of a diagonal": lambda x, w: tf.raw_ops.Einsum(
        inputs=[x[:, :COLUMNS], w[:COLUMNS]], equation="ab,bb->ab"
    ),
    "one column": lambda x, w: tf.linalg.matvec(w, x[0], transpose_a=True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    compare(chain(multiply=PRODUCTS[name]), inputs(), [])


def test_double_precision():
    """The op has none."""
    compiled = compare(chain(), inputs("float64"), [])
    assert "has no float64 kernel" in reasons(compiled)["weight_only_matmul"]


def test_groups_that_do_not_count_from_behind():
    *others, group = inputs()
    compare(gathered(tf.identity), [*others, group % GROUPS], [])


@pytest.mark.parametrize("value", [GROUPS, -GROUPS - 1])
def test_groups_that_are_not_there(value):
    *others, group = inputs()
    args = [*others, tf.where(group == 1, value, group)]
    for decorator in (tf.function, function):
        with pytest.raises(tf.errors.InvalidArgumentError):
            decorator(chain())(*args)


COMPUTED = {
    "vector": lambda z, d: z / (d[0] * tf.ones([COLUMNS])),
    "twice": lambda z, d: z / d / d,
    "after a reciprocal": lambda z, d: z * (1 / d),
    "into the scale": lambda z, d: d / z,
    "with a shift": lambda z, d: (z + 1) / d,
    "by itself": lambda z, d: z / z,
    "by its maxima": lambda z, d: z / (tf.reduce_max(tf.abs(z), 0) + d),
    "by the number of rows": lambda z, d: z / tf.cast(tf.shape(z)[0], z.dtype),
    "by two": lambda z, d: z / 2,
    "by a one": lambda z, d: z / 1,
    "by a one of dimension one": lambda z, d: z / np.ones([1], np.float32),
    "by a two of dimension one": lambda z, d: z / np.full([1], 2, np.float32),
    "by a one of more dimensions": lambda z, d: z / np.ones([1, 1, 1], np.float32),
    "by many ones": lambda z, d: z / np.ones([COLUMNS], np.float32),
    "without NaN": lambda z, d: tf.math.divide_no_nan(z, d),
    "rounded down": lambda z, d: z // d,
}
FUSED = {"vector", "twice", "by a one of dimension one", "by many ones"}


@pytest.mark.parametrize("name", COMPUTED)
def test_divisors(name):
    x, packed, scale, *_ = inputs()
    code = columnwise(divide=COMPUTED[name])
    compare(code, [x, packed, scale[0] + 1], [4] if name in FUSED else [])


DIVIDED = {
    "temperature": 2.0,
    "one": np.ones([1], np.float32),
    "two": np.full([1], 2, np.float32),
    "columns": np.arange(1, COLUMNS + 1, dtype=np.float32),
    "rows": np.arange(1, ROWS + 1, dtype=np.float32)[:, None],
    "a batch": np.ones([2, 1, 1], np.float32),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_scaled_products_that_are_divided(name):
    """Afterwards, by stock."""
    args = [*inputs(), tf.constant(DIVIDED[name])]
    compare(lambda *args: tf.nn.relu(chain()(*args[:-1]) / args[-1]), args, [4])
    # Constants may be part of what is fused.
    compare(lambda *args: tf.nn.relu(chain()(*args) / DIVIDED[name]), args[:-1], [4])


# Shapes of rows and divisors, and whether these are scales of columns.
SIZES = [
    ((ROWS, DEPTH), (), False),
    ((ROWS, DEPTH), (1,), False),
    ((ROWS, DEPTH), (COLUMNS,), True),
    ((ROWS, DEPTH), (1, COLUMNS), True),
    ((ROWS, DEPTH), (1, 1, COLUMNS), False),
    ((ROWS, DEPTH), (ROWS, 1), False),
    ((ROWS, DEPTH), (ROWS, COLUMNS), False),
    ((COLUMNS, DEPTH), (COLUMNS, 1), False),
    ((1, DEPTH), (ROWS, COLUMNS), False),
    ((2, ROWS, DEPTH), (1, 1, COLUMNS), True),
    ((2, ROWS, DEPTH), (ROWS, COLUMNS), False),
    ((2, ROWS, DEPTH), (2, 1, COLUMNS), False),
    ((2, ROWS, DEPTH), (1, 1, 1, COLUMNS), False),
    ((2, ROWS, DEPTH), (1, 1, 1), False),
]


@pytest.mark.parametrize(("shape", "divisor", "fused"), SIZES, ids=str)
def test_sizes_of_divisors(shape, divisor, fused):
    x, packed, *_ = inputs(shape=shape)
    args = [x, packed, tf.abs(values(divisor, seed=1)[0]) + 1]
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in args]
    if fused:
        specs[2] = tf.TensorSpec([None] * len(divisor))
        compare(columnwise(), args, [], specs)
        specs[::2] = tf.TensorSpec([None, *shape[1:]]), tf.TensorSpec(divisor)
    compare(columnwise(), args, [4] * fused, specs)


def of_bytes(part):
    """Returns code that divides a part of the bytes by a vector; the numbers are of all."""

    def code(x, packed, rows, columns):
        if part == "a row":
            w = tf.cast(packed[:1], x.dtype) / tf.expand_dims(rows, 1)
        elif part == "a column":
            w = tf.cast(packed[:, :1], x.dtype) / columns
        elif part == "a column by a column":
            w = tf.cast(packed[:, :1], x.dtype) / tf.expand_dims(rows, 1)
        elif part == "a row by a row":
            w = tf.cast(packed[:1], x.dtype) / columns
        else:
            w = tf.cast(packed, x.dtype) / tf.expand_dims(columns, 0)
        return (x[:, : w.shape[0]] @ w) / columns[: w.shape[1]]

    return code


# Where the integers are as many as the numbers.
FITTING = {"a column by a column", "a row by a row"}


@pytest.mark.parametrize(
    "part", ["a row", "a column", "a column by a column", "a row by a row", "all by a row"]
)
def test_integers_that_broadcast(part):
    x, packed, *_ = inputs(packed=(DEPTH, COLUMNS))
    rows, columns = (tf.abs(t) + 1 for t in values((DEPTH,), (COLUMNS,), seed=1))
    compare(of_bytes(part), [x, packed, rows, columns], [8] * (part in FITTING))
