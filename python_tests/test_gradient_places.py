"""Gradients in every place where TensorFlow takes them."""

import numpy as np
import pytest
import tensorflow as tf
from gradient_problems import assert_all_close, gradients_of, problem, weights_for

from tf_fused_ops.ops import activations, matmul_bias_act

# Where gradients are taken. "silu" needs the pre-activation, which the op keeps only on request;
# batch norm + side input + relu needs the mask, and an LSTM its gates, in the same way.
PLACES = [
    ("act", "relu"),
    ("act", "silu"),
    ("conv", "relu"),
    ("conv", "silu"),
    ("conv_transpose", "relu"),
    ("conv_transpose", "silu"),
    ("matmul", "silu"),
    ("batch_norm", "relu"),
    ("batch_norm", "silu"),
    ("lstm", "tanh"),
    ("gru", "tanh"),
    ("rnn", "relu"),
    ("quantized_matmul", "relu"),
    ("quantized_matmul", "silu"),
    ("weight_only_matmul", "relu"),
    ("weight_only_matmul", "silu"),
]


def in_tape_inside_function(fused, inputs, dy):
    return tf.function(lambda *v: gradients_of(fused, list(v), dy))(*inputs)


def in_tape_outside_function(fused, inputs, dy):
    return gradients_of(tf.function(fused), inputs, dy)


def in_tape_outside_used_function(fused, inputs, dy):
    function = tf.function(fused)
    function(*inputs)
    return gradients_of(function, inputs, dy)


def in_tape_outside_nested_function(fused, inputs, dy):
    inner = tf.function(fused)
    return gradients_of(tf.function(lambda *v: inner(*v)), inputs, dy)


def in_tape_inside_nested_function(fused, inputs, dy):
    inner = tf.function(fused)
    return tf.function(lambda *v: gradients_of(inner, list(v), dy))(*inputs)


def in_tf_gradients(fused, inputs, dy):
    return tf.function(lambda *v: tf.gradients(fused(*v), list(v), dy))(*inputs)


def in_session(fused, inputs, dy):
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        values = [tf.constant(value.numpy()) for value in inputs]
        return session.run(tf.gradients(fused(*values), values, dy.numpy()))


def in_cond(fused, inputs, dy):
    @tf.function
    def run(flag, *values):
        with tf.GradientTape() as tape:
            tape.watch(values)
            y = tf.cond(flag, lambda: fused(*values), lambda: tf.zeros_like(dy))
        return tape.gradient(y, list(values), output_gradients=dy)

    return run(tf.constant(True), *inputs)


def in_cond_outside(fused, inputs, dy):
    @tf.function
    def run(flag, *values):
        return tf.cond(flag, lambda: fused(*values), lambda: tf.zeros_like(dy))

    return gradients_of(lambda *v: run(tf.constant(True), *v), inputs, dy)


def in_session_with_control_flow_v1(fused, inputs, dy):
    """A loop that runs the op once, in the control flow of TensorFlow 1."""
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        values = [tf.constant(value.numpy()) for value in inputs]
        _, y = tf.compat.v1.while_loop(
            lambda i, y: i < 1,
            lambda i, y: (i + 1, y + fused(*values)),
            (0, tf.zeros(dy.shape, dy.dtype)),
        )
        return session.run(tf.gradients(y, values, dy.numpy()))


def in_recompute_grad(fused, inputs, dy):
    return gradients_of(tf.recompute_grad(fused), inputs, dy)


def in_py_function(fused, inputs, dy):
    def run(*values):
        return tf.py_function(fused, values, dy.dtype)

    return gradients_of(tf.function(run), inputs, dy)


@pytest.mark.parametrize(
    "place",
    [
        gradients_of,
        in_tape_inside_function,
        in_tape_outside_function,
        in_tape_outside_used_function,
        in_tape_outside_nested_function,
        in_tape_inside_nested_function,
        in_tf_gradients,
        in_session,
        in_cond,
        in_cond_outside,
        in_session_with_control_flow_v1,
        in_recompute_grad,
        in_py_function,
    ],
)
@pytest.mark.parametrize(("form", "act"), PLACES)
def test_everywhere(form, act, place):
    fused, stock, inputs, dy = problem(form, act)
    assert_all_close(place(fused, inputs, dy), gradients_of(stock, inputs, dy), 64)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("act", ["tanh", "silu"])
def test_while_loop(act, outside):
    """Three rounds of a recurrent product: the loop keeps what each round's gradient needs."""
    rng = np.random.default_rng(0)
    x, w, b = (tf.constant(rng.normal(size=s)) for s in ((4, 5), (5, 5), (5,)))

    def loop(op, x, w, b):
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, op(h, w, b)), (0, x))[1]

    def fused(h, w, b):
        return matmul_bias_act(h, w, b, activation=act)

    def stock(h, w, b):
        return activations.STOCK[act](tf.matmul(h, w) + b, 0)

    dy = tf.ones((4, 5), tf.float64)
    expected = gradients_of(lambda *v: loop(stock, *v), [x, w, b], dy)
    if outside:
        found = gradients_of(tf.function(lambda *v: loop(fused, *v)), [x, w, b], dy)
    else:
        run = tf.function(lambda *v: gradients_of(lambda *u: loop(fused, *u), list(v), dy))
        found = run(x, w, b)
    assert_all_close(found, expected)


@pytest.mark.parametrize(("form", "act"), PLACES)
def test_some_inputs_only(form, act):
    fused, stock, inputs, dy = problem(form, act)
    for i in range(len(inputs)):

        def one(function, i=i):
            with tf.GradientTape() as tape:
                tape.watch(inputs[i])
                y = function(*inputs)
            return tape.gradient(y, inputs[i], output_gradients=dy)

        assert_all_close([one(fused)], [one(stock)], 64)


@pytest.mark.parametrize(("form", "act"), PLACES)
def test_sparse_gradient_of_the_output(form, act):
    fused, stock, inputs, _ = problem(form, act)

    def gathered(function):
        return lambda *v: tf.gather(function(*v), [0, 0])

    rows = tf.gather(stock(*inputs), [0, 0])
    expected = gradients_of(gathered(stock), inputs, tf.ones_like(rows))
    assert_all_close(gradients_of(gathered(fused), inputs, tf.ones_like(rows)), expected, 64)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(("form", "act"), PLACES)
def test_forward_mode(form, act, in_function):
    fused, stock, inputs, _ = problem(form, act)
    if in_function:
        fused = tf.function(fused)

    def jvp(function):
        with tf.autodiff.ForwardAccumulator(inputs, weights_for(inputs)) as accumulator:
            y = function(*inputs)
        return accumulator.jvp(y)

    assert_all_close([jvp(fused)], [jvp(stock)], 64)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(("form", "act"), PLACES)
def test_jacobian(form, act, parallel):
    fused, stock, inputs, _ = problem(form, act)

    def jacobian(function):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(inputs)
            y = function(*inputs)
        return tape.jacobian(y, inputs, experimental_use_pfor=parallel)

    assert_all_close(jacobian(fused), jacobian(stock), 64)


@pytest.mark.parametrize(("form", "act"), PLACES)
def test_saved_and_loaded(form, act, tmp_path):
    fused, stock, inputs, dy = problem(form, act)
    module = tf.Module()
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in inputs]
    module.run = tf.function(fused, input_signature=specs)
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    expected = gradients_of(stock, inputs, dy)
    assert_all_close(gradients_of(loaded.run, inputs, dy), expected, 64)
