"""Grouped convolutions: by hand, and as Keras calls them by functions that XLA compiles."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tolerances
from remapping import assert_same, check, gradient_count, reasons, rule_counts, values

import tf_fused_ops as tfo
from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions, kernels, remap

Conv2D = keras.layers.Conv2D
SHAPE = (8, 9, 8)
CALLS = ("StatefulPartitionedCall", "PartitionedCall")
STOCK = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


def model_of(build, shape=SHAPE):
    """Returns a Keras model with parameters and statistics that are all different."""
    inputs = keras.Input(shape)
    model = keras.Model(inputs, build(inputs))
    rng = np.random.default_rng(1)
    model.set_weights([rng.uniform(0.2, 1, w.shape) for w in model.get_weights()])
    return model


def found(graph, op_types):
    """Returns the names of the ops of some types in a graph."""
    return [op.name for op in graph.get_operations() if op.type in op_types]


def train_step(model):
    def step(x, scale):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
            loss = tf.reduce_sum(tf.cast(y, scale.dtype) * scale)
        return y, tape.gradient(loss, [x, *model.trainable_variables])

    return step


def compare(model, rules, gradients, shape=SHAPE, unknown_batch=True, dtype="float32", units=64):
    """Runs a train step stock and fused; asserts equal results, these fusions, and that nothing of
    a convolution is left to XLA or stock."""
    (x,) = values((2, *shape))
    (scale,) = values(model(x).shape, seed=1)
    batch = None if unknown_batch else 2
    signature = [tf.TensorSpec([batch, *t.shape[1:]]) for t in (x, scale)]
    weights = model.get_weights()
    expected = tf.function(train_step(model), input_signature=signature)(x, scale)
    model.set_weights(weights)
    fused = function(train_step(model), input_signature=signature)
    results = fused(x, scale)
    told = "\n".join(map(str, fused.remap_reports))
    assert rule_counts(fused) == rules, told
    assert gradient_count(fused) == gradients, told
    graph = fused.get_concrete_function().graph
    assert found(graph, (*CALLS, *STOCK)) == [], told
    flat = zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True)
    for i, (a, b) in enumerate(flat):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        tolerances.assert_close(f"output {i}", a, b, dtype, units)
    return fused


LAYERS = {
    "bare": (lambda x: Conv2D(12, 3, groups=4, use_bias=False)(x), "grouped_conv2d"),
    "bias": (lambda x: Conv2D(12, 3, groups=4)(x), "conv2d_bias"),
    "depthwise": (lambda x: Conv2D(8, 7, groups=8, padding="same")(x), "conv2d_bias"),
    "multiplied": (lambda x: Conv2D(16, 3, groups=8)(x), "conv2d_bias"),
    "relu": (lambda x: Conv2D(8, 3, groups=2, activation="relu")(x), "conv2d_bias_relu"),
    "silu": (lambda x: Conv2D(8, 3, groups=2, activation="silu")(x), "conv2d_bias_silu"),
    "strides": (
        lambda x: Conv2D(8, 3, strides=2, groups=2, padding="same", activation="relu")(x),
        "conv2d_bias_relu",
    ),
    "no_bias_relu": (
        lambda x: Conv2D(8, 3, groups=2, use_bias=False, activation="relu")(x),
        "conv2d_relu",
    ),
    "channels_first": (
        lambda x: Conv2D(12, 3, groups=4, use_bias=False, data_format="channels_first")(x),
        "grouped_conv2d",
    ),
    "residual": (
        lambda x: keras.layers.ReLU()(Conv2D(8, 3, groups=2, padding="same")(x) + x),
        "conv2d_bias_add_relu",
    ),
}


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, unknown_batch):
    build, rule = LAYERS[name]
    compare(model_of(build), {rule: 1}, 1, unknown_batch=unknown_batch)


def test_conv1d():
    def build(x):
        return keras.layers.Conv1D(8, 3, groups=2, padding="same", activation="relu")(x)

    compare(model_of(build, (9, 8)), {"conv1d_bias_relu": 1}, 1, (9, 8))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    def build(x):
        return Conv2D(8, 3, groups=2, activation="relu", dtype=policy)(x)

    dtype = policy.removeprefix("mixed_")
    compare(model_of(build), {"conv2d_bias_relu": 1}, 1, dtype=dtype, units=4)


def test_batch_norm():
    """The convolution takes the moments as it does without groups."""

    def build(x):
        x = Conv2D(16, 3, groups=4, use_bias=False)(x)
        return keras.layers.ReLU()(keras.layers.BatchNormalization()(x))

    rules = {"grouped_conv2d": 1, "moments_batch_norm_relu": 1, "conv2d_moments": 1}
    compare(model_of(build), rules, 2, units=256)


def test_same_layer_twice():
    layer = Conv2D(8, 3, groups=2, padding="same", activation="relu")
    compare(model_of(lambda x: layer(layer(x))), {"conv2d_bias_relu": 2}, 2, units=256)


def test_frozen_kernel():
    def build(x):
        return Conv2D(8, 3, groups=2, trainable=False)(x)

    fused = compare(model_of(build), {"conv2d_bias": 1}, 1)
    (gradient,) = found(fused.get_concrete_function().graph, ["TfFusedOps>Conv2DBiasActGrad"])
    op = fused.get_concrete_function().graph.get_operation_by_name(gradient)
    assert op.get_attr("input_gradient")
    assert not op.get_attr("filters_gradient")


def test_first_layer():
    """Nobody asks for the gradient of the image."""
    model = model_of(lambda x: Conv2D(8, 3, groups=2, use_bias=False)(x))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    (x,) = values((2, *SHAPE))
    fused = function(step)
    assert_same(fused(x), tf.function(step)(x))
    assert rule_counts(fused) == {"grouped_conv2d": 1}
    assert found(fused.get_concrete_function(x).graph, (*CALLS, *STOCK)) == []


def convnext_block(x):
    y = Conv2D(8, 7, padding="same", groups=8)(x)
    y = keras.layers.LayerNormalization(epsilon=1e-6)(y)
    y = keras.layers.Dense(32, activation="gelu")(y)
    return keras.layers.Dense(8)(y) + x


def regnet_block(x):
    def normalized(x, activation=True):
        x = keras.layers.BatchNormalization()(x)
        return keras.layers.ReLU()(x) if activation else x

    y = normalized(Conv2D(16, 1, use_bias=False)(x))
    y = normalized(Conv2D(16, 3, strides=2, padding="same", groups=4, use_bias=False)(y))
    y = normalized(Conv2D(16, 1, use_bias=False)(y), activation=False)
    shortcut = normalized(Conv2D(16, 1, strides=2, use_bias=False)(x), activation=False)
    return keras.layers.ReLU()(y + shortcut)


def test_convnext_block():
    rules = {"conv2d_bias": 1, "layer_norm": 1, "dense_bias_gelu_erf": 1, "dense_bias_add": 1}
    compare(model_of(convnext_block), rules, 4, unknown_batch=False, units=256)


def test_regnet_block():
    model = model_of(regnet_block)
    (x,) = values((2, *SHAPE))
    (scale,) = values(model(x).shape, seed=1)
    weights = model.get_weights()
    expected = tf.function(train_step(model))(x, scale)
    model.set_weights(weights)
    fused = function(train_step(model))
    assert_same(fused(x, scale), expected, units=1024)
    counts = rule_counts(fused)
    assert counts["grouped_conv2d"] == 1
    assert counts["conv2d_moments"] == 4
    assert found(fused.get_concrete_function(x, scale).graph, CALLS) == []


@pytest.mark.parametrize("name", LAYERS)
def test_inference(name):
    build, rule = LAYERS[name]
    model = model_of(build)
    (x,) = values((2, *SHAPE))
    fused = function(model)
    assert_same(fused(x), model(x))
    assert rule_counts(fused) == {rule: 1}
    assert found(fused.get_concrete_function(x).graph, (*CALLS, *STOCK)) == []


@pytest.mark.parametrize("name", LAYERS)
def test_outer_tape(name):
    build, rule = LAYERS[name]
    model = model_of(build)
    (x,) = values((2, *SHAPE))

    def gradients(fn):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(fn(x) ** 2)
        return tape.gradient(loss, [x, *model.trainable_variables])

    fused = function(model)
    assert_same(gradients(fused), gradients(tf.function(model)), units=256)
    assert rule_counts(fused) == {rule: 1}


def test_gradient_of_the_gradient():
    """XLA keeps the second one inside a train step; the results are those of stock."""
    model = model_of(lambda x: Conv2D(8, 3, groups=2)(x))

    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(model(x) ** 3)
            penalty = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(penalty, model.trainable_variables)

    (x,) = values((2, *SHAPE))
    fused = function(step)
    assert_same(fused(x), tf.function(step)(x), units=256)
    assert rule_counts(fused)["conv2d_bias"] == 1


def test_assignment_between_two_calls():
    """The first call reads the kernel that was, the second the one that is."""
    layer = Conv2D(8, 3, groups=2, use_bias=False)
    (x,) = values((2, *SHAPE))
    layer(x)
    before = layer.kernel.numpy()

    def step(x):
        first = layer(x)
        layer.kernel.assign(layer.kernel + 1.0)
        second = layer(x)
        layer.kernel.assign(layer.kernel * 2.0)
        return first, second

    expected = tf.function(step)(x)
    layer.kernel.assign(before)
    fused = function(step)
    assert_same(fused(x), expected)
    assert_same(layer.kernel.value, 2 * (before + 1))
    assert rule_counts(fused) == {"grouped_conv2d": 2}
    assert found(fused.get_concrete_function(x).graph, CALLS) == []


def test_who_waits_for_a_call():
    layer = Conv2D(8, 3, groups=2, use_bias=False)
    (x,) = values((2, *SHAPE))
    layer(x)

    def code(x):
        y = layer(x)
        with tf.control_dependencies([y]):
            return y, tf.identity(x)

    fused = function(code)
    assert_same(fused(x), code(x))
    graph = fused.get_concrete_function(x).graph
    assert found(graph, (*CALLS, *STOCK)) == []
    (read,) = found(graph, ["ReadVariableOp"])
    waiting = [op for op in graph.get_operations() if op.type == "Identity"]
    assert any(read in [other.name for other in op.control_inputs] for op in waiting)


def test_trained_by_fit():
    def trained(wrap):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input(SHAPE),
                Conv2D(8, 3, groups=2, padding="same", activation="relu"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
        wrap(model)
        x, y = values((8, *SHAPE), (8, 3))
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model

    expected = trained(lambda model: model.make_train_function())
    fused = trained(tfo.accelerate)
    assert_same([v.value for v in fused.weights], [v.value for v in expected.weights], units=256)
    assert fused.train_step.remap_reports[-1].counts()["conv2d_bias_relu"] == 1


HAND = [(2, 6, 5, 8), (3, 3, 2, 12), (12,)]


def by_hand(x, w, b):
    with tf.GradientTape() as tape:
        tape.watch([x, w, b])
        y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))
    return y, tape.gradient(y, [x, w, b])


def test_by_hand():
    check(by_hand, values(*HAND), {"conv2d_bias_relu": 1}, 1)


def test_log_says_that_it_is_grouped():
    compiled = check(by_hand, values(*HAND), {"conv2d_bias_relu": 1}, 1)
    (fusion,) = compiled.remap_reports[-1].fused
    assert fusion.messages[0].startswith("Fuse grouped Conv2D with BiasAdd and Relu: ")
    assert fusion.messages[1].startswith("Fuse gradient of grouped Conv2D with BiasAdd and Relu: ")


def test_winograd_is_not_for_groups():
    def code(x, w):
        return tf.nn.conv2d(x, w, 1, "SAME")

    fused = function(code, remap=RemapOptions(winograd=True))
    x, w, _ = values(*HAND)
    assert_same(fused(x, w), code(x, w))
    assert rule_counts(fused) == {"grouped_conv2d": 1}


def test_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "has_kernel", lambda *_: True)

    def code(x, w, b):
        with tf.device("/GPU:0"):
            return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))

    fused = function(code)
    fused.get_concrete_function(*values(*HAND))
    assert rule_counts(fused) == {}
    assert reasons(fused)["conv2d_bias_relu"] == (
        "a grouped convolution, which is fused on the CPU alone: 8 in the input, 2 in the filters"
    )


def test_unknown_channels_are_refused():
    _, w, b = values(*HAND)
    spec = tf.TensorSpec([2, 6, 5, None])
    fused = function(lambda x: tf.nn.relu(tf.nn.bias_add(conv(x, w), b)), input_signature=[spec])
    fused.get_concrete_function()
    assert rule_counts(fused) == {}
    assert reasons(fused)["conv2d_bias_relu"] == (
        "its channels are not known or do not fit: None in the input, 2 in the filters"
    )


def test_calls_on_a_gpu_stay():
    model = model_of(lambda x: Conv2D(8, 3, groups=2)(x))

    def code(x):
        with tf.device("/GPU:0"):
            return model(x)

    (x,) = values((2, *SHAPE))
    graph = function(code).get_concrete_function(x).graph
    assert len(found(graph, CALLS)) == 1


@pytest.mark.parametrize("disabled", ["grouped_conv2d", "grouped_*"])
def test_switched_off(disabled):
    model = model_of(lambda x: Conv2D(8, 3, groups=2)(x))
    (x,) = values((2, *SHAPE))
    (scale,) = values(model(x).shape)
    fused = function(train_step(model), remap=RemapOptions(disable=[disabled]))
    assert_same(fused(x, scale), tf.function(train_step(model))(x, scale))
    assert rule_counts(fused) == {}
    assert len(found(fused.get_concrete_function(x, scale).graph, CALLS)) == 2


def test_gradient_switched_off():
    model = model_of(lambda x: Conv2D(8, 3, groups=2)(x))
    (x,) = values((2, *SHAPE))
    (scale,) = values(model(x).shape)
    fused = function(train_step(model), remap=RemapOptions(disable=["grouped_conv2d_grad"]))
    assert_same(fused(x, scale), tf.function(train_step(model))(x, scale))
    assert len(found(fused.get_concrete_function(x, scale).graph, CALLS)) == 1


def conv(x, w):
    return tf.nn.conv2d(x, w, 1, "SAME")


OTHERS = {
    "more": (lambda x, w: tf.nn.relu(conv(x, w)), HAND[:2]),
    "two_of_which_one_is_not_grouped": (
        lambda x, w: conv(conv(x, w), tf.reshape(tf.transpose(w), [3, 3, 12, 2])),
        HAND[:2],
    ),
    "not_grouped": (conv, [(2, 6, 5, 2), (3, 3, 2, 12)]),
    "sizes_from_elsewhere": (
        lambda y, w: tf.raw_ops.Conv2DBackpropInput(
            input_sizes=[2, 6, 5, 8],
            filter=w,
            out_backprop=y,
            strides=[1, 1, 1, 1],
            padding="SAME",
        ),
        [(2, 6, 5, 12), (3, 3, 2, 12)],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_compiled_functions_stay(name):
    code, shapes = OTHERS[name]
    inner = tf.function(code, jit_compile=True)
    fused = function(lambda x, w: inner(x, w))
    args = values(*shapes)
    assert_same(fused(*args), inner(*args))
    assert rule_counts(fused) == {}
    assert len(found(fused.get_concrete_function(*args).graph, CALLS)) == 1


def test_compiled_gradient_ops_of_their_own():
    """What no rule knows is fused alone, since stock may have no kernel."""
    attrs = {"strides": [1, 1, 1, 1], "padding": "SAME"}

    @tf.function(jit_compile=True)
    def of_input(x, w, dy):
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=tf.shape(x), filter=w, out_backprop=dy, **attrs
        )

    @tf.function(jit_compile=True)
    def of_filters(x, w, dy):
        return tf.raw_ops.Conv2DBackpropFilter(
            input=x, filter_sizes=tf.shape(w), out_backprop=dy, **attrs
        )

    def code(x, w, dy):
        return of_input(x, w, dy), of_filters(x, w, dy)

    args = values(*HAND[:2], (2, 6, 5, 12))
    unknown = [tf.TensorSpec([None] * 3 + [8]), tf.TensorSpec([None, None, 2, 12])]
    unknown.append(tf.TensorSpec([None] * 3 + [12]))
    fused = function(code, input_signature=unknown)
    assert_same(fused(*args), code(*args))
    assert rule_counts(fused) == {"grouped_conv2d_grad": 2}
    assert gradient_count(fused) == 2
    assert found(fused.get_concrete_function().graph, (*CALLS, *STOCK)) == []


def test_volumes_stay():
    shape = (4, 4, 4, 4)
    model = model_of(keras.layers.Conv3D(4, 2, groups=2), shape)
    (x,) = values((2, *shape))
    (scale,) = values(model(x).shape)
    fused = function(train_step(model))
    assert_same(fused(x, scale), tf.function(train_step(model))(x, scale))
    assert rule_counts(fused) == {}


@pytest.mark.parametrize("of", ["inference", "train step"])
def test_remapped_later(of):
    """Functions that were traced without the decorator."""
    model = model_of(lambda x: Conv2D(8, 3, groups=2, activation="relu")(x))
    (x,) = values((2, *SHAPE))
    (scale,) = values(model(x).shape)
    code, args = {
        "inference": (lambda x: model(x), [x]),
        "train step": (train_step(model), [x, scale]),
    }[of]
    concrete = tf.function(code).get_concrete_function(*args)
    result = remap(concrete)
    assert result.report.counts() == {"conv2d_bias_relu": 1}
    assert not {node.op for node in result.graph_def.node} & {*CALLS, *STOCK}


def test_saved_model(tmp_path):
    model = model_of(lambda x: Conv2D(8, 3, groups=2, activation="relu")(x))
    stock, fused = str(tmp_path / "stock"), str(tmp_path / "fused")
    model.export(stock, verbose=False)
    reports = tfo.remapper.convert(stock, fused)
    assert sum(report.counts().get("conv2d_bias_relu", 0) for report in reports) == 1
    (x,) = values((2, *SHAPE))
    loaded = tf.saved_model.load(fused)
    assert_same(loaded.serve(x), model(x))
