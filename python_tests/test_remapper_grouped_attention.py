"""Attention with a dimension for the heads that share keys, as KerasHub's Gemma has it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import assert_same, rule_counts, values

import tf_fused_ops as tfo

KEYS = {"b": 2, "s": 9, "k": 2, "h": 8}


def attend(query, key, value, mask=None, scores="btkgh,bskh->bkgts", masked=True):
    """Gemma's attention."""
    z = keras.ops.einsum(scores, query * tf.cast(0.25, query.dtype), key)
    softmax = keras.layers.Softmax(dtype=query.dtype.name)
    weights = softmax(z, mask=mask if masked else None)
    return keras.ops.einsum("bkgts,bskh->btkgh", weights, value)


def operands(queries=5, shared=3, width=8, dtype="float32"):
    b, s, k, h = KEYS.values()
    made = values((b, queries, k, shared, h), (b, s, k, h), (b, s, k, width))
    return [tf.cast(x, dtype) for x in made]


def ops_of(function, *args):
    return [op.type for op in function.get_concrete_function(*args).graph.get_operations()]


def check(function, args, fused=1, signature=None):
    """Compares with stock, and the number of ops of attention with what is expected."""
    decorated = tfo.function(function, input_signature=signature)
    assert_same(tf.function(function)(*args), decorated(*args))
    assert rule_counts(decorated).get("grouped_attention", 0) == fused
    arguments = () if signature else args
    assert ops_of(decorated, *arguments).count("TfFusedOps>Attention") == fused
    return decorated


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_values(dtype, queries, masked):
    args = operands(queries, dtype=dtype)
    mask = tf.constant(np.random.default_rng(0).random((2, 1, 1, queries, 9)) < 0.7)
    decorated = check(lambda *args: attend(*args, mask, masked=masked), args)
    assert not {"BatchMatMulV2", "Softmax", "Transpose"} & set(ops_of(decorated, *args))


def test_values_of_another_depth():
    check(attend, operands(width=3))


def test_unknown_batch():
    (query, *_) = operands()
    signature = [tf.TensorSpec([None, *query.shape[1:]], query.dtype)]

    def of_itself(query):
        keys = tf.reshape(query, [-1, 15, KEYS["k"], KEYS["h"]])
        return attend(query, keys, keys)

    check(of_itself, [query], signature=signature)


def test_batches_that_may_differ():
    args = operands()
    signature = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in args]
    check(lambda *args: attend(*args), args, fused=0, signature=signature)


@pytest.mark.parametrize("shape, fused", [((5, 9), 1), ((1, 1, 5, 9), 1), ((2, 1, 1, 1, 9), 1),
                                          ((2, 2, 1, 5, 9), 0), ((2, 1, 3, 5, 9), 0),
                                          ((3, 5, 9), 0)])  # fmt: skip
def test_masks(shape, fused):
    mask = tf.constant(np.random.default_rng(1).random(shape) < 0.7)
    check(lambda *args: attend(*args, mask), operands(), fused)


def test_other_order_is_left():
    def mixed(query, key, value):
        z = keras.ops.einsum("btkgh,bskh->bkgts", query, key)
        return keras.ops.einsum("bkgts,bskh->btgkh", tf.nn.softmax(z), value)

    check(mixed, operands(), fused=0)


def test_training_has_stock_gradients():
    args = operands()

    def step(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            loss = tf.reduce_sum(attend(*args) ** 2)
        return loss, *tape.gradient(loss, args)

    check(step, args, fused=0)


def test_switched_off():
    args = operands()
    options = tfo.RemapOptions(disable=("grouped_attention",))
    decorated = tfo.function(attend, remap=options)
    assert_same(attend(*args), decorated(*args))
    assert "grouped_attention" not in rule_counts(decorated)
