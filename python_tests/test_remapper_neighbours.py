"""Neighbours of every row that must not fuse, and TensorFlow's own mistakes."""

import itertools

import pytest
import tensorflow as tf
from remapping import assert_same, check, op_counts, plain, reasons, rule_counts, values
from test_remapper_refusals import after, conv, dense, keep
from test_remapper_rules import attrs, operands, stock

from tf_fused_ops.function import function
from tf_fused_ops.remapper import rules

ROWS = {rule.family: rule for rule in rules.RULES if rule.activation.name == "relu"}


def relu_elsewhere(z, x):
    with tf.device("CPU:0"):
        return tf.nn.relu(z)


# What becomes of the pre-activation z (x is an operand), and the reason that is reported.
NEIGHBOURS = {
    "second_consumer": (lambda z, x: (tf.nn.relu(z), tf.exp(z)), "is also used by Exp"),
    "fetched_interior": (lambda z, x: (tf.nn.relu(z), z), "is an output of the graph"),
    "control_edge": (lambda z, x: (tf.nn.relu(z), after(z, x)), "has a control edge from"),
    "kept": (lambda z, x: tf.nn.relu(keep(z)), "is marked _grappler_do_not_remove"),
    "other_device": (relu_elsewhere, "the nodes are on different devices"),
}


# The fused op takes over the control edges of the op whose other outputs it replaces.
FORWARDED = ("batch_norm", "control_edge")
PAIRS = [pair for pair in itertools.product(ROWS, NEIGHBOURS) if pair != FORWARDED]


@pytest.mark.parametrize(("family", "neighbour"), PAIRS)
def test_must_not_fuse(family, neighbour):
    rule, (finish, reason) = ROWS[family], NEIGHBOURS[neighbour]
    linear, named = type(rule)(), operands(rule)

    def forward(*args):
        z = stock(linear, dict(zip(named, args, strict=True)))["y"]
        return finish(z, args[0])

    with plain():
        expected = tf.function(forward)(*named.values())
        compiled = function(forward)
        found = compiled(*named.values())
    assert_same(found, expected)
    assert rule.name not in rule_counts(compiled)
    assert reason in reasons(compiled)[rule.name]


UNKNOWN_RANK = {
    "conv2d_bias_relu": (lambda *args: tf.nn.relu(conv(*args)), [(2, 6, 5, 3), (3, 3, 3, 4), (4,)]),
    "matmul_bias_relu": (lambda *args: tf.nn.relu(dense(*args)), [(6, 7), (7, 5), (5,)]),
}


@pytest.mark.parametrize("name", UNKNOWN_RANK)
def test_unknown_rank(name):
    fn, shapes = UNKNOWN_RANK[name]
    args = values(*shapes)
    signature = [tf.TensorSpec(None), *(tf.TensorSpec(v.shape) for v in args[1:])]
    compiled = function(fn, input_signature=signature)
    assert_same(compiled(*args), fn(*args))
    assert all(
        "relu" not in rule or "has rank None" in why for rule, why in reasons(compiled).items()
    )
    assert rule_counts(compiled) == {}


DENSE = [(6, 7), (7, 5), (5,)]
NEAR_MISSES = {
    "hard_swish_0.16": lambda z: z * (tf.nn.relu6(z + 3.0) * 0.16),
    "hard_swish_2.9": lambda z: z * tf.nn.relu6(z + 2.9) / 6.0,
    "hard_swish_other_factor": lambda z: z * tf.nn.relu6(z + 3.0) / 5.0,
    "gelu_other_root": lambda z: 0.5 * z * (1.0 + tf.math.erf(z / 1.4)),
    "steep_maximum": lambda z: tf.maximum(z, 1.5 * z),
    "sigmoid_of_sigmoid": lambda z: tf.sigmoid(z) * tf.sigmoid(tf.sigmoid(z)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    """TensorFlow takes constants within a hundredth and max(x, 1.5 x) for a leaky relu."""
    fused = {"matmul_bias": 1}
    check(lambda *args: NEAR_MISSES[name](dense(*args)), values(*DENSE), fused)


PORTS = {
    "operand": lambda halves, x, w, b: dense(halves[1][:, :7], w, b),
    "factor": lambda halves, x, w, b: dense(x, tf.unstack(tf.stack([w, -w]))[1], b),
    "bias": lambda halves, x, w, b: dense(x, w, tf.split(tf.concat([b, -b], 0), 2)[1]),
    "side_input": lambda halves, x, w, b: (
        dense(x, w, b) + tf.split(tf.concat([x, -x], 0), 2)[1][:, :5]
    ),
    "side_input_itself": lambda halves, x, w, b: halves[1] + dense(x, w, b),
}


@pytest.mark.parametrize("name", PORTS)
def test_ports_are_kept(name):
    """TensorFlow rewires operands that are second outputs of their ops to the first ones."""

    def forward(x, wide, w, b):
        halves = tf.split(wide, 2)
        return tf.nn.relu(PORTS[name](halves, x, w, b))

    width = 5 if name == "side_input_itself" else 8
    rule = "matmul_bias_add_relu" if "side" in name else "matmul_bias_relu"
    check(forward, values((6, 7), (12, width), (7, 5), (5,)), {rule: 1})


@pytest.mark.parametrize("alpha", [0.0, 0.37])
@pytest.mark.parametrize("family", ["conv2d_bias_add", "matmul_bias_add"])
def test_leaky_slope_behind_a_sum(family, alpha):
    """TensorFlow loses the slope here and takes 0.2."""
    rule = next(r for r in rules.RULES if r.name == f"{family}_leaky_relu")
    named = operands(rule)

    def forward(*args):
        return rule.stock(attrs(rule, alpha=alpha), **dict(zip(named, args, strict=True)))["y"]

    check(forward, list(named.values()), {rule.name: 1})


def test_dense_sum_relu_has_a_name():
    """TensorFlow emits an op without a type here."""

    def forward(x, w, b, side):
        return tf.nn.relu(dense(x, w, b) + side)

    compiled = check(forward, values(*DENSE, (6, 5)), {"matmul_bias_add_relu": 1})
    nodes = compiled.get_concrete_function().function_def.node_def
    assert all(node.op and node.name for node in nodes)


@pytest.mark.parametrize("epsilon", [1e-3, 0.2])
def test_epsilon_of_layer_norm(epsilon):
    """That of TensorFlow's own pass has an epsilon of 0.001 whatever the graph says."""

    def forward(x, w, b):
        y = dense(x, w, b)
        mean, variance = tf.nn.moments(y, [-1], keepdims=True)
        return tf.nn.batch_normalization(y, mean, variance, b, None, epsilon)

    check(forward, values(*DENSE), {"matmul_bias": 1, "layer_norm": 1})


@pytest.mark.parametrize("inside", [False, True])
def test_colocation(inside):
    """What is placed beside a replaced op runs, and so does a chain placed beside another op."""

    def forward(x, w, b):
        z = dense(x, w, b)
        with tf.compat.v1.colocate_with(z if inside else x):
            y = tf.nn.relu(z)
            other = tf.exp(x)
        return y, other

    compiled = check(forward, values(*DENSE), {"matmul_bias_relu": 1})
    assert "BiasAdd" not in op_counts(compiled.get_concrete_function())
