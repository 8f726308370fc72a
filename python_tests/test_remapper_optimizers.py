"""Keras's optimizers as one op a variable: their formulas, where the op has no kernel, and portable
forms of train steps."""

import numpy as np
import pytest
import tensorflow as tf
from remapping import fused_ops, op_counts, reasons, rule_counts, values
from test_remapper_updates import (  # fmt: skip
    OPS,
    SHAPE,
    STOCK_OPS,
    adam,
    momentum,
    nesterov_momentum,
    rmsprop,
    run,
)
from tolerances import assert_as_exact, assert_close

from tf_fused_ops.function import function
from tf_fused_ops.remapper import convert, kernels

keras = pytest.importorskip("keras")


@pytest.fixture
def elsewhere(monkeypatch):
    """A device without UpdateVariable."""
    has_kernel, missing = kernels.has_kernel, OPS["adam"]
    monkeypatch.setattr(
        kernels,
        "has_kernel",
        lambda op_type, *others: op_type != missing and has_kernel(op_type, *others),
    )
    for rule, op_type in STOCK_OPS.items():
        monkeypatch.setitem(OPS, rule, op_type)


@pytest.mark.parametrize("update", [momentum, nesterov_momentum, adam])
def test_elsewhere(update, elsewhere):
    run(update, {update.__name__: 1})


def test_elsewhere_there_are_fewer(elsewhere):
    compiled = run(rmsprop, {})
    assert "UpdateVariable has no float32 kernel" in reasons(compiled)["rmsprop"]


@pytest.mark.parametrize(
    ("optimizer", "options", "counts"),
    [
        ("SGD", {}, {"gradient_descent": 4}),
        ("SGD", {"momentum": 0.9}, {"momentum": 4}),
        ("SGD", {"momentum": 0.8, "nesterov": True}, {"nesterov_momentum": 4}),
        ("SGD", {"momentum": 0.9, "clipnorm": 0.1}, {"momentum": 4}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.01}, {"gradient_descent": 4, "momentum": 4}),
        # A moving average reads the variables afterwards.
        ("SGD", {"momentum": 0.9, "use_ema": True}, {"momentum": 4}),
        ("Adam", {}, {"adam": 4}),
        ("Adam", {"global_clipnorm": 0.1, "epsilon": 1e-3}, {"adam": 4}),
        ("AdamW", {}, {"adamw": 4}),
        ("AdamW", {"clipnorm": 0.1, "use_ema": True}, {"adamw": 4}),
        ("Adam", {"use_ema": True, "ema_overwrite_frequency": 2}, {"adam": 4}),
        ("Adam", {"amsgrad": True}, {"amsgrad": 4}),
        ("Nadam", {}, {"nadam": 4}),
        ("Adamax", {}, {"adamax": 4}),
        ("RMSprop", {}, {"rmsprop": 4}),
        ("RMSprop", {"weight_decay": 0.01}, {"gradient_descent": 4, "rmsprop": 4}),
        ("RMSprop", {"momentum": 0.9, "clipnorm": 0.1}, {"rmsprop_momentum": 4}),
        ("RMSprop", {"centered": True, "use_ema": True}, {"centered_rmsprop": 4}),
        ("RMSprop", {"centered": True, "momentum": 0.9}, {"centered_rmsprop_momentum": 4}),
        ("Adagrad", {}, {"adagrad": 4}),
        ("Adadelta", {}, {"adadelta": 4}),
        ("Lion", {}, {"lion": 4}),
        # This changes the variables by another formula.
        ("Ftrl", {}, {}),
    ],
)
def test_keras_optimizers(optimizer, options, counts):
    stock, slots, _ = train(tf.function, optimizer, options, "float32")
    reference, _, _ = train(tf.function, optimizer, options, "float64")
    fused, fused_slots, step = train(function, optimizer, options, "float32")
    for ours, theirs, exact in zip(fused, stock, reference, strict=True):
        assert_as_exact(optimizer, ours, theirs, exact, "float32")
    for ours, theirs in zip(fused_slots, slots, strict=True):
        assert_close(optimizer, ours, theirs, "float32")
    assert {rule: n for rule, n in rule_counts(step).items() if rule in OPS} == counts
    assert not OPS.keys() & reasons(step).keys()


@pytest.mark.parametrize("batch", [6, None])
@pytest.mark.parametrize("inputs", ["int32", "int64"])
@pytest.mark.parametrize(
    ("optimizer", "options", "rule"),
    [
        ("SGD", {"momentum": 0.9}, "momentum"),
        ("SGD", {"momentum": 0.8, "nesterov": True}, "nesterov_momentum"),
        ("Adam", {}, "adam"),
        ("AdamW", {"weight_decay": 0.1}, "adamw"),
        ("Adam", {"amsgrad": True}, "amsgrad"),
        ("Nadam", {}, "nadam"),
        ("Adamax", {}, "adamax"),
        ("RMSprop", {}, "rmsprop"),
        ("RMSprop", {"momentum": 0.9}, "rmsprop_momentum"),
        ("RMSprop", {"centered": True}, "centered_rmsprop"),
        ("RMSprop", {"centered": True, "momentum": 0.9}, "centered_rmsprop_momentum"),
        ("Adagrad", {}, "adagrad"),
        ("Adadelta", {}, "adadelta"),
        ("Lion", {}, "lion"),
    ],
)
def test_embeddings(optimizer, options, rule, inputs, batch):
    """Rows that no token, one and several tokens have."""

    def trained(decorator, dtype):
        tables = [keras.layers.Embedding(n, 5, dtype=dtype) for n in (9, 30)]
        tokens = keras.Input((3,), dtype=inputs)
        x = keras.layers.Concatenate(dtype=dtype)([table(tokens) for table in tables])
        model = keras.Model(tokens, keras.layers.Dense(2, dtype=dtype)(x))
        model.set_weights([values(w.shape, seed=i)[0] for i, w in enumerate(model.get_weights())])
        made = getattr(keras.optimizers, optimizer)(0.05, **options)
        made.build(model.trainable_variables)

        signature = [tf.TensorSpec([batch, 3], inputs)]
        step = decorator(train_step(model, made), input_signature=signature)
        rng = np.random.default_rng(0)
        losses = [step(tf.constant(rng.integers(0, 9, (6, 3)), inputs)).numpy() for _ in range(3)]
        return [*losses, *model.get_weights()], [v.numpy() for v in made.variables], step

    stock, slots, _ = trained(tf.function, "float32")
    exact, _, _ = trained(tf.function, "float64")
    fused, fused_slots, step = trained(function, "float32")
    for ours, theirs, reference in zip(fused, stock, exact, strict=True):
        assert_as_exact(optimizer, ours, theirs, reference, "float32")
    for ours, theirs in zip(fused_slots, slots, strict=True):
        assert_close(optimizer, ours, theirs, "float32")
    counts = {name: n for name, n in rule_counts(step).items() if name in OPS}
    assert counts == {f"sparse_{rule}": 2, rule: 2}
    assert op_counts(step.get_concrete_function())["UnsortedSegmentSum"] == 0


def test_rows_of_unknown_number():
    """Of the gradient there may be any; of the variable, as many as stock code sums up."""

    def run(decorator, size):
        variable, optimizer = tf.Variable(values(SHAPE)[0]), keras.optimizers.Adam(0.1)
        optimizer.build([variable])

        @decorator(input_signature=[tf.TensorSpec([None, 5]), tf.TensorSpec([None], tf.int64)])
        def step(rows, indices):
            shape = tf.constant(SHAPE, tf.int64) if size is None else tf.stack([size, 5])
            gradient = tf.IndexedSlices(rows, indices, shape)
            optimizer.apply_gradients([(gradient, variable)])

        for indices in ([], [6], [1, 0, 1, 3]):
            step(*values((len(indices), 5)), tf.constant(indices, tf.int64))
        return variable.numpy(), step

    size = tf.Variable(7, dtype=tf.int64)
    for rows in None, size:
        expected, _ = run(tf.function, rows)
        found, step = run(function, rows)
        assert_close("variable", found, expected, "float32")
        assert rule_counts(step) == ({"sparse_adam": 1} if rows is None else {})
        if rows is size:
            assert "may broadcast to" in reasons(step)["sparse_adam"]


@pytest.mark.parametrize("width", [5, None])
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def test_rows_of_unknown_width(optimizer, width):
    """Rows of one element would broadcast."""
    variable, made = tf.Variable(values(SHAPE)[0]), getattr(keras.optimizers, optimizer)(0.1)
    made.build([variable])

    @function(input_signature=[tf.TensorSpec([None, width]), tf.TensorSpec([None], tf.int32)])
    def step(rows, indices):
        made.apply_gradients([(tf.IndexedSlices(rows, indices, tf.constant(SHAPE)), variable)])

    step(*values((2, 5)), tf.constant([3, 1]))
    assert rule_counts(step) == ({f"sparse_{optimizer.lower()}": 1} if width else {})
    if width is None:
        assert "may not be rows" in reasons(step)[f"sparse_{optimizer.lower()}"]


@pytest.mark.parametrize("other", [False, True])
def test_divisions_of_rows(other):
    """Which rows Keras divides is left to it, but no other code is taken for its."""
    rate, shape, start = tf.constant(0.1), tf.constant(SHAPE), values(SHAPE)[0]
    indices, gradient = tf.constant([3, 1, 3]), values((3, 5), seed=1)[0]

    def divide(dividend, divisor):
        if not other:
            return keras.ops.divide(dividend, divisor)
        at_zero = tf.logical_or(tf.equal(divisor, 0), tf.math.is_nan(divisor))
        at_zero = tf.reduce_any(at_zero, axis=(1,))

        def rest():
            return tf.IndexedSlices(
                dividend.values / tf.gather(divisor, dividend.indices),
                tf.cast(dividend.indices, tf.int64),
                dividend.dense_shape,
            )

        def with_others():
            tf.where(at_zero)
            # Read in the order in which Keras does.
            shape, rows, values = map(
                tf.identity, (dividend.dense_shape, dividend.indices, dividend.values)
            )
            product = values * tf.gather(divisor, rows)
            return tf.IndexedSlices(product, tf.cast(rows, tf.int64), shape)

        return tf.cond(tf.reduce_any(at_zero), with_others, rest)

    def run(decorator):
        variable, square = tf.Variable(start), tf.Variable(tf.ones(SHAPE))

        @decorator
        def step(gradient, indices):
            square.scatter_add(tf.IndexedSlices(tf.square(gradient), indices, shape))
            step = tf.IndexedSlices(rate * gradient, indices, shape)
            variable.scatter_sub(divide(step, tf.sqrt(square + 1e-7)))

        step(gradient, indices)
        return variable.numpy(), step

    expected, _ = run(tf.function)
    found, step = run(function)
    assert_close("variable", found, expected, "float32")
    assert rule_counts(step) == ({} if other else {"sparse_adagrad": 1})
    if other:
        assert "is not the division of rows" in reasons(step)["sparse_adagrad"]


def train_step(model, optimizer):
    """A step towards a model that returns ones."""

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1.0) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


def train(decorator, optimizer, options, dtype):
    """Returns losses and variables of a model, what its optimizer keeps, and the train step."""
    layers = [keras.layers.Dense(n, dtype=dtype) for n in (4, 2)]
    model = keras.Sequential([keras.Input((3,), dtype=dtype), *layers])
    model.set_weights([values(w.shape, seed=w.ndim)[0] for w in model.get_weights()])
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)
    made = getattr(keras.optimizers, optimizer)(rate, **options)
    made.build(model.trainable_variables)

    step = decorator(train_step(model, made))
    batches = [values((5, 3), seed=i)[0] for i in range(4)]
    losses = [step(tf.cast(batch, dtype)).numpy() for batch in batches]
    return [*losses, *model.get_weights()], [v.numpy() for v in made.variables], step


def test_default_betas_of_adam(elsewhere):
    """Keras rounds beta where it corrects the bias and 1 - beta elsewhere, the fused op only beta:
    its moments are a little off, but the variable is nearer to the published formula."""
    rate, first, second, gradients = 0.01, 0.9, 0.999, values(*[SHAPE] * 5, seed=3)
    m, v, exact = (np.zeros(SHAPE) for _ in range(3))
    for t, gradient in enumerate(np.asarray(gradients, np.float64), 1):
        m, v = first * m + (1 - first) * gradient, second * v + (1 - second) * gradient**2
        exact -= rate * m / (1 - first**t) / (np.sqrt(v / (1 - second**t)) + 1e-7)

    def train(decorator):
        variable, adam = tf.Variable(tf.zeros(SHAPE)), keras.optimizers.Adam(rate)
        adam.build([variable])
        step = decorator(lambda gradient: adam.apply_gradients([(gradient, variable)]))
        for gradient in gradients:
            step(gradient)
        return variable.numpy(), [moment.numpy() for moment in adam.variables[2:]], step

    stock, _, _ = train(tf.function)
    fused, moments, step = train(function)
    assert rule_counts(step) == {"adam": 1}
    assert_as_exact("variable", fused, stock, exact, "float32")
    for moment, reference in zip(moments, (m, v), strict=True):
        np.testing.assert_allclose(moment, reference, rtol=2e-5, atol=1e-8)


def test_rate_of_adam_whose_complement_is_rounded(elsewhere):
    def program(state, gradient):
        state.velocity.assign_add((gradient - state.velocity) * 0.1)
        state.square.assign_add((tf.square(gradient) - state.square) * 0.0001)
        state.variable.assign_sub(state.velocity * 0.1 / (tf.sqrt(state.square) + 1e-7))

    compiled = run(program, {})
    assert reasons(compiled)["adam"].startswith("1 - 0.0001 is rounded to 0.9999")


@pytest.mark.parametrize(
    ("optimizer", "options", "rule"),
    [
        ("RMSprop", {"centered": True, "momentum": 0.5}, "centered_rmsprop_momentum"),
        ("Adam", {"amsgrad": True}, "amsgrad"),
        ("Adadelta", {}, "adadelta"),
        ("Adam", {}, "sparse_adam"),
        ("AdamW", {}, "sparse_adamw"),
        ("Adam", {"amsgrad": True}, "sparse_amsgrad"),
        ("SGD", {"momentum": 0.9}, "sparse_momentum"),
        ("RMSprop", {"centered": True}, "sparse_centered_rmsprop"),
        ("Adagrad", {}, "sparse_adagrad"),
        ("Adadelta", {}, "sparse_adadelta"),
    ],
)
def test_train_step_without_the_package(optimizer, options, rule, tmp_path):
    """What is saved with fused updates is turned to stock ops that do the same, in the same
    order."""
    gradients = values((7, 5), (7, 5), (7, 5))

    class Trainer(tf.Module):
        def __init__(self):
            self.variable = keras.Variable(values(SHAPE, seed=1)[0])
            self.optimizer = getattr(keras.optimizers, optimizer)(0.1, **options)
            self.optimizer.build([self.variable])

        @function(input_signature=[tf.TensorSpec(SHAPE)])
        def step(self, gradient):
            before = self.variable + 0.0
            if rule.startswith("sparse_"):
                rows = tf.constant([3, 1, 0, 3, 3, 6, 0])
                gradient = tf.IndexedSlices(gradient, rows, tf.constant(SHAPE))
            self.optimizer.apply_gradients([(gradient, self.variable)])
            return before, self.variable + 0.0

    trainer, folders = Trainer(), [str(tmp_path / name) for name in ("fused", "portable")]
    tf.saved_model.save(trainer, folders[0])
    assert rule_counts(trainer.step) == {rule: 1}
    convert(*folders, to_stock=True)
    assert fused_ops(folders[1]) == {}
    stock = tf.saved_model.load(folders[1])
    for gradient in gradients:
        for ours, theirs in zip(trainer.step(gradient), stock.step(gradient), strict=True):
            assert_close(optimizer, theirs, ours, "float32")
