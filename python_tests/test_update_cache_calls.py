"""The update of a cache: gradients, shapes, calls at the limits, portable conversion."""

import itertools

import cases
import numpy as np
import pytest
import tensorflow as tf
from bad_calls import ERRORS
from cache_cases import TWO, assert_bits, by_numpy, inputs, normal, plain
from gradient_problems import assert_all_close, second_order, weights_for
from remapping import op_counts

from tf_fused_ops import update_cache
from tf_fused_ops.remapper import convert

PLACES = list(itertools.product([1, 2], [(-3, 0), (1, 1), (9, 2)]))
AT_PLACES = pytest.mark.parametrize(("batch", "place"), PLACES, ids=str)


def joined(update, index, slot, power=1):
    """All outputs as one tensor."""

    def function(*operands):
        outputs = update(*operands, index, slot=slot)
        return tf.concat([tf.reshape(y, [-1]) for y in outputs], 0) ** power

    return function


@pytest.mark.parametrize(("batch", "place"), PLACES[::2], ids=str)
def test_against_finite_differences(batch, place):
    theory, numbers = tf.test.compute_gradient(joined(update_cache, *place), normal(batch))
    for found, expected in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


SOME = ((0,), (1,), (2,), (0, 1, 2))
FACTORS = {"batch": (1, 2), "place": ((-3, 0), (1, 1), (9, 2)), "used": SOME, "watched": SOME}


@pytest.mark.parametrize(
    "row", cases.pairwise(FACTORS), ids=lambda row: "-".join(map(str, row.values()))
)
def test_gradient(row):
    """Of some outputs for some inputs, in every place; zero where nothing leads to them."""
    batch, (index, slot), used, watched = row.values()
    operands = normal(batch)

    def gradients(update, *operands):
        with tf.GradientTape() as tape:
            tape.watch([operands[i] for i in watched])
            outputs = update(*operands, index, slot=slot)
            loss = tf.add_n([tf.reduce_sum(outputs[i] ** 3) for i in used])
        zero = tf.UnconnectedGradients.ZERO
        return tape.gradient(loss, [operands[i] for i in watched], unconnected_gradients=zero)

    specs = [tf.TensorSpec(None, tf.float64)] * 3
    unknown = tf.function(lambda *v: gradients(update_cache, *v), input_signature=specs)
    expected = gradients(plain, *operands)
    assert_all_close(gradients(update_cache, *operands), expected)
    assert_all_close(gradients(tf.function(update_cache), *operands), expected)
    assert_all_close(unknown(*operands), expected)


@AT_PLACES
def test_gradients_of_other_orders_and_modes(batch, place):
    operands = normal(batch)
    weights = weights_for(operands)

    def forward(function):
        with tf.autodiff.ForwardAccumulator(operands, weights) as accumulator:
            y = function(*operands)
        return [accumulator.jvp(y)]

    def jacobian(function):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(operands)
            y = function(*operands)[::7]
        return tape.jacobian(y, operands)

    theirs, ours = (joined(update, *place, power=3) for update in (plain, update_cache))
    dy = tf.sin(theirs(*operands))
    expected = second_order(theirs, operands, dy, weights)
    for function in (ours, tf.function(ours)):
        assert_all_close(second_order(function, operands, dy, weights), expected)
        assert_all_close(forward(function), forward(theirs))
        assert_all_close(jacobian(function), jacobian(theirs))


N = None


@pytest.mark.parametrize(
    ("cache", "key", "value", "slots"),
    [
        ([1, 3, 2, 9, 4, 5], [1, N, 4, 5], N, [1, 9, 4, 5]),
        ([N, 3, 2, N, N, 5], [7, 1, 4, N], N, [7, N, 4, 5]),
        ([N, 2, N], N, [3, 1], [3, N]),
        ([1, N, 9, 4], [N, N, N], [N, N, N], [1, 9, 4]),
        ([1, 3, 2, 9, 4, 5], N, N, N),
        (N, [1, 1, 4, 5], [1, 1, 4, 5], N),
        (N, N, N, N),
    ],
    ids=str,
)
def test_shapes(cache, key, value, slots):
    specs = [tf.TensorSpec(shape, tf.float16) for shape in (cache, key, value)]
    compiled = tf.function(update_cache).get_concrete_function(*specs, tf.TensorSpec(N, tf.int64))
    found = [shape.as_list() if shape.rank is not None else N for shape in compiled.output_shapes]
    assert found == [cache, slots, slots]


def test_an_index_that_turns_out_to_be_a_vector():
    arrays = inputs(*TWO, 1)
    signature = [tf.TensorSpec(x.shape) for x in arrays] + [tf.TensorSpec(None, tf.int32)]
    compiled = tf.function(update_cache, input_signature=signature)
    assert_bits(compiled(*arrays, 1), by_numpy(*arrays, 1))
    for index in ([], [1], [1, 2]):
        with pytest.raises(ERRORS, match=r"\bindex\b"):
            compiled(*arrays, tf.constant(index, tf.int32))


# Prints the shapes of keys, or the error, of eager and traced calls: before eager ones no shape
# function runs.
EXTREMES = """
import sys
import tensorflow as tf
from tf_fused_ops import _library

def zeros(shape):
    return tf.zeros(tf.constant(shape, tf.int64))

for cache, key, slot, _ in eval(sys.argv[1]):
    def call(cache, key):
        return _library.ops.tf_fused_ops_update_cache(
            cache=cache, key=key, value=key, index=0, slot=slot
        )

    unknown = [tf.TensorSpec(None)] * 2
    for run in (call, tf.function(call), tf.function(call, input_signature=unknown)):
        try:
            print(run(zeros(cache), zeros(key))[1].shape)
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            print(str(error).replace(chr(10), " "))
"""
FAR = 2**31
# Of tensors without elements.
SIZES = [
    ([0, FAR, FAR, 3, 1], [0, 3, 1], 0, "(0, 3, 1)"),
    ([0, FAR, FAR, FAR, 3, 1], [0, 2, 1], FAR - 2, "(0, 3, 1)"),
    ([0, 0, FAR, FAR, FAR, 3, 1], [0, 3, 1], 0, "slot"),
    ([FAR, 2, 0, FAR], [FAR, 0, FAR], 0, f"({FAR}, 0, {FAR})"),
    ([0, 2, FAR, FAR], [0, FAR + 1, FAR], 0, "key"),
    ([FAR, 2, 0, FAR], [0, FAR, 1], 0, "key"),
]
SLOTS = [
    ([batch, 2, 3, 4], [batch, 1, 4], slot, "slot")
    for batch, slot in itertools.product([1, 0], [-1, 1, FAR - 1, FAR, 2**62, 2**63 - 1])
]


@pytest.mark.parametrize("calls", [SIZES, SLOTS], ids=["sizes", "slots"])
def test_extremes(calls, run_python):
    """In a process of its own, which may crash."""
    lines = run_python(EXTREMES, repr(calls)).splitlines()
    wanted = [told for *_, told in calls for _ in range(3)]
    wrong = [(line, told) for line, told in zip(lines, wanted, strict=True) if told not in line]
    assert wrong == []


@pytest.mark.parametrize("unknown", [False, True])
def test_portable_conversion(unknown, tmp_path):
    """Stock ops stand for the op where the package is not installed."""
    arrays = inputs(*TWO, 2)
    module, paths = tf.Module(), [str(tmp_path / name) for name in ("fused", "portable")]
    specs = [tf.TensorSpec(None if unknown else x.shape, x.dtype) for x in arrays]
    module.forward = tf.function(
        lambda *v: update_cache(*v, slot=3), input_signature=[*specs, tf.TensorSpec([], tf.int64)]
    )
    tf.saved_model.save(module, paths[0])
    convert(*paths, to_stock=True)
    for path, count in zip(paths, (1, 0), strict=True):
        forward = tf.saved_model.load(path).forward
        for index in (-1, 3, 2**40):
            assert_bits(forward(*arrays, index), by_numpy(*arrays, index, 3))
        assert op_counts(forward.concrete_functions[0])["TfFusedOps>UpdateCache"] == count
