"""Cross entropy of logits, with classes or numbers for each class: numbers, rules, errors."""

from typing import Any, NamedTuple

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from remapping import (
    assert_same,
    check,
    gradient_count,
    op_counts,
    plain,
    reasons,
    rule_counts,
    step_of,
)
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import (
    _library,
    function,
    softmax_cross_entropy,
    sparse_softmax_cross_entropy,
)
from tf_fused_ops.ops import cross_entropy, reference
from tf_fused_ops.remapper import convert

# A class, parts of a vector, of a block and of a task, blocks, and past the caches.
SHAPES = [(5, 1), (7, 3), (2, 3, 17), (67,), (33, 1000), (3, 5003), (1100, 2048), (0, 4)]


class Kind(NamedTuple):
    """What there is for labels of a kind; functions of labels and logits, or as an op has them."""

    rule: str
    op: Any
    stock_op: Any
    raw_op: Any
    reference: Any

    def stock(self, labels):
        return lambda logits: self.stock_op(labels, logits)

    def ours(self, labels):
        return lambda logits: self.op(labels, logits)

    def of_classes(self, classes, like):
        """Labels of logits like these that say the classes."""
        if self is SPARSE:
            return tf.constant(classes)
        return tf.one_hot(classes, like.shape[-1], dtype=like.dtype)


SPARSE = Kind(
    "sparse_cross_entropy",
    sparse_softmax_cross_entropy,
    tf.nn.sparse_softmax_cross_entropy_with_logits,
    _library.ops.tf_fused_ops_sparse_softmax_cross_entropy,
    reference.sparse_softmax_cross_entropy,
)
DENSE = Kind(
    "cross_entropy",
    softmax_cross_entropy,
    tf.nn.softmax_cross_entropy_with_logits,
    _library.ops.tf_fused_ops_softmax_cross_entropy,
    reference.softmax_cross_entropy,
)


@pytest.fixture(params=[SPARSE, DENSE], ids=lambda kind: kind.rule)
def kind(request):
    return request.param


def tensors(kind, shape, dtype, seed=0):
    """Returns logits, labels and the gradient of the loss."""
    rng = np.random.default_rng(seed)
    logits = tf.cast(tf.constant(rng.normal(1, 4, shape)), dtype)
    dloss = tf.cast(tf.constant(rng.normal(size=shape[:-1])), dtype)
    if kind is SPARSE:
        return logits, tf.constant(rng.integers(0, shape[-1], shape[:-1])), dloss
    labels = tf.nn.softmax(tf.constant(rng.normal(0, 2, shape)))
    return logits, tf.cast(labels, dtype), dloss


def outputs(code, logits, dloss):
    results = [code(logits), *gradients_of(code, [logits], dloss)]
    # Of one row as well, of whose loss bfloat16 makes no array.
    return [tf.reshape(value, [-1]) for value in results]


def wide(labels):
    return tf.cast(labels, tf.float64) if labels.dtype.is_floating else labels


def check_numbers(kind, logits, labels, dloss, dtype):
    """Asserts that loss and gradient are as exact as stock's."""
    # A loss is a difference of numbers of this size, a gradient one of parts of dloss.
    largest, gradient = (np.abs(wide(x)).max(initial=0) for x in (logits, dloss))
    if kind is DENSE:
        sums = np.abs(wide(labels)).sum(-1).max(initial=0)
        largest, gradient = largest * sums, gradient * np.abs(wide(labels)).max(initial=1)
    runs = [outputs(code(labels), logits, dloss) for code in (kind.ours, kind.stock)]
    for name, size, found, *others in zip(
        ("loss", "gradient"),
        (largest, gradient),
        *runs,
        outputs(kind.stock(wide(labels)), wide(logits), wide(dloss)),
        strict=True,
    ):
        assert_as_exact(name, found, *others, dtype, size)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradient(kind, shape, dtype, isa):
    logits, labels, dloss = tensors(kind, shape, dtype)
    if kind is SPARSE and shape[-1] == 17:
        labels = tf.cast(labels, tf.int32)
    check_numbers(kind, logits, labels, dloss, dtype)
    assert _library.isa() == isa


LABELS = {
    "one hot": lambda rng, shape: np.eye(shape[1])[rng.integers(0, shape[1], shape[0])],
    "smoothed": lambda rng, shape: LABELS["one hot"](rng, shape) * 0.9 + 0.1 / shape[1],
    "of other sums": lambda rng, shape: rng.uniform(0, 3, shape),
    "of both signs": lambda rng, shape: rng.normal(0, 2, shape),
    "zeros": lambda rng, shape: np.zeros(shape),
}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("shape", [(33, 10), (5, 5003)], ids=str)
def test_other_labels(shape, name, dtype, isa):
    logits, _, dloss = tensors(DENSE, shape, dtype)
    labels = LABELS[name](np.random.default_rng(1), shape)
    check_numbers(DENSE, logits, tf.cast(tf.constant(labels), dtype), dloss, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("rows", [(4, 1), (1, 4), (1, 1), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("classes", [7, 2501])
def test_a_row_that_stands_for_all(classes, rows, dtype, isa):
    """Of logits or labels, with the gradients of either; TensorFlow's op takes it, too."""
    logits, labels = (tensors(DENSE, (n, classes), dtype, n)[i] for i, n in enumerate(rows))
    dloss = tensors(DENSE, (max(rows) * min(1, *rows), classes), dtype)[2]
    values = [wide(x) for x in (logits, labels, dloss)]
    expected = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=values[0], labels=values[1])
    loss = softmax_cross_entropy(labels, logits)
    assert loss.shape == dloss.shape
    assert_close("loss", loss, expected.loss, dtype)
    found = gradients_of(lambda x, y: softmax_cross_entropy(y, x), [logits, labels], dloss)
    of_labels = -tf.nn.log_softmax(values[0]) * values[2][:, None]
    for name, x, n, gradient, whole in zip(
        ("logits", "labels"),
        (logits, labels),
        rows,
        found,
        (expected.backprop * values[2][:, None], of_labels),
        strict=True,
    ):
        assert gradient.shape == x.shape
        whole = tf.reduce_sum(whole, 0, keepdims=True) if n == 1 else whole
        assert_close(name, gradient, whole, dtype, units=64)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_large_logits(kind, dtype, isa):
    """The largest is subtracted first, also where it comes in a later block."""
    numbers = np.full((2, 5000), -3e4)
    numbers[:, 4990] = 3e4
    logits = tf.cast(tf.constant(numbers), dtype)
    labels = kind.of_classes([4990, 3], logits)
    loss, gradient = outputs(kind.ours(labels), logits, tf.ones([2], dtype))
    ones = tf.ones([2], tf.float64)
    expected = outputs(kind.stock(wide(labels)), wide(logits), ones)
    assert_close("loss", loss, expected[0], dtype)
    assert_close("gradient", gradient, expected[1], dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_losses_near_zero(kind, dtype, isa):
    """Are never less, and have the digits of the sum."""
    margins = tf.cast(tf.constant([6.0, 9.0, 12.0, 20.0, 60.0]), dtype)
    logits = tf.stack([margins, tf.zeros_like(margins)], 1)
    labels = kind.of_classes([0] * 5, logits)
    loss = wide(kind.op(labels, logits)).numpy()
    assert (loss >= 0).all()
    expected = kind.stock(wide(labels))(wide(logits))
    # One and what it is added to have the digits of the accumulator.
    digits = 1e-15 if dtype == "float64" else 2e-7
    rounding = {"float16": 1e-3, "bfloat16": 5e-3}.get(dtype, 1e-6)
    np.testing.assert_allclose(loss, expected, rtol=rounding, atol=digits)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 4000])
def test_special_numbers(kind, special, place, isa):
    """Stay in their rows; minus infinity is a class that is ruled out."""
    logits, _, dloss = tensors(kind, (3, 5000), "float32")
    numbers = logits.numpy()
    numbers[1, place] = special
    labels = kind.of_classes([2, 1, 4], logits)
    runs = [outputs(code(labels), tf.constant(numbers), dloss) for code in (kind.ours, kind.stock)]
    for found, expected in zip(*runs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    found = kind.reference(tf.constant(numbers), labels)[0]
    np.testing.assert_allclose(found, runs[0][0], rtol=1e-4)


# Pairs of rows of logits and of labels.
SPECIAL_ROWS = [
    *([(1, x, 2), (0.5, p, 0.4)] for x in (-np.inf, np.nan) for p in (0, 0.1, -0.1)),
    *([(1, np.inf, 2), (0, p, 0)] for p in (0, 1)),
    *([(-np.inf,) * 3, (0, p, 0)] for p in (0, 1)),
    *([(1, 2, 3), (p, 0, 1)] for p in (np.nan, np.inf, -np.inf)),
    [(1, 2, 3), (np.inf, -np.inf, 1)],
    [(-3e38, 3e38, 3), (0.5, 0.5, 0)],
    [(-3e38, 3e38, 3), (0, 0.5, 0.5)],
    [(1, 2, 3), (0, 0, 0)],
]


@pytest.mark.parametrize("between", [0, 40, 5000])
@pytest.mark.parametrize("row", SPECIAL_ROWS, ids=str)
def test_special_numbers_beside_labels(row, between, isa):
    """Whatever becomes of them is what TensorFlow makes of them, be it in other blocks."""
    logits, labels = np.full((2, 2 + between, 2), -5.0), np.zeros((2, 2 + between, 2))
    for values, numbers in zip((logits, labels), row, strict=True):
        values[1, [0, 0, -1], [0, 1, 1]] = numbers
    logits, labels = (tf.constant(v.reshape(2, -1), tf.float32) for v in (logits, labels))
    dloss = tf.constant([1.0, -2.0])
    runs = [outputs(code(labels), logits, dloss) for code in (DENSE.ours, DENSE.stock)]
    for found, expected in zip(*runs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_nothing_but_minus_infinity(kind, isa):
    logits, dloss = tf.fill([2, 9], -np.inf), tf.ones([2])
    logits = tf.cast(logits, tf.float32)
    loss, gradient = outputs(kind.ours(kind.of_classes([1, 2], logits)), logits, dloss)
    assert np.isnan(loss).all() and np.isnan(gradient).all()


@pytest.mark.parametrize("shape", [(3, 0), (0, 0), (2, 3, 0), (0,)], ids=str)
def test_no_class(shape):
    """Makes a sum of nothing, as in TensorFlow."""
    logits = tf.zeros(shape)
    loss, gradient = outputs(DENSE.ours(logits), logits, tf.ones(shape[:-1]))
    np.testing.assert_array_equal(loss, np.zeros(shape[:-1]).reshape(-1))
    assert gradient.shape == (0,)


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
def test_labels_that_are_no_numbers(kind, labels):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="labels"):
        kind.op(labels, tf.zeros([2, 3]))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", [(4, 7), (2, 3, 17), (67,)], ids=str)
@pytest.mark.parametrize("graph", [False, True])
def test_gradient_of_labels(graph, shape, dtype):
    logits, labels, dloss = tensors(DENSE, shape, dtype)

    def gradients(logits, labels, dloss):
        return gradients_of(lambda x, y: DENSE.op(y, x), [logits, labels], dloss)

    _, found = (tf.function(gradients) if graph else gradients)(logits, labels, dloss)
    expected = -tf.nn.log_softmax(wide(logits)) * wide(dloss)[..., None]
    assert_close("gradient", found, expected, dtype)


def test_gradients_that_are_not_wanted_are_not_computed(monkeypatch):
    logits, labels, dloss = tensors(DENSE, (4, 7), "float32")
    expected = gradients_of(lambda x, y: DENSE.op(y, x), [logits, labels], dloss)
    monkeypatch.setattr(cross_entropy, "_labels_gradient", None)
    assert_same(gradients_of(DENSE.ours(labels), [logits], dloss), expected[:1])
    monkeypatch.undo()
    monkeypatch.setattr(cross_entropy, "_logits_gradient", None)
    found = gradients_of(lambda labels: DENSE.op(labels, logits), [labels], dloss)
    assert_same(found, expected[1:])


def test_second_order(kind):
    logits, labels, dloss = tensors(kind, (3, 7), "float64")

    def by_reference(logits):
        return kind.reference(logits, labels)[0]

    weights = weights_for([logits])
    expected = second_order(by_reference, [logits], dloss, weights)
    assert_all_close(second_order(kind.ours(labels), [logits], dloss, weights), expected)


@pytest.mark.parametrize("rows", [(3, 3), (1, 3), (3, 1)], ids=str)
def test_second_order_with_labels(rows):
    """Of the gradients as they are defined, which are not those of labels of other sums."""
    logits, labels = (tensors(DENSE, (n, 7), "float64", n)[i] for i, n in enumerate(rows))
    values = [logits, labels * 2, tensors(DENSE, (3, 7), "float64")[2]]
    weights = weights_for(values[:2])

    def by_definition(logits, labels, dloss):
        of_logits = (tf.nn.softmax(logits) - labels) * dloss[:, None]
        return of_logits, -tf.nn.log_softmax(logits) * dloss[:, None]

    def by_op(logits, labels, dloss):
        return gradients_of(lambda x, y: DENSE.op(y, x), [logits, labels], dloss)

    results = []
    for gradients in (by_op, by_definition):
        with tf.GradientTape() as tape:
            tape.watch(values)
            found = gradients(*values)
            total = sum(tf.reduce_sum(g * w) for g, w in zip(found, weights, strict=True))
        results.append(tape.gradient(total, values))
    assert_all_close(*results)


def test_what_the_op_keeps_has_gradients(kind):
    logits, labels, _ = tensors(kind, (3, 7), "float64")

    def kept(logits):
        return kind.raw_op(logits=logits, labels=labels, U=tf.float64)

    gradients = []
    for code in (kept, lambda x: kind.reference(x, labels)):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = sum(tf.reduce_sum(value**2) for value in code(logits))
        gradients.append(tape.gradient(loss, logits))
    np.testing.assert_allclose(*gradients, rtol=1e-12)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("rank", [2, 3])
def test_rule(kind, rank, dtype):
    """Stock code makes rows of what has more dimensions."""
    logits, labels, _ = tensors(kind, (2, 3, 17)[-rank:], dtype)
    code = kind.stock(labels)
    check(code, [logits], {kind.rule: 1})
    check(step_of(code), [logits], {kind.rule: 1}, gradients=1, unknown_batch=[0] * (rank == 3))


@pytest.mark.parametrize("unknown_batch", [[], [0], [1], [0, 1]])
@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=str)
def test_rule_where_labels_are_an_argument(shape, unknown_batch):
    """Their own gradient, which step_of takes, too, is stock's."""
    logits, labels, _ = tensors(DENSE, shape, "float32")

    def loss(logits, labels):
        return tf.nn.softmax_cross_entropy_with_logits(labels, logits)

    def step(logits, labels):
        return step_of(lambda x: loss(x, labels))(logits)

    for code, gradients in ((loss, 0), (step, 1), (step_of(loss), 1)):
        check(code, [logits, labels], {"cross_entropy": 1}, gradients, unknown_batch)


def of_matrices(logits, labels):
    return tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=logits, labels=labels).loss


@pytest.mark.parametrize("rows", [(4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("unknown_batch", [[], [0, 1]])
def test_rule_where_a_row_stands_for_all(unknown_batch, rows):
    logits, labels = (tensors(DENSE, (n, 5), "float32", n)[i] for i, n in enumerate(rows))
    # Of a single row of logits, stock yields a gradient for each loss.
    step = step_of(lambda x: of_matrices(x, labels))

    def with_labels(logits, labels):
        return step_of(lambda x: of_matrices(x, labels))(logits)

    check(of_matrices, [logits, labels], {"cross_entropy": 1}, 0, unknown_batch)
    check(with_labels, [logits, labels], {"cross_entropy": 1}, 1, unknown_batch)
    check(step, [logits], {"cross_entropy": 1}, 1)


@pytest.mark.parametrize(
    ("shapes", "static"),
    [
        ([(4, 1), (4, 5)], None),
        ([(4, 5), (4, 1)], None),
        ([(4, 5), (4, 5)], [(4, None), (4, 5)]),
        ([(4, 5), (4, 5)], [(4, None), (4, None)]),
    ],
)
def test_rule_leaves_classes_that_may_broadcast(shapes, static):
    arguments = [tf.constant(np.random.default_rng(0).normal(size=s), tf.float32) for s in shapes]
    specs = [tf.TensorSpec(s) for s in static or shapes]
    compiled = function(of_matrices, input_signature=specs)
    with plain():
        assert_same(compiled(*arguments), of_matrices(*arguments))
    assert rule_counts(compiled) == {}
    assert "broadcasts" in reasons(compiled)["cross_entropy"]


def test_rule_where_numbers_of_classes_are_the_same():
    """Without being known. The gradient by labels that are made of the logits is stock's."""
    logits, _, _ = tensors(DENSE, (6, 5), "float32")
    step = step_of(lambda logits: of_matrices(logits, tf.sigmoid(logits)))
    compiled = function(step, input_signature=[tf.TensorSpec([None, None])])
    assert_same(compiled(logits), step(logits))
    assert rule_counts(compiled) == {"cross_entropy": 1}
    assert gradient_count(compiled) == 1


RAW_OPS = {
    SPARSE: tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits,
    DENSE: tf.raw_ops.SoftmaxCrossEntropyWithLogits,
}


def test_rule_leaves_the_gradient_that_other_code_uses(kind):
    logits, labels, _ = tensors(kind, (3, 7), "float32")

    def code(logits):
        op = RAW_OPS[kind](features=logits, labels=labels)
        return op.loss, op.backprop

    check(code, [logits], {})


def test_labels_are_checked_behind_the_rule():
    def code(labels, logits):
        with tf.device("CPU:0"):
            return SPARSE.stock(labels)(logits)

    compiled = function(code)
    with pytest.raises(tf.errors.InvalidArgumentError, match="labels"):
        compiled(tf.constant([0, 3]), tf.zeros([2, 3]))
    assert rule_counts(compiled) == {"sparse_cross_entropy": 1}


KERAS_LOSSES = {
    "ignored class": (
        SPARSE,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2),
    ),
    "dense": (DENSE, keras.losses.CategoricalCrossentropy(from_logits=True)),
    "smoothed": (
        DENSE,
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    ),
}


@pytest.mark.parametrize("name", KERAS_LOSSES)
def test_keras_loss(name):
    kind, loss = KERAS_LOSSES[name]
    logits, labels, _ = tensors(kind, (6, 5), "float32")

    def step(logits):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            value = loss(labels, logits)
        return value, tape.gradient(value, logits)

    compiled = check(step, [logits], {kind.rule: 1}, gradients=1)
    assert gradient_count(compiled) == 1


@pytest.mark.parametrize("activation", [None, "softmax"])
def test_step_of_a_keras_model(activation):
    """Keras takes the logits from before a softmax."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(12), keras.layers.Dense(5, activation)]
    )
    loss = keras.losses.CategoricalCrossentropy(from_logits=activation is None, label_smoothing=0.1)
    weights = model.trainable_variables

    def step(x, labels):
        with tf.GradientTape() as tape:
            value = loss(labels, model(x, training=True))
        return value, tape.gradient(value, weights)

    x = tf.constant(np.random.default_rng(0).normal(size=(6, 8)), tf.float32)
    _, labels, _ = tensors(DENSE, (6, 5), "float32")
    specs = [tf.TensorSpec([None, 8]), tf.TensorSpec([None, 5])]
    compiled = function(step, input_signature=specs)
    with plain():
        expected = tf.function(step)(x, labels)
    assert_same(compiled(x, labels), expected)
    assert rule_counts(compiled)["cross_entropy"] == 1
    (fusion,) = (f for f in compiled.remap_reports[0].fused if f.rule == "cross_entropy")
    assert fusion.gradients == 1


@pytest.mark.parametrize("known", [True, False])
def test_portable_conversion(tmp_path, kind, known):
    """Also of ranks that are not known, which the op itself takes."""
    logits, labels, _ = tensors(kind, (6, 5), "float32")
    module, path = tf.Module(), str(tmp_path / "fused")

    def forward(labels, logits):
        code = kind.stock(labels) if known else kind.ours(labels)
        return step_of(code)(logits)

    specs = [tf.TensorSpec(x.shape if known else None, x.dtype) for x in (labels, logits)]
    module.forward = function(forward, input_signature=specs)
    expected = module.forward(labels, logits)
    tf.saved_model.save(module, path)
    convert(path, f"{path}_stock", to_stock=True)
    forward = tf.saved_model.load(f"{path}_stock").forward
    (concrete,) = forward.concrete_functions
    assert not [name for name in op_counts(concrete) if name.startswith("TfFusedOps>")]
    assert_same(forward(labels, logits), expected)
    if kind is DENSE and not known:
        # A row of labels that stands for all.
        assert_same(forward(labels[:1], logits), module.forward(labels[:1], logits))
