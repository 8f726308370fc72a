"""What a function keeps for its gradient."""

import numpy as np
import pytest
import tensorflow as tf

from tf_fused_ops.ops import (
    act,
    batch_norm_act,
    conv2d_bias_act,
    conv2d_transpose_bias_act,
    matmul_bias_act,
)


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


def test_a_transposed_convolution_keeps_x_w_y_and_nothing_else():
    def run(x, w, b):
        sizes = tf.shape(x) * [1, 2, 2, 0] + [0, 0, 0, 4]
        return conv2d_transpose_bias_act(x, w, sizes, b, strides=2)

    rng = np.random.default_rng(0)
    x, w, b = (tf.constant(rng.normal(size=s)) for s in ((2, 5, 5, 3), (3, 3, 4, 3), (4,)))
    kept, y = saved_tensors(run, x, w, b), run(x, w, b)
    assert len(kept) == 3
    for expected in (x, w, y):
        assert any(k.shape == expected.shape and np.all(k == expected) for k in kept)


@pytest.mark.parametrize("name", ["silu", "hard_swish", "mish", "gelu_tanh", "gelu_erf"])
def test_an_activation_keeps_x_and_nothing_else(name):
    x = tf.constant(np.random.default_rng(0).normal(size=(3, 5)))
    (kept,) = saved_tensors(lambda x: act(x, name), x)
    np.testing.assert_array_equal(kept, x)


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
