"""`accelerate`: Keras trains, evaluates and predicts with fused ops, and all else is as before."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import values

import tf_fused_ops as tfo
from tf_fused_ops.remapper import RemapOptions

STEPS = ("train_step", "test_step", "predict_step")


class Subclassed(keras.Model):
    """Fuses two sites with gradients."""

    def __init__(self):
        super().__init__()
        self.conv = keras.layers.Conv2D(4, 3, activation="relu")
        self.flatten = keras.layers.Flatten()
        self.dropout = keras.layers.Dropout(0.2, seed=1)
        self.dense = keras.layers.Dense(3)

    def call(self, x, training=False):
        return self.dense(self.dropout(self.flatten(self.conv(x)), training=training))


class OwnStep(Subclassed):
    """Has a train step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own": loss}


def functional():
    inputs = keras.Input((6, 6, 2))
    x = keras.layers.Conv2D(4, 3, activation="relu")(inputs)
    x = keras.layers.Dropout(0.2, seed=1)(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def data():
    return [v.numpy() for v in values((24, 6, 6, 2), (24, 3))]


def train(make, prepare=lambda model: None, after=lambda model: None, **options):
    """Returns a model that was trained for two epochs, and its history."""
    keras.utils.set_random_seed(3)
    model = make()
    prepare(model)
    model.compile("adam", "mse", **{"metrics": ["mae"], **options})
    after(model)
    x, y = data()
    history = model.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), verbose=0)
    return model, history.history


# Variables of the models below, each of which optimizers update by one op.
UPDATES = 4


def fused(model, step):
    """Returns (number of fusions, number with gradients) of an accelerated step.

    TensorFlow traces what makes variables twice, so the last trace counts.
    """
    fusions = getattr(model, step).remap_reports[-1].fused
    return len(fusions), sum(f.gradients for f in fusions)


def assert_same_history(found, expected):
    assert found.keys() == expected.keys()
    for name, curve in expected.items():
        np.testing.assert_allclose(found[name], curve, rtol=1e-4, err_msg=name)


def assert_trains(make, prepare=lambda model: None, after=lambda model: None, **options):
    """Asserts the curve of stock training, and two fusions in every step."""
    stock, expected = train(make, **options)
    model, history = train(make, prepare, after, **options)
    assert_same_history(history, expected)
    assert fused(model, "train_step") == (3 + UPDATES, 3)
    assert fused(model, "test_step") == (2, 0)
    x, _ = data()
    np.testing.assert_allclose(
        model.predict(x, verbose=0), stock.predict(x, verbose=0), rtol=1e-3, atol=1e-4
    )
    assert fused(model, "predict_step") == (2, 0)
    return model


@pytest.mark.parametrize("make", [functional, Subclassed])
def test_before_compile(make):
    assert_trains(make, prepare=tfo.accelerate)


@pytest.mark.parametrize("make", [functional, Subclassed])
def test_after_compile(make):
    assert_trains(make, after=tfo.accelerate)


def test_own_train_step():
    model = assert_trains(OwnStep, tfo.accelerate, metrics=None)
    assert "own" in model.history.history


@pytest.mark.parametrize("steps", [2, 5])
def test_steps_per_execution(steps):
    assert_trains(functional, tfo.accelerate, steps_per_execution=steps)


def test_after_fit():
    """A model that has been trained stock takes up the fused steps, and lays them down."""
    model, _ = train(functional)
    x, y = data()
    tfo.accelerate(model)
    model.fit(x, y, verbose=0)
    assert fused(model, "train_step") == (3 + UPDATES, 3)


def test_batches():
    x, y = data()
    results = []
    for prepare in (lambda model: model, tfo.accelerate):
        keras.utils.set_random_seed(3)
        model = functional()
        model.compile("sgd", "mse", metrics=["mae"])
        prepare(model)
        results.append(
            [
                *model.train_on_batch(x, y),
                *model.test_on_batch(x, y),
                *np.ravel(model.predict_on_batch(x)),
            ]
        )
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
    assert [fused(model, step)[0] for step in STEPS] == [3 + UPDATES, 2, 2]


def test_undone_completely():
    model = functional()
    model.compile("adam", "mse")
    before = dict(vars(model))
    tfo.accelerate(model)
    tfo.accelerate(model)
    assert all(step in vars(model) for step in STEPS)
    assert tfo.accelerate(model, False) is model
    assert vars(model) == before
    model.fit(*data(), verbose=0)
    assert not hasattr(model.train_step, "remap_reports")


def test_undone_gives_back_a_step_of_the_instance():
    model = functional()
    own = model.predict_step
    model.predict_step = own
    tfo.accelerate(model)
    assert model.predict_step is not own
    tfo.accelerate(model, False)
    assert model.predict_step is own


def test_never_accelerated():
    model = functional()
    before = dict(vars(model))
    tfo.accelerate(model, False)
    assert vars(model) == before


def test_run_eagerly_runs_stock_ops():
    _, expected = train(functional, run_eagerly=True)
    model, history = train(functional, tfo.accelerate, run_eagerly=True)
    assert model.run_eagerly
    assert_same_history(history, expected)
    assert model.train_step.remap_reports == []


def test_jit_compile_is_left_alone():
    _, expected = train(functional, jit_compile=True)
    with pytest.warns(UserWarning) as told:
        model, history = train(functional, tfo.accelerate, jit_compile=True)
    assert model.jit_compile
    assert_same_history(history, expected)
    assert fused(model, "train_step") == (0, 0)
    assert str(told[0].message) == (
        f"tf_fused_ops: train_step of {model.name} is left alone: it is compiled by XLA, which has "
        "no kernels for the fused ops. Compile the model with jit_compile=False to fuse it."
    )


def test_automatic_choice_of_jit_compile(monkeypatch):
    """Where there is a GPU, Keras chooses XLA for stock models; what the user chooses stays."""
    device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [device])
    model = functional()
    for enable in (False, True, False):
        tfo.accelerate(model, enable)
        for choice, expected in (("auto", not enable), (True, True), (False, False)):
            model.compile("adam", "mse", jit_compile=choice)
            assert model.jit_compile is expected


def test_verbose_prints_once(capsys):
    model, _ = train(functional, lambda model: tfo.accelerate(model, verbose=1))
    x, y = data()
    model.fit(x[:7], y[:7], verbose=0)
    model.predict(x, verbose=0)
    counts = "1 conv2d_bias_relu, 1 matmul_bias"
    trained = "4 adam, 1 conv2d_bias_relu, 1 dropout, 1 matmul_bias"
    assert capsys.readouterr().out.splitlines() == [
        f"tf_fused_ops: train_step of {model.name}: 7 fused, 3 with gradients: {trained}",
        f"tf_fused_ops: test_step of {model.name}: 2 fused, 0 with gradients: {counts}",
        f"tf_fused_ops: predict_step of {model.name}: 2 fused, 0 with gradients: {counts}",
    ]


def test_options():
    options = RemapOptions(disable=["conv2d_*", "trained_*"])
    model, _ = train(functional, lambda model: tfo.accelerate(model, remap=options))
    assert fused(model, "train_step") == (2 + UPDATES, 2)


def test_callbacks_and_metrics():
    seen = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, sorted(logs)))

    keras.utils.set_random_seed(0)
    model = tfo.accelerate(functional())
    model.compile("adam", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
    history = model.fit(*data(), batch_size=8, epochs=9, verbose=0, callbacks=[Count(), stop])
    assert len(history.epoch) == 2
    assert seen[:3] == [(i, ["loss", "mean_absolute_error"]) for i in range(3)]
    assert isinstance(model.train_step.remap_reports, list)


def test_loss_scaling():
    def make():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return functional()
        finally:
            keras.config.set_dtype_policy("float32")

    _, expected = train(make)
    model, history = train(make, tfo.accelerate)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert fused(model, "train_step") == (3, 3)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=2e-2)


def test_converted_model():
    """Fused layers and the rewriting go together."""
    _, expected = train(functional)
    model, history = train(
        lambda: tfo.layers.convert(functional()), lambda model: tfo.accelerate(model)
    )
    assert_same_history(history, expected)
    assert fused(model, "train_step") == (1 + UPDATES, 1)


def test_saved_like_any_model(tmp_path):
    model, _ = train(functional, tfo.accelerate)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x, _ = data()
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4)
    model.export(str(tmp_path / "saved"), verbose=False)
    graph = tf.saved_model.load(tmp_path / "saved").signatures["serving_default"].graph
    assert "TfFusedOps" not in str(graph.as_graph_def())
    clone = keras.models.clone_model(model)
    assert not hasattr(clone.train_step, "remap_reports")


def test_inside_a_decorated_function():
    """A function that rewrites its graph itself sees the step once."""
    model = tfo.accelerate(functional())
    model.compile("sgd", "mse")
    x, y = data()

    @tfo.function
    def step(x, y):
        return model.train_step((x, y))

    step(tf.constant(x), tf.constant(y))
    assert model.train_step.remap_reports == []
    assert sum(len(report.fused) for report in step.remap_reports) == 3 + UPDATES


def test_not_a_model():
    with pytest.raises(TypeError, match=r"keras\.Model; got Dense"):
        tfo.accelerate(keras.layers.Dense(1))


def test_other_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ValueError, match=r"tf_fused_ops\.accelerate needs .* uses 'torch'"):
        tfo.accelerate(functional())


def test_mirrored_strategy(run_python):
    """Two replicas give the curve of stock training, each with its fused ops."""
    program = """
import keras, numpy as np, tensorflow as tf, tf_fused_ops as tfo
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
rng = np.random.default_rng(0)
x, y = rng.standard_normal((16, 6, 6, 2), "f"), rng.standard_normal((16, 3), "f")
curves = []
for fuse in (False, True):
    keras.utils.set_random_seed(0)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([
            keras.Input((6, 6, 2)), keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile("adam", "mse", metrics=["mae"])
    tfo.accelerate(model, fuse)
    curves.append(model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"])
np.testing.assert_allclose(*curves, rtol=1e-4)
fusions = [f for report in model.train_step.remap_reports for f in report.fused]
print(sum(f.gradients for f in fusions))
"""
    assert run_python(program) == "4\n"


@pytest.mark.parametrize("make", [functional, OwnStep])
def test_steps_in_a_function_of_ones_own(make):
    """Which autograph converts, and all that it calls."""
    model = make()
    model.compile("sgd", "mse")
    model(data()[0])
    tfo.accelerate(model)
    step = tf.function(model.train_step)
    logs = step(tuple(map(tf.constant, data())))
    assert all(np.isfinite(float(value)) for value in logs.values())
    assert fused(model, "train_step") == (3 + UPDATES, 3)
