"""Moments that a convolution yields and a batch norm takes, as ops: values, gradients, errors."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from remapping import assert_same, op_counts, values

from tf_fused_ops._library import ops
from tf_fused_ops.function import function
from tf_fused_ops.ops import batch_norm_act
from tf_fused_ops.remapper import convert

SHAPES = [(3, 8, 7, 5), (3, 3, 5, 32), (32,)]


def convolved(x, w, b, num_moments=1, **options):
    options = {"strides": [1] * 4, "padding": "SAME", "activation": "none"} | options
    return ops.tf_fused_ops_conv2d_bias_act(x, w, [b], [], [], num_moments=num_moments, **options)


def normalized(x, vectors, moments, **options):
    return ops.tf_fused_ops_batch_norm_act(x, *vectors, [], moments, **options)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh"])
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_are_those_of_the_output(data_format, activation, dtype, isa):
    x, w, b = (tf.cast(v, dtype) for v in values(*SHAPES))
    if data_format == "NCHW":
        x = tf.transpose(x, [0, 3, 1, 2])
    options = {"activation": activation, "data_format": data_format}
    y, _, (moments,) = convolved(x, w, b, **options)
    alone, _, nothing = convolved(x, w, b, num_moments=0, **options)
    assert nothing == []
    np.testing.assert_array_equal(y, alone)
    expected = ops.tf_fused_ops_batch_norm_moments(y, data_format=data_format)
    np.testing.assert_allclose(moments, expected, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(0, 8, 7, 5), (2, 0, 7, 5)], ids=str)
def test_are_zero_for_an_empty_output(shape, isa):
    x, w, b = values(shape, *SHAPES[1:])
    moments = convolved(x, w, b).moments[0]
    np.testing.assert_array_equal(moments, np.zeros([3, 32]))


def test_gradient_through_moments():
    """Of what stock ops make of the output, in float64."""
    x, w, b = values(*SHAPES, dtype="float64")

    def ours(x, w, b):
        y, _, (moments,) = convolved(x, w, b)
        return y, moments[1], moments[2] / moments[0]

    def stock(x, w, b):
        y = tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)
        return y, *tf.nn.moments(y, [0, 1, 2])

    found = []
    for code in (ours, stock):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y, mean, variance = code(x, w, b)
            loss = tf.reduce_sum(tf.sin(mean) + tf.exp(-variance)) + tf.reduce_sum(tf.cos(y))
        found.append(tape.gradient(loss, [x, w, b]))
    assert_same(*found, units=1024)


@pytest.mark.parametrize("decorate", [lambda f: f, tf.function], ids=["eager", "function"])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_batch_norm_with_moments(activation, decorate, isa):
    """The same results and gradients as if the op computed them."""
    x, w, b = values(*SHAPES)
    vectors = [tf.abs(v) + 0.5 for v in values(*[(32,)] * 4, seed=1)]

    def given(x, w, b, scale, offset):
        y, _, moments = convolved(x, w, b)
        return normalized(y, [scale, offset, *vectors[2:]], moments, activation=activation)[:5]

    def computed(x, w, b, scale, offset):
        y = convolved(x, w, b, num_moments=0).y
        return batch_norm_act(y, scale, offset, *vectors[2:], activation=activation)

    found = []
    for code in map(decorate, (given, computed)):
        sources = [x, w, b, *vectors[:2]]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = code(*sources)
            loss = tf.reduce_sum(tf.sin(outputs[0])) + sum(map(tf.reduce_sum, outputs[1:]))
        found.append([outputs, tape.gradient(loss, sources)])
    assert_same(*found, units=1024)


@pytest.mark.parametrize("decorate", [lambda f: f, tf.function], ids=["eager", "function"])
def test_wrong_moments_are_refused(decorate):
    (x,) = values((4, 6))
    vectors = [tf.ones([6])] * 4

    def call(moments, **options):
        return decorate(lambda: normalized(x, vectors, moments, **options))()

    for shape in ((3, 5), (2, 6), (6,), (1, 3, 6)):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="moments"):
            call([tf.zeros(shape, tf.float64)])
    good = tf.ones([3, 6], tf.float64)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="training"):
        call([good], training=False)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="num_moments"):
        call([good, good])
    image, filters, bias = values((1, 4, 4, 2), (1, 1, 2, 3), (3,))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="num_moments"):
        decorate(lambda: convolved(image, filters, bias, num_moments=2))()


def test_portable_conversion(tmp_path):
    """Stock ops stand for both ops in a SavedModel for a server without the plugin."""
    x, w, b = values(*SHAPES)

    class Network(tf.Module):
        @function(input_signature=[tf.TensorSpec(x.shape)])
        def train(self, x):
            z = tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)
            y, mean, _ = tf.compat.v1.nn.fused_batch_norm(z, tf.ones([32]), tf.zeros([32]))
            return tf.nn.relu(y), mean

    network = Network()
    folders = [str(tmp_path / name) for name in ("fused", "stock")]
    tf.saved_model.save(network, folders[0], signatures=network.train.get_concrete_function())
    convert(*folders, to_stock=True)
    loaded = [tf.saved_model.load(folder).signatures["serving_default"] for folder in folders]
    counts = [op_counts(signature) for signature in loaded]
    assert counts[0]["TfFusedOps>BatchNormAct"] == counts[0]["TfFusedOps>Conv2DBiasAct"] == 1
    assert not [name for name in counts[1] if name.startswith("TfFusedOps>")]
    assert_same(*([*signature(x).values()] for signature in loaded), units=256)
