"""Recurrent layers: numbers and gradients of every order, masks, shapes, what is kept."""

import dataclasses
import functools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import RecurrentCase
from gradient_problems import assert_all_close, gradients_of, problem, second_order, weights_for
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_as_exact

from tf_fused_ops import _library, gru, lstm, simple_rnn
from tf_fused_ops.ops import reference

CELLS = {"rnn": simple_rnn, "gru": gru, "lstm": lstm}
LAYERS = {"rnn": keras.layers.SimpleRNN, "gru": keras.layers.GRU, "lstm": keras.layers.LSTM}
STATES = ("h", "c")


def used(case, y, last):
    """What a case asks for."""
    return {"both": [y, *last], "y": [y], "last": list(last)}[case.used]


def fused(case, mask, **inputs):
    states = [inputs.pop(name) for name in STATES if name in inputs]
    if states:
        inputs["initial_state"] = states if case.cell == "lstm" else states[0]
    y, last = CELLS[case.cell](**inputs, mask=mask, **case.attributes())
    return used(case, y, tf.nest.flatten(last))


def stock_step(cell, act, x, p, h, c=None):
    if cell == "rnn":
        return [act(x + p)]
    if cell == "gru":
        (xz, xr, xn), (pz, pr, pn) = tf.split(x, 3, -1), tf.split(p, 3, -1)
        z = tf.sigmoid(xz + pz)
        return [z * h + (1 - z) * act(xn + tf.sigmoid(xr + pr) * pn)]
    i, f, g, o = tf.split(x + p, 4, -1)
    c = tf.sigmoid(f) * c + tf.sigmoid(i) * act(g)
    return [tf.sigmoid(o) * act(c), c]


def stock(case, mask, x, kernel, recurrent_kernel, bias=None, recurrent_bias=None, **states):
    """As people write it, step by step."""
    act = {"tanh": tf.tanh, "relu": tf.nn.relu}[case.act]
    (batch, steps, _), units = x.shape, recurrent_kernel.shape[0]
    zeros = tf.zeros([batch, units], x.dtype)
    states = list(states.values()) or [zeros] * (2 if case.cell == "lstm" else 1)
    x = tf.matmul(x, kernel) + (0 if bias is None else bias)
    outputs, y = [None] * steps, zeros
    for t in range(steps)[:: -1 if case.backwards else 1]:
        p = states[0] @ recurrent_kernel + (0 if recurrent_bias is None else recurrent_bias)
        new = stock_step(case.cell, act, x[:, t], p, *states)
        keep = tf.ones([batch, 1], tf.bool) if mask is None else mask[:, t, None]
        y = outputs[t] = tf.where(keep, new[0], y)
        states = [tf.where(keep, a, b) for a, b in zip(new, states, strict=True)]
    return used(case, tf.stack(outputs, 1) if outputs else zeros[:, None][:, :0], states)


def run(function, case, inputs, dys, mask):
    """Returns by name the outputs of a function and the gradients of its inputs."""
    inputs, dys = {k: tf.constant(v) for k, v in inputs.items()}, list(map(tf.constant, dys))
    outputs = [f"output {i}" for i in range(len(dys))]

    def positional(*values):
        return function(case, mask, **dict(zip(inputs, values, strict=True)))

    found = dict(zip(outputs, positional(*inputs.values()), strict=True))
    gradients = gradients_of(positional, list(inputs.values()), dys)
    for (name, value), gradient in zip(inputs.items(), gradients, strict=True):
        # Without steps nothing but states is used.
        found[f"{name}_grad"] = tf.zeros_like(value) if gradient is None else gradient
    return {k: tf.convert_to_tensor(v) for k, v in found.items()}


def tensors(case, seed=0):
    values, dys = case.inputs(seed)
    return {k: rounded(v, case.dtype) for k, v in values.items()}, [
        rounded(v, case.dtype) for v in dys
    ]


def rounded(value, dtype):
    return tf.cast(tf.constant(value), dtype).numpy()


@functools.lru_cache(maxsize=None)
def expected(case, seed):
    """Stock TensorFlow in the dtype of a case, and in float64."""
    inputs, dys = tensors(case, seed)
    wide = {k: v.astype(np.float64) for k, v in inputs.items()}
    mask = case.mask(seed)
    return run(stock, case, inputs, dys, mask), run(
        stock, case, wide, [dy.astype(np.float64) for dy in dys], mask
    )


def check(case, seed=0):
    found = run(fused, case, *tensors(case, seed), case.mask(seed))
    narrow, wide = expected(case, seed)
    for name, value in found.items():
        assert value.dtype == case.dtype
        assert_as_exact(name, value, narrow[name], wide[name], case.dtype)


@pytest.mark.parametrize("case", cases.recurrent_cases(), ids=str)
def test_forward_and_gradient(case, isa):
    check(case)
    assert _library.isa() == isa
