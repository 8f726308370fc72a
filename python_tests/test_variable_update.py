"""UpdateVariable: the formulas of optimizers beside the same in TensorFlow's own ops, and what
happens to the variables' memory."""

import threading
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tolerances import assert_as_exact

from tf_fused_ops import _library
from tf_fused_ops._library import ops

RATE, DECAY, GAIN, EPSILON, MOMENTUM = 0.125, 0.9, 0.1, 1e-3, 0.8
RMSPROP = (RATE, DECAY, GAIN, EPSILON)


class Gradient(NamedTuple):
    """With its square and its absolute value; of rows that occur more than once, the sums."""

    value: object
    square: object
    size: object


def whole(gradient):
    """The gradient of all elements."""
    return Gradient(gradient, gradient * gradient, tf.abs(gradient))


def momentum(g, x, velocity, rate, momentum):
    velocity = momentum * velocity - rate * g.value
    return x + velocity, velocity


def nesterov_momentum(g, x, velocity, rate, momentum):
    velocity = momentum * velocity - rate * g.value
    return x + momentum * velocity - rate * g.value, velocity


def adam(g, x, m, v, alpha, m_rate, v_rate, epsilon):
    m, v = m + m_rate * (g.value - m), v + v_rate * (g.square - v)
    return x - alpha * m / (tf.sqrt(v) + epsilon), m, v


def adamw(g, x, m, v, alpha, m_rate, v_rate, epsilon, decay, rate):
    m, v = m + m_rate * (g.value - m), v + v_rate * (g.square - v)
    return x - decay * rate * x - alpha * m / (tf.sqrt(v) + epsilon), m, v


def amsgrad(g, x, m, v, largest, alpha, m_rate, v_rate, epsilon):
    m, v = m + m_rate * (g.value - m), v + v_rate * (g.square - v)
    largest = tf.maximum(largest, v)
    return x - alpha * m / (tf.sqrt(largest) + epsilon), m, v, largest


def nadam(g, x, m, v, rate, m_rate, v_rate, epsilon, *shares):
    m_share, m_correction, g_share, g_correction, v_correction = shares
    m, v = m + m_rate * (g.value - m), v + v_rate * (g.square - v)
    ahead = m_share * m / m_correction + g_share * g.value / g_correction
    return x - rate * ahead / (tf.sqrt(v / v_correction) + epsilon), m, v


def adamax(g, x, m, norm, rate, m_rate, decay, epsilon, correction):
    m, norm = m + m_rate * (g.value - m), tf.maximum(decay * norm, g.size)
    return x - rate * m / (correction * (norm + epsilon)), m, norm


def rmsprop(g, x, square, rate, decay, gain, epsilon):
    square = decay * square + gain * g.square
    return x - rate * g.value / tf.sqrt(square + epsilon), square


def rmsprop_momentum(g, x, square, velocity, rate, decay, gain, epsilon, momentum):
    square = decay * square + gain * g.square
    velocity = momentum * velocity + rate * g.value / tf.sqrt(square + epsilon)
    return x - velocity, square, velocity


def centered_rmsprop(g, x, square, mean, rate, decay, gain, epsilon):
    square, mean = decay * square + gain * g.square, decay * mean + gain * g.value
    return x - rate * g.value / tf.sqrt(square - mean * mean + epsilon), square, mean


def centered_rmsprop_momentum(g, x, square, mean, velocity, rate, decay, gain, epsilon, momentum):
    square, mean = decay * square + gain * g.square, decay * mean + gain * g.value
    velocity = momentum * velocity + rate * g.value / tf.sqrt(square - mean * mean + epsilon)
    return x - velocity, square, mean, velocity


def adagrad(g, x, square, rate, epsilon):
    square = square + g.square
    return x - rate * g.value / tf.sqrt(square + epsilon), square


def adadelta(g, x, square, step_square, rate, decay, gain, epsilon):
    square = decay * square + gain * g.square
    share = (step_square + epsilon) / (square + epsilon)
    step_square = decay * step_square + gain * share * g.square
    return x - rate * tf.sqrt(share) * g.value, square, step_square


def lion(g, x, m, rate, m_share, g_share, decay, gain):
    return x - rate * tf.sign(m_share * m + g_share * g.value), decay * m + gain * g.value


# Formula: number of states, factors.
FORMULAS = {
    momentum: (1, (RATE, MOMENTUM)),
    nesterov_momentum: (1, (RATE, MOMENTUM)),
    adam: (2, RMSPROP),
    adamw: (2, (*RMSPROP, 0.1, RATE)),
    amsgrad: (3, RMSPROP),
    nadam: (2, (*RMSPROP, 0.8, 0.3, 0.15, 0.2, 0.1)),
    adamax: (2, (RATE, GAIN, DECAY, EPSILON, 0.3)),
    rmsprop: (1, RMSPROP),
    rmsprop_momentum: (2, (*RMSPROP, MOMENTUM)),
    centered_rmsprop: (2, RMSPROP),
    centered_rmsprop_momentum: (3, (*RMSPROP, MOMENTUM)),
    adagrad: (1, (RATE, EPSILON)),
    adadelta: (2, RMSPROP),
    lion: (1, (RATE, DECAY, GAIN, 0.95, 0.05)),
}
FIRST = pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: f.__name__)


def arrays(formula, shape, seed=0):
    """Returns gradient, variable and states, of which the first is more than a mean squared."""
    rng = np.random.default_rng(seed)
    gradient, variable = rng.normal(size=(2, *shape))
    states = rng.uniform(0.5, 1.0, (FORMULAS[formula][0], *shape))
    states[0] += 4.0
    return [gradient, variable, *states]


def update(formula, gradient, values, factors, indices=()):
    """Runs the op on variables, all given as tensors of one dtype; returns their values."""
    variables = [tf.Variable(value) for value in values]
    apply(formula, gradient, variables, factors, indices)
    return [v.numpy() for v in variables]


def apply(formula, gradient, variables, factors, indices=()):
    variable, *states = (v.handle for v in variables)
    ops.tf_fused_ops_update_variable(
        variable=variable,
        states=states,
        gradient=gradient,
        factors=factors,
        indices=list(indices),
        formula=getattr(formula, "__name__", formula),
    )


def cast(values, dtype):
    return [tf.cast(tf.constant(value, tf.float64), dtype) for value in values]


@FIRST
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 7), (3, 4099)])
def test_formula(formula, dtype, shape):
    values, factors = arrays(formula, shape), FORMULAS[formula][1]
    gradient, *before = cast(values, dtype)
    given = cast(factors, dtype)
    wide = [tf.cast(v, tf.float64) for v in (gradient, *before, *given)]
    results = update(formula, gradient, before, given)
    stock = formula(whole(gradient), *before, *given)
    reference = formula(whole(wide[0]), *wide[1:])
    for fused, plain, exact in zip(results, stock, reference, strict=True):
        assert_as_exact(formula.__name__, fused, plain.numpy(), exact.numpy(), dtype)


@FIRST
def test_instruction_sets(formula, isa):
    assert _library.isa() == isa
    gradient, *before = cast(arrays(formula, (2, 4099)), "float32")
    factors = cast(FORMULAS[formula][1], "float32")
    expected = formula(whole(gradient), *before, *factors)
    results = update(formula, gradient, before, factors)
    for fused, stock in zip(results, expected, strict=True):
        np.testing.assert_allclose(fused, stock, rtol=2e-5, atol=1e-6)


# The variable's shape, and which of its rows those of the gradient belong to.
ROWS = {
    "none": ((5, 3), []),
    "one": ((5, 3), [4]),
    "all": ((3, 16), [2, 0, 1]),
    "several": ((7, 5), [3, 0, 3, 6, 3, 0]),
    "left out": ((4, 2), [-1, 2, -7, 2]),
    "numbers": ((9,), [0, 8, 8, 1]),
    "matrices": ((4, 3, 7), [1, 1, 3]),
    "long": ((3, 4099), [1, 1]),
    "many": ((3000, 5), [7 * i * i % 3000 for i in range(400)]),
    "of nothing": ((4, 0), [1, 2]),
    "no row": ((0, 3), []),
}


def row_sums(values, indices, rows):
    return tf.math.unsorted_segment_sum(values, tf.cast(indices, tf.int64), rows)


def given_rows(formula, name, dtype):
    """Returns some rows of a gradient, their indices, and the variables and factors."""
    shape, indices = ROWS[name]
    before = cast(arrays(formula, shape)[1:], dtype)
    rng = np.random.default_rng(1)
    gradient = tf.cast(tf.constant(rng.normal(size=(len(indices), *shape[1:]))), dtype)
    return gradient, indices, before, cast(FORMULAS[formula][1], dtype)


def expected_of_rows(formula, gradient, indices, before, factors):
    rows = before[0].shape[0]
    sums = (row_sums(v, indices, rows) for v in whole(gradient))
    return formula(Gradient(*sums), *before, *factors)


@FIRST
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_rows(formula, name, dtype, index):
    """A row's gradient is the sum of all that belong to it, its square the sum of squares."""
    gradient, indices, before, factors = given_rows(formula, name, dtype)
    results = update(formula, gradient, before, factors, [tf.constant(indices, index)])
    stock = expected_of_rows(formula, gradient, indices, before, factors)
    gradient, *wide = (tf.cast(v, tf.float64) for v in (gradient, *before, *factors))
    before, factors = wide[: len(before)], wide[len(before) :]
    exact = expected_of_rows(formula, gradient, indices, before, factors)
    for fused, plain, reference in zip(results, stock, exact, strict=True):
        assert_as_exact(formula.__name__, fused, plain.numpy(), reference.numpy(), dtype)


@FIRST
def test_rows_on_instruction_sets(formula, isa):
    assert _library.isa() == isa
    for name in ROWS:
        gradient, indices, before, factors = given_rows(formula, name, "float32")
        results = update(formula, gradient, before, factors, [tf.constant(indices, tf.int64)])
        expected = expected_of_rows(formula, gradient, indices, before, factors)
        for fused, stock in zip(results, expected, strict=True):
            np.testing.assert_allclose(fused, stock, rtol=2e-5, atol=1e-6)


@FIRST
def test_rows_of_what_others_have_read(formula):
    """Then all rows are written to other memory."""
    gradient, indices, before, factors = given_rows(formula, "several", "float32")
    variables = [tf.Variable(value) for value in before]
    read = [v.read_value() for v in variables]
    kept = [value.numpy().copy() for value in read]
    apply(formula, gradient, variables, factors, [tf.constant(indices)])
    expected = expected_of_rows(formula, gradient, indices, before, factors)
    for value, old, fused, stock in zip(read, kept, variables, expected, strict=True):
        np.testing.assert_array_equal(value, old)
        np.testing.assert_allclose(fused, stock, rtol=2e-5, atol=1e-6)


def test_rows_without_gradient_under_adagrad():
    """Are left alone, but where zero is divided by zero."""
    squares = tf.constant([0.0, 0.0, 4.0])[:, None]
    for epsilon in 1e-7, 0.0:
        before, factors = [tf.ones([3, 1]), squares], cast([RATE, epsilon], "float32")
        gradient = tf.constant([[2.0]])
        found = update(adagrad, gradient, before, factors, [tf.constant([1])])
        expected = expected_of_rows(adagrad, gradient, [1], before, factors)
        for fused, stock in zip(found, expected, strict=True):
            np.testing.assert_allclose(fused, stock, rtol=1e-6)
        assert np.isnan(found[0][0, 0]) == (epsilon == 0.0)


def test_rows_of_the_variable_itself():
    start = [[1.0, -2.0], [3.0, 4.0]], tf.ones([2, 2]), tf.ones([2, 2])
    variables = [tf.Variable(value) for value in start]
    gradient, factors = variables[0].read_value(), cast(RMSPROP, "float32")
    before = [v.read_value() for v in variables]
    expected = expected_of_rows(adam, gradient, [1, 0], before, factors)
    apply(adam, gradient, variables, factors, [tf.constant([1, 0])])
    for fused, stock in zip(variables, expected, strict=True):
        np.testing.assert_allclose(fused, stock, rtol=1e-6)


@FIRST
def test_what_is_no_number_stays(formula):
    """In the variable and in every state that it gets into, as with TensorFlow's own ops."""
    for place in range(len(arrays(formula, (3,)))):
        values = cast(arrays(formula, (3,)), "float32")
        values[place] = tf.constant([np.nan, 1.0, np.nan])
        factors = cast(FORMULAS[formula][1], "float32")
        results = update(formula, values[0], values[1:], factors)
        expected = formula(whole(values[0]), *values[1:], *factors)
        for fused, stock in zip(results, expected, strict=True):
            np.testing.assert_array_equal(np.isnan(fused), np.isnan(stock))


@FIRST
def test_who_has_read_a_variable_keeps_its_value(formula):
    gradient, *before = cast(arrays(formula, (5, 7)), "float32")
    variables = [tf.Variable(value) for value in before]
    read = [v.read_value() for v in variables]
    kept = [value.numpy().copy() for value in read]
    factors = cast(FORMULAS[formula][1], "float32")
    for _ in range(2):
        apply(formula, gradient, variables, factors)
    for value, expected in zip(read, kept, strict=True):
        np.testing.assert_array_equal(value, expected)
    given = whole(gradient)
    twice = formula(given, *formula(given, *before, *factors), *factors)
    for fused, stock in zip(variables, twice, strict=True):
        np.testing.assert_allclose(fused, stock, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_the_variable():
    variables = [tf.Variable([1.0, -2.0]), tf.Variable([0.5, 0.5])]
    gradient = variables[0].read_value()
    expected = adagrad(whole(gradient), *variables, RATE, EPSILON)
    apply(adagrad, gradient, variables, [RATE, EPSILON])
    for fused, stock in zip(variables, expected, strict=True):
        np.testing.assert_allclose(fused, stock, rtol=1e-6)


def test_concurrent_updates():
    """None is lost, whatever the order in which two of them name their variables."""
    first, second = (tf.Variable(tf.zeros([100_000])) for _ in range(2))
    gradient = tf.ones([100_000])

    def run(variable, square):
        for _ in range(50):
            apply(adagrad, gradient, [variable, square], [0.0, 1.0])

    threads = [
        threading.Thread(target=run, args=pair) for pair in [(first, second), (second, first)] * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(first, np.full(100_000, 200.0))
    np.testing.assert_array_equal(second, np.full(100_000, 200.0))


def wrong_rows():
    """Yields what replaces arguments of a call of adam of rows, and what the error says."""

    def zeros(*shape, dtype="float32"):
        return tf.zeros(shape, dtype)

    def vector(*numbers, dtype="int32"):
        return [tf.constant(numbers, dtype)]

    rows = "gradient, but for the rows"
    yield {"variables": [zeros(4, 2), *[zeros(4, 3)] * 2]}, f"variable must have .* {rows}"
    yield {"variables": [zeros(4), *[zeros(4, 3)] * 2]}, f"variable must have .* {rows}"
    yield {"variables": [zeros(), *[zeros(4, 3)] * 2]}, f"variable must have .* {rows}"
    yield {"variables": [zeros(4, 3), zeros(5, 3), zeros(4, 3)]}, f"m must have .* {rows}"
    yield {"variables": [zeros(4, 3), zeros(4, 3), zeros(3)]}, f"v must have .* {rows}"
    yield {"gradient": zeros()}, "gradient must have rank at least 1"
    yield {"gradient": zeros(3, 3)}, "indices "
    yield {"indices": vector(1)}, "indices "
    yield {"indices": [tf.constant(1)]}, "indices must"
    yield {"indices": [tf.constant([[1, 2]])]}, "indices must"
    yield {"indices": vector(0, 4)}, "indices must be less than 4, the rows of variable, got 4"
    yield {"indices": vector(2**40, 0, dtype="int64")}, "indices must be less than 4"
    yield {"indices": vector(0, 1) * 2}, "indices must be none or one vector, got 2"


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", range(len(list(wrong_rows()))))
def test_wrong_rows(case, traced):
    changes, message = list(wrong_rows())[case]
    call = {
        "formula": "adam",
        "gradient": tf.ones([2, 3]),
        "variables": [tf.zeros([4, 3])] * 3,
        "factors": cast(RMSPROP, "float32"),
        "indices": [tf.constant([3, 1])],
    }
    assert_refused(call | changes, message, traced)


def test_rows_of_more_than_fit():
    """Of no elements: nothing is allocated for rows, and sizes do not overflow."""
    rows = 2**40
    variables = [tf.Variable(tf.zeros([rows, 0])) for _ in range(3)]
    factors = cast(RMSPROP, "float32")
    apply(adam, tf.zeros([2, 0]), variables, factors, [tf.constant([5, rows - 1], tf.int64)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="indices must be less than"):
        apply(adam, tf.zeros([1, 0]), variables, factors, [tf.constant([rows], tf.int64)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="variable must have the shape of"):
        apply(adam, tf.zeros([0, rows]), variables, factors, [tf.zeros([0], tf.int64)])


def wrong_calls():
    """Yields what replaces arguments of a call of rmsprop, and what the error says."""

    def zeros(shape=(2, 3), dtype="float32"):
        return tf.zeros(shape, dtype)

    yield {"variables": [zeros((2, 4)), zeros()]}, "variable must have the shape of gradient"
    yield {"variables": [zeros(), zeros((6,))]}, "square must have the shape of gradient"
    yield {"gradient": zeros((3,))}, "variable must have the shape of gradient"
    yield {"variables": [zeros(dtype="float64"), zeros()]}, "variable must be a variable of float"
    yield {"variables": [zeros(), zeros(dtype="bfloat16")]}, "square must be a variable of float"
    yield {"variables": [zeros()] * 3}, "states must be 1 variables"
    yield {"factors": [zeros(())] * 3}, "factors must be 4 numbers"
    yield {"factors": [*[zeros(())] * 3, zeros((1,))]}, "epsilon must"
    yield {"factors": [zeros((1, 1)), *[zeros(())] * 3]}, "rate must"
    yield {"formula": "descent"}, "formula"


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", range(len(list(wrong_calls()))))
def test_wrong_calls(case, traced):
    changes, message = list(wrong_calls())[case]
    call = {
        "formula": "rmsprop",
        "gradient": tf.ones([2, 3]),
        "variables": [tf.zeros([2, 3])] * 2,
        "factors": cast(RMSPROP, "float32"),
    }
    assert_refused(call | changes, message, traced)


def assert_refused(call, message, traced):
    """Asserts that a call fails for a reason and leaves the variables as they are."""
    call["variables"] = [tf.Variable(value) for value in call["variables"]]
    before = [v.numpy() for v in call["variables"]]
    run = tf.function(lambda: apply(**call)) if traced else lambda: apply(**call)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        run()
    for variable, value in zip(call["variables"], before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_one_variable_twice():
    variable = tf.Variable([1.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="different variables"):
        apply(rmsprop, tf.constant([1.0]), [variable, variable], RMSPROP)
    np.testing.assert_array_equal(variable, [1.0])


def test_a_variable_that_is_not_initialized():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [tf.compat.v1.Variable([1.0], use_resource=True) for _ in range(2)]
        call = ops.tf_fused_ops_update_variable(
            variable=variables[0].handle,
            states=[variables[1].handle],
            gradient=[1.0],
            factors=list(RMSPROP),
            indices=[],
            formula="rmsprop",
        )
        session.run(variables[0].initializer)
        with pytest.raises(tf.errors.OpError, match=r"not initialized|does not exist"):
            session.run(call)
