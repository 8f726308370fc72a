"""Rules that users bring: they fuse like those of the table, and are refused like them."""

import runpy

import pytest
import tensorflow as tf
from conftest import ROOT
from remapping import assert_same, gradient_count, op_counts, reasons, rule_counts, values

import tf_fused_ops as tfo
from tf_fused_ops.remapper import RemapOptions

ThresholdedDense = runpy.run_path(str(ROOT / "examples" / "own_rule.py"))["ThresholdedDense"]
RULE = ThresholdedDense()
SHAPES = [(6, 7), (7, 5), (5,)]


def forward(x, w, threshold):
    return tf.nn.relu(x @ w - threshold)


def step(x, w, threshold):
    with tf.GradientTape() as tape:
        tape.watch([x, w, threshold])
        loss = tf.reduce_sum(forward(x, w, threshold) ** 2)
    return loss, tape.gradient(loss, [x, w, threshold])


def run(function, args, **options):
    """Returns the decorated function after a call whose result is that of stock."""
    compiled = tfo.function(function, remap=RemapOptions(**options))
    assert_same(compiled(*args), tf.function(function)(*args))
    return compiled


def test_inference_and_training():
    for function, gradients in ((forward, 0), (step, 1)):
        args = values(*SHAPES)
        compiled = run(function, args, rules=[RULE])
        assert rule_counts(compiled) == {"thresholded_dense": 1}
        assert gradient_count(compiled) == gradients
        counts = op_counts(compiled.get_concrete_function(*args))
        assert counts["TfFusedOps>MatMulBiasAct"] == 1
        assert counts["TfFusedOps>MatMulBiasActGrad"] == 2 * gradients
        assert not counts.keys() & {"MatMul", "Relu", "ReluGrad"}


def test_operands_that_depend_on_each_other():
    """Each gradient is that by one operand alone."""

    def square(x, threshold):
        return step(x, x, threshold)

    def after(x, w, threshold):
        with tf.GradientTape() as tape:
            tape.watch([x, w, threshold])
            loss = tf.reduce_sum(forward(tf.sin(x) * tf.reduce_sum(w), w, threshold) ** 2)
        return loss, tape.gradient(loss, [x, w, threshold])

    for function, args in ((square, values((7, 7), (7,))), (after, values(*SHAPES))):
        compiled = run(function, args, rules=[RULE])
        assert (rule_counts(compiled), gradient_count(compiled)) == ({"thresholded_dense": 1}, 1)


def test_beside_the_table():
    def both(x, w, threshold):
        return forward(tf.nn.gelu(tf.nn.bias_add(x @ w, threshold)), tf.transpose(w), x[0])

    compiled = run(both, values(*SHAPES), rules=[RULE])
    assert rule_counts(compiled) == {"matmul_bias_gelu_erf": 1, "thresholded_dense": 1}


def test_only_where_it_is_asked_for():
    assert rule_counts(run(forward, values(*SHAPES))) == {}
    compiled = run(forward, values(*SHAPES), rules=[RULE], disable=["thresholded_*"])
    assert rule_counts(compiled) == {}


def test_refused():
    compiled = run(forward, values((6, 7), (7, 5), (1,)), rules=[RULE])
    assert reasons(compiled)["thresholded_dense"] == (
        "a threshold of 1 elements may broadcast to 5 units"
    )
    compiled = run(lambda x, w, t: tf.nn.relu(t - x @ w), values(*SHAPES), rules=[RULE])
    assert rule_counts(compiled) == {}


def test_graph_def():
    graph_def = tf.function(forward).get_concrete_function(*values(*SHAPES)).graph.as_graph_def()
    result = tfo.remap(graph_def, options=RemapOptions(rules=[RULE]))
    assert result.report.counts() == {"thresholded_dense": 1}


def test_not_a_rule():
    with pytest.raises(TypeError, match=r"instances of tf_fused_ops\.remapper\.Rule; got <class"):
        RemapOptions(rules=[ThresholdedDense])
