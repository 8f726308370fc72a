"""Attention whose queries share heads of keys: numbers, gradients of every order, errors."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from bad_calls import ERRORS
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from test_attention import (
    MASKED,
    SEED,
    assert_same_through_all_outputs,
    left_padding,
    mask_for,
    some_nothing,
    stock,
    sums_of,
    window,
)
from tolerances import assert_as_exact

from tf_fused_ops import _library, attention
from tf_fused_ops.ops import reference

# Batch, queries, keys, heads, key heads, depth, value depth: one block and several, parts of a
# vector and of a step; queries for which keys are read as they lie; a head for each and for all.
SHAPES = [
    (2, 10, 10, 6, 3, 16, 16),
    (1, 64, 256, 4, 2, 64, 64),
    (1, 130, 601, 4, 1, 40, 24),
    (3, 67, 33, 6, 2, 17, 5),
    (2, 197, 197, 4, 2, 64, 64),
    (1, 1, 300, 8, 2, 8, 70),
    (2, 1, 1030, 12, 4, 64, 64),
    (2, 2, 257, 9, 3, 33, 17),
    (1, 3, 601, 6, 1, 64, 5),
    (3, 4, 40, 2, 1, 7, 64),
    (2, 5, 60, 4, 2, 7, 9),
    (2, 3, 20, 3, 3, 8, 8),
    (2, 300, 1, 4, 2, 3, 1),
    (1, 700, 7, 2, 1, 9, 33),
]
NAMES = ("y", "query_grad", "key_grad", "value_grad", "bias_grad")


def tensors(shape, dtype, seed=0, bias=()):
    """Returns query, key, value, a bias if it has a shape, and dy as NumPy arrays."""
    batch, queries, keys, heads, key_heads, depth, value_depth = shape
    rng = np.random.default_rng(seed)
    sizes = (
        (batch, queries, heads, depth),
        (batch, keys, key_heads, depth),
        (batch, keys, key_heads, value_depth),
        (batch, queries, heads, value_depth),
    )
    values = [rng.normal(0.2, 1, size) for size in sizes]
    values[3:3] = [rng.normal(0, 0.5, size) for size in bias]
    return [tf.cast(tf.constant(value), dtype).numpy() for value in values]


def outputs(function, *args):
    """Returns y and the gradients of all operands, given these and dy."""
    *operands, dy = map(tf.constant, args)
    return [function(*operands), *gradients_of(function, operands, dy)]


def in_float64(function, args, groups):
    """Returns the same of keys and values that NumPy repeats for all heads."""
    query, key, value, *rest = (arg.astype(np.float64) for arg in args)
    wide = [query, *(np.repeat(x, groups, axis=2) for x in (key, value)), *rest]
    found = [x.numpy() for x in outputs(function, *wide)]
    for i, x in ((2, key), (3, value)):
        batch, keys, key_heads, depth = x.shape
        found[i] = found[i].reshape(batch, keys, key_heads, groups, depth).sum(3)
    return found


@remembered
def expected(shape, dtype, mask, scale, zero_masked, rate, seed, bias):
    """Returns operands and dy, and what to compare with: outputs of stock on repeated keys and
    values, those in float64, and how large the sums are of which each may be a small one."""
    args = tensors(shape, dtype, seed, bias)
    groups = shape[3] // shape[4]
    plain = stock(mask, scale, False, zero_masked, rate, tf.as_dtype(dtype))

    def theirs(query, key, value, bias=None):
        return plain(query, *(tf.repeat(x, groups, axis=2) for x in (key, value)), bias)

    sums = sums_of([value.astype(np.float64) for value in args], scale)
    return args, outputs(theirs, *args), in_float64(plain, args, groups), sums


def check(shape, dtype, mask=None, scale=0.2, zero_masked=False, rate=0.0, seed=0, bias=()):
    """Compares with stock; `bias` is empty or has its shape."""
    args, *others = expected(shape, dtype, mask, scale, zero_masked, rate, seed, bias)
    options = {"zero_masked": zero_masked}
    options |= {"dropout_rate": rate, "seed": SEED} if rate else {}

    def ours(query, key, value, bias=None):
        return attention(query, key, value, mask, scale, bias=bias, **options)

    found = outputs(ours, *args)
    assert len(found) == len(args)
    for name, *compared, total in zip(NAMES, found, *others, strict=False):
        assert_as_exact(name, *compared, dtype, total)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradient(shape, dtype, isa):
    check(shape, dtype)
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (4, 4), (32, 8), (7, 1), (1, 1)], ids=str)
def test_few_queries(heads, queries, dtype, isa):
    """As decoders have them, with a mask of the positions up to now."""
    check((2, queries, 300, *heads, 16, 16), dtype, np.arange(300) < 70)
    assert _library.isa() == isa


@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 150, 600, 4, 4, 40, 40))),
    kept=st.integers(0, 31),
    dtype=st.sampled_from(cases.DTYPES),
    scale=st.sampled_from([1.0, 0.1, -0.3]),
    zero_masked=st.booleans(),
    rate=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
    biased=st.integers(0, 31),
    few=st.booleans(),
)
def test_random_shapes(sizes, kept, dtype, scale, zero_masked, rate, seed, biased, few):
    """Of masks and biases, some dimensions, and the first ones, are broadcast."""
    batch, queries, keys, key_heads, groups, depth, value_depth = sizes
    queries = queries % 4 + 1 if few else queries
    heads = key_heads * groups

    def broadcast(bits):
        full = (batch, heads, queries)
        return [*(n if bits >> i & 1 else 1 for i, n in enumerate(full)), keys][bits % 4 :]

    mask = mask_for(broadcast(kept), seed) if kept & 16 else None
    bias = [broadcast(biased)] if biased & 16 else []
    shape = batch, queries, keys, heads, key_heads, depth, value_depth
    check(shape, dtype, mask, scale, zero_masked and mask is not None, rate, seed, bias)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 3, 6, 9)], ids=str)
def test_bias(shape, masked, dtype, isa):
    """Of all scores, whose gradient is theirs, or of all heads of queries and keys."""
    batch, queries, keys, heads, *_ = shape
    mask = np.tri(queries, keys, keys - queries, dtype=bool) if masked else None
    check(shape, dtype, mask, bias=[[heads, 1, keys] if masked else [batch, heads, queries, keys]])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 2, 5, 9)], ids=str)
def test_dropout(shape, masked, dtype, isa):
    """Of each head of the queries its own weights; half of a number is exact in all dtypes."""
    batch, queries, keys, heads, *_ = shape
    mask = mask_for((batch, heads, queries, keys)) if masked else None
    check(shape, dtype, mask, zero_masked=masked, rate=0.5)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("make_mask", [left_padding, window, some_nothing])
@pytest.mark.parametrize("lengths", [(600, 600), (3, 1100)], ids=str)
def test_blocks_of_which_nothing_is_kept(lengths, make_mask, dtype, isa):
    check((2, *lengths, 4, 2, 24, 17), dtype, make_mask(*lengths))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("queries", [1, 4, 150])
def test_as_repeated_keys_bit_for_bit(queries, dtype, isa):
    """In the forward pass each head computes what it would with keys of its own."""
    query, key, value, _ = tensors((2, queries, 300, 6, 2, 24, 17), dtype)
    mask = mask_for((2, 6, queries, 300))
    repeated = [np.repeat(x, 3, axis=2) for x in (key, value)]
    found, expected = attention(query, key, value, mask), attention(query, *repeated, mask)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("queries", [1, 150])
def test_what_no_block_keeps_is_not_read(queries, dtype, isa):
    query, key, value, _ = tensors((2, queries, 1000, 4, 2, 16, 8), dtype)
    expected = attention(query, key[:, :70], value[:, :70])
    key[:, 256:], value[:, 256:] = np.nan, np.nan
    found = attention(query, key, value, np.arange(1000) < 70)
    scale = np.abs(np.asarray(expected).astype(np.float64)).max()
    units = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-13}[dtype]
    difference = tf.cast(found, tf.float64) - tf.cast(expected, tf.float64)
    assert np.abs(difference).max() <= units * scale


@pytest.mark.parametrize("empty", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_empty(empty, masked, biased, isa):
    """Batch, queries, keys, depth or value depth are zero."""
    shape = [2, 3, 4, 4, 2, 5, 6]
    shape[empty] = 0
    batch, queries, keys, heads, *_ = shape
    mask = np.ones((1, keys), bool) if masked else None
    args = tensors(shape, "float32", bias=[(batch, heads, queries, keys)] if biased else [])

    def ours(query, key, value, bias=None):
        return attention(query, key, value, mask, 0.5, bias=bias)

    def theirs(query, key, value, bias=None):
        return stock(mask, 0.5)(query, *(tf.repeat(x, 2, axis=2) for x in (key, value)), bias)

    for name, *pair in zip(NAMES, outputs(ours, *args), outputs(theirs, *args), strict=False):
        np.testing.assert_allclose(*pair, rtol=1e-6, atol=1e-6, err_msg=name)


def test_no_heads(isa):
    args = tensors((2, 3, 4, 0, 0, 5, 6), "float32")
    for found, arg in zip(outputs(attention, *args), [args[3], *args[:3]], strict=True):
        assert found.shape == arg.shape and not np.size(found)


MASK = mask_for((2, 1, 1, 4), 3)
# Heads that follow one another share, all do, none do.
HEADS = pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)], ids=str)


def problem(heads):
    """Returns query, key, value, bias and dy."""
    args = tensors((2, 3, 4, *heads, 5, 3), "float64", bias=[(heads[0], 1, 4)])
    return [tf.constant(v) for v in args]


def masked(query, key, value, bias):
    return attention(query, key, value, MASK, 0.5, dropout_rate=0.5, seed=SEED, bias=bias)


def by_reference(query, key, value, bias):
    random = tf.raw_ops.StatelessRandomGetKeyCounter(seed=SEED)
    groups = query.shape[2] // key.shape[2]
    key, value = (tf.repeat(x, groups, axis=2) for x in (key, value))
    options = {"scale": 0.5, "masked": MASKED, "dropout_rate": 0.5, "dropout_scale": 2.0}
    return reference.attention(query, key, value, MASK, bias, random, **options)[0]


@HEADS
def test_against_finite_differences(heads):
    theory, numbers = tf.test.compute_gradient(masked, problem(heads)[:4], delta=1e-4)
    for found, expected in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5)


@HEADS
def test_second_order(heads):
    *operands, dy = problem(heads)
    weights = weights_for(operands)
    expected = second_order(by_reference, operands, dy, weights)
    for run in (second_order, tf.function(second_order, autograph=False)):
        assert_all_close(run(masked, operands, dy, weights), expected)


@HEADS
@pytest.mark.parametrize("watched", range(4))
def test_what_the_op_keeps_has_gradients(watched, heads):
    """They are stock's."""
    operands = problem(heads)[:4]

    def ours(query, key, value, bias):
        return _library.ops.tf_fused_ops_attention(
            **{"query": query, "key": key, "value": value, "mask": [MASK], "bias": [bias]},
            **{"rng_key": [], "rng_counter": [], "scale": 0.5, "U": tf.float64},
        )

    def theirs(query, key, value, bias):
        key, value = (tf.repeat(x, heads[0] // heads[1], axis=2) for x in (key, value))
        return reference.attention(query, key, value, MASK, bias, scale=0.5, masked=MASKED)

    assert_same_through_all_outputs(ours, theirs, operands, watched)


@pytest.mark.parametrize(
    "known",
    [
        (None, None),
        ([None] * 4, [None] * 4),
        ([2, None, 4, 5], [2, None, None, 5]),
        ([2, 3, None, 5], [2, 4, 2, 5]),
        ([None, None, 4, None], [None, None, 2, None]),
        (None, [2, 4, 2, 5]),
    ],
    ids=str,
)
def test_gradients_of_unknown_shapes(known):
    *operands, dy = problem((4, 2))
    expected = [by_reference(*operands), *gradients_of(by_reference, operands, dy)]
    of_query, of_key = known
    of_value = of_key and [*of_key[:3], None]
    shapes = [of_query, of_key, of_value, None, None]
    signature = [tf.TensorSpec(shape, tf.float64) for shape in shapes]

    @tf.function(input_signature=signature, autograph=False)
    def step(*args):
        *operands, dy = args
        return [masked(*operands), *gradients_of(masked, operands, dy)]

    assert_all_close(step(*operands, dy), expected)
    weights = weights_for(operands)

    @tf.function(input_signature=signature, autograph=False)
    def twice(*args):
        *operands, dy = args
        return second_order(masked, operands, dy, weights)

    assert_all_close(twice(*operands, dy), second_order(by_reference, operands, dy, weights))


@pytest.mark.parametrize(
    ("query", "key", "y"),
    [
        ([2, 3, 4, 5], [2, 6, 2, 5], [2, 3, 4, 7]),
        ([None, 3, 4, 5], [2, 6, 2, 5], [2, 3, 4, 7]),
        ([None, None, None, None], [2, None, 2, 5], [2, None, None, 7]),
        ([2, 3, 8, 5], [None, None, None, None], [2, 3, 8, 7]),
        ([2, 3, 8, 5], None, [2, 3, 8, None]),
    ],
    ids=str,
)
def test_shapes(query, key, y):
    value = key and [*key[:3], 7]
    specs = [tf.TensorSpec(shape, tf.float16) for shape in (query, key, value)]
    assert tf.function(attention).get_concrete_function(*specs).output_shapes.as_list() == y


def raw(op="attention", **changes):
    """Calls an op on operands of the right shapes but for some."""
    zeros = {"query": (2, 3, 4, 5), "key": (2, 6, 2, 5), "value": (2, 6, 2, 7)} | changes
    operands = {name: tf.zeros(shape) for name, shape in zeros.items()}
    if op == "attention_grad":
        rows = tf.zeros((2, 4, 3))
        y = tf.zeros((2, 3, 4, 7))
        operands |= {"dy": y, "y": y, "largest": rows, "inverse_sum": rows}
    lists = {name: [] for name in ("mask", "bias", "rng_key", "rng_counter")}
    options = {"U": tf.float32} if op == "attention" else {}
    call = getattr(_library.ops, f"tf_fused_ops_{op}")
    return call(**operands, **lists, **options)


# How calls of some shapes are made.
RUNS = {
    "eager": lambda call, *shapes: call(*map(tf.zeros, shapes)),
    "function": lambda call, *shapes: tf.function(call)(*map(tf.zeros, shapes)),
    "unknown": lambda call, *shapes: tf.function(call, input_signature=[tf.TensorSpec(None)] * 3)(
        *map(tf.zeros, shapes)
    ),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("heads", [(4, 3), (4, 8), (2, 4), (4, 0), (1, 2)], ids=str)
def test_heads_that_do_not_go_with_one_another(heads, run):
    shapes = (2, 3, heads[0], 5), (2, 6, heads[1], 5), (2, 6, heads[1], 7)
    with pytest.raises(ERRORS, match=r"\bkey must have a number of heads .*got"):
        RUNS[run](attention, *shapes)


@pytest.mark.parametrize("run", RUNS)
def test_no_heads_share_some(run):
    shapes = (2, 3, 0, 5), (2, 6, 4, 5), (2, 6, 4, 7)
    assert RUNS[run](attention, *shapes).shape == (2, 3, 0, 7)


@pytest.mark.parametrize("run", RUNS)
def test_values_of_other_heads_than_keys(run):
    for value_heads in (1, 4, 0):
        shapes = (2, 3, 4, 5), (2, 6, 2, 5), (2, 6, value_heads, 7)
        with pytest.raises(ERRORS, match=r"\bvalue\b"):
            RUNS[run](attention, *shapes)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_heads_in_front_are_not_shared(key_heads, run):
    shapes = (2, 4, 3, 5), (2, key_heads, 6, 5), (2, key_heads, 6, 7)
    with pytest.raises(ERRORS, match=r"\bkey\b"):
        RUNS[run](lambda *args: attention(*args, heads_first=True), *shapes)


def test_raw_gradient_is_of_keys_for_each_head():
    raw()
    raw("attention_grad", key=(2, 6, 4, 5), value=(2, 6, 4, 7))
    for call in (raw, tf.function(raw)):
        with pytest.raises(ERRORS, match=r"\bkey\b"):
            call("attention_grad")
        with pytest.raises(ERRORS, match=r"\bkey\b"):
            call("attention_grad", value=(2, 6, 4, 7))
        with pytest.raises(ERRORS, match=r"\bvalue\b"):
            call("attention_grad", key=(2, 6, 4, 5))
