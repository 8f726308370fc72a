"""The update of a cache: exact values, inputs that stay as they are, memory."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from cache_cases import (
    ALIGNED,
    IN_GRAPH,
    ODD,
    OF_KINDS,
    assert_bits,
    by_numpy,
    inputs,
    normal,
    plain,
)
from gradient_problems import assert_all_close, gradients_of
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.compiler.tf2xla.python.xla import dynamic_update_slice

from tf_fused_ops import update_cache
from tf_fused_ops.ops import reference

# Batch, slots, length and what is inside: slots that begin anywhere and where vectors may, one
# task and several, none of something.
SHAPES = [
    (1, (2,), 7, (3, 5)),
    (2, (3, 2), 6, (2, 8)),
    (1, (3, 2), 16, (4, 16)),
    (3, (5,), 4, ()),
    (1, (4,), 9, ()),
    (2, (2, 2, 2), 5, (3,)),
    (1, (2,), 1, (1, 1, 1)),
    (1, (3, 2), 1031, (3, 37)),
    (1, (4,), 40000, (4,)),
    (2, (3,), 2053, (67,)),
    (0, (2,), 3, (2,)),
    (2, (3, 2), 3, (0, 4)),
    (1, (2,), 0, (3,)),
]
INDICES = ("least", "before", "first", "second", "last", "behind", "most")
RUNS = {
    "eager": lambda slot, specs: lambda *args: update_cache(*args, slot=slot),
    "function": lambda slot, specs: tf.function(lambda *args: update_cache(*args, slot=slot)),
    "unknown": lambda slot, specs: tf.function(
        lambda *args: update_cache(*args, slot=slot),
        input_signature=[tf.TensorSpec(None, dtype) for dtype in specs],
    ),
}


def check(shape, rows, index, slot, dtype, index_dtype="int32", run="eager"):
    arrays = inputs(*shape, rows, dtype)
    tensors = [*map(tf.constant, arrays), tf.constant(index, index_dtype)]
    function = RUNS[run](slot, [tensor.dtype for tensor in tensors])
    for _ in range(2):
        assert_bits(function(*tensors), by_numpy(*arrays, index, slot))
    assert_bits(tensors[:3], arrays)


FACTORS = {
    "shape": SHAPES,
    "dtype": cases.DTYPES,
    "rows": ("none", "one", "some", "all"),
    "index": INDICES,
    "slot": ("first", "middle", "last"),
    "index_dtype": ("int32", "int64"),
    "run": tuple(RUNS),
}


@pytest.mark.parametrize(
    "row", cases.pairwise(FACTORS), ids=lambda row: "-".join(map(str, row.values()))
)
def test_bit_for_bit(row):
    shape = row["shape"]
    length, last = shape[2], int(np.prod(shape[1])) - 2
    rows = min(length, {"none": 0, "one": 1, "some": 3, "all": length}[row["rows"]])
    limits = tf.as_dtype(row["index_dtype"]).limits
    room = length - rows
    index = dict(zip(INDICES, (limits[0], -3, 0, 1, room, length + 3, limits[1]), strict=True))
    slot = {"first": 0, "middle": last // 2, "last": last}[row["slot"]]
    check(shape, rows, index[row["index"]], slot, row["dtype"], row["index_dtype"], row["run"])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    slots=st.lists(st.integers(1, 4), max_size=2),
    rows=st.integers(0, 40),
    index=st.integers(-50, 50),
    slot=st.integers(0, 30),
    dtype=st.sampled_from(cases.DTYPES),
)
def test_random_shapes(sizes, slots, rows, index, slot, dtype):
    batch, length, *inner = sizes
    slots = (*slots, 2)
    shape = (batch % 3 + 1, slots, length, tuple(inner[:2]))
    check(shape, min(rows, length), index, slot % (int(np.prod(slots)) - 1), dtype)


@OF_KINDS
@pytest.mark.parametrize("used", [(), (0,), (1,), (2,), (1, 2)], ids=str)
def test_outputs_that_nobody_uses(used, shape):
    arrays = inputs(*shape, 2)
    compiled = tf.function(lambda *v: [update_cache(*v, 3, slot=2)[i] for i in used])
    expected = by_numpy(*arrays, 3, 2)
    assert_bits(compiled(*map(tf.constant, arrays)), [expected[i] for i in used])


@pytest.mark.parametrize("index", [-(2**31), -4, 0, 3, 7, 9, 2**31 - 1])
def test_as_the_update_slice_of_xla(index):
    cache, key, value = map(tf.random.normal, ((2, 2, 9, 3), (2, 2, 3), (2, 2, 3)))
    expected = [
        dynamic_update_slice(cache[:, i], part, [0, index, 0])
        for i, part in enumerate((key, value))
    ]
    assert_bits(update_cache(cache, key, value, index)[1:], [part.numpy() for part in expected])


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("index", [-(2**63), -(2**40), 2, 2**31, 2**32 + 1, 2**40, 2**63 - 1])
def test_reference(index, unknown):
    """What gradients and other installations compute the op with."""
    arrays = inputs(2, (3, 2), 7, (3, 5), 2)
    expected = by_numpy(*arrays, index, 3)
    tensors = [*map(tf.constant, arrays), tf.constant(index, tf.int64)]
    signature = [tf.TensorSpec(None if unknown else x.shape, x.dtype) for x in tensors]
    run = tf.function(lambda *v: reference.update_cache(*v, slot=3), input_signature=signature)
    assert_bits(run(*tensors), expected)


def steps(arrays, slot=2, count=4):
    """What updates that follow one another at 0, 1, .. return."""
    (cache, *parts), found = arrays, []
    for index in range(count):
        found.append(by_numpy(cache, *parts, index, slot))
        cache = found[-1][0]
    return found


def run(function, graph, *args):
    """Calls a function twice, in a graph or not, as what it holds must stay as it is, too."""
    function = tf.function(function) if graph else function
    function(*args)
    return function(*args)


@IN_GRAPH
@OF_KINDS
@pytest.mark.parametrize("origin", ["argument", "constant", "variable", "intermediate"])
def test_what_is_updated_stays(origin, shape, graph):
    """Used before, beside and after the update."""
    arrays = inputs(*shape, 2)
    held, *parts = map(tf.constant, arrays)
    variable = tf.Variable(held)

    def program(argument):
        caches = {
            "argument": argument,
            "constant": tf.constant(arrays[0]),
            "variable": variable.read_value(),
            "intermediate": tf.reverse(tf.reverse(argument, [0]), [0]),
        }
        cache = caches[origin]
        updates = [update_cache(cache, *parts, index, slot=2) for index in (1, 3)]
        with tf.control_dependencies([update[0] for update in updates]):
            after = tf.identity(cache)
        return cache, after, variable.read_value(), updates

    expected = [by_numpy(*arrays, index, 2) for index in (1, 3)]
    assert_bits(run(program, graph, held), [arrays[0]] * 3 + expected)
    assert_bits([held, variable], [arrays[0]] * 2)


@IN_GRAPH
@OF_KINDS
def test_keys_and_values_stay(shape, graph):
    """Of updates that others follow, while ops that may write in place take them."""
    arrays = inputs(*shape, 2)
    held, *parts = map(tf.constant, arrays)

    def program(cache):
        cache, found, after = tf.reverse(tf.reverse(cache, [0]), [0]), [], []
        for index in range(4):
            cache, keys, values = update_cache(cache, *parts, index, slot=2)
            found.append((cache, keys, values))
        for cache, keys, values in found:
            after += [tf.zeros_like(keys) * keys, tf.nn.relu(values), tf.square(cache)]
        with tf.control_dependencies(after):
            return found, tf.nest.map_structure(tf.identity, found)

    assert_bits(run(program, graph, held), [steps(arrays)] * 2)


@IN_GRAPH
@OF_KINDS
def test_keys_and_values_as_inputs(shape, graph):
    """Of another update of what they share memory with, also as caches themselves."""
    arrays = inputs(*shape, 2)
    held, *parts = map(tf.constant, arrays)

    def program(cache):
        first = update_cache(cache, *parts, 3, slot=2)
        crossed = update_cache(first[0], first[2], first[1], 1, slot=2)
        rows = [part[:, 0, :1] for part in parts]
        inside = update_cache(first[1], *rows, 1, slot=4)
        return first, crossed, inside, tf.identity(first[1])

    first = by_numpy(*arrays, 3, 2)
    crossed = by_numpy(first[0], first[2], first[1], 1, 2)
    inside = by_numpy(first[1], *(part[:, 0, :1] for part in arrays[1:]), 1, 4)
    assert_bits(run(program, graph, held), [first, crossed, inside, first[1]])


@IN_GRAPH
@OF_KINDS
def test_variables(shape, graph):
    """That hold a cache, or keys: what is written to them changes no tensor."""
    arrays = [np.nan_to_num(x, posinf=1, neginf=1) for x in inputs(*shape, 2)]
    held, *parts = map(tf.constant, arrays)
    keys_shape = (shape[0], shape[2], *shape[3])
    whole, part = tf.Variable(held), tf.Variable(tf.zeros(keys_shape))

    def program(cache):
        whole.assign(cache)
        found = [update_cache(whole, *parts, 3, slot=2)]
        whole.assign(found[0][0])
        part.assign(found[0][1])
        found.append(update_cache(whole, *parts, 1, slot=2))
        whole.assign_add(tf.ones_like(whole))
        part.scatter_nd_update([[0]], tf.zeros([1, *keys_shape[1:]]))
        found.append(update_cache(whole, *parts, 0, slot=2))
        part.assign_add(tf.ones(keys_shape))
        return found

    first = by_numpy(*arrays, 3, 2)
    last = by_numpy(first[0] + np.float32(1), *arrays[1:], 0, 2)
    assert_bits(run(program, graph, held), [first, by_numpy(first[0], *arrays[1:], 1, 2), last])


def decode(cache, key, value, update, loop, count=5):
    """Each layer writes into the cache what the one before it makes of that."""

    def step(index, cache, state, seen):
        for layer in range(cache.shape[1]):
            cache, *parts = update(cache, key + state, value - state, index, slot=2 * layer)
            state = tf.reduce_mean(parts[0] * parts[1], [1, 2], keepdims=True)
            seen = seen.write(index * cache.shape[1] + layer, parts)
        return index + 1, cache, state, seen

    seen = tf.TensorArray(cache.dtype, size=count * cache.shape[1])
    state = tf.zeros([cache.shape[0], 1, 1], cache.dtype)
    found = loop(lambda index, *_: index < count, step, (0, cache, state, seen))
    return found[1], found[2], found[3].stack()


def unrolled(condition, step, variables):
    while condition(*variables):
        variables = step(*variables)
    return variables


@pytest.mark.parametrize("batch", [1, 3])
def test_loop(batch):
    tensors = normal(batch)
    expected = decode(*tensors, plain, unrolled)
    found = tf.function(lambda *v: decode(*v, update_cache, tf.while_loop))(*tensors)
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        values = [tf.constant(x.numpy()) for x in tensors]
        of_version_1 = session.run(decode(*values, update_cache, tf.compat.v1.while_loop))
    assert_all_close([*found, *of_version_1], [*expected, *expected])


@pytest.mark.parametrize("batch", [1, 2])
def test_gradient_of_a_loop(batch):
    tensors = normal(batch)

    def gradients(update, loop):
        return gradients_of(
            lambda *v: tf.reduce_sum(tf.sin(decode(*v, update, loop)[2])), tensors, None
        )

    found = tf.function(lambda: gradients(update_cache, tf.while_loop))()
    assert_all_close(found, gradients(plain, unrolled))


# Prints the peak over the size of the cache.
MEMORY = """
import sys
import tensorflow as tf
import tf_fused_ops as tfo
from tf_fused_ops.bench import memory

batch, kept = map(int, sys.argv[1:])

def program(shape):
    def step(index, cache, total):
        for layer in range(2):
            part = tf.fill([batch, 1, 32, 64], total)
            updated, keys, values = tfo.update_cache(cache, part, part, index, slot=2 * layer)
            total = tf.reduce_max(keys[:, :1]) + tf.reduce_max(values[:, :1])
            if kept:
                with tf.control_dependencies([updated]):
                    total += tf.reduce_max(cache[:, :1, :1, :1])
            cache = updated
        return index + 1, cache, total / 2

    cache = tf.fill(shape, 1.0)
    return tf.while_loop(lambda index, *_: index < 6, step, (0, cache, tf.ones([])))[2]

compiled = tf.function(program, input_signature=[tf.TensorSpec([6], tf.int32)])
# Of a short cache first: what is freed may stay with the process.
shapes = (tf.constant([batch, 2, 2, n // batch, 32, 64]) for n in (16, 8192))
measured = memory.measure(lambda: compiled(next(shapes)))
print((measured["peak"] - measured["start"]) / (4 * 4 * 8192 * 32 * 64))
"""


@pytest.mark.parametrize(
    ("batch", "kept", "least", "most"),
    [(1, 0, 0.9, 1.25), (2, 0, 1.4, 1.75), (1, 1, 1.9, 2.25)],
    ids=["one", "two", "kept"],
)
def test_memory_of_a_loop(batch, kept, least, most, run_python):
    """That of one cache, of keys and values where these are not in one piece, and of the cache
    before where that is used, too."""
    assert least < float(run_python(MEMORY, str(batch), str(kept))) < most


def addresses(tensors):
    return [np.asarray(memoryview(tensor)).ctypes.data for tensor in tensors]


@pytest.mark.parametrize("slot", [0, 1])
@OF_KINDS
def test_keys_and_values_share_memory(shape, slot):
    """Where they are in one piece that begins where vectors may."""
    outputs = update_cache(*inputs(*shape, 2), 1, slot=slot)
    updated, *parts = addresses(outputs)
    size = 4 * int(np.prod(shape[2:3] + shape[3]))
    shared = [part == updated + (slot + i) * size for i, part in enumerate(parts)]
    assert shared == [shape is ALIGNED or (shape is ODD and slot + i == 0) for i in range(2)]
    for part in outputs[1:]:
        np.testing.assert_array_equal(tf.negative(part), -part.numpy())
