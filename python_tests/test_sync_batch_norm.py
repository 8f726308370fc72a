"""Batch normalization over several replicas: equal to one batch on one device."""

import functools

import cases
import numpy as np
import pytest
import replicas
import tensorflow as tf
from gradient_problems import gradients_of, weights_for
from test_batch_norm import NAMES, check, operands, pre_activation
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import _library, distribute
from tf_fused_ops.ops import batch_norm_act, reference, sync_batch_norm_act

OPS = ("BatchNormMoments", "BatchNormApply", "BatchNormGradSums", "BatchNormGradApply")


def alone(*values, **attributes):
    return sync_batch_norm_act(*values, communicator=replicas.Alone(), **attributes)


@pytest.mark.parametrize(
    "case", [case for case in cases.batch_norm_cases() if case.training], ids=str
)
def test_group_of_one(case):
    check(case, fused=alone)


def batches(value, sizes):
    """Cuts a tensor, or None, into batches of these sizes."""
    return [None] * len(sizes) if value is None else tf.split(value, sizes)


def joined(case, sizes):
    """The case whose batch is those of all replicas."""
    return cases.BatchNormCase(**{**vars(case), "sizes": (sum(sizes), *case.sizes)})


def in_replicas(values, sizes, function):
    """[function(communicator, x, scale, offset, mean, variance, side, dy)] over the replicas."""
    x, *vectors, side, dy = values
    parts = [batches(value, sizes) for value in (x, side, dy)]

    def replica(communicator):
        own_x, own_side, own_dy = (part[communicator.rank] for part in parts)
        return function(communicator, own_x, *vectors, own_side, own_dy)

    return replicas.run(len(sizes), replica)


GROUPS = [
    ((3, 2), cases.BatchNormCase(sizes=(5, 4), channels=17)),
    ((1, 5, 0, 2), cases.BatchNormCase(sizes=(3, 4), channels=3, side=True)),
    ((2, 7), cases.BatchNormCase(sizes=(), channels=33, side=True, act="gelu_tanh")),
    ((4, 4), cases.BatchNormCase(sizes=(9, 7), channels=31, layout="NCHW", act="leaky_relu")),
    ((0, 3), cases.BatchNormCase(sizes=(5, 4, 3), channels=4, layout="NCHW", side=True)),
    ((2, 1), cases.BatchNormCase(sizes=(3, 3), channels=64, act="none", side=True)),
]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("sizes", "case"), GROUPS, ids=str)
def test_group_equals_one_batch(sizes, case, dtype):
    whole = joined(cases.BatchNormCase(**{**vars(case), "dtype": dtype}), sizes)
    values, wide = operands(whole)
    attributes = whole.attributes()
    z = pre_activation(whole, wide)
    near = tf.reduce_any([abs(z - kink) < 0.05 for kink in cases.KINKS.get(whole.act, [np.inf])], 0)
    values[6], wide[6] = (tf.where(near, tf.zeros_like(d), d) for d in (values[6], wide[6]))

    def outputs_and_gradients(function, x, scale, offset, mean, variance, side, dy):
        watched = [value for value in (x, scale, offset, side) if value is not None]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = function(x, scale, offset, mean, variance, side, **attributes)
        return outputs, tape.gradient(outputs[0], watched, output_gradients=dy)

    def replica(communicator, *own):
        def function(*values, **attributes):
            return sync_batch_norm_act(*values, communicator=communicator, **attributes)

        return outputs_and_gradients(function, *own)

    exact, exact_gradients = outputs_and_gradients(reference.batch_norm_act, *wide)
    stock, stock_gradients = outputs_and_gradients(reference.batch_norm_act, *values)
    results = in_replicas(values, sizes, replica)
    kind = "float64" if dtype == "float64" else "float32"
    y = tf.concat([outputs[0] for outputs, _ in results], 0)
    assert_as_exact("y", y, stock[0], exact[0], dtype)
    for i, name in enumerate(NAMES[1:], 1):
        for outputs, _ in results:
            assert_as_exact(name, outputs[i], stock[i], exact[i], kind)
            np.testing.assert_array_equal(outputs[i], results[0][0][i], name)
    for i, name in enumerate(("dx", "dscale", "doffset", "dside")[: len(exact_gradients)]):
        parts = [gradients[i] for _, gradients in results]
        vector = i in (1, 2)
        value = tf.add_n(parts) if vector else tf.concat(parts, 0)
        other = stock_gradients[i], exact_gradients[i]
        assert_as_exact(name, value, *other, kind if vector else dtype)


def test_published_two_rank_example():
    # Each rank its own uniform batch of shape (2, 1, 2, 3), momentum 0.5.
    sizes = (2, 2)
    x = tf.random.uniform((4, 1, 2, 3))
    ones, zeros = tf.ones(3), tf.zeros(3)
    options = {"activation": "none", "momentum": 0.5}
    expected = batch_norm_act(x, ones, zeros, ones, ones, **options)

    def replica(communicator, *own):
        return sync_batch_norm_act(*own[:6], communicator=communicator, **options)

    first, second = in_replicas((x, ones, zeros, ones, ones, None, x), sizes, replica)
    for name, a, b, c in zip(NAMES[1:], first[1:], second[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(a, b, name)
        np.testing.assert_allclose(a, c, rtol=2e-7, err_msg=name)
    np.testing.assert_allclose(tf.concat([first[0], second[0]], 0), expected[0], rtol=2e-6)


def test_means_far_from_zero_and_from_one_another():
    sizes = (40, 60, 1)
    x = np.random.default_rng(0).normal(size=(101, 5)) + 1e4
    x[:40] += 3
    x = x.astype(np.float32)
    ones, zeros = tf.ones(5), tf.zeros(5)

    def replica(communicator, *own):
        return sync_batch_norm_act(
            *own[:6], momentum=0.0, unbiased=False, communicator=communicator
        )

    wide = x.astype(np.float64)
    for outputs in in_replicas((tf.constant(x), ones, zeros, zeros, ones, None, x), sizes, replica):
        np.testing.assert_allclose(outputs[1], wide.mean(0), rtol=1e-7)
        np.testing.assert_allclose(outputs[2], wide.var(0), rtol=1e-6)


def test_a_group_without_elements_keeps_the_moving_statistics():
    mean, variance = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])
    x = tf.zeros((0, 3, 2))

    def replica(communicator):
        return sync_batch_norm_act(x, None, None, mean, variance, communicator=communicator)

    for y, new_mean, new_variance, *saved in replicas.run(2, replica):
        assert y.shape == (0, 3, 2)
        np.testing.assert_array_equal(new_mean, mean)
        np.testing.assert_array_equal(new_variance, variance)
        assert all(np.isfinite(value).all() for value in saved)


SMALL = cases.BatchNormCase(sizes=(2,), channels=2, side=True, dtype="float64", act="tanh")


@pytest.mark.parametrize("act", ["relu", "tanh", "gelu_erf"])
def test_second_order(act):
    sizes = (2, 1, 3)
    case = joined(cases.BatchNormCase(**{**vars(SMALL), "act": act}), sizes)
    values, _ = operands(case)
    attributes = case.attributes()

    def total(function, weights, x, scale, offset, mean, variance, side, dy):
        inputs = [x, scale, offset, side]
        with tf.GradientTape() as tape:
            tape.watch([*inputs, dy])
            gradients = gradients_of(
                lambda x, scale, offset, side: function(
                    x, scale, offset, mean, variance, side, **attributes
                )[0],
                inputs,
                dy,
            )
            value = tf.add_n(
                [tf.reduce_sum(g * w) for g, w in zip(gradients, weights, strict=True)]
            )
        return tape.gradient(value, [*inputs, dy], unconnected_gradients="zero")

    weights = weights_for([values[i] for i in (0, 1, 2, 5)])
    expected = total(reference.batch_norm_act, weights, *values)
    own_weights = [batches(weights[0], sizes), weights[1], weights[2], batches(weights[3], sizes)]

    def replica(communicator, *own):
        def function(*values, **attributes):
            return sync_batch_norm_act(*values, communicator=communicator, **attributes)

        rank = communicator.rank
        mine = [own_weights[0][rank], *own_weights[1:3], own_weights[3][rank]]
        return total(function, mine, *own)

    results = in_replicas(values, sizes, replica)
    for i, (name, other) in enumerate(
        zip(("x", "scale", "offset", "side", "dy"), expected, strict=True)
    ):
        parts = [result[i] for result in results]
        value = tf.add_n(parts) if i in (1, 2) else tf.concat(parts, 0)
        assert_close(name, value, other, "float64", 5000)


def test_gradients_through_the_statistics():
    sizes = (2, 3)
    case = joined(SMALL, sizes)
    values, _ = operands(case)

    def gradient(function, x, scale, offset, mean, variance, side, _):
        watched = [x, mean, variance]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = function(x, scale, offset, mean, variance, side, **case.attributes())
            value = tf.add_n([tf.reduce_sum(v * v) for v in outputs[1:]])
        return tape.gradient(value, watched)

    def replica(communicator, *own):
        def function(*values, **attributes):
            return sync_batch_norm_act(*values, communicator=communicator, **attributes)

        return gradient(function, *own)

    expected = gradient(reference.batch_norm_act, *values)
    results = in_replicas(values, sizes, replica)
    # Every replica adds the same statistics to the loss.
    dx = tf.concat([result[0] for result in results], 0)
    assert_close("x", dx, len(sizes) * expected[0], "float64", 500)
    for i in (1, 2):
        assert_close("moving", results[0][i], expected[i], "float64", 500)


@pytest.mark.parametrize("side", [False, True])
def test_traced_step_is_four_ops(side):
    case = cases.BatchNormCase(side=side)
    values, _ = operands(case)
    vectors = values[3:5]

    @tf.function
    def step(x, scale, offset, side_input, dy):
        watched = [v for v in (x, scale, offset, side_input) if v is not None]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            y = alone(x, scale, offset, *vectors, side_input, **case.attributes())[0]
        return y, tape.gradient(y, watched, output_gradients=dy)

    arguments = [*values[:3], values[5], values[6]]
    graph = step.get_concrete_function(*arguments).graph
    fused = [op for op in graph.get_operations() if op.type.startswith("TfFusedOps>")]
    assert sorted(op.type for op in fused) == sorted(f"TfFusedOps>{name}" for name in OPS)
    y, gradients = step(*arguments)
    assert y.shape == case.shape()

    with tf.GradientTape() as tape:
        watched = [v for v in arguments[:4] if v is not None]
        tape.watch(watched)
        expected = batch_norm_act(*values[:3], *vectors, values[5], **case.attributes())[0]
    np.testing.assert_array_equal(y, expected)
    others = tape.gradient(expected, watched, output_gradients=values[6])
    for value, other in zip(gradients, others, strict=True):
        np.testing.assert_array_equal(value, other)


def raw(name, data_format):
    """An op as a function of its floating-point inputs, and the same in stock ops."""
    op = getattr(_library.ops, f"tf_fused_ops_batch_norm_{name}")
    stock = getattr(reference, f"batch_norm_{name}")
    if name == "moments":
        return [functools.partial(f, data_format=data_format) for f in (op, stock)]
    attributes = {"data_format": data_format, "activation": "tanh"}
    # What comes after the side input: the list of masks and attributes of the op, the stock mask.
    op_rest, stock_rest = [[]], [None]
    if name == "apply":
        attributes |= {"epsilon": 2.0**-10, "momentum": 0.75, "unbiased": True}
        op_rest, stock_rest = [], []
    switches = {"side_input_gradient": True} if name == "grad_apply" else {}

    def fused(*inputs):
        *operands, side = inputs
        return op(*operands, [side], *op_rest, **attributes, **switches)[:5]

    return fused, lambda *inputs: stock(*inputs, *stock_rest, **attributes, alpha=cases.ALPHA)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("name", ["moments", "apply", "grad_sums", "grad_apply"])
def test_op_and_its_own_gradient(name, layout):
    case = cases.BatchNormCase(sizes=(3, 2), channels=2, layout=layout, side=True, dtype="float64")
    x, scale, offset, mean, variance, side, dy = operands(case)[0]
    inv_std = tf.math.rsqrt(variance)
    rng = np.random.default_rng(1)
    sums = tf.constant(np.stack([[6.0, 6.0], *rng.normal(size=(2, 2))]))
    moments = tf.constant(rng.uniform(1, 2, size=(3, 3, 2)))
    inputs = {
        "moments": [x],
        "apply": [x, scale, offset, mean, variance, moments, side],
        "grad_sums": [dy, x, scale, offset, mean, inv_std, side],
        "grad_apply": [dy, x, scale, offset, mean, inv_std, sums, side],
    }[name]
    fused, stock = raw(name, layout)
    for value, other in zip(
        tf.nest.flatten(fused(*inputs)), tf.nest.flatten(stock(*inputs)), strict=True
    ):
        assert_close(name, value, other, "float64", 100)

    def total(*values):
        outputs = [tf.reduce_sum(v * v) for v in tf.nest.flatten(fused(*values))]
        return tf.add_n(outputs)

    theory, numbers = tf.test.compute_gradient(total, inputs, delta=1e-5)
    for i, (value, other) in enumerate(zip(theory, numbers, strict=True)):
        np.testing.assert_allclose(value, other, atol=1e-5, rtol=1e-6, err_msg=f"input {i}")


def test_shapes_are_inferred():
    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 3])])
    def run(x):
        ones = tf.ones(3)
        y, *statistics = alone(x, ones, ones, ones, ones, x)
        assert y.shape.as_list() == [None, 4, 4, 3]
        assert all(v.shape.as_list() == [3] for v in statistics)
        (dx,) = tf.gradients(y, x)
        assert dx.shape.as_list() == [None, 4, 4, 3]
        return dx

    assert run(tf.random.normal((2, 4, 4, 3))).shape == (2, 4, 4, 3)


def test_without_a_group_it_is_batch_norm_act():
    values, _ = operands(cases.BatchNormCase())
    attributes = cases.BatchNormCase().attributes()
    for training in (True, False):
        attributes["training"] = training
        expected = batch_norm_act(*values[:6], **attributes)
        for value, other in zip(
            sync_batch_norm_act(*values[:6], **attributes), expected, strict=True
        ):
            np.testing.assert_array_equal(value, other)


def test_set_communicator():
    try:
        distribute.set_communicator(replicas.Alone())
        assert isinstance(distribute.current(), replicas.Alone)
    finally:
        distribute.set_communicator(None)
    assert distribute.current() is None
    with pytest.raises(TypeError, match=r"communicator must be .*Communicator; got str"):
        distribute.set_communicator("horovod")
    x, ones = tf.ones((2, 3)), tf.ones(3)
    with pytest.raises(TypeError, match=r"communicator must be .*Communicator; got int"):
        sync_batch_norm_act(x, ones, ones, ones, ones, communicator=2)


def test_slots_are_in_order_of_rank():
    def replica(communicator):
        return communicator.all_gather(
            tf.fill([2], tf.constant(communicator.rank - 1.5, tf.float64))
        )

    for gathered in replicas.run(3, replica):
        np.testing.assert_array_equal(gathered, [[-1.5] * 2, [-0.5] * 2, [0.5] * 2])
