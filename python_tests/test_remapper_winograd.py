"""Winograd's algorithm, where it is allowed: by the decorator, for Keras models, in SavedModels."""

import keras
import numpy as np
import tensorflow as tf
from remapping import gradient_count, reasons, rule_counts, values
from tolerances import WINOGRAD_FACTOR, assert_close

import tf_fused_ops as tfo
from tf_fused_ops.__main__ import main
from tf_fused_ops.remapper import RemapOptions, kernels

OPERANDS = [(2, 28, 27, 32), (3, 3, 32, 40), (40,)]
ALLOWED = RemapOptions(winograd=True)


def conv_relu(x, w, b):
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))


def convolutions(concrete):
    """The op and the switch of all convolutions of a function and of those that it calls."""
    graph_def = concrete.graph.as_graph_def()
    nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
    return [(node.op, node.attr["winograd"].b) for node in nodes if "Conv2DBiasAct" in node.op]


def test_decorator_allows_it():
    operands = values(*OPERANDS)

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = conv_relu(x, w, b)
        return y, *tape.gradient(y, [x, w, b])

    fused = tfo.function(step, remap=ALLOWED)
    for a, e in zip(fused(*operands), step(*operands), strict=True):
        assert_close("output", a, e, "float32", units=16 * WINOGRAD_FACTOR)
    assert rule_counts(fused) == {"conv2d_bias_relu": 1}
    assert gradient_count(fused) == 1
    ops = ("TfFusedOps>Conv2DBiasAct", "TfFusedOps>Conv2DBiasActGrad")
    found = convolutions(fused.get_concrete_function(*operands))
    assert found == [(op, True) for op in ops]
    off = tfo.function(step)
    off(*operands)
    found = convolutions(off.get_concrete_function(*operands))
    assert found == [(op, False) for op in ops]


def test_a_convolution_alone_is_fused_where_it_fits():
    x, w, _ = values(*OPERANDS)

    def code(x, w):
        y = tf.nn.conv2d(x, w, 1, "SAME")
        strided = tf.nn.conv2d(x, w, 2, "SAME")
        dilated = tf.nn.conv2d(x, w, 1, "SAME", dilations=2)
        return y, strided, dilated, tf.nn.conv2d(x, w[:1, :1], 1, "SAME")

    fused = tfo.function(code, remap=ALLOWED)
    for a, e in zip(fused(x, w), code(x, w), strict=True):
        assert_close("output", a, e, "float32", units=16 * WINOGRAD_FACTOR)
    assert rule_counts(fused) == {"winograd_conv2d": 1}
    refused = fused.remap_reports[0].refused
    assert [(r.rule, r.reason) for r in refused] == [
        ("winograd_conv2d", "Winograd's algorithm is for 3x3 filters of stride and dilation 1")
    ] * 3
    stock = tfo.function(code)
    stock(x, w)
    assert rule_counts(stock) == {}
    named = tfo.function(code, remap=RemapOptions(winograd=True, disable=["winograd_*"]))
    named(x, w)
    assert rule_counts(named) == {}


def test_a_convolution_alone_on_another_device_is_left(monkeypatch):
    monkeypatch.setattr(kernels, "has_kernel", lambda *_: True)

    def code(x, w):
        with tf.device("/GPU:0"):
            return tf.nn.conv2d(x, w, 1, "SAME")

    x, w, _ = values(*OPERANDS)
    fused = tfo.function(code, remap=ALLOWED)
    fused.get_concrete_function(x, w)
    assert reasons(fused) == {"winograd_conv2d": "Winograd's algorithm is for the CPU"}


def test_batch_norm_in_training_computes_its_own_moments():
    x, w, b = values(OPERANDS[0], (3, 3, 32, 32), (32,))

    def code(x, w, b):
        z = tf.nn.conv2d(x, w, 1, "SAME")
        return tf.nn.relu(tf.compat.v1.nn.fused_batch_norm(z, b, b)[0])

    joined, apart = tfo.function(code), tfo.function(code, remap=ALLOWED)
    assert_close("y", apart(x, w, b), joined(x, w, b), "float32", units=16 * WINOGRAD_FACTOR)
    assert rule_counts(joined) == {"batch_norm_relu": 1, "conv2d_moments": 1}
    assert rule_counts(apart) == {"batch_norm_relu": 1, "winograd_conv2d": 1}
    assert reasons(apart) == {
        "conv2d_moments": "the moments of Winograd's algorithm would take a pass of their own"
    }


def test_accelerated_model_is_close():
    layer = keras.layers
    model = keras.Sequential(
        [
            keras.Input((32, 32, 16)),
            layer.Conv2D(32, 3, padding="same", activation="relu"),
            layer.Conv2D(32, 3, padding="same", use_bias=False),
            layer.GlobalAveragePooling2D(),
        ]
    )
    (images,) = values((8, 32, 32, 16))
    expected = model.predict(images, verbose=0)
    tfo.accelerate(model, remap=ALLOWED)
    found = model.predict(images, verbose=0)
    assert_close("prediction", found, expected, "float32", units=16 * WINOGRAD_FACTOR)
    (report,) = model.predict_step.remap_reports
    assert report.counts() == {"conv2d_bias_relu": 1, "winograd_conv2d": 1}


def test_layer_allows_it():
    (images,) = values((4, 24, 24, 32))
    layer = tfo.layers.FusedConv2D(32, 3, padding="same", activation="relu", winograd=True)
    model = keras.Sequential([keras.Input((24, 24, 32)), layer])
    assert layer.get_config()["winograd"] is True
    assert tfo.layers.FusedConv2D.from_config(layer.get_config()).winograd
    assert "winograd" not in tfo.layers.FusedConv2D(4, 3).get_config()
    traced = tf.function(model)
    found = traced(images)
    assert convolutions(traced.get_concrete_function(images)) == [
        ("TfFusedOps>Conv2DBiasAct", True)
    ]
    stock = tfo.layers.revert(model)
    assert type(stock.layers[-1]) is keras.layers.Conv2D
    assert_close("y", found, stock(images), "float32", units=16 * WINOGRAD_FACTOR)


def test_convert_allows_it(tmp_path):
    (x,) = values(OPERANDS[0])
    module = tf.Module()
    module.filters = tf.Variable(values(OPERANDS[1])[0])
    module.serve = tf.function(
        lambda x: tf.nn.conv2d(x, module.filters, 1, "SAME"),
        input_signature=[tf.TensorSpec(x.shape)],
    )
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable")]
    tf.saved_model.save(module, paths[0])
    main(["convert", *paths[:2], "--winograd"])
    main(["convert", *paths[1:], "--portable"])
    expected = module.serve(x)
    for path in paths[1:]:
        loaded = tf.saved_model.load(path).signatures["serving_default"]
        (found,) = loaded(x).values()
        assert_close("y", found, expected, "float32", units=16 * WINOGRAD_FACTOR)
        assert convolutions(loaded) == [("TfFusedOps>Conv2DBiasAct", True)] * (path == paths[1])


def test_training_follows_the_same_curve():
    images, _ = values((32, 24, 24, 16), (1,))
    labels = tf.argmax(tf.reduce_mean(images, [1, 2])[:, :4], axis=1)
    layer = keras.layers

    def train(accelerated):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [
                keras.Input((24, 24, 16)),
                layer.Conv2D(32, 3, padding="same", activation="relu"),
                layer.Conv2D(32, 3, padding="same", activation="relu"),
                layer.GlobalAveragePooling2D(),
                layer.Dense(4),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        if accelerated:
            tfo.accelerate(model, remap=ALLOWED)
        history = model.fit(images, labels, batch_size=16, epochs=4, shuffle=False, verbose=0)
        return model, history.history["loss"]

    (model, found), (_, expected) = train(True), train(False)
    report = model.train_step.remap_reports[-1]
    assert report.counts() == {
        **{"conv2d_bias_relu": 2, "matmul_bias": 1},
        **{"sparse_cross_entropy": 1, "adam": 6},
    }
    assert all(fusion.gradients for fusion in report.fused if fusion.rule != "adam")
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
