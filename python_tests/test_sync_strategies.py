"""Synchronised batch norm in Keras models under MirroredStrategy, and over Horovod."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SETUP = """
import keras, numpy as np, tensorflow as tf, tf_fused_ops as tfo
REPLICAS = 3
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
rng = np.random.default_rng(0)

def values(*shape):
    # Examples next to one another resemble one another.
    return (rng.normal(size=shape) + np.arange(shape[0]).reshape(-1, 1, 1, 1)).astype("f")
"""
CUSTOM_LOOP = (
    SETUP
    + """
SIZES = (3, 0, 5)
x, side, dy = values(8, 4, 3, 6), values(8, 4, 3, 6), values(8, 4, 3, 6)

def train(scope, step_of, function):
    with scope:
        layer = tfo.layers.FusedBatchNormalization(
            synchronized=True, activation="relu", momentum=0.5, beta_initializer="ones")
        layer.build(x.shape)

    def replica(x, side, dy):
        weights = [v.value for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch([x, side])
            y = layer(x, side, training=True)
        return y, *tape.gradient(y, [x, side, *weights], output_gradients=dy)

    outputs = function(lambda: step_of(replica))()
    return [*outputs, *layer.get_weights()[2:]]

def distributed(value):
    parts = tf.split(value, SIZES)
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group])

batches = [distributed(value) for value in (x, side, dy)]

def on_replicas(replica):
    per_replica = strategy.run(replica, batches)
    local = [strategy.experimental_local_results(v) for v in per_replica]
    return [tf.concat(v, 0) for v in local[:3]] + [tf.add_n(v) for v in local[3:]]

alone = train(tf.distribute.get_strategy().scope(),
              lambda replica: replica(*map(tf.constant, (x, side, dy))), tf.function)
for function in (lambda f: f, tf.function, tfo.function):
    for a, b in zip(alone, train(strategy.scope(), on_replicas, function), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(b, a, rtol=0, atol=4e-6 * abs(a).max())
print("equal")
"""
)
FIT = (
    SETUP
    + """
x, y = values(18, 6, 6, 2), rng.normal(size=(18, 3)).astype("f")

def fit(scope, prepare):
    keras.utils.set_random_seed(0)
    with scope:
        inputs = keras.Input((6, 6, 2))
        h = keras.layers.Conv2D(4, 3)(inputs)
        h = keras.layers.BatchNormalization(synchronized=True)(h)
        h = keras.layers.Flatten()(keras.layers.ReLU()(h))
        model = keras.Model(inputs, keras.layers.Dense(3)(h))
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        model = prepare(model)
    curve = model.fit(x, y, batch_size=9, epochs=3, shuffle=False, verbose=0).history["loss"]
    return model, curve, model.get_weights()

_, curve, weights = fit(tf.distribute.get_strategy().scope(), lambda model: model)
for prepare in (tfo.layers.convert, tfo.accelerate):
    model, found, found_weights = fit(strategy.scope(), prepare)
    np.testing.assert_allclose(found, curve, rtol=1e-5)
    for a, b in zip(weights, found_weights, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-5 * abs(a).max() + 1e-6)
    print(type(model.layers[2]).__name__)
"""
)


def test_custom_loop(run_python):
    assert run_python(CUSTOM_LOOP) == "equal\n"


def test_fit(run_python):
    assert run_python(FIT) == "FusedBatchNormalization\nBatchNormalization\n"


def test_horovod():
    reason = "Horovod is not installed (docs/distributed.md says how to build it)"
    pytest.importorskip("horovod.tensorflow", reason=reason)
    launcher = Path(sys.executable).with_name("horovodrun")
    result = subprocess.run(
        [launcher, "-np", "2", "--gloo", sys.executable, ROOT / "python_tests/horovod_worker.py"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("equal") == 2
