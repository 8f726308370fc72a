"""Transposed convolutions in Keras models, in SavedModels and in graphs that are rewritten."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check_portable,
    check_training,
    fused_ops,
    rule_counts,
    step_of,
    taped,
    values,
)
from test_remapper_graph_def import counts, run
from test_remapper_saved_model import LOAD_WITHOUT_US
from transposing import (
    IMAGE,
    LINE,
    OP,
    B,
    W,
    X,
    batched,
    biased,
    compare,
    line,
    transposed,
)

import tf_fused_ops as tfo
from tf_fused_ops.remapper import RemapOptions, Report, convert, remap


def upscale(filters, kernel=4, **options):
    options = {"strides": 2, "padding": "same", **options}
    return keras.layers.Conv2DTranspose(filters, kernel, **options)


def u_net(*sizes):
    """With skips joined and added."""
    inputs = keras.Input((*(sizes or (8, 12)), 2))
    high = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    low = keras.layers.Conv2D(6, 3, 2, padding="same", activation="relu")(high)
    lowest = keras.layers.Conv2D(8, 3, 2, padding="same", activation="relu")(low)
    up = upscale(6, activation="relu")(lowest)
    up = upscale(4, 3)(keras.layers.Concatenate()([up, low]))
    up = keras.layers.ReLU()(keras.layers.Add()([up, high]))
    return keras.Model(inputs, keras.layers.Conv2D(2, 1, activation="sigmoid")(up))


def dcgan():
    inputs = keras.Input((6,))
    y = keras.layers.Reshape((4, 4, 8))(keras.layers.Dense(128, use_bias=False)(inputs))
    for filters in (8, 4):
        y = upscale(filters, use_bias=False)(y)
        y = keras.layers.LeakyReLU(0.2)(keras.layers.BatchNormalization()(y))
    return keras.Model(inputs, upscale(3, activation="tanh")(y))


def wave_u_net():
    inputs = keras.Input((16, 2))
    high = keras.layers.Conv1D(4, 5, padding="same", activation="relu")(inputs)
    low = keras.layers.Conv1D(6, 5, 2, padding="same", activation="relu")(high)
    up = keras.layers.Conv1DTranspose(4, 4, 2, padding="same", activation="relu")(low)
    up = keras.layers.Concatenate()([up, high])
    up = keras.layers.Conv1DTranspose(3, 3, padding="valid", activation="tanh")(up)
    return keras.Model(inputs, keras.layers.Conv1D(2, 3, activation="sigmoid")(up))


# The shape of the output, and what fuses in training.
MODELS = {
    u_net: (
        (8, 12, 2),
        {"conv2d_transpose_bias_relu": 1, "conv2d_transpose_bias_add_relu": 1},
    ),
    dcgan: ((32, 32, 3), {"conv2d_transpose_bias_tanh": 1, "trained_conv2d_transpose": 2}),
    wave_u_net: (
        (16, 2),
        {"conv1d_transpose_bias_relu": 1, "conv1d_transpose_bias_tanh": 1},
    ),
}


@pytest.mark.parametrize("make", MODELS)
def test_training(make):
    target, rules = MODELS[make]
    compiled = check_training(make, (4, *target))
    found = {rule: n for rule, n in rule_counts(compiled).items() if "transpose" in rule}
    assert found == rules, compiled.remap_reports
    fused = [f for r in compiled.remap_reports for f in r.fused if f.rule in rules]
    assert all(f.gradients == 1 for f in fused)


@pytest.mark.parametrize("make", [u_net, wave_u_net])
def test_accelerated_fit(make):
    """The layers are converted, or their chains are found; the last batch is a smaller one."""
    losses, outputs = [], []
    for accelerate in (False, True):
        keras.utils.set_random_seed(0)
        model = make()
        x, y = (v.numpy() for v in values((3, *model.input_shape[1:]), (3, *MODELS[make][0])))
        if accelerate:
            model = tfo.accelerate(model) or model
        model.compile(keras.optimizers.SGD(0.01), "mse")
        history = model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
        outputs.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-3, atol=1e-4)
    assert losses[0][-1] < losses[0][0]


def upscale_line(kernel, strides, **options):
    return keras.layers.Conv1DTranspose(4, kernel, strides, **options)


LAYERS = {
    "conv2d_transpose_bias_relu": upscale(4, activation="relu"),
    "conv2d_transpose_bias_gelu_erf": upscale(4, 3, padding="valid", activation="gelu"),
    "conv2d_transpose_bias_silu": upscale(4, 3, output_padding=1, activation="silu"),
    "conv2d_transpose_elu": upscale(4, use_bias=False, activation="elu"),
    "conv2d_transpose_bias_relu6": upscale(4, 3, strides=1, dilation_rate=2, activation="relu6"),
    "conv2d_transpose_bias_sigmoid": upscale(4, dtype="mixed_bfloat16", activation="sigmoid"),
    "conv1d_transpose_bias_tanh": upscale_line(4, 2, padding="same", activation="tanh"),
    "conv1d_transpose_bias_relu6": upscale_line(4, 3, output_padding=2, activation="relu6"),
    "conv1d_transpose_bias_elu": upscale_line(4, 2, dtype="mixed_bfloat16", activation="elu"),
}


@pytest.mark.parametrize("rule", LAYERS)
def test_layers(rule):
    """Of sizes that are not known."""
    layer = LAYERS[rule]
    shape = (2, 5, 6, 2) if rule.startswith("conv2d") else (2, 5, 2)
    layer.build(shape)
    layer.set_weights([v.numpy() for v in values(*(w.shape for w in layer.weights))])

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y**2)
        gradients = tape.gradient(loss, [x, *layer.trainable_variables])
        return y, [tf.cast(gradient, y.dtype) for gradient in gradients]

    known = (*[None] * (len(shape) - 1), shape[-1])
    units = 1024 if layer.compute_dtype == "float32" else 8
    compiled = compare(step, values(shape), [known], {rule: 1}, 1, units)
    graph = compiled.get_concrete_function().graph
    types = [op.get_attr("T").name for op in graph.get_operations() if op.type == OP]
    assert types == [layer.compute_dtype]


PORTABLE = {
    "image": lambda x, w, b: tf.nn.relu(biased(x, w, b)),
    "pre-activation is kept": lambda x, w, b: tf.nn.silu(biased(x, w, b)),
    "sizes": lambda x, w, b: tf.nn.elu(biased(x, w, b, batched(x))),
    "no bias": lambda x, w, b: tf.nn.sigmoid(transposed(x, w)) * b,
    "side": lambda x, w, b: tf.tanh(biased(x, w, b) + tf.sin(biased(x, 2.0 * w, b))),
    "padded": lambda x, w, b: tf.nn.relu6(
        biased(x, w, b, (2, 5, 6, 5), 2, [[0, 0], [1, 1], [2, 1], [0, 0]])
    ),
    "leaky": lambda x, w, b: tf.nn.leaky_relu(biased(x, w, b), -0.3),
}


@pytest.mark.parametrize("gradients", [False, True])
def test_portable(gradients, tmp_path):
    """All in one model."""

    def code(x, w, b, line_x, line_w):
        chains = [(chain, (x + i, w, b)) for i, chain in enumerate(PORTABLE.values())]
        chains.append((lambda x, w, b: tf.nn.silu(line(x, w) + b), (line_x, line_w, b)))
        return [(step_of(chain) if gradients else chain)(*args) for chain, args in chains]

    check_portable(code, [X, W, B, *values(*LINE[:2])], tmp_path)
    kind, fusions = OP.removeprefix("TfFusedOps>"), len(PORTABLE) + 2
    found = fused_ops(tmp_path / "fused")
    assert found[kind] == fused_ops(tmp_path / "again")[kind] == fusions
    assert (found.get(f"{kind}Grad", 0) >= fusions) == gradients
    assert fused_ops(tmp_path / "portable") == {}


def test_keras_export(tmp_path, run_python):
    """Rewritten, made portable and read without this package, and rewritten again."""
    keras.utils.set_random_seed(0)
    model = u_net(None, None)
    (x,) = values((2, 8, 12, 2))
    expected = model(x)
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable", "again")]
    model.export(paths[0], verbose=False)
    # Sizes that are not known: those of what is added may be others.
    rules = {
        "conv2d_bias_relu": 3,
        "conv2d_transpose_bias_relu": 1,
        "conv2d_transpose_bias": 1,
        "conv2d_bias_sigmoid": 1,
    }
    assert Report.of_all(convert(*paths[:2])).counts() == rules
    convert(*paths[1:3], to_stock=True)
    assert Report.of_all(convert(*paths[2:])).counts() == rules
    transposes = [fused_ops(path).get("Conv2DTransposeBiasAct", 0) for path in paths]
    assert transposes == [0, 2, 0, 2]
    for path in paths:
        loaded = tf.saved_model.load(path)
        assert_same(loaded.serve(x), expected, units=256)
    ((name,),) = (s.structured_input_signature[1] for s in [loaded.signatures["serve"]])
    np.savez(tmp_path / "given.npz", **{name: x})
    run_python(LOAD_WITHOUT_US, paths[2], tmp_path / "given.npz", tmp_path, PYTHONPATH="")
    (y,) = np.load(tmp_path / "serve.npz").values()
    assert_same(tf.constant(y), expected, units=256)


def test_outer_tape_after_loading(tmp_path):
    """Of the stock, the fused and the portable one."""
    module = tf.Module()
    signature = [tf.TensorSpec([None, *IMAGE[0][1:]]), *map(tf.TensorSpec, IMAGE[1:3])]
    module.fn = tf.function(
        lambda x, w, b: tf.nn.silu(biased(x, w, b, batched(x))), input_signature=signature
    )
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable")]
    tf.saved_model.save(module, paths[0])
    convert(*paths[:2])
    convert(*paths[1:], to_stock=True)
    results = [taped(tf.saved_model.load(path).fn, [X, W, B]) for path in paths]
    assert_same(results[1:], [results[0]] * 2, units=512)
    assert fused_ops(paths[1]) == {"Conv2DTransposeBiasAct": 1}


def test_graph_def():
    """Rewritten offline, and twice; the outputs keep their names."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, *IMAGE[0][1:]], name="x")
        w, b = W.numpy(), B.numpy()
        y = tf.nn.relu(biased(x, w, b, batched(x)))
        tf.nn.tanh(transposed(y, w.transpose(0, 1, 3, 2), [2, 12, 16, 3]), name="end")
    source = graph.as_graph_def()
    untouched = source.SerializeToString()
    result = remap(source)
    assert source.SerializeToString() == untouched
    rules = {"conv2d_transpose_bias_relu": 1, "conv2d_transpose_tanh": 1}
    assert result.report.counts() == rules
    assert counts(result.graph_def)[OP] == 2
    assert not counts(result.graph_def).keys() & {"Conv2DBackpropInput", "BiasAdd", "Tanh"}
    assert result.outputs == ("end:0",)
    given = {"x:0": X.numpy()}
    assert_same(run(result.graph_def, given, ["end:0"]), run(source, given, ["end:0"]), units=512)
    twice = remap(result.graph_def)
    assert twice.report.fused == []
    assert counts(twice.graph_def) == counts(result.graph_def)
    assert remap(source, options=RemapOptions(disable=["*transpose*"])).report.fused == []
