"""Convolutions that take the moments for the batch norm in training behind them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import assert_same, gradient_count, op_counts, plain, reasons, rule_counts, values

from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions, graph, kernels

RULE = "conv2d_moments"
SHAPES = [(2, 9, 8, 6), (3, 3, 6, 32), (32,), (32,), (32,)]


def conv(x, w, strides=1, padding="SAME", data_format="NHWC"):
    return tf.nn.conv2d(x, w, strides, padding, data_format)


def biased(x, w, b, **options):
    return tf.nn.bias_add(conv(x, w, **options), b, options.get("data_format"))


def normalized(z, scale, offset, data_format="NHWC"):
    """Batch norm in training by TensorFlow's own op; y and the batch's statistics."""
    return tf.compat.v1.nn.fused_batch_norm(z, scale, offset, data_format=data_format)


def decomposed(z, scale, offset):
    """The same as Keras has it."""
    mean, variance = tf.nn.moments(z, [0, 1, 2])
    return tf.nn.batch_normalization(z, mean, variance, offset, scale, 1e-3), mean, variance


def relu(outputs):
    y, *statistics = outputs
    return tf.nn.relu(y), *statistics


def added(outputs, side):
    y, *statistics = outputs
    return tf.nn.relu(y + side), *statistics


# Code of x, w, b, scale and offset; what else is fused.
FUSED = {
    "bias_relu": (
        lambda x, w, b, *v: relu(normalized(biased(x, w, b), *v)),
        {"conv2d_bias": 1, "batch_norm_relu": 1},
    ),
    "no_bias_relu": (lambda x, w, b, *v: relu(normalized(conv(x, w), *v)), {"batch_norm_relu": 1}),
    "keras": (lambda x, w, b, *v: decomposed(conv(x, w), *v), {"moments_batch_norm": 1}),
    "keras_relu6": (
        lambda x, w, b, *v: (tf.nn.relu6(decomposed(biased(x, w, b), *v)[0]),),
        {"conv2d_bias": 1, "moments_batch_norm_relu6": 1},
    ),
    "strided_valid": (
        lambda x, w, b, *v: relu(normalized(conv(x, w, 2, "VALID"), *v)),
        {"batch_norm_relu": 1},
    ),
    "side_input": (
        lambda x, w, b, *v: added(
            decomposed(biased(x, w, b), *v), tf.tile(x[..., :4], [1, 1, 1, 8])
        ),
        {"conv2d_bias": 1, "moments_batch_norm_add_relu": 1},
    ),
    "side_input_is_the_output": (
        lambda x, w, b, *v: added(decomposed(z := biased(x, w, b), *v), z),
        {"conv2d_bias": 1, "moments_batch_norm_add_relu": 1},
    ),
    "output_used_twice": (
        lambda x, w, b, *v: (*relu(normalized(biased(x, w, b), *v)), tf.sin(biased(x, w, b))),
        {"conv2d_bias": 2, "batch_norm_relu": 1},
    ),
}
# TensorFlow's own op has no float64.
CASES = [
    (name, dtype)
    for name, (_, others) in FUSED.items()
    for dtype in ("float32", "float64")
    if dtype == "float32" or "batch_norm_relu" not in others
]


def gradients(fn, args):
    with tf.GradientTape() as tape:
        tape.watch(args)
        outputs = fn(*args)
        # Stock TensorFlow has no gradient of the statistics.
        loss = sum(tf.reduce_sum(tf.sin(y)) for y in outputs if y.shape.rank == 4)
    return outputs, tape.gradient(loss, args)


def joined(concrete):
    """Returns how many convolutions yield moments, and how many batch norms take them."""
    ops = [op for op in concrete.graph.get_operations() if op.node_def.attr["num_moments"].i]
    types = [op.type for op in ops]
    return [types.count(f"TfFusedOps>{name}") for name in ("Conv2DBiasAct", "BatchNormAct")]


@pytest.mark.parametrize("mode", ["forward", "outer tape", "inner tape"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_fused(name, dtype, mode):
    code, others = FUSED[name]
    args = values(*SHAPES, dtype=dtype)
    with plain():
        if mode == "forward":
            compiled, expected = function(code), tf.function(code)(*args)
            found = compiled(*args)
        elif mode == "outer tape":
            compiled, expected = function(code), gradients(tf.function(code), args)
            found = gradients(compiled, args)
        else:
            expected = tf.function(lambda *args: gradients(code, args))(*args)
            compiled = function(lambda *args: gradients(code, args))
            found = compiled(*args)
            assert gradient_count(compiled) >= 1
            if "conv2d_bias" not in others:
                others = others | {"trained_conv2d": 1}
            if name == "side_input":
                others = others | {"slice_gradient": 1}
    assert rule_counts(compiled) == {**others, RULE: 1}, "\n".join(map(str, compiled.remap_reports))
    concrete = compiled.get_concrete_function(*args)
    assert joined(concrete) == [1, 1]
    assert "Conv2D" not in op_counts(concrete)
    assert_same(found, expected, units=4096)


def refused(changes, code=FUSED["no_bias_relu"][0], dtype="float32"):
    """Returns the reason why nothing is joined, of arguments of other shapes."""
    shapes = [changes.get(i, shape) for i, shape in enumerate(SHAPES)]
    x, w, b, *vectors = values(*shapes)
    x, w, b = (tf.cast(t, dtype) for t in (x, w, b))
    compiled = function(code)
    concrete = compiled.get_concrete_function(x, w, b, *vectors)
    assert joined(concrete) == [0, 0]
    assert RULE not in rule_counts(compiled)
    return reasons(compiled).get(RULE)


def test_a_batch_norm_that_stays_stock_is_left():
    """TensorFlow has one op for it, without an activation, already."""
    assert refused({}, lambda x, w, b, *v: normalized(biased(x, w, b), *v)) is None


def test_channels_that_are_no_whole_vectors_are_left():
    changes = dict.fromkeys((2, 3, 4), (24,)) | {1: (3, 3, 6, 24)}
    assert "24 channels" in refused(changes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_are_left(dtype):
    assert f"the moments of {dtype} would take a pass" in refused({}, dtype=dtype)


def test_channels_that_come_first_are_left():
    def code(x, w, b, *vectors):
        return relu(normalized(conv(x, w, data_format="NCHW"), *vectors, data_format="NCHW"))

    assert "channels that come first" in refused({0: (2, 6, 9, 8)}, code)


def test_grouped_convolutions():
    x, w, b, *vectors = values(SHAPES[0], (3, 3, 3, 32), *SHAPES[2:])
    code, others = FUSED["bias_relu"]
    compiled = function(code)
    assert_same(compiled(x, w, b, *vectors), code(x, w, b, *vectors))
    assert rule_counts(compiled) == {**others, RULE: 1}


def test_other_devices_are_left(monkeypatch):
    """Also where they have both kernels."""
    monkeypatch.setattr(kernels, "has_kernel", lambda *_: True)

    def code(*args):
        with tf.device("/GPU:0"):
            return FUSED["no_bias_relu"][0](*args)

    assert refused({}, code) == "the convolution takes no moments on GPU"


def test_what_is_between_keeps_them_apart():
    assert refused({}, lambda x, w, b, *v: relu(normalized(tf.sin(biased(x, w, b)), *v))) is None
    # An activation of the convolution, in a network that normalizes first.
    assert (
        refused({}, lambda x, w, b, *v: relu(normalized(tf.nn.relu(biased(x, w, b)), *v))) is None
    )


def test_inference_is_left():
    def code(x, w, b, scale, offset):
        mean, variance = tf.zeros_like(scale), tf.ones_like(scale)
        z = biased(x, w, b)
        return relu(
            tf.compat.v1.nn.fused_batch_norm(z, scale, offset, mean, variance, is_training=False)
        )

    assert refused({}, code) is None


def test_rule_can_be_switched_off_and_runs_once():
    code, others = FUSED["bias_relu"]
    args = values(*SHAPES)
    compiled = function(code, remap=RemapOptions(disable=(RULE,)))
    compiled(*args)
    assert rule_counts(compiled) == others
    # A fused function inside another one is looked at again.
    inner = function(code)
    outer = function(lambda *args: inner(*args))
    assert_same(outer(*args), compiled(*args), units=256)
    assert rule_counts(outer) == {}
    assert op_counts(inner.get_concrete_function(*args))["TfFusedOps>BatchNormAct"] == 1


def test_joining_does_not_sort_the_graph_anew(monkeypatch):
    """Two ops that read each other take the places of those that they replace."""
    sorts = []
    sort = graph._topological
    monkeypatch.setattr(graph, "_topological", lambda before: sorts.append(1) or sort(before))

    def layers(x, w, b, *vectors):
        for _ in range(3):
            x = relu(normalized(biased(x, w, b), *vectors))[0]
        return (x,)

    compiled = function(lambda *args: gradients(layers, args))
    compiled.get_concrete_function(*values((2, 9, 8, 32), (3, 3, 32, 32), *SHAPES[2:]))
    assert rule_counts(compiled)[RULE] == 3
    assert len(sorts) == 1


def test_moving_averages_of_a_keras_network():
    """A train step leaves stock's weights, statistics and losses."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Conv2D(32, 1, strides=2),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    x, y = values((4, 9, 9, 3), (4, 32))
    model.build(x.shape)
    start = model.get_weights()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        for v, g in zip(
            model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            v.assign_sub(0.1 * g)
        return loss

    results = []
    for decorate in (tf.function, function):
        model.set_weights(start)
        compiled = decorate(step)
        losses = [compiled(x, y) for _ in range(3)]
        results.append([*losses, *model.get_weights()])
    assert rule_counts(compiled)[RULE] == 2
    for found, expected in zip(*reversed(results), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
