"""The recurrent layers, and the stock ones under the decorator: what the stock layers compute."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.testing import TestCase
from layer_cases import classes, fused_counts
from remapping import FUSED, OF_STOCK_OPS, assert_same, op_counts, reasons, rule_counts, values

import tf_fused_ops as tfo
from tf_fused_ops import layers
from tf_fused_ops.layers import fused, runs
from tf_fused_ops.remapper import recurrent

RECURRENT = FUSED["recurrent"]
NAMES = ("LSTM", "GRU", "SimpleRNN")
SHAPE = (5, 11, 3)
OPTIONS = {
    "sequences": {"return_sequences": True},
    "last": {},
    "states": {"return_state": True, "return_sequences": True},
    "backwards": {"go_backwards": True, "return_sequences": True, "return_state": True},
    "last, backwards": {"go_backwards": True},
    "no bias": {"use_bias": False},
    "relu": {"activation": "relu", "return_sequences": True},
    "unrolled": {"unroll": True, "return_state": True},
    "zeros where masked": {"zero_output_for_mask": True, "return_sequences": True},
    "zero at last": {"zero_output_for_mask": True, "go_backwards": True},
}


@pytest.fixture
def told(monkeypatch):
    """The lines that the layers log."""
    lines = []
    monkeypatch.setattr(fused.log, "vlog", lambda level, line: lines.append(line))
    return lines


def pair(name, shape=SHAPE, **options):
    """Returns a stock and a fused layer of 7 units with equal weights."""
    made = [getattr(where, kind)(7, **options) for where, kind in kinds(name)]
    for layer in made:
        layer.build(shape)
    rng = np.random.default_rng(7)
    weights = [rng.normal(0, 0.4, weight.shape) for weight in made[0].get_weights()]
    for layer in made:
        layer.set_weights(weights)
    return made


def kinds(name):
    return (keras.layers, name), (layers, f"Fused{name}")


def mask_of(shape):
    """A mask with rows that begin and end masked, that are so in between, and altogether."""
    mask = np.random.default_rng(3).uniform(size=shape[:2]) < 0.7
    mask[0] = True
    mask[1], mask[2, :4], mask[3, 6:] = False, False, False
    return tf.constant(mask)


def step_of(layer, training=False, **arguments):
    """Returns a function that returns the outputs of a layer and all gradients."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.nest.flatten(layer(x, training=training, **arguments))
            loss = tf.add_n([tf.reduce_sum(tf.sin(tf.cast(y, "float64"))) for y in outputs])
        return [*outputs, *tape.gradient(loss, [x, *layer.trainable_variables])]

    return step


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_as_stock(name, options, masked, told):
    stock, layer = pair(name, **OPTIONS[options])
    (x,) = values(SHAPE)
    mask = {"mask": mask_of(SHAPE)} if masked else {}
    expected = tf.function(step_of(stock, **mask))(x)
    assert_same(step_of(layer, **mask)(x), expected, units=256)
    counts = fused_counts(step_of(layer, **mask), x)
    assert counts[RECURRENT] == counts[f"{RECURRENT}Grad"] == 1
    assert told == []
    assert not layer.supports_jit

    compiled = tfo.function(step_of(stock, **mask))
    assert_same(compiled(x), expected, units=256)
    # Other rules apply to slices of weights and results.
    (fusion,) = (f for f in compiled.remap_reports[-1].fused if f.rule not in OF_STOCK_OPS)
    assert fusion.rule == rule_of(name)
    assert fusion.gradients == 1
    assert fusion.source.startswith(__file__)


def rule_of(name):
    return next(loop.name for loop in recurrent.LOOPS if loop.layer == name)


@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name, dtype):
    stock, layer = pair(name, return_sequences=True, dtype=dtype)
    wide = getattr(keras.layers, name)(7, return_sequences=True, dtype="float64")
    wide.build(SHAPE)
    wide.set_weights(stock.get_weights())
    (x,) = values(SHAPE, dtype=layer.compute_dtype)
    exact = [tf.cast(v, "float64") for v in step_of(wide)(tf.cast(x, "float64"))]
    found, ordinary = (
        [tf.cast(v, "float64") for v in run(x)]
        for run in (step_of(layer), tf.function(step_of(stock)))
    )
    for ours, theirs, value in zip(found, ordinary, exact, strict=True):
        # Errors grow from step to step, and half precision rounds in every one.
        size = np.abs(value).max()
        bound = 4 * np.abs(theirs - value).max() + 1e-12 * size
        assert np.abs(ours - value).max() <= bound, f"{name} {dtype}"


@pytest.mark.parametrize("name", NAMES)
def test_initial_state_and_unknown_sizes(name):
    stock, layer = pair(name, return_sequences=True, return_state=True)
    (x,) = values(SHAPE)
    states = values(*[(5, 7)] * (2 if name == "LSTM" else 1), seed=4)
    mask = mask_of(SHAPE)

    def of(layer):
        return lambda x, mask, *states: layer(x, initial_state=list(states), mask=mask)

    expected = of(stock)(x, mask, *states)
    signature = [tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, None], tf.bool)]
    signature += [tf.TensorSpec([None, 7])] * len(states)
    for decorate, used in ((tf.function, layer), (tfo.function, stock)):
        compiled = decorate(of(used), input_signature=signature)
        assert_same(compiled(x, mask, *states), expected, units=256)
    assert rule_counts(compiled) == {rule_of(name): 1}


@pytest.mark.parametrize("name", NAMES)
def test_dropout_of_inputs(name, told):
    stock, layer = pair(name, dropout=0.4, seed=5, return_sequences=True)
    (x,) = values(SHAPE)
    layer.cell.seed_generator.state.assign(stock.cell.seed_generator.state)
    expected = tf.function(step_of(stock, training=True))(x)
    assert_same(tf.function(step_of(layer, training=True))(x), expected, units=256)
    assert told == []


@pytest.mark.parametrize("name", NAMES)
def test_dropout_of_all(name):
    """Keras's cells with gates take a rate of 1 for none."""
    stock, layer = pair(name, dropout=1.0, seed=5)
    (x,) = values(SHAPE)
    expected = tf.function(step_of(stock, training=True))(x)
    assert_same(tf.function(step_of(layer, training=True))(x), expected, units=256)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_one_row_for_all_and_states_too_many(name):
    stock, layer = pair(name, unroll=True)
    (x,), states = values(SHAPE), values((1, 7), (1, 7), seed=4)
    mask = mask_of(SHAPE)[2:3]

    def of(layer):
        return lambda x: layer(x, initial_state=states, mask=mask)

    expected = of(stock)(x)
    assert_same(of(layer)(x), expected, units=256)
    compiled = tfo.function(of(stock))
    assert_same(compiled(x), expected, units=256)
    assert rule_counts(compiled) == {rule_of(name): 1}


def test_many_half_precision_terms():
    """What is summed over all steps is not summed in half precision."""
    stock, layer = pair("GRU", (128, 200, 3), return_sequences=True, dtype="mixed_float16")
    wide = keras.layers.GRU(7, return_sequences=True)
    wide.build((128, 200, 3))
    wide.set_weights(stock.get_weights())
    (x,) = values((128, 200, 3))

    def gradient(layer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(layer(x), "float32")) * 0.01
        return tape.gradient(loss, layer.trainable_variables)

    for found, expected in zip(gradient(layer), gradient(wide), strict=True):
        assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


LEFT = {
    "LSTM, activation": ("LSTM", {"activation": "elu"}, "activation elu is neither"),
    "LSTM, gates": ("LSTM", {"recurrent_activation": "hard_sigmoid"}, "hard_sigmoid is not"),
    "GRU, reset": ("GRU", {"reset_after": False}, "reset_after is False"),
    "SimpleRNN, linear": ("SimpleRNN", {"activation": None}, "activation linear is neither"),
}
IN_TRAINING = {
    "recurrent dropout": ("GRU", {"recurrent_dropout": 0.3, "seed": 1}, "recurrent_dropout"),
    "dropouts": (
        "LSTM",
        {"dropout": 0.3, "implementation": 1, "use_cudnn": False},
        "implementation 1",
    ),
}


@pytest.mark.parametrize("case", [*LEFT, *IN_TRAINING])
def test_what_stays_stock(case, told):
    name, options, reason = (LEFT | IN_TRAINING)[case]
    stock, layer = pair(name, **options)
    training = case in IN_TRAINING
    (x,) = values(SHAPE)
    if training:
        layer.cell.seed_generator.state.assign(stock.cell.seed_generator.state)
    expected = tf.function(step_of(stock, training))(x)
    assert_same(tf.function(step_of(layer, training))(x), expected, units=256)
    assert reason in told[-1]
    assert layer.supports_jit or training
    counts = fused_counts(step_of(layer, training), x)
    assert RECURRENT not in counts

    compiled = tfo.function(step_of(stock, training))
    compiled(x)
    assert reason in reasons(compiled)[rule_of(name)]
    if training:
        fused_too = tfo.function(step_of(stock, training=False))
        fused_too(x)
        assert rule_counts(fused_too)[rule_of(name)] == 1


def test_other_cell(told):
    class Cell(keras.layers.GRUCell):
        def call(self, inputs, states, training=False):
            y, states = super().call(inputs, states, training=training)
            return 2 * y, states

    stock, layer = keras.layers.GRU(7), layers.FusedGRU(7)
    for made in (stock, layer):
        made.cell = Cell(7)
        made.build(SHAPE)
    layer.set_weights(stock.get_weights())
    (x,) = values(SHAPE)
    expected = tf.function(step_of(stock))(x)
    assert_same(step_of(layer)(x), expected, units=256)
    assert "its cell is a Cell" in told[-1]
    compiled = tfo.function(step_of(stock))
    assert_same(compiled(x), expected, units=256)
    assert "its cell is a Cell" in reasons(compiled)["gru"]


def test_layer_that_runs_while_a_graph_is_traced():
    stock, _ = pair("LSTM")
    (x,) = values(SHAPE)
    found = []

    @tfo.function
    def build(x):
        with tf.init_scope():
            found.append(stock(np.ones(SHAPE, "float32")))
        return x

    build(x)
    assert_same(found, [stock(tf.ones(SHAPE))])
    assert rule_counts(build) == {}


def test_only_what_is_asked_for():
    stock, layer = pair("LSTM")
    (x,) = values(SHAPE)

    class Own(keras.layers.LSTM):
        def inner_loop(self, sequences, initial_state, mask, training=False):
            return super().inner_loop(sequences, initial_state, mask, training=training)

    own = Own.from_config(stock.get_config())
    options = tfo.RemapOptions(disable=["lst*"])
    for decorate, used in (
        (lambda f: tfo.function(f, remap=options), stock),
        (lambda f: tfo.function(f, jit_compile=True), stock),
        (tfo.function, own),
        (tfo.function, layer),
    ):
        compiled = decorate(step_of(used))
        compiled(x)
        assert "lstm" not in rule_counts(compiled)
    assert RECURRENT not in fused_counts(stock, x)


def test_nested_function_and_loop():
    """Layers in a function that the decorated one calls, and in a loop."""
    stock, _ = pair("GRU", (4, 6, 7), return_sequences=True)
    (x,) = values((4, 6, 7))

    def three_times(call):
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x
                for _ in tf.range(3):
                    y = call(y)
            return y, tape.gradient(y, [x, *(v.value for v in stock.trainable_variables)])

        return run

    expected = tf.function(three_times(stock))(x)
    compiled = tfo.function(three_times(tf.function(stock)))
    assert_same(compiled(x), expected, units=256)
    assert rule_counts(compiled) == {"gru": 1, "joined_slice_gradients": 1}
    counts = op_counts(compiled.get_concrete_function(x))
    assert counts[f"{RECURRENT}Grad"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_keras_checks(name):
    TestCase("run_layer_test").run_layer_test(
        getattr(layers, f"Fused{name}"),
        init_kwargs={"units": 4, "return_sequences": True},
        input_shape=(3, 2, 5),
        call_kwargs={"training": True},
        expected_output_shape=(3, 2, 4),
        expected_num_trainable_weights=3,
        expected_num_non_trainable_weights=0,
        supports_masking=True,
    )


def model_of_all():
    words = keras.Input((9,), dtype="int32")
    x = keras.layers.Embedding(20, 8, mask_zero=True)(words)
    x = keras.layers.Bidirectional(keras.layers.LSTM(5, return_sequences=True))(x)
    x, state = keras.layers.GRU(6, return_sequences=True, return_state=True)(x)
    x = keras.layers.SimpleRNN(4)(x, initial_state=[keras.layers.Dense(4)(state)])
    return keras.Model(words, x)


def test_conversion(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(runs.log, "vlog", lambda level, line: lines.append(line))
    model = model_of_all()
    words = np.random.default_rng(0).integers(0, 5, (4, 9))
    expected = model(words)
    converted = layers.convert(model)
    assert lines == []
    found = [type(layer).__name__ for layer in converted._flatten_layers()]
    assert [kind for kind in found if kind.startswith("Fused")] == [
        *["FusedLSTM"] * 2, "FusedGRU", "FusedDense", "FusedSimpleRNN",
    ]  # fmt: skip
    assert_same(converted(words), expected, units=256)
    assert fused_counts(converted, tf.constant(words))[RECURRENT] == 4
    back = layers.revert(converted)
    assert [type(layer) for layer in back._flatten_layers()] == [
        type(layer) for layer in model._flatten_layers()
    ]
    assert_same(back(words), expected)
    for old, new in zip(model.get_weights(), back.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)

    converted.save(tmp_path / "model.keras")
    assert_same(keras.models.load_model(tmp_path / "model.keras")(words), converted(words))
    assert classes(converted)[1] == "Bidirectional"


def test_stateful_model_goes_on():
    (x,) = values((2, 5, 3))

    def made():
        inputs = keras.Input(batch_shape=(2, 5, 3))
        return keras.Model(inputs, keras.layers.LSTM(4, stateful=True)(inputs))

    model = made()
    model(x)
    converted = layers.convert(model)
    # Its state goes with it.
    assert_same(converted(x), model(x), units=256)
    assert_same(converted(x), model(x), units=256)


def test_accelerated_fit():
    words = np.random.default_rng(0).integers(0, 5, (8, 9))
    losses = {}
    for fuse in (False, True):
        keras.utils.set_random_seed(2)
        model = model_of_all()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        if fuse:
            tfo.accelerate(model)
        history = model.fit(words, np.ones((8, 4)), epochs=3, shuffle=False, verbose=0)
        losses[fuse] = history.history["loss"]
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-5)
    counts = model.train_step.remap_reports[-1].counts()
    assert (counts["lstm"], counts["gru"], counts["simple_rnn"]) == (2, 1, 1)
    assert not np.array_equal(losses[True][0], losses[True][-1])


def test_replicas_report_a_loop_once(run_python):
    program = """
import keras, numpy as np, tensorflow as tf, tf_fused_ops as tfo
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.GRU(4)])
    model.compile("sgd", "mse")
tfo.accelerate(model)
model.fit(np.ones((8, 5, 3)), np.ones((8, 4)), verbose=0)
print(sum(report.counts().get("gru", 0) for report in model.train_step.remap_reports))
"""
    # One for each.
    assert run_python(program) == "2\n"
