"""Attention that reads keys and values where they lie in a cache."""

import itertools

import cases
import numpy as np
import pytest
import tensorflow as tf
from bad_calls import ERRORS
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from remapping import op_counts
from test_attention import SEED, bias_for, mask_for
from tolerances import assert_close

from tf_fused_ops import _library, attention, update_cache
from tf_fused_ops.remapper import convert

# Batch, slots, keys, key heads, depth; queries and heads: those of a decoder, one block and
# several, slots that begin anywhere.
CACHES = [
    ((1, 2, 40, 4, 16), (1, 4)),
    ((2, 6, 300, 2, 64), (1, 4)),
    ((3, 4, 2, 33, 3, 7), (2, 3)),
    ((1, 3, 2, 600, 2, 24), (4, 6)),
    ((2, 3, 2, 70, 1, 9), (67, 4)),
    ((1, 12, 2, 64, 4, 64), (5, 4)),
    ((2, 2, 2, 2, 20, 2, 5), (3, 2)),
    ((1, 2, 3, 2, 257, 1, 33), (1, 3)),
]
OF_CACHES = pytest.mark.parametrize(("cache", "of_query"), CACHES, ids=str)


def slots_of(cache):
    """How many slots the shape of a cache has."""
    return int(np.prod(cache[1:-3]))


def arrays(cache, of_query, dtype="float32", seed=0):
    """Returns a query, a cache of keys and one of values of another depth."""
    rng = np.random.default_rng(seed)
    shapes = (cache[0], *of_query, cache[-1]), cache, (*cache[:-1], cache[-1] + 3)
    return [tf.cast(rng.normal(0.2, 1, shape), dtype) for shape in shapes]


def sliced(keys, values, slot):
    """Keys and values in slots, as tensors of their own."""
    apart = [tf.reshape(x, [x.shape[0], -1, *x.shape[-3:]]) for x in (keys, values)]
    return apart[0][:, slot], apart[1][:, slot + 1]


def assert_bits(found, expected):
    found, expected = found.numpy(), expected.numpy()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@OF_CACHES
def test_bit_for_bit(cache, of_query, dtype, isa):
    """As attention to slices: to one cache of both, and to one of keys and one of values."""
    query, keys, values = arrays(cache, of_query, dtype)
    last = slots_of(cache) - 2
    for slot in sorted({0, last // 2, last}):
        for both in ((keys, keys), (keys, values)):
            expected = attention(query, *sliced(*both, slot))
            assert_bits(attention(query, *both, slot=slot), expected)
            in_function = tf.function(lambda *v, s=slot: attention(*v, slot=s))
            assert_bits(in_function(query, *both), expected)
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("rate", [0.0, 0.5])
@OF_CACHES
def test_masks_biases_and_dropout(cache, of_query, rate, dtype):
    query, keys, values = arrays(cache, of_query, dtype)
    batch, (queries, heads), length = cache[0], of_query, cache[-3]
    mask = mask_for((batch, 1, queries, length))
    bias = bias_for((heads, 1, length), dtype)
    options = {"scale": 0.3, "bias": bias, "dropout_rate": rate, "seed": SEED if rate else None}
    options |= {"zero_masked": rate > 0}
    expected = attention(query, *sliced(keys, values, 0), mask, **options)
    assert_bits(attention(query, keys, values, mask, slot=0, **options), expected)


def test_other_slots_do_not_matter():
    cache, of_query = CACHES[3]
    query, keys, _ = arrays(cache, of_query)
    found = keys.numpy()
    found[:, 0], found[:, 2] = np.nan, np.inf
    assert_bits(attention(query, found, found, slot=2), attention(query, keys, keys, slot=2))


def test_caches_of_other_slots():
    """Of each the slot is counted in its own."""
    query, keys, _ = arrays((2, 3, 9, 2, 5), (4, 2))
    *_, values = arrays((2, 2, 3, 9, 2, 5), (4, 2))
    for slot in (0, 1, 2):
        expected = attention(query, *sliced(keys, values, slot))
        assert_bits(attention(query, keys, values, slot=slot), expected)


def test_after_an_update():
    """As a decoder calls both, layer by layer."""
    query, cache, _ = arrays((2, 3, 2, 9, 2, 5), (1, 4))
    key, value = (tf.random.normal((2, 1, 2, 5)) for _ in range(2))
    mask = np.arange(9) < 5

    @tf.function
    def step(cache):
        found, expected = [], []
        for slot in (0, 2, 4):
            cache, keys, values = update_cache(cache, key, value, 4, slot=slot)
            found.append(attention(query, cache, cache, mask, slot=slot))
            expected.append(attention(query, keys, values, mask))
        return tf.stack(found), tf.stack(expected)

    assert_bits(*step(cache))


SMALL = [
    ((2, 3, 4, 2, 5), (3, 2)),
    ((1, 2, 2, 4, 1, 5), (1, 3)),
    ((2, 2, 2, 4, 2, 3), (2, 4)),
    ((1, 2, 1, 2, 3, 1, 2), (2, 1)),
]
OF_SMALL = pytest.mark.parametrize(("cache", "of_query"), SMALL, ids=str)


def chains(cache, of_query, slot, together):
    """Returns attention to slots and to slices, of a query, one cache or two, and a bias."""
    queries, length = of_query[0], cache[-3]
    mask = mask_for((cache[0], 1, queries, length), 3)

    def ours(query, *rest):
        *caches, bias = rest
        caches = caches * 2 if together else caches
        return attention(query, *caches, mask, 0.5, bias=bias, slot=slot)

    def theirs(query, *rest):
        *caches, bias = rest
        found = sliced(*(caches * 2 if together else caches), slot)
        return attention(query, *found, mask, 0.5, bias=bias)

    return ours, theirs


def problem(cache, of_query, together, dtype="float64"):
    """Returns the operands of these, and dy."""
    query, keys, values = arrays(cache, of_query, dtype)
    bias = tf.constant(bias_for((of_query[1], 1, cache[-3]), dtype))
    caches = [keys] if together else [keys, values]
    width = caches[-1].shape[-1]
    dy = tf.cast(np.random.default_rng(9).normal(size=(cache[0], *of_query, width)), dtype)
    return [query, *caches, bias], dy


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@OF_SMALL
def test_gradient(cache, of_query, dtype, together):
    """Of the caches it is zero in all other slots."""
    operands, dy = problem(cache, of_query, together, dtype)
    for slot in range(slots_of(cache) - 1):
        ours, theirs = chains(cache, of_query, slot, together)
        expected = gradients_of(theirs, operands, dy)
        for function in (ours, tf.function(ours)):
            found = gradients_of(function, operands, dy)
            for i, (ours_, theirs_) in enumerate(zip(found, expected, strict=True)):
                assert_close(f"gradient {i}", ours_, theirs_, dtype, units=64)
        apart = tf.reshape(found[1], [cache[0], -1, *cache[-3:]])
        used = {slot, slot + 1} if together else {slot}
        for other in set(range(slots_of(cache))) - used:
            assert not tf.cast(apart[:, other], tf.float32).numpy().any()
        assert tf.cast(apart[:, slot], tf.float32).numpy().any()


@pytest.mark.parametrize("together", [False, True])
@OF_SMALL
def test_against_finite_differences(cache, of_query, together):
    operands, _ = problem(cache, of_query, together)
    ours, _ = chains(cache, of_query, 1, together)
    theory, numbers = tf.test.compute_gradient(ours, operands, delta=1e-4)
    for found, expected in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("together", [False, True])
@OF_SMALL
def test_second_order(cache, of_query, together):
    operands, dy = problem(cache, of_query, together)
    ours, theirs = chains(cache, of_query, 0, together)
    weights = weights_for(operands)
    expected = second_order(theirs, operands, dy, weights)
    for run in (second_order, tf.function(second_order, autograph=False)):
        assert_all_close(run(ours, operands, dy, weights), expected)


@pytest.mark.parametrize("known", ["ranks", "nothing", "inner"])
@pytest.mark.parametrize("together", [False, True])
@OF_SMALL
def test_unknown_sizes(cache, of_query, together, known):
    operands, dy = problem(cache, of_query, together)
    ours, theirs = chains(cache, of_query, 1, together)
    expected = [theirs(*operands), *gradients_of(theirs, operands, dy)]

    def spec(x):
        inner = [None] * (x.shape.rank - 2) + x.shape[-2:].as_list()
        sizes = {"ranks": [None] * x.shape.rank, "nothing": None, "inner": inner}[known]
        return tf.TensorSpec(sizes, x.dtype)

    @tf.function(input_signature=[spec(x) for x in (*operands, dy)], autograph=False)
    def step(*args):
        *operands, dy = args
        return [ours(*operands), *gradients_of(ours, operands, dy)]

    assert_all_close(step(*operands, dy), expected)


N = None


@pytest.mark.parametrize(
    ("query", "key", "value", "y"),
    [
        ([2, 3, 4, 5], [2, 3, 2, 9, 2, 5], [2, 3, 2, 9, 2, 7], [2, 3, 4, 7]),
        ([N, 3, 4, 5], [2, 6, 9, 2, 5], [2, N, 9, 2, 7], [2, 3, 4, 7]),
        ([N, N, N, N], [2, N, N, N, N, 2, 5], [N, N, N, N, N], [2, N, N, N]),
        ([2, 3, 4, 5], N, [2, 6, 9, 2, 7], [2, 3, 4, 7]),
        (N, N, N, [N, N, N, N]),
    ],
    ids=str,
)
def test_shapes(query, key, value, y):
    specs = [tf.TensorSpec(shape, tf.bfloat16) for shape in (query, key, value)]
    compiled = tf.function(lambda *v: attention(*v, scale=1.0, slot=2)).get_concrete_function(
        *specs
    )
    found = compiled.output_shapes
    assert (found.rank is None and key is N) or found.as_list() == y


def call(shapes, slot, **options):
    return attention(*map(tf.zeros, shapes), slot=slot, **options)


def with_known(shapes, slot, **options):
    function = tf.function(lambda *v: attention(*v, slot=slot, **options))
    return function(*map(tf.zeros, shapes))


def of_unknown(shapes, slot, **options):
    function = tf.function(
        lambda *v: attention(*v, slot=slot, **options), input_signature=[tf.TensorSpec(N)] * 3
    )
    return function(*map(tf.zeros, shapes))


RUNS = pytest.mark.parametrize("run", [call, with_known, of_unknown])
QUERY, CACHE = (2, 3, 4, 5), (2, 3, 2, 9, 2, 5)
BAD = {
    "slot too large for keys": ([QUERY, CACHE, (2, 9, 9, 2, 5)], 6, "slot"),
    "slot too large for values": ([QUERY, CACHE, CACHE], 5, "slot"),
    "slot too large for any": ([QUERY, CACHE, CACHE], 2**31 - 2, "slot"),
    "no slots": ([QUERY, (2, 0, 2, 9, 2, 5), CACHE], 0, "slot"),
    "one slot": ([QUERY, (2, 1, 9, 2, 5), (2, 1, 9, 2, 5)], 0, "slot"),
    "no cache of keys": ([QUERY, (2, 9, 2, 5), CACHE], 0, "key"),
    "no cache of values": ([QUERY, CACHE, (2, 9, 2, 5)], 0, "value"),
    "no caches": ([QUERY, (2, 9, 2, 5), (2, 9, 2, 5)], 0, "key"),
    "scalar keys": ([QUERY, (), CACHE], 0, "key"),
    "another batch of keys": ([QUERY, (3, *CACHE[1:]), CACHE], 0, "key"),
    "another batch of values": ([QUERY, CACHE, (3, *CACHE[1:])], 0, "value"),
    "another length of values": ([QUERY, CACHE, (2, 3, 2, 8, 2, 5)], 0, "value"),
    "other heads of values": ([QUERY, CACHE, (2, 3, 2, 9, 4, 5)], 0, "value"),
    "heads that do not divide": ([QUERY, (2, 3, 2, 9, 3, 5), (2, 3, 2, 9, 3, 5)], 0, "key"),
    "no heads": ([QUERY, (2, 3, 2, 9, 0, 5), (2, 3, 2, 9, 0, 5)], 0, "key"),
    "another depth": ([QUERY, (2, 3, 2, 9, 2, 6), CACHE], 0, "key"),
    "query of rank 5": ([(1, *QUERY), CACHE, CACHE], 0, "query"),
}


@RUNS
@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name, run):
    shapes, slot, told = BAD[name]
    with pytest.raises(ERRORS, match=rf"\b{told}\b"):
        run(shapes, slot)


@RUNS
@pytest.mark.parametrize("slot", [-1, -(2**40), 2**31 - 1, 2**63, 10**30, 1.0, "0", [0], (0, 1)])
def test_bad_slots(slot, run):
    with pytest.raises(ValueError, match=r"\bslot must be "):
        run([QUERY, CACHE, CACHE], slot)


@RUNS
@pytest.mark.parametrize("slot", [0, 3])
def test_heads_first(slot, run):
    with pytest.raises(ERRORS, match=r"\bslot\b"):
        run([QUERY, CACHE, CACHE], slot, heads_first=True)


def test_numbers_that_are_slots():
    args = arrays((2, 6, 9, 2, 5), (3, 4))
    expected = attention(*args, slot=3)
    for slot in (np.int8(3), np.uint64(3), tf.constant(3).numpy()):
        assert_bits(attention(*args, slot=slot), expected)


# Prints the shape of y, or the error, of eager and traced calls of the op itself: before eager ones
# no shape function runs.
EXTREMES = """
import sys
import tensorflow as tf
from tf_fused_ops import _library

def zeros(shape):
    return tf.zeros(tf.constant(shape, tf.int64))

for query, key, value, slot, heads_first, _ in eval(sys.argv[1]):
    def call(query, key, value):
        return _library.ops.tf_fused_ops_attention(
            query=query, key=key, value=value, mask=[], bias=[], rng_key=[], rng_counter=[],
            U=tf.float32, slot=slot, heads_first=heads_first,
        )

    unknown = [tf.TensorSpec(None)] * 3
    for run in (call, tf.function(call), tf.function(call, input_signature=unknown)):
        try:
            print(run(zeros(query), zeros(key), zeros(value))[0].shape)
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            print(str(error).replace(chr(10), " "))
"""
FAR = 2**31
NONE = [0, 1, 3, 4]
# Of tensors without elements.
SIZES = [
    (NONE, shape, shape, slot, False, told)
    for shape, slot, told in [
        ([0, FAR, FAR, 2, 3, 4], 0, "(0, 1, 3, 4)"),
        ([0, FAR, FAR, 2, 3, 4], 2**62 - 2, "(0, 1, 3, 4)"),
        ([0, FAR, FAR, 2, 3, 4], 2**62 - 1, "slot"),
        ([0, FAR, FAR, 2, 3, 4], 2**62, "slot"),
        ([0, FAR, FAR, FAR, 2, 3, 4], 2**63 - 1, "(0, 1, 3, 4)"),
        ([0, 0, FAR, FAR, FAR, 2, 3, 4], 0, "slot"),
        ([0, 2, FAR, 3, 4], 0, "(0, 1, 3, 4)"),
        ([0, 2, FAR, FAR, 4], 0, "key"),
        ([0, 2, 5, 3, FAR], 0, "key"),
        ([0, FAR, FAR, FAR, FAR, 3, 4], FAR, "(0, 1, 3, 4)"),
        ([FAR, 2, 0, 3, 4], 0, "key"),
        ([0, FAR, FAR, 3, 4], FAR - 2, "(0, 1, 3, 4)"),
        ([0, FAR, FAR, 3, 4], FAR - 1, "slot"),
    ]
]
SIZES += [
    ([1, 1, 3, 0], [1, FAR, FAR, 1, 1, 0], [1, FAR, FAR, 1, 1, 0], 7, False, "(1, 1, 3, 0)"),
    ([1, 1, 3, 4], [1, FAR, FAR, 0, 3, 4], [1, FAR, FAR, 0, 3, 4], 7, False, "(1, 1, 3, 4)"),
    ([1, 1, 0, 4], [1, FAR, FAR, 1, 0, 4], [1, FAR, FAR, 1, 0, 4], 7, False, "(1, 1, 0, 4)"),
    ([1, 1, 3, 4], [1, FAR, FAR, 1, 0, 4], [1, FAR, FAR, 1, 0, 4], 7, False, "key"),
    (NONE, [0, 2, 5, 3, 4], [0, FAR, FAR, FAR, 5, 3, 4], 1, False, "(0, 1, 3, 4)"),
    (NONE, [0, 1, 5, 3, 4], [0, FAR, FAR, FAR, 5, 3, 4], 1, False, "slot"),
    (NONE, [0, 2, 5, 3, 4], [0, FAR, FAR, 5, 3, FAR], 1, False, f"(0, 1, 3, {FAR})"),
    ([0, FAR, FAR, 4], [0, 2, FAR, 1, 4], [0, 2, FAR, 1, 4], 0, False, f"(0, {FAR}, {FAR}, 4)"),
]
SLOTS = [
    ([2, 1, 3, 4], [2, 2, 5, 3, 4], [2, 2, 5, 3, 4], slot, heads_first, "slot")
    for slot, heads_first in [
        *itertools.product([-2, 1, FAR - 1, FAR, 2**62, 2**63 - 1], [False]),
        *itertools.product([-2, 0, 1, FAR, 2**63 - 1], [True]),
    ]
]
RANKS = [
    ([2, 1, 3, 4], *pair, slot, False, told)
    for pair, told in [
        (([2, 5, 3, 4], [2, 2, 5, 3, 4]), "key"),
        (([2, 2, 5, 3, 4], [2, 5, 3, 4]), "value"),
        (([], [2, 2, 5, 3, 4]), "key"),
        (([2, 2, 5, 3, 4], [4]), "value"),
    ]
    for slot in (0, 2**63 - 1)
    if slot == 0 or told == "key"
]


@pytest.mark.parametrize("calls", [SIZES, SLOTS, RANKS], ids=["sizes", "slots", "ranks"])
def test_extremes(calls, run_python):
    """In a process of its own, which may crash."""
    lines = run_python(EXTREMES, repr(calls)).splitlines()
    wanted = [(call, call[-1]) for call in calls for _ in range(3)]
    wrong = [
        (line, call) for line, (call, told) in zip(lines, wanted, strict=True) if told not in line
    ]
    assert wrong == []


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("shape", CACHES[2:5], ids=str)
def test_portable_conversion(shape, unknown, tmp_path):
    """Stock ops stand for the op where the package is not installed."""
    args = arrays(*shape)
    module, paths = tf.Module(), [str(tmp_path / name) for name in ("fused", "portable")]
    specs = [tf.TensorSpec(None if unknown else x.shape, x.dtype) for x in args]
    module.forward = tf.function(lambda *v: attention(*v, scale=0.5, slot=2), input_signature=specs)
    tf.saved_model.save(module, paths[0])
    convert(*paths, to_stock=True)
    for path, count in zip(paths, (1, 0), strict=True):
        forward = tf.saved_model.load(path).forward
        assert_close("y", forward(*args), attention(*args, scale=0.5, slot=2), "float32")
        assert op_counts(forward.concrete_functions[0])["TfFusedOps>Attention"] == count
