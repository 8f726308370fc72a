"""Gradients of every order, in every place where TensorFlow takes them."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from tolerances import assert_close

from tf_fused_ops.ops import (
    _gradient,
    activations,
    batch_norm_act,
    conv2d_bias_act,
    matmul_bias_act,
    reference,
)

CONV = cases.ConvCase(
    batch=1, image=(3, 4), cin=2, cout=2, kernel=(2, 2), strides=(2, 1), side=True, dtype="float64"
)
MATMUL = cases.MatMulCase(lead=(2,), m=2, k=3, n=2, ta=True, side=True, dtype="float64")
BATCH_NORM = cases.BatchNormCase(sizes=(3, 2), channels=2, side=True, dtype="float64")
FORMS = ("conv", "matmul", "batch_norm", "batch_norm_inference", "batch_norm_no_side")
ACTIVATIONS = [(act, cases.ALPHA) for act in cases.ACTIVATIONS] + [("leaky_relu", -cases.ALPHA)]


def problem(form, act, alpha=cases.ALPHA, seed=0):
    """An op as a function of its float64 inputs, the same in stock ops, the inputs, and dy."""
    case = {"conv": CONV, "matmul": MATMUL}.get(form, BATCH_NORM)
    attributes = {**case.attributes(), "activation": act, "alpha": alpha}
    if form in ("conv", "matmul"):
        fused_op, stock_op = {
            "conv": (conv2d_bias_act, reference.conv2d_bias_act),
            "matmul": (matmul_bias_act, reference.matmul_bias_act),
        }[form]

        def fused(a, b, bias, side):
            return fused_op(a, b, bias, side_input=side, **attributes)

        def stock(*inputs):
            return stock_op(*inputs, **attributes)

        def argument(inputs):
            return stock_op(*inputs[:4], **{**attributes, "activation": "none"})

        inputs = cases.away_from_kinks(lambda i: case.inputs(seed + i), argument, act)
        return fused, stock, [tf.constant(v) for v in inputs[:4]], tf.constant(inputs[4])

    attributes["training"] = form != "batch_norm_inference"
    side = form != "batch_norm_no_side"

    def inputs_of(i):
        *inputs, side_value, dy = case.inputs(seed + i)
        return [*inputs, side_value * side, dy]

    def argument(inputs):
        values = [tf.constant(value) for value in inputs[:6]]
        return reference.batch_norm_act(*values, **{**attributes, "activation": "none"})[0]

    *inputs, side_value, dy = cases.away_from_kinks(inputs_of, argument, act)
    if attributes["training"]:
        moving, inputs = inputs[3:], inputs[:3]
    else:
        moving = []
    inputs = [tf.constant(v) for v in (*inputs, *([side_value] if side else []))]

    def order(values):
        values = list(values)
        side_input = values.pop() if side else None
        return [*values, *moving, side_input]

    def fused(*values):
        return batch_norm_act(*order(values), **attributes)[0]

    def stock(*values):
        return reference.batch_norm_act(*order(values), **attributes)[0]

    return fused, stock, inputs, tf.constant(dy)


def gradients_of(function, inputs, dy):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = function(*inputs)
    return tape.gradient(y, inputs, output_gradients=dy)


def second_order(function, inputs, dy, weights):
    """The gradient of the weighted sum of all gradients, with respect to inputs and dy."""
    with tf.GradientTape() as tape:
        tape.watch([*inputs, dy])
        gradients = gradients_of(function, inputs, dy)
        total = tf.add_n([tf.reduce_sum(g * w) for g, w in zip(gradients, weights, strict=True)])
    zero = tf.UnconnectedGradients.ZERO
    return tape.gradient(total, [*inputs, dy], unconnected_gradients=zero)


def weights_for(inputs):
    rng = np.random.default_rng(1)
    return [tf.constant(rng.normal(size=value.shape)) for value in inputs]


def assert_all_close(values, references, units=2000):
    for i, (value, other) in enumerate(zip(values, references, strict=True)):
        assert_close(f"gradient {i}", value, other, "float64", units)


@pytest.mark.parametrize(("act", "alpha"), ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_against_finite_differences(form, act, alpha):
    fused, _, inputs, _ = problem(form, act, alpha)
    theory, numbers = tf.test.compute_gradient(fused, inputs, delta=1e-4)
    for i, (value, other) in enumerate(zip(theory, numbers, strict=True)):
        np.testing.assert_allclose(value, other, atol=2e-6, rtol=1e-5, err_msg=f"input {i}")


@pytest.mark.parametrize(("act", "alpha"), ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_second_order(form, act, alpha):
    fused, stock, inputs, dy = problem(form, act, alpha)
    weights = weights_for(inputs)
    expected = second_order(stock, inputs, dy, weights)
    assert_all_close(second_order(fused, inputs, dy, weights), expected)
    in_function = tf.function(second_order, autograph=False)
    assert_all_close(in_function(fused, inputs, dy, weights), expected)


@pytest.mark.parametrize("act", ["tanh", "gelu_erf"])
@pytest.mark.parametrize("form", FORMS)
def test_second_order_against_finite_differences(form, act):
    fused, _, inputs, dy = problem(form, act)
    theory, numbers = tf.test.compute_gradient(
        lambda *v: gradients_of(fused, list(v[:-1]), v[-1])[0], [*inputs, dy], delta=1e-4
    )
    for value, other in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["conv", "matmul", "batch_norm"])
def test_third_order(form):
    fused, stock, inputs, dy = problem(form, "gelu_tanh")
    weights = weights_for(inputs)

    def third(function):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            values = second_order(function, inputs, dy, weights)
            total = tf.add_n([tf.reduce_sum(v * v) for v in values])
        return tape.gradient(total, inputs)

    assert_all_close(third(fused), third(stock), 1e6)


# Where gradients are taken. "silu" needs the pre-activation, which the op keeps only on request;
# batch norm + side input + relu needs the mask in the same way.
PLACES = [
    ("conv", "relu"),
    ("conv", "silu"),
    ("matmul", "silu"),
    ("batch_norm", "relu"),
    ("batch_norm", "silu"),
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
            (0, tf.zeros(dy.shape, tf.float64)),
        )
        return session.run(tf.gradients(y, values, dy.numpy()))


def in_recompute_grad(fused, inputs, dy):
    return gradients_of(tf.recompute_grad(fused), inputs, dy)


def in_py_function(fused, inputs, dy):
    def run(*values):
        return tf.py_function(fused, values, tf.float64)

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


@pytest.mark.parametrize(("form", "act"), PLACES)
def test_forward_mode(form, act):
    fused, stock, inputs, _ = problem(form, act)

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


def saved_tensors(function, *inputs):
    """The values that a function keeps for its gradient, without those of no elements."""
    concrete = tf.function(function).get_concrete_function(*inputs)
    graph, count = concrete.graph, len(concrete.graph.outputs)
    concrete._delayed_rewrite_functions.forward_backward()
    with tf.compat.v1.Session(graph=graph) as session:
        values = [*inputs, *(value for value, _ in graph.captures)]
        feed = {k.name: v.numpy() for k, v in zip(graph.inputs, values, strict=True)}
        kept = session.run(graph.outputs[count:], feed)
    return [value for value in kept if value.size]


def test_a_conv_bias_relu_keeps_x_w_y_and_nothing_else():
    rng = np.random.default_rng(0)
    x, w, b = (tf.constant(rng.normal(size=s)) for s in ((2, 5, 5, 3), (3, 3, 3, 4), (4,)))
    kept = saved_tensors(conv2d_bias_act, x, w, b)
    y = conv2d_bias_act(x, w, b)
    assert len(kept) == 3
    for expected in (x, w, y):
        assert any(k.shape == expected.shape and np.all(k == expected) for k in kept)


def test_what_batch_norm_keeps():
    rng = np.random.default_rng(0)
    x, side = (tf.constant(rng.normal(size=(2, 5, 5, 3)), tf.float32) for _ in range(2))
    vector = tf.ones(3)

    def run(x, scale, offset, side):
        return batch_norm_act(x, scale, offset, vector, vector, side)[0]

    sizes = sorted(k.nbytes for k in saved_tensors(run, x, vector, vector, side))
    # x in full, one bit an element, vectors: neither y nor the normalised tensor.
    assert [size for size in sizes if size > 12] == [19, 600]


@pytest.mark.parametrize("act", ["relu", "gelu_erf"])
def test_nothing_is_kept_without_a_gradient(act):
    function = tf.function(lambda x: matmul_bias_act(x, x, activation=act))
    graph = function.get_concrete_function(tf.ones((3, 3))).graph
    (op,) = [op for op in graph.get_operations() if "FusedOps" in op.type]
    assert not op.get_attr("save_pre_activation")


@pytest.mark.parametrize("training", [True, False])
def test_gradients_through_the_statistics(training):
    case = cases.BatchNormCase(sizes=(3, 2), channels=2, training=training, dtype="float64")
    inputs = [tf.constant(value) for value in case.inputs()[:5]]

    def total(function):
        def run(*values):
            outputs = function(*values, None, **case.attributes())
            return tf.add_n([tf.reduce_sum(v * v) for v in outputs[1:]])

        return run

    one = tf.constant(1.0, tf.float64)
    expected = gradients_of(total(reference.batch_norm_act), inputs, one)
    found = gradients_of(total(batch_norm_act), inputs, one)
    for value, other, like in zip(found, expected, inputs, strict=True):
        zeros = tf.zeros_like(like)
        assert_all_close([zeros if value is None else value], [zeros if other is None else other])


def test_an_unused_gradient_is_recognised():
    @tf.function
    def run(x):
        dynamic = tf.shape(x)
        assert _gradient.is_zero(tf.zeros_like(x))
        assert _gradient.is_zero(tf.zeros(dynamic))
        assert _gradient.is_zero(tf.constant([0.0, 0.0]))
        assert not _gradient.is_zero(tf.ones(dynamic))
        assert not _gradient.is_zero(x)
        return x

    run(tf.zeros(3))
    assert _gradient.is_zero(tf.zeros(3)) and _gradient.is_zero(None)
    assert not _gradient.is_zero(tf.constant([0.0, np.nan]))
