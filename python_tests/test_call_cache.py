"""Calls that find their trace without TensorFlow's search for it: as stock's in every way."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import tensorflow as tf
from remapping import values
from tensorflow.python.eager.polymorphic_function import polymorphic_function, tracing_compilation
from tensorflow.python.profiler import trace

import tf_fused_ops as tfo
from tf_fused_ops import call_cache

X, Y, Z = values((3, 4), (3, 4), (3, 4))


@pytest.fixture
def searches(monkeypatch):
    """A function that calls another and tells how often TensorFlow searched, and the result."""
    original, count = tracing_compilation.call_function, itertools.count()

    def counting(*args, **kwargs):
        next(count)
        return original(*args, **kwargs)

    monkeypatch.setattr(tracing_compilation, "call_function", counting)

    def call(compiled, *args, **kwargs):
        before = next(count)
        result = compiled(*args, **kwargs)
        return next(count) - before - 1, result

    return call


def settled(compiled, *args, **kwargs):
    """Calls a function until it knows its trace."""
    for _ in range(3):
        compiled(*args, **kwargs)


def test_known_calls_are_not_searched(searches):
    compiled = tfo.function(lambda x, y: x - 2 * y)
    settled(compiled, X, Y)
    count, result = searches(compiled, Z, X)
    assert count == 0
    np.testing.assert_array_equal(result, Z - 2 * X)
    assert compiled.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x, y: f(x, y=y),
        lambda f, x, y: f(y=y, x=x),
        lambda f, x, y: f(x, y, True),
        lambda f, x, y: f(x, y, scale=2.5),
        lambda f, x, y: f(scale=None, y=y, x=x),
        lambda f, x, y: f(x, y, "negative"),
        lambda f, x, y: f((x,), y),
        lambda f, x, y: f([x, y], y[0]),
        lambda f, x, y: f({"b": x, "a": y}, y[0]),
        lambda f, x, y: f({"b": (x, [y, 3.0])}, y[0]),
    ],
)
def test_arguments_reach_their_parameters(call, searches):
    def program(x, y, scale=1.0):
        leaves = tf.nest.flatten(x)
        scale = {"negative": -1.0, None: 3.0}.get(scale, scale)
        return sum((i + 1.0) * leaf for i, leaf in enumerate(leaves)) - y * scale

    ours, stock = tfo.function(program), tf.function(program)
    settled(lambda x, y: call(ours, x, y), X, Y)
    for x, y in itertools.permutations((X, Y, Z), 2):
        count, result = searches(lambda x=x, y=y: call(ours, x, y))
        assert count == 0
        np.testing.assert_array_equal(result, call(stock, x, y))


def test_one_tensor_for_two_parameters(searches):
    compiled = tfo.function(lambda x, y: x - 2 * y)
    settled(compiled, X, X)
    np.testing.assert_array_equal(compiled(X, Y), X - 2 * Y)
    settled(compiled, X, Y)
    count, result = searches(compiled, Z, Z)
    assert count == 0
    np.testing.assert_array_equal(result, -Z)


def test_python_values_are_told_apart_as_by_stock():
    def program(x, value):
        return x, repr(value)

    ours, stock = tfo.function(program), tf.function(program)
    for value in (1, True, 1.0, "1", None, 0, False) * 3:
        assert ours(X, value)[1] == stock(X, value)[1]


def test_another_shape_or_dtype_is_another_call(searches):
    compiled = tfo.function(lambda x: x + x)
    settled(compiled, X)
    for other in (X[:2], tf.cast(X, tf.float64), tf.cast(X, tf.int32), X[None]):
        count, result = searches(compiled, other)
        assert count > 0
        assert (result.dtype, result.shape) == (other.dtype, other.shape)


def test_same_traces_as_stock():
    def program(x, flag=True):
        return x + 1.0 if flag else x - 1.0

    calls = [((X,), {}), ((X[:2],), {}), ((X[0],), {}), ((X,), {"flag": False}), ((1.0,), {})]
    calls += [((2.0,), {}), ((np.ones((3, 4), "f"),), {}), ((tf.Variable(X),), {})]
    for relaxed in (False, True):
        ours = tfo.function(program, reduce_retracing=relaxed)
        stock = tf.function(program, reduce_retracing=relaxed)
        for args, kwargs in calls * 3:
            np.testing.assert_array_equal(ours(*args, **kwargs), stock(*args, **kwargs))
            assert ours.experimental_get_tracing_count() == stock.experimental_get_tracing_count()


def test_input_signature(searches):
    specs = [tf.TensorSpec([None, 4]), tf.TensorSpec([], tf.float32)]
    compiled = tfo.function(lambda x, y: x * y, input_signature=specs)
    settled(compiled, X, 2.0)
    np.testing.assert_array_equal(compiled(X, 2.0), X * 2.0)
    two = tf.constant(2.0)
    settled(compiled, X, two)
    assert searches(compiled, Y, two)[0] == 0
    for _ in range(3):
        with pytest.raises(TypeError, match=r"(?i)can not cast"):
            compiled(tf.cast(X, tf.float64), two)
    assert compiled.experimental_get_tracing_count() == 1


def test_default_value_that_is_a_tensor():
    def program(x, y=Y):
        return x - y

    compiled = tfo.function(program)
    settled(compiled, X)
    np.testing.assert_array_equal(compiled(X), X - Y)
    np.testing.assert_array_equal(compiled(X, Z), X - Z)


def test_gradients_of_known_calls(searches):
    weights = tf.Variable(Y)
    compiled = tfo.function(lambda x: tf.reduce_sum(weights * x * x))
    settled(compiled, X)
    with tf.GradientTape() as tape:
        tape.watch(X)
        count, y = searches(compiled, X)
    assert count == 0
    dx, dw = tape.gradient(y, [X, weights])
    np.testing.assert_allclose(dx, 2 * X * Y, rtol=1e-6)
    np.testing.assert_allclose(dw, X * X, rtol=1e-6)
    with tf.autodiff.ForwardAccumulator(X, Z) as accumulator:
        y = compiled(X)
    np.testing.assert_allclose(accumulator.jvp(y), tf.reduce_sum(2 * X * Y * Z), rtol=1e-5)


def test_in_a_graph_and_eagerly(searches):
    traced = []

    @tfo.function
    def compiled(x):
        traced.append(type(x).__name__)
        return x + 1.0

    settled(compiled, X)
    outer = tf.function(lambda x: compiled(x) * compiled(X))
    np.testing.assert_array_equal(outer(Y), (Y + 1.0) * (X + 1.0))
    tf.config.run_functions_eagerly(True)
    try:
        compiled(X)
    finally:
        tf.config.run_functions_eagerly(False)
    assert traced[-1] == "EagerTensor"
    assert searches(compiled, X)[0] == 0


def test_captured_values_are_read_in_every_call():
    variable = tf.Variable(1.0)
    compiled = tfo.function(lambda x: x * variable)
    settled(compiled, X)
    variable.assign(3.0)
    np.testing.assert_array_equal(compiled(X), X * 3.0)


def test_variables_made_by_the_first_call(searches):
    class Layer(tf.Module):
        weights = None

        @tfo.function
        def __call__(self, x):
            if self.weights is None:
                self.weights = tf.Variable(Y)
            return x * self.weights

    layers = Layer(), Layer()
    for layer in layers:
        settled(layer, X)
    layers[0].weights.assign(Z)
    np.testing.assert_array_equal(layers[0](X), X * Z)
    np.testing.assert_array_equal(layers[1](X), X * Y)
    assert searches(layers[0], X)[0] == 0


def test_handles_and_composites_go_to_tensorflow():
    compiled = tfo.function(lambda x: tf.reduce_sum(x.to_tensor()))
    for row in ([1.0], [2.0, 3.0]):
        ragged = tf.ragged.constant([row, []])
        for _ in range(3):
            assert compiled(ragged) == sum(row)
    stack = tfo.function(lambda x: tf.raw_ops.TensorListLength(input_handle=x))
    for length in (2, 3, 2):
        handle = tf.raw_ops.TensorListFromTensor(
            tensor=tf.zeros([length, 2]), element_shape=tf.constant([2])
        )
        assert stack(handle) == length
    assert call_cache.describe((handle,), {}) == (None, None)


def test_devices_and_strategies():
    compiled = tfo.function(lambda x: x + 1.0)
    settled(compiled, X)
    with tf.device("CPU:0"):
        np.testing.assert_array_equal(compiled(X), X + 1.0)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")

    @tfo.function
    def replicas(x):
        context = tf.distribute.get_replica_context()
        return x + (1.0 if context is None else 2.0)

    for _ in range(3):
        with strategy.scope():
            np.testing.assert_array_equal(replicas(X), X + 1.0)
        np.testing.assert_array_equal(strategy.run(replicas, [X]), X + 2.0)


def test_number_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(call_cache, "_MOST_CALLS", 3)
    compiled = tfo.function(lambda x: x + 1.0, input_signature=[tf.TensorSpec([None])])
    for size in list(range(10)) * 3:
        np.testing.assert_array_equal(compiled(tf.zeros([size])), tf.ones([size]))
    assert len(compiled._calls._calls) <= 3


def test_nothing_is_kept_alive():
    x = tf.random.normal([3])
    compiled = tfo.function(lambda x: x + 1.0)
    settled(compiled, x)
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is None


def test_errors_of_known_calls():
    def program(x, index):
        return tf.gather(x, index)

    for decorate in (tf.function, tfo.function):
        compiled = decorate(program)
        settled(compiled, X, tf.constant(0))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices = 9 is not in \[0, 3\)"):
            compiled(X, tf.constant(9))


@pytest.mark.parametrize("calls", [1, 2, 3, 9, 30])
def test_warnings_of_retracing(calls, monkeypatch):
    """TensorFlow warns of the same functions as if it had seen all calls."""
    warnings = []
    monkeypatch.setattr(
        polymorphic_function.logging, "warning", lambda text, *args: warnings.append(text)
    )

    def warned(decorator):
        manager = polymorphic_function._FrequentTracingDetectorManager()
        monkeypatch.setattr(polymorphic_function, "_frequent_tracing_detector_manager", manager)
        warnings.clear()
        compiled = decorator(lambda x: x + 1.0)
        for size in range(6):
            for _ in range(calls):
                compiled(tf.zeros([size]))
        return len(warnings)

    assert warned(tfo.function) == warned(tf.function)
    assert calls > 1 or warned(tfo.function) > 0


def test_profiled_calls(searches, tmp_path):
    """A profiler is told of known calls, too."""
    compiled = tfo.function(lambda x, y: x - 2 * y)
    settled(compiled, X, Y)
    names = []

    class Trace(trace.Trace):
        def __init__(self, name, **kwargs):
            names.append(name)
            super().__init__(name, **kwargs)

    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace, "Trace", Trace)
            count, result = searches(compiled, Z, X)
    finally:
        tf.profiler.experimental.stop()
    assert (count, names) == (0, [compiled.name])
    np.testing.assert_array_equal(result, Z - 2 * X)


def test_traceback_of_a_known_call():
    """Shows no more of TensorFlow than that of any other call."""
    compiled = tfo.function(lambda x, i: tf.gather(x, i))
    settled(compiled, X, 1)
    index = tf.constant(0)
    settled(compiled, X, index)
    tracebacks = []
    for decorated in (compiled, tf.function(lambda x, i: tf.gather(x, i))):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            decorated(X, tf.constant(7))
        tracebacks.append([str(entry.path) for entry in caught.traceback])
    ours, stock = ([path for path in paths if "/tensorflow/" in path] for paths in tracebacks)
    assert len(ours) <= len(stock)
