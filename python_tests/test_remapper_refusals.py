"""Graphs that look like a rule and must not be fused by it, each with the reported reason."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    given,
    given_op,
    op_counts,
    reasons,
    rule_counts,
    values,
)
from tensorflow.core.framework import attr_value_pb2

from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions

CONV = [(2, 6, 5, 3), (3, 3, 3, 4), (4,)]
MATMUL = [(6, 7), (7, 5), (5,)]
NORM = [(4, 5, 3, 6), (6,), (6,)]
CONV_NORM = [*CONV, *[(4,)] * 4]


def conv(x, w, b):
    return tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)


def dense(x, w, b):
    return tf.nn.bias_add(tf.matmul(x, w), b)


def norm(x, scale, offset):
    return tf.raw_ops.FusedBatchNormV3(
        x=x, scale=scale, offset=offset, mean=[], variance=[], is_training=True
    )


def gelu(x, cubic=0.044715, scale=0.7978845608028654, half=0.5):
    return half * x * (1.0 + tf.tanh(scale * (x + cubic * tf.pow(x, 3))))


def keep(tensor):
    """Marks the op of a tensor in a graph as one that grappler must keep."""
    if not tf.executing_eagerly():
        tensor.op._set_attr("_grappler_do_not_remove", attr_value_pb2.AttrValue(b=True))
    return tensor


def after(tensor, value):
    """Returns value, computed only after tensor."""
    with tf.control_dependencies([tensor]):
        return tf.identity(value)


def guided_relu(x):
    """Relu with another gradient, as for guided backpropagation."""
    with tf.compat.v1.get_default_graph().gradient_override_map({"Relu": "Identity"}):
        return tf.nn.relu(x)


@tf.custom_gradient
def straight_silu(x, beta):
    """The ops of tf.nn.silu with another gradient."""
    return x * tf.sigmoid(beta * x), lambda dy: (dy, None)


@dataclasses.dataclass(frozen=True)
class Case:
    """One graph.

    Attributes:
        name: The test's name.
        fn: The function.
        shapes: Shapes of its arguments.
        refused: The rule that must not fire.
        reason: Part of the reason in the report; empty where the graph is too different to be a
            near miss.
        fused: What fuses instead.
    """

    name: str
    fn: Callable
    shapes: list
    refused: str
    reason: str = ""
    fused: dict = dataclasses.field(default_factory=dict)


def _conv_relu_and(other):
    def fn(x, w, b):
        z = conv(x, w, b)
        return tf.nn.relu(z), other(z)

    return fn


def _conv_given_and(other):
    def fn(x, w, b, *vectors):
        z = conv(x, w, b)
        return given(z, *vectors), other(z)

    return fn


def _split_sides(x, scale, offset):
    """The side input is the second output of a Split: its port must not be lost."""
    first, second = tf.split(tf.concat([x * 2.0, x * 3.0], 0), 2)
    return tf.nn.relu(norm(x, scale, offset).y + second), first


def _two_devices(x, w, b):
    with tf.device("CPU:0"):
        z = tf.matmul(x, w)
    return tf.nn.relu(tf.nn.bias_add(z, b))


CASES = [
    Case(
        "conv_second_consumer",
        _conv_relu_and(tf.exp),
        CONV,
        "conv2d_bias_relu",
        "BiasAdd:0 is also used by Exp",
        {"conv2d_bias": 1},
    ),
    Case(
        "conv_fetched_interior",
        _conv_relu_and(lambda z: z),
        CONV,
        "conv2d_bias_relu",
        "BiasAdd:0 is an output of the graph",
        {"conv2d_bias": 1},
    ),
    Case(
        "conv_convolution_fetched",
        lambda x, w, b: (lambda z: (z, tf.nn.relu(tf.nn.bias_add(z, b))))(
            tf.nn.conv2d(x, w, 1, "SAME")
        ),
        CONV,
        "conv2d_bias_relu",
        "Conv2D:0 is an output of the graph",
    ),
    Case(
        "conv_control_edge",
        lambda x, w, b: (lambda z: (tf.nn.relu(z), after(z, x)))(conv(x, w, b)),
        CONV,
        "conv2d_bias_relu",
        "has a control edge from BiasAdd",
        {"conv2d_bias": 1},
    ),
    Case(
        "conv_kept_by_attribute",
        lambda x, w, b: tf.nn.relu(keep(conv(x, w, b))),
        CONV,
        "conv2d_bias_relu",
        "BiasAdd is marked _grappler_do_not_remove",
    ),
    Case(
        "conv_overridden_gradient",
        lambda x, w, b: guided_relu(conv(x, w, b)),
        CONV,
        "conv2d_bias_relu",
        "the gradient of Relu is overridden",
        {"conv2d_bias": 1},
    ),
    Case(
        "conv_bias_on_other_axis",
        lambda x, w, b: tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME") + b[:, None]),
        [(2, 6, 4, 3), (3, 3, 3, 4), (4,)],
        "conv2d_bias_relu",
    ),
    Case(
        "matmul_two_devices",
        _two_devices,
        MATMUL,
        "matmul_bias_relu",
        "different devices",
    ),
    Case(
        "matmul_second_consumer",
        lambda x, w, b: (lambda z: (gelu(z), tf.sin(z)))(dense(x, w, b)),
        MATMUL,
        "matmul_bias_gelu_tanh",
        "BiasAdd:0 is also used by Sin",
        {"matmul_bias": 1, "act_gelu_tanh": 1},
    ),
    Case(
        "gelu_other_cubic",
        lambda x, w, b: gelu(dense(x, w, b), cubic=0.0448),
        MATMUL,
        "matmul_bias_gelu_tanh",
        "is 0.0448, not 0.044715",
        {"matmul_bias": 1},
    ),
    Case(
        "gelu_other_half",
        lambda x, w, b: gelu(dense(x, w, b), half=1.5),
        MATMUL,
        "matmul_bias_gelu_tanh",
        "is 1.5, not 0.5",
        {"matmul_bias": 1},
    ),
    Case(
        "gelu_two_other_constants",
        lambda x, w, b: gelu(dense(x, w, b), half=1.5, cubic=0.0448),
        MATMUL,
        "matmul_bias_gelu_tanh",
        "",
        {"matmul_bias": 1},
    ),
    Case(
        "gelu_of_two_values",
        lambda x, w, b: 0.5 * x * (1.0 + tf.math.erf(dense(x, w, b) * np.float32(np.sqrt(0.5)))),
        [(6, 7), (7, 7), (7,)],
        "matmul_bias_gelu_erf",
        "",
        {"matmul_bias": 1},
    ),
    Case(
        "silu_with_custom_gradient",
        lambda x, w, b: straight_silu(dense(x, w, b), tf.constant(1.0)),
        MATMUL,
        "matmul_bias_silu",
        "attribute _gradient_op_type of",
        {"matmul_bias": 1},
    ),
    Case(
        "silu_with_beta",
        lambda x, w, b: tf.nn.silu(dense(x, w, b), beta=1.7),
        MATMUL,
        "matmul_bias_silu",
        "is 1.7, not 1",
        {"matmul_bias": 1},
    ),
    Case(
        "matmul_rank_3",
        lambda x, w, b: tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), b)),
        [(2, 6, 7), (2, 7, 5), (5,)],
        "matmul_bias_relu",
    ),
    Case(
        "matmul_sum_with_one_number",
        lambda x, w, b: tf.nn.relu(tf.matmul(x, w) + b),
        [(6, 7), (7, 5), (1,)],
        "matmul_bias_relu",
        "may not be a bias",
    ),
    Case(
        "matmul_sum_that_broadcasts_the_product",
        lambda x, w, b: tf.nn.relu(tf.matmul(x, w) + b),
        [(6, 7), (7, 1), (5,)],
        "matmul_bias_relu",
        "may not be a bias",
    ),
    Case(
        "matmul_sum_with_a_row",
        lambda x, w, b: tf.nn.relu(tf.matmul(x, w) + b),
        [(6, 7), (7, 5), (1, 5)],
        "matmul_bias_relu",
    ),
    Case(
        "conv_broadcast_side_input",
        lambda x, w, b, side: tf.nn.relu(conv(x, w, b) + side),
        [*CONV, (2, 6, 1, 4)],
        "conv2d_bias_add_relu",
        "may broadcast",
        {"conv2d_bias": 1},
    ),
    Case(
        "conv_sum_is_used",
        lambda x, w, b, side: (lambda z: (tf.nn.relu(z), tf.exp(z)))(conv(x, w, b) + side),
        [*CONV, (2, 6, 5, 4)],
        "conv2d_bias_add_relu",
        "also used by Exp",
        {"conv2d_bias_add": 1},
    ),
    Case(
        "matmul_sum_of_three",
        lambda x, w, b, side: tf.nn.relu(tf.add_n([dense(x, w, b), side, side])),
        [*MATMUL, (6, 5)],
        "matmul_bias_add_relu",
        "",
        {"matmul_bias": 1},
    ),
    Case(
        "matmul_larger_side_input",
        lambda x, w, b, side: tf.nn.relu(dense(x, w, b) + side),
        [(1, 7), (7, 5), (5,), (6, 5)],
        "matmul_bias_add_relu",
        "may broadcast",
        {"matmul_bias": 1},
    ),
    Case(
        "norm_broadcast_side_input",
        lambda x, scale, offset, side: tf.nn.relu(norm(x, scale, offset).y + side),
        [*NORM, (4, 5, 1, 6)],
        "batch_norm_add_relu",
        "may broadcast",
    ),
    Case(
        "norm_side_input_larger",
        lambda x, scale, offset, side: tf.nn.relu(norm(x, scale, offset).y + side),
        [(1, 5, 3, 6), (6,), (6,), (4, 5, 3, 6)],
        "batch_norm_add_relu",
        "may broadcast",
    ),
    Case(
        "norm_reserve_fetched",
        lambda x, scale, offset: (lambda n: (tf.nn.relu(n.y), n.reserve_space_1))(
            norm(x, scale, offset)
        ),
        NORM,
        "batch_norm_relu",
        "FusedBatchNormV3:3 is an output of the graph",
    ),
    Case(
        "norm_second_consumer",
        lambda x, scale, offset: (lambda n: (tf.nn.relu(n.y), tf.exp(n.y)))(norm(x, scale, offset)),
        NORM,
        "batch_norm_relu",
        "FusedBatchNormV3:0 is also used by Exp",
    ),
    Case(
        "conv_norm_second_consumer",
        _conv_given_and(tf.exp),
        CONV_NORM,
        "conv2d_given_batch_norm",
        "BiasAdd:0 is also used by Exp",
        {"conv2d_bias": 1, "given_batch_norm": 1},
    ),
    Case(
        "conv_norm_fetched_convolution",
        _conv_given_and(lambda z: z),
        CONV_NORM,
        "conv2d_given_batch_norm",
        "BiasAdd:0 is an output of the graph",
        {"conv2d_bias": 1, "given_batch_norm": 1},
    ),
    Case(
        "conv_norm_control_edge",
        lambda x, w, b, *vectors: (lambda z: (given(z, *vectors), after(z, x)))(conv(x, w, b)),
        CONV_NORM,
        "conv2d_given_batch_norm",
        "has a control edge from BiasAdd",
        {"conv2d_bias": 1, "given_batch_norm": 1},
    ),
    Case(
        "conv_norm_one_factor",
        lambda *args: given(conv(*args[:3]), *args[3:]),
        [*CONV, (1,), (4,), (4,), (4,)],
        "conv2d_given_batch_norm",
        "of 1 elements does not fit",
        {"conv2d_bias": 1},
    ),
    Case(
        "conv_norm_of_rows",
        lambda *args: given(conv(*args[:3]), *args[3:], shape=(1, 4, 1, 1)),
        [(2, 4, 5, 3), *CONV_NORM[1:]],
        "conv2d_given_batch_norm",
        "BiasAdd:0 are not those normalized",
        {"conv2d_bias": 1, "given_batch_norm": 1},
    ),
    Case(
        "conv_norm_of_a_sum",
        lambda x, w, side, *vectors: given(tf.nn.conv2d(x, w, 1, "SAME") + side, *vectors),
        [*CONV[:2], (2, 6, 5, 4), *CONV_NORM[3:]],
        "conv2d_given_batch_norm",
        "",
        {"conv2d_add": 1, "given_batch_norm": 1},
    ),
    Case(
        "conv_norm_of_the_batch",
        lambda x, w, b, *vectors: norm(conv(x, w, b), *vectors[:2]).y,
        CONV_NORM,
        "conv2d_batch_norm",
        "",
        {"conv2d_bias": 1},
    ),
    Case(
        "conv_norm_statistics_fetched",
        lambda x, w, b, *vectors: given_op(conv(x, w, b), *vectors)[:2],
        CONV_NORM,
        "conv2d_batch_norm",
        "FusedBatchNormV3:1 is an output of the graph",
        {"conv2d_bias": 1},
    ),
    Case(
        "conv_norm_broadcast_side_input",
        lambda *args: tf.nn.relu(given_op(conv(*args[:3]), *args[3:7]).y + args[7]),
        [*CONV_NORM, (2, 6, 1, 4)],
        "conv2d_batch_norm_add_relu",
        "may broadcast",
        {"conv2d_batch_norm": 1},
    ),
    Case(
        "norm_relu_of_statistics",
        lambda x, scale, offset: tf.nn.relu(norm(x, scale, offset).batch_mean),
        NORM,
        "batch_norm_relu",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_must_not_fuse(case):
    compiled = check(case.fn, values(*case.shapes), case.fused)
    found = reasons(compiled)
    if case.reason:
        assert case.reason in found[case.refused]
    else:
        assert case.refused not in found


def test_custom_gradient_survives():
    """What must not be fused keeps its own gradient."""
    x, w, b = values(*MATMUL)

    def gradient(fn):
        with tf.GradientTape() as tape:
            tape.watch(b)
            y = fn(x, w, b)
        return tape.gradient(y, b)

    def forward(x, w, b):
        return straight_silu(dense(x, w, b), tf.constant(1.0))

    assert_same(gradient(function(forward)), tf.fill([5], 6.0))
    assert_same(gradient(function(lambda *args: guided_relu(dense(*args)))), tf.fill([5], 6.0))


def test_split_port_is_kept():
    check(_split_sides, values(*NORM), {"batch_norm_add_relu": 1})


@pytest.mark.parametrize("port", [0, 1])
def test_operand_port_is_kept(port):
    def forward(x, w, b):
        return tf.nn.relu(dense(tf.split(x, 2)[port], w, b))

    check(forward, values((12, 7), (7, 5), (5,)), {"matmul_bias_relu": 1})


def test_unsupported_dtype():
    def forward(x, w, b):
        return tf.nn.relu(dense(x, w, b))

    args = [tf.cast(v * 4, tf.int32) for v in values(*MATMUL)]
    compiled = function(forward)
    np.testing.assert_array_equal(compiled(*args), forward(*args))
    assert rule_counts(compiled) == {}


def test_missing_kernel(monkeypatch):
    from tf_fused_ops.remapper import kernels

    monkeypatch.setattr(kernels, "has_kernel", lambda op_type, dtype, device: False)
    compiled = check(lambda *args: tf.nn.relu(conv(*args)), values(*CONV), {})
    assert (
        "TfFusedOps>Conv2DBiasAct has no float32 kernel on CPU"
        in reasons(compiled)["conv2d_bias_relu"]
    )


def test_control_inputs_are_forwarded():
    """What a replaced op had to wait for, the fused op waits for."""
    state = tf.Variable(0.0)

    def forward(x, w, b):
        update = state.assign_add(1.0)
        with tf.control_dependencies([update]):
            z = tf.matmul(x, w)
        return tf.nn.relu(tf.nn.bias_add(z, b))

    compiled = function(forward)
    args = values(*MATMUL)
    compiled(*args)
    assert rule_counts(compiled) == {"matmul_bias_relu": 1}
    graph = compiled.get_concrete_function(*args).graph
    fused = next(op for op in graph.get_operations() if op.type == "TfFusedOps>MatMulBiasAct")
    assert [op.type for op in fused.control_inputs] == ["AssignAddVariableOp"]
    assert state.numpy() == 1.0


def test_control_edges_of_the_result_are_kept():
    """What had to wait for a replaced op waits for the fused one."""

    def forward(x, w, b):
        y = tf.nn.relu(dense(x, w, b))
        return y, after(y, x)

    compiled = check(forward, values(*MATMUL), {"matmul_bias_relu": 1})
    graph = compiled.get_concrete_function().graph
    waiting = graph.get_operation_by_name("Identity")
    assert [op.type for op in waiting.control_inputs] == ["TfFusedOps>MatMulBiasAct"]


def test_interior_used_by_unmatched_gradient():
    """A gradient that autodiff would not make of the activation keeps the activation stock."""

    def step(x, w, b):
        z = dense(x, w, b)
        y = tf.nn.silu(z)
        slope = tf.sigmoid(z) * (1.0 + z)
        return y, tf.matmul(x, y * slope, transpose_a=True)

    compiled = check(step, values(*MATMUL), {"matmul_bias": 1, "act_silu": 1})
    assert "also used by" in reasons(compiled)["matmul_bias_silu"]


def test_cycle_is_refused():
    """The gradient of the bias moves the input of the product that it belongs to."""

    def step(x, w, b, dy):
        db = tf.raw_ops.BiasAddGrad(out_backprop=dy)
        shifted = x + tf.reduce_sum(db)
        y = dense(shifted, w, b)
        return y, tf.raw_ops.MatMul(a=shifted, b=dy, transpose_a=True, grad_b=True)

    compiled = check(step, values(*MATMUL, (6, 5)), {"matmul_bias": 1})
    assert op_counts(compiled.get_concrete_function())["BiasAddGrad"] == 1


def test_disabled_rules():
    options = RemapOptions(disable=("conv2d_*",))

    def forward(x, w, b):
        return tf.nn.relu(
            dense(
                tf.reshape(tf.nn.relu(conv(x, w, b)), [30, 8]), w[0, 0, 0, :1] * tf.ones([8, 4]), b
            )
        )

    compiled = function(forward, remap=options)
    assert_same(compiled(*values(*CONV)), forward(*values(*CONV)))
    assert rule_counts(compiled) == {"matmul_bias_relu": 1}
