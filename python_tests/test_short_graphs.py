"""Graphs of a few fused ops, which known calls run op by op: results, limits, and who looks on."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from remapping import values
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from test_bad_input_raw import RAW, ones, raw

import tf_fused_ops as tfo
from tf_fused_ops.short_graphs import ShortGraph

X, FILTERS, BIAS, DY = values((2, 5, 6, 3), (3, 3, 3, 7), (7,), (2, 5, 6, 7))
CHANNELS, SQUARE = BIAS[:3], FILTERS[..., :3]
A, B, C = values((5, 6), (6, 7), (7,))


def convolution(x, filters, bias):
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, filters, 1, "SAME"), bias))


def transposed(x, filters, bias):
    batch, height, width, _ = x.shape
    return tfo.ops.conv2d_transpose_bias_act(
        x, filters, [batch, 2 * height, 2 * width, 3], bias, strides=2
    )


def dense(a, b, c):
    return tf.nn.gelu(tf.matmul(a, b) + c)


def step(x, filters, bias, dy):
    with tf.GradientTape() as tape:
        tape.watch([x, filters, bias])
        y = convolution(x, filters, bias)
    return {"y": y, "gradients": tape.gradient(y, [x, filters, bias], dy)}


@pytest.fixture
def functions_run(monkeypatch):
    """A list that grows with each trace that TensorFlow runs as a function."""
    run, original = [], ConcreteFunction._call_flat

    def counting(self, tensor_inputs, captured_inputs):
        run.append(self)
        return original(self, tensor_inputs, captured_inputs)

    monkeypatch.setattr(ConcreteFunction, "_call_flat", counting)
    return run


def compiled(program, *args):
    """The function of a program, once it knows the call; and the result as a function."""
    function = tfo.function(program)
    for _ in range(2):
        result = function(*args)
    return function, result


@pytest.mark.parametrize(
    ("program", "args"),
    [
        (convolution, (X, FILTERS, BIAS)),
        (dense, (A, B, C)),
        (step, (X, FILTERS, BIAS, DY)),
        (lambda a, b, c: dense(dense(a, b, c), b, c), (A, B[:, :6], C[:6])),
        (lambda x: tfo.ops.batch_norm_act(x, *[CHANNELS] * 4)[0], (X,)),
        (lambda x, w, b: transposed(transposed(x, w, b), w, b), (X, SQUARE, CHANNELS)),
    ],
    ids=["conv", "dense", "step", "two", "constant", "transposed"],
)
def test_same_bits_as_the_function(program, args, functions_run):
    function, expected = compiled(program, *args)
    count = len(functions_run)
    assert count > 0
    for _ in range(3):
        result = function(*args)
        tf.nest.map_structure(np.testing.assert_array_equal, result, expected)
    assert len(functions_run) == count


def test_arguments_in_another_order(functions_run):
    function = tfo.function(dense)
    for _ in range(2):
        function(c=C, b=B, a=A)
    a, b, c = A * 2, B * 3, C * 5
    count = len(functions_run)
    result = function(c=c, b=b, a=a)
    assert len(functions_run) == count
    np.testing.assert_array_equal(result, dense_op(a, b, c))
    np.testing.assert_allclose(result, tf.function(dense)(a, b, c), rtol=1e-5, atol=1e-5)


def dense_op(a, b, c):
    return tfo.ops.matmul_bias_act(a, b, c, activation="gelu_erf")


def test_variables_are_read_in_each_call(functions_run):
    b, c = tf.Variable(B), tf.Variable(C)
    function, _ = compiled(lambda a: dense(a, b, c), A)
    count = len(functions_run)
    for factor in (1.0, -2.0, 3.0):
        b.assign(B * factor)
        c.assign_add(C)
        np.testing.assert_array_equal(function(A), dense_op(A, b, c))
    assert len(functions_run) == count


def test_threads_share_a_function(functions_run):
    function, expected = compiled(dense, A, B, C)
    count = len(functions_run)
    with ThreadPoolExecutor(4) as threads:
        for result in threads.map(lambda _: function(A, B, C), range(200)):
            np.testing.assert_array_equal(result, expected)
    assert len(functions_run) == count


def test_tapes_see_functions(functions_run):
    function, _ = compiled(dense, A, B, C)
    count = len(functions_run)
    with tf.GradientTape() as tape:
        tape.watch(B)
        y = function(A, B, C)
    assert len(functions_run) > count
    with tf.GradientTape() as expected:
        expected.watch(B)
        z = dense_op(A, B, C)
    np.testing.assert_array_equal(tape.gradient(y, B), expected.gradient(z, B))
    tangents = []
    for call in (function, tf.function(dense)):
        with tf.autodiff.ForwardAccumulator(A, tf.ones_like(A)) as accumulator:
            tangents.append(accumulator.jvp(call(A, B, C)))
    np.testing.assert_allclose(*tangents, rtol=1e-5, atol=1e-5)


def test_those_who_look_on_see_functions(functions_run, tmp_path):
    function, _ = compiled(dense, A, B, C)

    def ran():
        count = len(functions_run)
        function(A, B, C)
        return len(functions_run) > count

    assert not ran()
    with tf.device("CPU:0"):
        assert ran()
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        tf.summary.trace_on(graph=True)
        assert ran()
        tf.summary.trace_export("dense", step=0)
    tf.debugging.enable_check_numerics()
    try:
        assert ran()
    finally:
        tf.debugging.disable_check_numerics()
    assert not ran()


STATE = tf.Variable(0.0)


OTHER = {
    "assign": lambda a, b, c: (STATE.assign_add(1.0), dense(a, b, c))[1],
    "stock_op_behind": lambda a, b, c: tf.sqrt(dense(a, b, c)),
    "stock_op_before": lambda a, b, c: [dense(a * 1.0, b, c)],
    "an_input": lambda a, b, c: (a, dense(a, b, c)),
    "a_constant": lambda a, b, c: [dense(a, b, c), tf.ones([3])],
    "twice": lambda a, b, c: [dense(a, b, c)] * 2,
    "constant_filters": lambda a, b, c: dense(a, tf.ones(b.shape), c),
    "large_constant": lambda a, b, c: dense_op(tf.ones([1025, 6]), b, c),
    "many_ops": lambda a, b, c: [dense_op(a, b, c) for _ in range(13)],
}


@pytest.mark.parametrize("name", OTHER)
def test_other_graphs_are_functions(name, functions_run):
    function, expected = compiled(OTHER[name], A, B, C)
    count, state = len(functions_run), STATE.numpy()
    result = function(A, B, C)
    assert len(functions_run) > count
    tf.nest.map_structure(np.testing.assert_array_equal, result, expected)
    assert STATE.numpy() - state == (1.0 if name == "assign" else 0.0)
    for left, right in zip(tf.nest.flatten(result), tf.nest.flatten(result)[1:], strict=False):
        assert left is not right
    assert not any(output is A for output in tf.nest.flatten(result))


def test_several_devices_are_left_to_the_placer(functions_run, monkeypatch):
    state = context.context()
    monkeypatch.setattr(state, "_logical_devices", [*state.list_logical_devices(), None])
    function, _ = compiled(dense, A, B, C)
    count = len(functions_run)
    function(A, B, C)
    assert len(functions_run) > count


def test_what_is_no_longer_read_is_let_go():
    function, expected = compiled(lambda a, b, c: dense(dense(a, b, c), b, c), A, B[:, :6], C[:6])
    graph = function.get_concrete_function(A, B[:, :6], C[:6]).graph
    short = ShortGraph(graph)
    (_, first, made, none_done), (_, second, _, done) = short._steps
    assert made[0] in second and made[0] in done
    # The saved pre-activation, which nothing reads, and the first operand.
    assert {made[1], first[0]} <= set(none_done)
    np.testing.assert_array_equal(short.run([A, B[:, :6], C[:6]])[0], expected)


@pytest.mark.parametrize("name", RAW)
def test_every_op(name):
    """Each runs with what is left of its attributes, and does the same as with all of them."""
    arguments = {key: ones(name, key, value) for key, value in RAW[name].items()}
    expected = tf.nest.flatten(raw(name)(**arguments))
    trace = tf.function(lambda: raw(name)(**arguments)).get_concrete_function()
    results = ShortGraph(trace.graph).run(trace.captured_inputs)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.shape == theirs.shape
        if name != "random_words":
            np.testing.assert_array_equal(ours, theirs)
