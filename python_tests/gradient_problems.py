"""Small problems on which the gradients of all ops are compared, in float64 where ops have it."""

import dataclasses

import cases
import numpy as np
import tensorflow as tf
from tolerances import assert_close

from tf_fused_ops.ops import act as act_op
from tf_fused_ops.ops import (
    batch_norm_act,
    conv2d_bias_act,
    conv2d_transpose_bias_act,
    gru,
    lstm,
    matmul_bias_act,
    quantized_matmul_bias_act,
    reference,
    simple_rnn,
    weight_only_matmul_bias_act,
)

CONV = cases.ConvCase(
    batch=1, image=(3, 4), cin=2, cout=2, kernel=(2, 2), strides=(2, 1), side=True, dtype="float64"
)
MATMUL = cases.MatMulCase(lead=(2,), m=2, k=3, n=2, ta=True, side=True, dtype="float64")
QUANTIZED_MATMUL = cases.QuantizedOpCase(lead=(2,), m=2, k=3, n=2)
WEIGHT_ONLY_MATMUL = cases.WeightOnlyOpCase(lead=(2,), m=2, k=3, n=2, part=2, group="any")
BATCH_NORM = cases.BatchNormCase(sizes=(3, 2), channels=2, side=True, dtype="float64")
ACT = cases.ActCase(shape=(3, 5), dtype="float64")
RECURRENT_CELLS = {"rnn": simple_rnn, "gru": gru, "lstm": lstm}
CONV_TRANSPOSE = cases.ConvTransposeCase(
    batch=1, image=(4, 3), cin=2, cout=2, kernel=(3, 2), strides=(2, 1), side=True, dtype="float64"
)
GROUPED_CONV = dataclasses.replace(CONV, cin=4, cout=6, groups=2)
FORMS = (
    "act",
    "conv",
    "conv_groups",
    "conv_scale",
    "conv_transpose",
    "matmul",
    "batch_norm",
    "batch_norm_inference",
    "batch_norm_no_side",
)
ACTIVATIONS = [(act, cases.ALPHA) for act in cases.ACTIVATIONS] + [("leaky_relu", -cases.ALPHA)]


def problem(form, act, alpha=cases.ALPHA, seed=0):
    """An op as a function of its inputs, the same in stock ops, the inputs, and dy."""
    if form in RECURRENT_CELLS:
        return recurrent_problem(form, act, seed)
    if form == "quantized_matmul":
        return quantized_matmul_problem(act, alpha, seed)
    if form == "weight_only_matmul":
        return weight_only_matmul_problem(act, alpha, seed)
    contractions = {
        **{"conv": CONV, "conv_groups": GROUPED_CONV, "conv_scale": CONV},
        **{"conv_transpose": CONV_TRANSPOSE, "matmul": MATMUL},
    }
    case = {"act": ACT, **contractions}.get(form, BATCH_NORM)
    attributes = {**case.attributes(), "activation": act, "alpha": alpha}
    if form == "act":
        x, dy = cases.away_from_kinks(lambda i: case.inputs(seed + i), lambda v: v[0], act)

        def fused(x):
            return act_op(x, **attributes)

        def stock(x):
            return reference.act(x, **attributes)

        return fused, stock, [tf.constant(x)], tf.constant(dy)
    if form in contractions:
        fused_op, stock_op = conv2d_bias_act, reference.conv2d_bias_act
        if form == "matmul":
            fused_op, stock_op = matmul_bias_act, reference.matmul_bias_act
        if form == "conv_transpose":
            fused_op, stock_op = conv2d_transpose_bias_act, reference.conv2d_transpose_bias_act
            attributes["output_shape"] = case.output_shape()

        def fused(a, b, bias, side, *scale):
            optional = {"scale": scale[0]} if scale else {}
            return fused_op(a, b, bias=bias, side_input=side, **optional, **attributes)

        def stock(a, b, bias, side, *scale, **changes):
            optional = {"scale": scale[0]} if scale else {}
            b = reference.ungrouped(b, case.cin) if form == "conv_groups" else b
            optional |= {"bias": bias, "side_input": side}
            return stock_op(a, b, **optional, **(attributes | changes))

        def inputs_of(i):
            *inputs, dy = case.inputs(seed + i)
            return [*inputs, *([case.factors()] if form == "conv_scale" else []), dy]

        def argument(inputs):
            return stock(*inputs[:-1], activation="none")

        *inputs, dy = cases.away_from_kinks(inputs_of, argument, act)
        return fused, stock, [tf.constant(v) for v in inputs], tf.constant(dy)

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


def recurrent_problem(cell, act, seed=0):
    """The same of a recurrent layer: its output is y with the states behind the last step."""
    shape = (4, 3, 2, 3)
    case = cases.RecurrentOpCase(
        cell=cell, shape=shape, act=act, backwards=cell == "gru", dtype="float64"
    )
    (inputs, (dy, *dlast)), mask = case.inputs(seed), case.mask()

    def joined(y, *last):
        return tf.concat([y, *(state[:, None] for state in last)], 1)

    def named(values):
        values = dict(zip(inputs, values, strict=True))
        return values, [values.pop(name) for name in ("h", "c") if name in values]

    def fused(*values):
        values, states = named(values)
        states = states if cell == "lstm" else states[0]
        y, last = RECURRENT_CELLS[cell](
            **values, initial_state=states, mask=mask, **case.attributes()
        )
        return joined(y, *tf.nest.flatten(last))

    def stock(*values):
        values, states = named(values)
        y, *last, _ = reference.recurrent(
            *(values["x"] @ values["kernel"] + values["bias"], values["recurrent_kernel"], states),
            *(values.get("recurrent_bias"), tf.constant(mask)),
            **{"cell": cell, "activation": act, "backwards": case.backwards},
        )
        return joined(y, *last)

    return fused, stock, [tf.constant(v) for v in inputs.values()], joined(dy, *dlast)


def quantized_matmul_problem(act, alpha=cases.ALPHA, seed=0):
    """The same, in float32, of a product with 8-bit weights, the inputs being a and bias."""
    case = QUANTIZED_MATMUL
    attributes = {**case.attributes(), "activation": act, "alpha": alpha}

    def inputs_of(i):
        return [v if v.dtype == np.int8 else v.astype(np.float32) for v in case.inputs(seed + i)]

    def quantized(a, b, b_scale):
        plain = attributes | {"activation": "none"}
        return reference.quantized_matmul_bias_act(
            tf.convert_to_tensor(a), b, b_scale, None, **plain
        )

    def argument(inputs):
        return quantized(*inputs[:3]) + inputs[3]

    a, b, b_scale, bias, dy = cases.away_from_kinks(inputs_of, argument, act)

    def fused(a, bias):
        return quantized_matmul_bias_act(a, b, b_scale, bias, **attributes)

    def stock(a, bias):
        """Has the gradient of a product of numbers that are not rounded."""
        product = tf.matmul(a, reference.dequantized(b, b_scale, case.tb, a.dtype))
        z = product + tf.stop_gradient(quantized(a, b, b_scale) - product)
        return reference.act(z + bias, act, alpha)

    return fused, stock, [tf.constant(a), tf.constant(bias)], tf.constant(dy)


def weight_only_matmul_problem(act, alpha=cases.ALPHA, seed=0, case=WEIGHT_ONLY_MATMUL):
    """The same of a product with quantized weights, the inputs being a, scale, zero and bias."""
    attributes = {**case.attributes(), "activation": act, "alpha": alpha}

    def inputs_of(i):
        values = case.inputs(seed + i)
        return [v.astype(np.float32) if np.asarray(v).dtype == np.float64 else v for v in values]

    def argument(inputs):
        given = [None if v is None else tf.constant(v) for v in inputs[:-1]]
        plain = attributes | {"activation": "none"}
        return reference.weight_only_matmul_bias_act(*given, **plain)

    a, b, scale, zero, group, bias, dy = cases.away_from_kinks(inputs_of, argument, act)

    def fused(a, scale, zero, bias):
        return weight_only_matmul_bias_act(a, b, scale, zero, group, bias, **attributes)

    def stock(a, scale, zero, bias):
        # As gathered, they would have slices for gradients.
        scale, zero = 1.0 * scale, 1.0 * zero
        return reference.weight_only_matmul_bias_act(a, b, scale, zero, group, bias, **attributes)

    return fused, stock, [tf.constant(v) for v in (a, scale, zero, bias)], tf.constant(dy)


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
    return [tf.constant(rng.normal(size=value.shape), value.dtype) for value in inputs]


def assert_all_close(values, references, units=2000):
    for i, (value, other) in enumerate(zip(values, references, strict=True)):
        dtype = np.asarray(other).dtype.name
        assert_close(f"gradient {i}", value, other, dtype, units)
