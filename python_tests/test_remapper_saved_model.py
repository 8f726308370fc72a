"""SavedModels: converted to fused ops and back, with all that belongs to them."""

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf
from remapping import assert_same, fused_ops, plain, saved_op_counts, values
from tensorflow.python.saved_model import loader_impl

import tf_fused_ops as tfo
from tf_fused_ops.cli import main
from tf_fused_ops.remapper import RemapOptions, Report, convert

X, W, B, SCALE, OFFSET = values((4, 6, 6, 4), (3, 3, 4, 4), (4,), (4,), (4,))
W *= 0.3


LOAD_WITHOUT_US = """
import sys
import numpy as np, tensorflow as tf
path, inputs, outputs = sys.argv[1:]
model, given = tf.saved_model.load(path), np.load(inputs)
for name, signature in model.signatures.items():
    wanted = signature.structured_input_signature[1]
    found = signature(**{key: tf.constant(given[key]) for key in wanted})
    np.savez(f"{outputs}/{name}.npz", **{key: value.numpy() for key, value in found.items()})
assert not any(name.startswith("tf_fused_ops") for name in sys.modules)
"""


class Network(tf.Module):
    """Two signatures, a variable that is updated, an asset, a table, a step with gradients."""

    def __init__(self, vocabulary):
        super().__init__()
        self.w, self.b = tf.Variable(W), tf.Variable(B)
        self.scale, self.offset = tf.Variable(SCALE), tf.Variable(OFFSET)
        self.calls = tf.Variable(0)
        self.vocabulary = tf.saved_model.Asset(vocabulary)
        line, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
        initializer = tf.lookup.TextFileInitializer(
            self.vocabulary, tf.string, line, tf.int64, number
        )
        self.table = tf.lookup.StaticHashTable(initializer, -1)

    def features(self, x):
        y = tf.nn.silu(tf.nn.bias_add(tf.nn.conv2d(x, self.w, 1, "SAME"), self.b))
        mean, variance = tf.nn.moments(y, [0, 1, 2])
        norm = tf.nn.batch_normalization(y, mean, variance, self.offset, self.scale, 1e-3)
        y = tf.nn.relu(norm + x)
        rows = tf.reshape(y, [-1, 4])
        return tf.nn.gelu(tf.nn.bias_add(tf.matmul(rows, self.w[0, 0]), self.b))

    @tf.function(input_signature=[tf.TensorSpec([None, 6, 6, 4]), tf.TensorSpec([], tf.string)])
    def infer(self, x, word):
        self.calls.assign_add(1)
        _, y = tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, tf.nn.tanh(y @ self.w[0, 0] + self.b)),
            [0, self.features(x)],
        )  # fmt: skip
        return {"y": y, "index": tf.cast(self.table.lookup(word), tf.float32)}

    @tf.function(input_signature=[tf.TensorSpec([4, 6, 6, 4])])
    def gradients(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(self.features(x)))
        sources = {"w": self.w, "b": self.b, "scale": self.scale, "offset": self.offset}
        return tape.gradient(loss, sources)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def network(folder):
    """The folder of a saved Network, of the fused one, and of the fused one made portable."""
    vocabulary = folder / "words.txt"
    vocabulary.write_text("one\ntwo\nthree\n")
    model = Network(str(vocabulary))
    signatures = {"serving_default": model.infer, "gradients": model.gradients}
    names = [str(folder / name) for name in ("stock", "fused", "portable")]
    tf.saved_model.save(model, names[0], signatures)
    convert(names[0], names[1])
    convert(names[1], names[2], to_stock=True)
    return names


def test_everything_is_fused(network):
    stock, fused, portable = network
    assert fused_ops(stock) == fused_ops(portable) == {}
    # `infer` and `gradients` have the features each, and infer's loop has one product.
    assert fused_ops(fused) == {
        "Conv2DBiasAct": 2,
        "Conv2DBiasActGrad": 1,
        "BatchNormAct": 2,
        "BatchNormActGrad": 1,
        "MatMulBiasAct": 3,
        "MatMulBiasActGrad": 2,
    }
    assert not saved_op_counts(fused).keys() & {"Conv2D", "BiasAdd", "MatMul", "Relu", "IdentityN"}


def test_signatures_variables_and_assets_stay(network):
    models = [tf.saved_model.load(path) for path in network]
    word = tf.constant("two")
    with plain():
        found = [m.signatures["serving_default"](x=X, word=word) for m in models]
        gradients = [m.signatures["gradients"](x=X) for m in models]
    assert found[0]["index"] == 1
    for model, outputs, slopes in zip(models, found, gradients, strict=True):
        assert_same(outputs, found[0], units=512)
        assert_same(slopes, gradients[0], units=2048)
        assert model.calls == 1
        assert_same(model.infer(X, word), found[0], units=512)
        assert set(model.signatures) == {"serving_default", "gradients"}
        assert_same([model.w, model.b], [W, B])
    tags = [
        list(loader_impl.parse_saved_model(path).meta_graphs[0].meta_info_def.tags)
        for path in network
    ]
    assert tags == [["serve"]] * 3


def test_outer_tape_after_loading(network):
    """Gradients are taken through loaded functions, the saved custom gradient of silu included."""
    slopes = []
    for path in network:
        model = tf.saved_model.load(path)
        with tf.GradientTape() as tape:
            y = model.infer(X, "one")["y"]
        slopes.append(tape.gradient(y, [model.w, model.b, model.scale, model.offset]))
    assert_same(slopes[1], slopes[0], units=2048)
    assert_same(slopes[2], slopes[0], units=2048)


def test_portable_runs_without_us(network, run_python, tmp_path):
    """In a process that does not know this package."""
    inputs = {"x": X.numpy(), "word": np.asarray("three")}
    np.savez(tmp_path / "inputs.npz", **inputs)
    given = str(tmp_path / "inputs.npz")
    run_python(LOAD_WITHOUT_US, network[2], given, str(tmp_path), PYTHONPATH="")
    stock = tf.saved_model.load(network[0])
    for name, signature in stock.signatures.items():
        wanted = signature.structured_input_signature[1]
        expected = signature(**{key: tf.constant(inputs[key]) for key in wanted})
        found = np.load(tmp_path / f"{name}.npz")
        assert found.files and set(found.files) == set(expected)
        assert_same({key: tf.constant(found[key]) for key in expected}, expected, units=2048)


def test_converting_twice_changes_nothing(network, folder):
    twice = str(folder / "twice")
    assert Report.of_all(convert(network[1], twice)).fused == []
    assert saved_op_counts(twice) == saved_op_counts(network[1])


def test_remap_of_a_folder(network):
    result = tfo.remap(network[0])
    assert result.report.counts()["conv2d_bias_silu"] == 2
    assert len(result.outputs) == 6
    names = {node.name for node in result.graph_def.node}
    assert {name.partition(":")[0] for name in result.outputs} <= names
    assert tfo.remap(network[0], options=RemapOptions(disable=["*"])).report.fused == []


def keras_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3), name="image"),
            keras.layers.Conv2D(4, 3, activation="silu"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(5, activation="gelu"),
        ]
    )


RULES = {"conv2d_bias_silu": 1, "given_batch_norm_relu": 1, "matmul_bias_gelu_erf": 1}


def test_keras_model_is_remapped():
    model = keras_model()
    result = tfo.remap(model)
    assert result.report.counts() == RULES
    subclassed = type("Subclassed", (keras.Model,), {})(name="unbuilt")
    with pytest.raises(ValueError, match="Keras model unbuilt does not know its inputs"):
        tfo.remap(subclassed)


def test_keras_export(tmp_path):
    model = keras_model()
    (x,) = values((2, 8, 8, 3))
    expected = {"output_0": model(x)}
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable")]
    model.export(paths[0], verbose=False)
    report = Report.of_all(convert(*paths[:2]))
    assert report.counts() == RULES
    convert(*paths[1:], to_stock=True)
    again = convert(paths[2], tmp_path / "again")
    assert Report.of_all(again).counts() == RULES
    for path in paths:
        assert_same(tf.saved_model.load(path).signatures["serving_default"](x), expected)


@tf.custom_gradient
def straight_silu(x):
    return x * tf.sigmoid(x), lambda dy: dy * tf.cast(x > 0, tf.float32)


def save(path, fn, *shapes):
    """Saves a function of tensors with one signature."""
    module = tf.Module()
    module.fn = tf.function(fn, input_signature=[tf.TensorSpec(shape) for shape in shapes])
    tf.saved_model.save(module, str(path), module.fn)
    return str(path)


@pytest.mark.parametrize("captured", ["result", "interior"])
def test_custom_gradients_survive(captured, tmp_path):
    """What a saved custom gradient reads is still there; its op keeps its own gradient."""

    def fn(x, w, b):
        z = tf.nn.bias_add(tf.matmul(x, w), b)
        if captured == "result":
            return straight_silu(tf.nn.relu(z))
        return straight_silu(z)

    args = values((6, 7), (7, 5), (5,))
    source = save(tmp_path / "stock", fn, *[a.shape for a in args])
    report = Report.of_all(convert(source, tmp_path / "fused"))
    product = "matmul_bias_relu" if captured == "result" else "matmul_bias"
    assert report.counts() == {product: 1, "act_silu": 1}
    convert(tmp_path / "fused", tmp_path / "portable", to_stock=True)
    slopes = []
    for name in ("stock", "fused", "portable"):
        model = tf.saved_model.load(str(tmp_path / name))
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = model.fn(*args)
        slopes.append([y, *tape.gradient(y, args)])
    assert_same(slopes[1:], [slopes[0], slopes[0]])


def test_graph_of_tensorflow_1(tmp_path):
    """Signatures on the main graph, collections and control flow of TensorFlow 1."""
    path, args = str(tmp_path / "stock"), values((6, 7), (7, 7), (7,))
    graph = tf.Graph()
    with graph.as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.disable_control_flow_v2()
        x = tf.compat.v1.placeholder(tf.float32, [None, 7], name="x")
        w = tf.compat.v1.get_variable("w", initializer=args[1].numpy())
        z = tf.nn.bias_add(tf.matmul(x, w), args[2].numpy())
        inside = tf.compat.v1.cond(
            tf.reduce_sum(x) > 0,
            lambda: tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), args[2].numpy())),
            lambda: x,
        )
        kept = tf.nn.relu(tf.nn.bias_add(tf.matmul(z, w), args[2].numpy()))
        tf.compat.v1.add_to_collection("kept", kept)
        y = tf.nn.tanh(tf.nn.bias_add(tf.matmul(kept + inside, w), args[2].numpy()), name="y")
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.saved_model.simple_save(session, path, {"x": x}, {"y": y})
    tf.compat.v1.enable_control_flow_v2()
    report = Report.of_all(convert(path, tmp_path / "fused"))
    # Not what is inside the cond.
    assert report.counts() == {"matmul_bias": 1, "matmul_bias_relu": 1, "matmul_bias_tanh": 1}
    convert(tmp_path / "fused", tmp_path / "portable", to_stock=True)
    found = []
    for name in ("stock", "fused", "portable"):
        model = tf.saved_model.load(str(tmp_path / name))
        found.append(model.signatures["serving_default"](args[0]))
        with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
            tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / name))
            assert [t.name for t in graph.get_collection("kept")] == ["Relu:0"]
            y = session.run("y:0", {"x:0": args[0].numpy()})
        found.append({"y": tf.constant(y)})
    assert_same(found, [found[0]] * 6)


@pytest.mark.parametrize("activation", [tf.nn.silu, tf.nn.gelu])
def test_activation_alone(activation, tmp_path):
    """SiLU has a custom gradient, which is saved as a function."""
    (x,) = values((6, 7))
    source = save(tmp_path / "stock", lambda x: activation(tf.sin(x)), x.shape)
    convert(source, tmp_path / "fused")
    convert(tmp_path / "fused", tmp_path / "portable", to_stock=True)
    assert fused_ops(tmp_path / "fused") == {"Act": 1}
    assert fused_ops(tmp_path / "portable") == {}
    found = []
    for name in ("stock", "fused", "portable"):
        model = tf.saved_model.load(str(tmp_path / name))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model.fn(x)
        found.append([y, tape.gradient(y, x)])
    assert_same(found[1:], [found[0]] * 2)


FORWARD_OPS = {
    "act": lambda x, w, b, side: tfo.act(x, approximate=True),
    "act_slope_from_value": lambda x, w, b, side: tfo.act(x, "leaky_relu", alpha=0.3),
    "conv": lambda x, w, b, side: tfo.conv2d_bias_act(
        x, w, b, padding=[[0, 0], [1, 2], [0, 3], [0, 0]], dilations=2, activation="mish"
    ),
    "conv_nchw": lambda x, w, b, side: tfo.conv2d_bias_act(
        tf.transpose(x, [0, 3, 1, 2]), w, b, strides=2, data_format="NCHW", activation="elu"
    ),
    "conv_without_bias": lambda x, w, b, side: tfo.conv2d_bias_act(
        x, w, side_input=side, activation="leaky_relu", alpha=0.3
    ),
    "conv_scale": lambda x, w, b, side: tfo.conv2d_bias_act(
        x, w, b, activation="silu", side_input=side, scale=tf.sin(b)
    ),
    "conv_scale_nchw": lambda x, w, b, side: tfo.conv2d_bias_act(
        tf.transpose(x, [0, 3, 1, 2]), w, data_format="NCHW", scale=b
    ),
    "matmul": lambda x, w, b, side: tfo.matmul_bias_act(
        x, w[0, 0], b, transpose_b=True, side_input=side, approximate=True
    ),
    "norm": lambda x, w, b, side: tfo.batch_norm_act(x, b, b, b, b * b, side, momentum=0.7)[:3],
    "norm_sync": lambda x, w, b, side: tfo.sync_batch_norm_act(
        x, b, b, b, b * b, side, momentum=0.7, communicator=replicas.Alone()
    )[:3],
    "norm_sync_nchw": lambda x, w, b, side: tfo.sync_batch_norm_act(
        tf.transpose(x, [0, 3, 1, 2]), b, b, b, b * b, tf.transpose(side, [0, 3, 1, 2]), "silu",
        data_format="NCHW", communicator=replicas.Alone(),
    ),
    "norm_inference": lambda x, w, b, side: tfo.batch_norm_act(
        tf.transpose(x, [0, 3, 1, 2]), b, b, b, b * b, None, "silu", training=False,
        data_format="NCHW",
    ),
}  # fmt: skip


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", FORWARD_OPS)
def test_every_op_has_a_stock_form(name, gradient, tmp_path):
    def fn(*args):
        if not gradient:
            return tf.nest.flatten(FORWARD_OPS[name](*args))
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = tf.nest.flatten(FORWARD_OPS[name](*args))[0]
            loss = tf.reduce_sum(tf.sin(y))
        return [g for g in tape.gradient(loss, args) if g is not None]

    args = values(X.shape, W.shape, B.shape, X.shape)
    path = save(tmp_path / "fused", fn, *[a.shape for a in args])
    assert fused_ops(path)
    convert(path, tmp_path / "stock", to_stock=True)
    assert fused_ops(tmp_path / "stock") == {}
    stock = tf.saved_model.load(str(tmp_path / "stock"))
    assert_same(stock.fn(*args), fn(*args), units=1024)


def test_bad_folders(tmp_path, network):
    with pytest.raises(ValueError, match="nowhere holds no SavedModel"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match="nowhere holds no SavedModel"):
        tfo.remap(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="exists already"):
        convert(network[0], network[1])
    assert list(tmp_path.iterdir()) == []


def test_command_line(network, tmp_path, capsys):
    fused, portable = str(tmp_path / "fused"), str(tmp_path / "portable")
    assert main(["convert", network[0], fused, "--disable", "matmul_*"]) == 0
    printed = capsys.readouterr().out
    assert f"written: {fused}, " in printed and "2 conv2d_bias_silu" in printed
    assert "matmul" not in printed and "MatMulBiasAct" not in fused_ops(fused)
    assert main(["convert", fused, portable, "--portable"]) == 0
    assert "2 TfFusedOps>Conv2DBiasAct" in capsys.readouterr().out
    assert fused_ops(portable) == {}
    for arguments in ([str(tmp_path), "out"], [network[0], fused]):
        with pytest.raises(SystemExit) as stopped:
            main(["convert", *arguments])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("python -m tf_fused_ops convert: ")
