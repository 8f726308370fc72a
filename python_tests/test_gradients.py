"""Gradients of every order against finite differences and stock TensorFlow."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from gradient_problems import (
    ACTIVATIONS,
    FORMS,
    assert_all_close,
    gradients_of,
    problem,
    second_order,
    weights_for,
)

from tf_fused_ops.ops import _gradient, batch_norm_act, reference


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


@pytest.mark.parametrize(
    "form", ["act", "conv", "conv_scale", "conv_transpose", "matmul", "batch_norm"]
)
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
