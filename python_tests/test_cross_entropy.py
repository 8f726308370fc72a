"""Cross entropy of logits and numbers of classes: numbers and gradients, rule, errors."""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from remapping import assert_same, check, gradient_count, op_counts, rule_counts, step_of
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import _library, function, sparse_softmax_cross_entropy
from tf_fused_ops.ops import reference
from tf_fused_ops.remapper import convert

# A class, parts of a vector, of a block and of a task, blocks, and past the caches.
SHAPES = [(5, 1), (7, 3), (2, 3, 17), (67,), (33, 1000), (3, 5003), (1100, 2048), (0, 4)]


def tensors(shape, dtype, seed=0):
    """Returns logits, labels and the gradient of the loss."""
    rng = np.random.default_rng(seed)
    logits = tf.cast(tf.constant(rng.normal(1, 4, shape)), dtype)
    dloss = tf.cast(tf.constant(rng.normal(size=shape[:-1])), dtype)
    return logits, tf.constant(rng.integers(0, shape[-1], shape[:-1])), dloss


def stock(labels):
    return lambda logits: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def ours(labels):
    return lambda logits: sparse_softmax_cross_entropy(labels, logits)


def outputs(code, logits, dloss):
    results = [code(logits), *gradients_of(code, [logits], dloss)]
    # Of one row as well, of whose loss bfloat16 makes no array.
    return [tf.reshape(value, [-1]) for value in results]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradient(shape, dtype, isa):
    logits, labels, dloss = tensors(shape, dtype)
    if shape[-1] == 17:
        labels = tf.cast(labels, tf.int32)
    wide = [tf.cast(x, tf.float64) for x in (logits, dloss)]
    # A loss is a difference of numbers of this size, a gradient one of parts of dloss.
    largest, gradient = (np.abs(x).max(initial=0) for x in wide)
    runs = [outputs(code(labels), logits, dloss) for code in (ours, stock)]
    for name, size, found, *others in zip(
        ("loss", "gradient"),
        (largest, gradient),
        *runs,
        outputs(stock(labels), *wide),
        strict=True,
    ):
        assert_as_exact(name, found, *others, dtype, size)
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_large_logits(dtype, isa):
    """The largest is subtracted first, also where it comes in a later block."""
    numbers = np.full((2, 5000), -3e4)
    numbers[:, 4990] = 3e4
    logits, labels = tf.cast(tf.constant(numbers), dtype), tf.constant([4990, 3])
    loss, gradient = outputs(ours(labels), logits, tf.ones([2], dtype))
    expected = outputs(stock(labels), tf.cast(logits, tf.float64), tf.ones([2], tf.float64))
    assert_close("loss", loss, expected[0], dtype)
    assert_close("gradient", gradient, expected[1], dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_losses_near_zero(dtype, isa):
    """Are never less, and have the digits of the sum."""
    margins = tf.cast(tf.constant([6.0, 9.0, 12.0, 20.0, 60.0]), dtype)
    logits, labels = tf.stack([margins, tf.zeros_like(margins)], 1), tf.zeros([5], tf.int32)
    loss = tf.cast(sparse_softmax_cross_entropy(labels, logits), tf.float64).numpy()
    wide = tf.cast(logits, tf.float64)
    assert (loss >= 0).all()
    expected = stock(labels)(wide)
    # One and what it is added to have the digits of the accumulator.
    digits = 1e-15 if dtype == "float64" else 2e-7
    rounding = {"float16": 1e-3, "bfloat16": 5e-3}.get(dtype, 1e-6)
    np.testing.assert_allclose(loss, expected, rtol=rounding, atol=digits)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 4000])
def test_special_numbers(special, place, isa):
    """Stay in their rows; minus infinity is a class that is ruled out."""
    logits, _, dloss = tensors((3, 5000), "float32")
    numbers = logits.numpy()
    numbers[1, place] = special
    labels = tf.constant([2, 1, 4])
    runs = [outputs(code(labels), tf.constant(numbers), dloss) for code in (ours, stock)]
    for found, expected in zip(*runs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    found = reference.sparse_softmax_cross_entropy(tf.constant(numbers), labels)[0]
    np.testing.assert_allclose(found, runs[0][0], rtol=1e-4)


def test_nothing_but_minus_infinity(isa):
    logits, dloss = tf.fill([2, 9], -np.inf), tf.ones([2])
    loss, gradient = outputs(ours(tf.constant([1, 2])), tf.cast(logits, tf.float32), dloss)
    assert np.isnan(loss).all() and np.isnan(gradient).all()


@pytest.mark.parametrize("label", [-1, 3, 2**40])
@pytest.mark.parametrize("graph", [False, True])
def test_labels_that_are_no_classes(label, graph):
    labels, logits = tf.constant([0, label], tf.int64), tf.zeros([2, 3])

    def code(labels, logits):
        with tf.device("CPU:0"):
            return sparse_softmax_cross_entropy(labels, logits)

    with pytest.raises(tf.errors.InvalidArgumentError, match=f"labels must be .* got {label}"):
        (tf.function(code) if graph else code)(labels, logits)


@pytest.mark.parametrize("labels", [[0.5, 1.0], "ab", None])
def test_labels_that_are_no_numbers(labels):
    with pytest.raises(ValueError, match="labels"):
        sparse_softmax_cross_entropy(labels, tf.zeros([2, 3]))


def test_second_order():
    logits, labels, dloss = tensors((3, 7), "float64")

    def by_reference(logits):
        return reference.sparse_softmax_cross_entropy(logits, labels)[0]

    weights = weights_for([logits])
    expected = second_order(by_reference, [logits], dloss, weights)
    assert_all_close(second_order(ours(labels), [logits], dloss, weights), expected)


def test_what_the_op_keeps_has_gradients():
    logits, labels, _ = tensors((3, 7), "float64")

    def kept(logits):
        return _library.ops.tf_fused_ops_sparse_softmax_cross_entropy(
            logits=logits, labels=labels, U=tf.float64
        )

    gradients = []
    for code in (kept, lambda x: reference.sparse_softmax_cross_entropy(x, labels)):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = sum(tf.reduce_sum(value**2) for value in code(logits))
        gradients.append(tape.gradient(loss, logits))
    np.testing.assert_allclose(*gradients, rtol=1e-12)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("rank", [2, 3])
def test_rule(rank, dtype):
    """Stock code makes rows of what has more dimensions."""
    logits, labels, _ = tensors((2, 3, 17)[-rank:], dtype)
    rules = {"sparse_cross_entropy": 1}
    check(stock(labels), [logits], rules)
    check(step_of(stock(labels)), [logits], rules, gradients=1, unknown_batch=[0] * (rank == 3))


def test_rule_leaves_the_gradient_that_other_code_uses():
    logits, labels, _ = tensors((3, 7), "float32")

    def code(logits):
        op = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=logits, labels=labels)
        return op.loss, op.backprop

    check(code, [logits], {})


def test_labels_are_checked_behind_the_rule():
    def code(labels, logits):
        with tf.device("CPU:0"):
            return stock(labels)(logits)

    compiled = function(code)
    with pytest.raises(tf.errors.InvalidArgumentError, match="labels"):
        compiled(tf.constant([0, 3]), tf.zeros([2, 3]))
    assert rule_counts(compiled) == {"sparse_cross_entropy": 1}


def test_keras_loss():
    """In a step of a model, and with classes that do not count."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    logits, labels, _ = tensors((6, 5), "float32")

    def step(logits):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            value = loss(labels, logits)
        return value, tape.gradient(value, logits)

    compiled = check(step, [logits], {"sparse_cross_entropy": 1}, gradients=1)
    assert gradient_count(compiled) == 1


@pytest.mark.parametrize("known", [True, False])
def test_portable_conversion(tmp_path, known):
    """Also of ranks that are not known, which the op itself takes."""
    logits, labels, _ = tensors((6, 5), "float32")
    module, path = tf.Module(), str(tmp_path / "fused")

    def forward(labels, logits):
        code = stock(labels) if known else ours(labels)
        return step_of(code)(logits)

    specs = [tf.TensorSpec([6] if known else None, labels.dtype)]
    specs += [tf.TensorSpec([6, 5] if known else None)]
    module.forward = function(forward, input_signature=specs)
    expected = module.forward(labels, logits)
    tf.saved_model.save(module, path)
    convert(path, f"{path}_stock", to_stock=True)
    forward = tf.saved_model.load(f"{path}_stock").forward
    (concrete,) = forward.concrete_functions
    assert not [name for name in op_counts(concrete) if name.startswith("TfFusedOps>")]
    assert_same(forward(labels, logits), expected)
