"""Attention whose keys and values are repeated for the heads of queries: which are read."""

import keras
import pytest
import tensorflow as tf
from keras import ops
from remapping import (
    assert_same,
    gradient_count,
    op_counts,
    plain,
    rule_counts,
    step_of,
    taped,
    values,
)
from test_remapper_attention import by_einsum

from tf_fused_ops.function import function

OP = "TfFusedOps>Attention"
ATTENTION = {"attention": 1}
# Batch, queries or keys, heads, depth.
GROUPED = [(2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 7)]


def attend(query, key, value):
    """As in KerasHub's models."""
    scores = ops.einsum("bquh,bkuh->buqk", query, key)
    return ops.einsum("buqk,bkuh->bquh", ops.softmax(scores * 0.5), value)


def with_masked_scores(query, key, value):
    layer = keras.layers.Softmax(dtype="float64" if query.dtype == tf.float64 else "float32")
    scores = ops.einsum("bquh,bkuh->buqk", query, key)
    mask = ops.arange(query.shape[1])[:, None] >= ops.arange(key.shape[1]) - 1
    weights = ops.cast(layer(scores, mask[None, None]), query.dtype)
    return ops.einsum("buqk,bkuh->bquh", weights, value)


def of_keras(query, key, value):
    return ops.dot_product_attention(query, key, value, scale=0.5)


def with_dropout(query, key, value):
    weights = tf.nn.softmax(ops.einsum("bquh,bkuh->buqk", query, key))
    weights = tf.nn.experimental.stateless_dropout(weights, 0.2, seed=[1, 2])
    return ops.einsum("buqk,bkuh->bquh", weights, value)


def with_bias(query, key, value):
    (bias,) = values((4, 1, 6), seed=3, dtype=query.dtype)
    weights = tf.nn.softmax(ops.einsum("bquh,bkuh->buqk", query, key) + bias)
    return ops.einsum("buqk,bkuh->bquh", weights, value)


ATTENTIONS = {
    "as KerasHub": attend,
    "masked": with_masked_scores,
    "of keras": of_keras,
    "einsum": by_einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
    "dropout": with_dropout,
    "bias": with_bias,
}


def repeated(repeat, attention=attend):
    """Returns attention to keys and values that are repeated."""
    return lambda query, key, value: attention(query, repeat(key), repeat(value))


def by_hand(x, times=2):
    batch, length, heads, depth = x.shape
    wide = tf.tile(tf.expand_dims(x, 3), [1, 1, 1, times, 1])
    return tf.reshape(wide, [batch, length, heads * times, depth])


REPEATS = {
    "keras": lambda x, times=2: ops.repeat(x, times, axis=2),
    "tf": lambda x, times=2: tf.repeat(x, times, axis=2),
    "tf, from the end": lambda x, times=2: tf.repeat(x, times, axis=-2),
    "tf, int64": lambda x, times=2: tf.repeat(x, tf.constant(times, tf.int64), axis=2),
    "by hand": by_hand,
}


def the_op(compiled, *args):
    """Returns the one fused op of a decorated function."""
    graph = compiled.get_concrete_function(*args).graph
    (op,) = (op for op in graph.get_operations() if op.type == OP)
    return op


def heads_of(compiled, *args):
    """Returns how many heads the op's query, keys and values have."""
    return tuple(x.shape[2] for x in the_op(compiled, *args).inputs[:3])


def tiles(compiled, *args):
    return op_counts(compiled.get_concrete_function(*args))["Tile"]


def compared(code, args, rules=None, signature=None, **options):
    """Returns a decorated function that fuses what is expected and computes what stock does."""
    compiled = function(code, input_signature=signature, **options)
    with plain():
        expected = tf.function(code, input_signature=signature)(*args)
        found = compiled(*args)
    assert_same(found, expected, units=256)
    told = "\n".join(map(str, compiled.remap_reports))
    assert rule_counts(compiled) == (ATTENTION if rules is None else rules), told
    return compiled


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_repeated_keys_are_read_once(name, dtype):
    args = values(*GROUPED, dtype=dtype)
    compiled = compared(repeated(REPEATS["keras"], ATTENTIONS[name]), args)
    assert heads_of(compiled, *args) == (4, 2, 2) and not tiles(compiled, *args)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", REPEATS)
def test_spellings_of_repeats(name, queries, groups):
    args = values((3, queries, 4, 8), (3, 6, 4 // groups, 8), (3, 6, 4 // groups, 7))
    compiled = compared(repeated(lambda x: REPEATS[name](x, groups)), args)
    assert heads_of(compiled, *args) == (4, 4 // groups, 4 // groups)
    assert not tiles(compiled, *args)


KNOWN = {
    "batch": [None, 6],
    "length": [2, None],
    "neither": [None, None],
}


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_unknown_sizes(name, itself):
    """Of keys that are made of what queries are made of, and of others."""

    def code(x, *others):
        sizes = tf.shape(x)[:2]
        made = [x] * 2 if itself else others
        key, value = (tf.reshape(t, tf.concat([tf.shape(t)[:2], [2, 8]], 0)) for t in made)
        query = tf.reshape(tf.concat([x, x], -1), tf.concat([sizes, [4, 8]], 0))
        return attend(query, *(ops.repeat(t, 2, axis=2) for t in (key, value)))

    args = values(*[(2, 6, 16)] * (1 if itself else 3))
    signature = [tf.TensorSpec([*KNOWN[name], 16])] * len(args)
    compiled = function(code, input_signature=signature)
    assert_same(compiled(*args), tf.function(code, input_signature=signature)(*args), units=256)
    # The batch of keys may not be that of queries.
    if itself or name == "length":
        assert rule_counts(compiled) == ATTENTION
        assert heads_of(compiled) == (4, 2, 2) and not tiles(compiled)
    else:
        assert rule_counts(compiled) == {"softmax": 1}
        assert tiles(compiled) == 2


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (0, 1, 2), (0, 1, 3)], ids=str)
@pytest.mark.parametrize("name", ["einsum", "as KerasHub"])
def test_unknown_sizes_of_operands(name, axes):
    def spec(x):
        sizes = [None if i in axes else n for i, n in enumerate(x.shape)]
        return tf.TensorSpec(sizes, x.dtype)

    args = values(*GROUPED)
    code, signature = repeated(REPEATS["keras"], ATTENTIONS[name]), [spec(x) for x in args]
    compiled = function(code, input_signature=signature)
    assert_same(compiled(*args), tf.function(code, input_signature=signature)(*args), units=256)
    fused = rule_counts(compiled).get("attention", 0)
    assert fused == (name == "einsum" or axes == (1,))
    # Nor may the number of heads be unknown, or the depth.
    once = fused and not {2, 3} & set(axes)
    assert tiles(compiled) == (0 if once else 2)
    if once:
        assert heads_of(compiled) == (4, 2, 2)


def tiled(x):
    """Heads one after the other, again and again."""
    return tf.tile(x, [1, 1, 2, 1])


def uneven(x):
    return tf.repeat(x, [1, 3], axis=2)


def two_batches(x):
    wide = tf.tile(tf.expand_dims(x[:1], 3), [2, 1, 1, 2, 1])
    return tf.reshape(wide, [2, 6, 4, x.shape[3]])


def in_another_order(x):
    wide = tf.tile(tf.expand_dims(x, 2), [1, 1, 2, 1, 1])
    return tf.reshape(wide, [2, 6, 4, x.shape[3]])


def mixed(x):
    """Whose rows are of another batch than they were."""
    wide = tf.tile(tf.expand_dims(tf.reshape(x, [6, 2, 2, -1]), 3), [1, 1, 1, 2, 1])
    return tf.reshape(wide, [2, 6, 4, x.shape[3]])


def of_depth(x):
    wide = tf.tile(tf.expand_dims(x, 4), [1, 1, 1, 1, 2])
    return tf.reshape(wide, [2, 6, 4, x.shape[3]])


OTHERS = {
    "tiled": tiled,
    "uneven": uneven,
    "two batches": two_batches,
    "in another order": in_another_order,
    "mixed": mixed,
    "of depth": of_depth,
    "behind": lambda x: tf.repeat(x, 2, axis=2) + 1.0,
    "backwards": lambda x: tf.repeat(x, 2, axis=2)[:, :, ::-1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_repeats(name):
    """Of which heads are not those that follow one another."""
    args = values(*GROUPED)
    compiled = compared(repeated(OTHERS[name]), args)
    assert heads_of(compiled, *args) == (4, 4, 4)
    assert name == "uneven" or tiles(compiled, *args) == 2


@pytest.mark.parametrize("axis", [0, 1, 3])
def test_repeats_over_other_axes(axis):
    shapes = [list(shape) for shape in ((2, 5, 4, 8), (2, 6, 4, 8), (2, 6, 4, 7))]
    shapes[0][axis] *= 1 if axis == 1 else 2
    args = values(*shapes)
    compiled = compared(repeated(lambda x: tf.repeat(x, 2, axis=axis)), args)
    assert heads_of(compiled, *args) == (4, 4, 4) and tiles(compiled, *args) == 2


@pytest.mark.parametrize("which", ["key", "value"])
def test_one_of_them_repeated(which):
    """Both are read as they are given."""
    shapes = [(2, 5, 4, 8), (2, 6, 4, 8), (2, 6, 4, 7)]
    place = ["query", "key", "value"].index(which)
    shapes[place] = GROUPED[place]
    args = values(*shapes)

    def code(*operands):
        operands = list(operands)
        operands[place] = tf.repeat(operands[place], 2, axis=2)
        return attend(*operands)

    compiled = compared(code, args)
    assert heads_of(compiled, *args) == (4, 4, 4) and tiles(compiled, *args) == 1


@pytest.mark.parametrize("heads", [(2, 1), (1, 2), (4, 1), (1, 4)], ids=str)
def test_repeats_of_other_numbers_of_heads(heads):
    """Of keys and of values."""
    args = values((2, 5, 4, 8), (2, 6, heads[0], 8), (2, 6, heads[1], 7))

    def code(query, *others):
        return attend(query, *(tf.repeat(x, 4 // x.shape[2], axis=2) for x in others))

    compiled = compared(code, args)
    assert heads_of(compiled, *args) == (4, 4, 4)


def test_repeated_queries():
    args = values((2, 5, 2, 8), (2, 6, 4, 8), (2, 6, 4, 7))
    compiled = compared(lambda q, k, v: attend(tf.repeat(q, 2, axis=2), k, v), args)
    assert heads_of(compiled, *args) == (4, 4, 4) and tiles(compiled, *args) == 1


def test_repeats_that_something_else_reads():
    args = values(*GROUPED)

    def code(query, key, value):
        wide = [tf.repeat(x, 2, axis=2) for x in (key, value)]
        return attend(query, *wide), wide[0] + 1

    compiled = compared(code, args)
    assert heads_of(compiled, *args) == (4, 2, 2) and tiles(compiled, *args) == 1


def test_keys_that_are_values():
    args = values((2, 5, 4, 8), (2, 6, 2, 8))

    def code(query, key):
        wide = tf.repeat(key, 2, axis=2)
        return attend(query, wide, wide)

    compiled = compared(code, args)
    assert heads_of(compiled, *args) == (4, 2, 2) and not tiles(compiled, *args)


@pytest.mark.parametrize("repeats", [True, False])
def test_heads_in_front(repeats):
    """Share none."""
    args = values((2, 4, 5, 8), (2, 4 - 2 * repeats, 6, 8), (2, 4 - 2 * repeats, 6, 7))

    def code(query, key, value):
        wide = [tf.repeat(x, 2, axis=1) if repeats else x for x in (key, value)]
        return tf.nn.softmax(tf.matmul(query, wide[0], transpose_b=True)) @ wide[1]

    compiled = compared(code, args)
    assert the_op(compiled, *args).get_attr("heads_first")
    assert the_op(compiled, *args).get_attr("slot") == -1
    assert tiles(compiled, *args) == 2 * repeats


@pytest.mark.parametrize("sizes", [(0, 5, 6, 2), (2, 0, 6, 2), (2, 5, 0, 2), (2, 5, 6, 0)], ids=str)
def test_no_elements(sizes):
    batch, queries, keys, heads = sizes
    args = values((batch, queries, 2 * heads, 8), (batch, keys, heads, 8), (batch, keys, heads, 7))
    compared(repeated(REPEATS["tf"]), args)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("groups", [2, 4])
def test_training(groups, name):
    args = values((2, 5, 4, 8), (2, 6, 4 // groups, 8), (2, 6, 4 // groups, 7))
    code = repeated(lambda x: ops.repeat(x, groups, axis=2), ATTENTIONS[name])
    compiled = compared(step_of(code), args)
    assert gradient_count(compiled) == 1
    assert op_counts(compiled.get_concrete_function(*args))["TfFusedOps>AttentionGrad"] == 1


@pytest.mark.parametrize("name", ["as KerasHub", "bias", "dropout"])
def test_outer_tape(name):
    args, code = values(*GROUPED), repeated(REPEATS["keras"], ATTENTIONS[name])
    compiled = function(code)

    with plain():
        expected = taped(tf.function(code), args)
    assert_same(taped(compiled, args), expected, units=256)
    assert heads_of(compiled, *args) == (4, 2, 2) and not tiles(compiled, *args)


def test_second_order():
    args, code = values(*GROUPED, dtype="float64"), repeated(REPEATS["keras"])

    def step(*args):
        with tf.GradientTape() as outer:
            outer.watch(args)
            with tf.GradientTape() as tape:
                tape.watch(args)
                y = code(*args)
            gradients = tape.gradient(y, args, output_gradients=tf.sin(y))
            total = tf.add_n([tf.reduce_sum(g**3) for g in gradients])
        return outer.gradient(total, args)

    compiled = function(step)
    with plain():
        assert_same(compiled(*args), tf.function(step)(*args), units=4096)
    assert sum(rule_counts(compiled).values()) >= 1
