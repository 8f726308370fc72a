"""Attention that reads keys and values in the cache that `update_cache` has written them into."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from remapping import assert_same, op_counts, plain, rule_counts, values
from test_remapper_attention_keys import OP, attend, compared, the_op
from test_remapper_caches import single, written

from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions

UPDATE = "TfFusedOps>UpdateCache"
# A decoder's layers: their caches, what comes in, and the heads that queries have for each of keys.
LENGTH, HEADS, DEPTH = 7, 2, 4


def decoder_inputs(layers, batch=1, rows=1, dtype="float32"):
    return values(
        (batch, layers, 2, LENGTH, HEADS, DEPTH), (batch, rows, HEADS, DEPTH), dtype=dtype
    )


def decode(groups=1, masks=True):
    """Returns a step of a decoder: each layer's keys are made of what the one before has seen."""

    def step(cache, x, index):
        caches = []
        for i in range(cache.shape[1]):
            keys, parts = written(cache[:, i, ...], index, x * (i + 1.5), x - 0.5)
            caches.append(ops.stack((keys, parts), axis=1))
            query = ops.repeat(x, groups, axis=2) * np.arange(1.0, 1 + HEADS * groups)[:, None]
            query = ops.cast(query, x.dtype)
            wide = [ops.repeat(t, groups, axis=2) if groups > 1 else t for t in (keys, parts)]
            scores = ops.einsum("bquh,bkuh->buqk", query, wide[0])
            if masks:
                places = index + ops.arange(x.shape[1])[:, None]
                mask = ops.arange(LENGTH)[None, :] <= places
                scores = tf.where(mask[None, None], scores, tf.constant(-1e4, scores.dtype))
            y = ops.einsum("buqk,bkuh->bquh", ops.softmax(scores), wide[1])
            shared = ops.reshape(y, (*x.shape[:2], HEADS, groups, DEPTH))
            x = ops.tanh(x + ops.sum(shared, axis=3))
        return x, ops.stack(caches, axis=1)

    return step


def reads(compiled, *args):
    """Returns the slots that ops read, also those in bodies of loops; -1 for no cache."""
    graph = compiled.get_concrete_function(*args).graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    found = [node for node in nodes if node.op == OP]
    for node in found:
        assert (node.input[1] == node.input[2]) == (node.attr["slot"].i >= 0)
    return sorted(node.attr["slot"].i for node in found)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layers", [1, 3])
def test_caches_are_read_where_they_lie(layers, batch, groups, dtype):
    step = decode(groups)
    for rows, index in ((1, 3), (4, 0)):
        args = [*decoder_inputs(layers, batch, rows, dtype), tf.constant(index)]
        compiled = compared(step, args, {"update_cache": 1, "attention": layers})
        assert reads(compiled, *args) == [2 * i for i in range(layers)]
        counts = op_counts(compiled.get_concrete_function(*args))
        assert counts[UPDATE] == layers
        assert not counts.keys() & {"XlaDynamicUpdateSlice", "Softmax", "BatchMatMulV2"}
        # That of the query.
        assert counts["Tile"] == layers


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("loop", [tf.while_loop, ops.while_loop], ids=["tf", "keras"])
def test_loops(loop, batch, groups):
    step, layers = decode(groups), 3

    def code(cache, x):
        def body(index, cache, x):
            x, cache = step(cache, x, index)
            return index + 1, cache, x / 2

        start = (tf.constant(1), cache, x)
        return loop(lambda index, *_: index < LENGTH - 1, body, start)[1:]

    args = decoder_inputs(layers, batch)
    before = [arg.numpy().copy() for arg in args]
    compiled = compared(code, args, {"update_cache": 1, "attention": layers})
    assert reads(compiled, *args) == [0, 2, 4]
    for arg, kept in zip(args, before, strict=True):
        np.testing.assert_array_equal(arg, kept)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_queries_in_groups(rows, batch):
    """As in KerasHub's Gemma."""

    def step(cache, x, index):
        caches = []
        for i in range(cache.shape[1]):
            keys, parts = written(cache[:, i, ...], index, x * (i + 1.5), x - 0.5)
            caches.append(ops.stack((keys, parts), axis=1))
            query = ops.stack([x, x * 2.0, x - 1.0], axis=3)
            scores = ops.einsum("btkgh,bskh->bkgts", query, keys)
            y = ops.einsum("bkgts,bskh->btkgh", ops.softmax(scores), parts)
            x = ops.tanh(x + ops.sum(y, axis=3))
        return x, ops.stack(caches, axis=1)

    args = [*decoder_inputs(3, batch, rows), tf.constant(2)]
    compiled = compared(step, args, {"update_cache": 1, "grouped_attention": 3})
    assert reads(compiled, *args) == [0, 2, 4]


@pytest.mark.parametrize("batch", [1, 3])
def test_one_layer_alone(batch):
    """Whose cache has no dimension of layers."""
    cache, x = decoder_inputs(1, batch)
    cache = cache[:, 0]

    def code(cache, x):
        keys, parts = written(cache, 2, x, x + 1.0)
        return attend(x, keys, parts), ops.stack((keys, parts), axis=1)

    args = [cache, x]
    compiled = compared(code, args, {"update_cache": 1, "attention": 1})
    assert reads(compiled, *args) == [0]


def swapped(query, keys, parts):
    return attend(query, parts, keys)


def changed(query, keys, parts):
    return attend(query, keys * 2.0, parts)


def cut(query, keys, parts):
    return attend(query, keys[:, :4], parts[:, :4])


def keys_alone(query, keys, parts):
    return attend(query, keys, keys)


def keys_repeated(query, keys, parts):
    wide = [ops.repeat(query, 2, axis=2), ops.repeat(keys, 2, axis=2)]
    return attend(*wide, ops.concatenate([parts, parts], axis=2))


def heads_first(query, keys, parts):
    first = [tf.transpose(x, [0, 2, 1, 3]) + 0.0 for x in (query, keys, parts)]
    return tf.nn.softmax(tf.matmul(first[0], first[1], transpose_b=True)) @ first[2]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("code", [swapped, changed, cut, keys_alone, keys_repeated, heads_first])
def test_what_is_no_slot(code, batch):
    cache, x = decoder_inputs(1, batch)
    args = [cache[:, 0], x]

    def whole(cache, x):
        keys, parts = written(cache, 2, x, x + 1.0)
        return code(x, keys, parts), ops.stack((keys, parts), axis=1)

    compiled = function(whole)
    with plain():
        assert_same(compiled(*args), tf.function(whole)(*args), units=256)
    assert rule_counts(compiled)["update_cache"] == rule_counts(compiled)["attention"] == 1
    assert the_op(compiled, *args).get_attr("slot") == -1


@pytest.mark.parametrize("batch", [1, 3])
def test_slots_of_two_caches(batch):
    """Keys of one, values of the other."""
    first, x = decoder_inputs(1, batch)
    second, _ = values(first.shape, (1,), seed=5)
    args = [first[:, 0], second[:, 0], x]

    def code(first, second, x):
        pairs = [written(cache, 2, x, x + 1.0) for cache in (first, second)]
        y = attend(x, pairs[0][0], pairs[1][1])
        return y, *(ops.stack(pair, axis=1) for pair in pairs)

    compiled = compared(code, args, {"update_cache": 2, "attention": 1})
    assert the_op(compiled, *args).get_attr("slot") == -1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("axes", [(-3,), (0,)], ids=["length", "batch"])
def test_caches_of_unknown_sizes(axes, batch):
    step = decode(masks=False)
    args = [*decoder_inputs(2, batch), tf.constant(3)]

    def spec(x):
        sizes = [
            None if i in axes or i - x.shape.rank in axes else n for i, n in enumerate(x.shape)
        ]
        return tf.TensorSpec(sizes if x.shape.rank > 4 else x.shape, x.dtype)

    signature = [spec(x) for x in args]
    compiled = function(step, input_signature=signature)
    with plain():
        expected = tf.function(step, input_signature=signature)(*args)
        assert_same(compiled(*args), expected, units=256)
    fused = axes == (-3,)
    assert rule_counts(compiled).get("update_cache", 0) == fused
    assert not fused or reads(compiled) == [0, 2]


def test_outer_tape_through_a_cache():
    """Of the fused ops, which have gradients."""
    cache, x = decoder_inputs(2, 2, dtype="float64")
    compiled = function(lambda cache, x: decode(2)(cache, x, 3))

    def by_slices(cache, x):
        caches = []
        for i in range(2):
            parts = []
            for j, new in enumerate((x * (i + 1.5), x - 0.5)):
                old = cache[:, i, j]
                parts.append(tf.concat([old[:, :3], new, old[:, 4:]], 1))
            caches.append(tf.stack(parts, 1))
            query = tf.repeat(x, 2, axis=2) * np.arange(1.0, 5)[:, None]
            wide = [tf.repeat(t, 2, axis=2) for t in parts]
            scores = tf.einsum("bqhd,bkhd->bhqk", query, wide[0])
            scores = tf.where(np.arange(LENGTH) <= 3, scores, tf.constant(-1e4, scores.dtype))
            y = tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), wide[1])
            x = tf.tanh(x + tf.reduce_sum(tf.reshape(y, [2, 1, HEADS, 2, DEPTH]), 3))
        return x, tf.stack(caches, 1)

    def gradients(code):
        with tf.GradientTape() as tape:
            tape.watch([cache, x])
            y, updated = code(cache, x)
            loss = tf.reduce_sum(y**2) + tf.reduce_sum(updated**3)
        return y, updated, tape.gradient(loss, [cache, x])

    assert_same(gradients(compiled), gradients(by_slices), units=4096)
    assert reads(compiled, cache, x) == [0, 2]


def test_switched_off():
    args = [*decoder_inputs(2), tf.constant(3)]
    for disabled, rules in (
        ("update_cache", {"attention": 2}),
        ("attention", {"update_cache": 1, "softmax": 2}),
    ):
        options = RemapOptions(disable=[disabled])
        compiled = compared(decode(2), args, rules, remap=options)
        if disabled == "update_cache":
            assert reads(compiled, *args) == [-1, -1]


def test_updates_that_nothing_attends_to():
    args = [decoder_inputs(1)[0][:, 0], tf.constant(2), *values(*[(1, 1, HEADS, DEPTH)] * 2)]
    compared(single, args, {"update_cache": 1})
