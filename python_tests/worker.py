"""A worker of a training job with synchronised batch norm; alone without TF_CONFIG.

worker.py OUTPUT              trains, and writes losses, weights and fusions to OUTPUT (.npz)
worker.py OUTPUT kill|sleep   the same, but the last worker dies or falls asleep after one step
"""

import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_fused_ops as tfo

# Examples of either worker, a step.
SIZES = ((5, 2), (0, 4), (3, 3), (1, 6))
# Seconds: to notice a lost worker, and enough for one on a busy machine.
TIMEOUT, PATIENCE = 20, 240


def make_strategy(timeout):
    if "TF_CONFIG" not in os.environ:
        return tf.distribute.get_strategy()
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING,
        timeout_seconds=timeout,
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def make_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 2))
    x = keras.layers.Conv2D(6, 3, padding="same", activation="relu")(inputs)
    y = keras.layers.Conv2D(6, 3, padding="same")(x)
    y = tfo.layers.FusedBatchNormalization(synchronized=True, activation="relu", momentum=0.5)(
        y, side_input=x
    )
    y = keras.layers.Conv2D(5, 3, strides=2)(y)
    y = tfo.layers.FusedBatchNormalization(synchronized=True, activation="silu", momentum=0.5)(y)
    y = keras.layers.Flatten()(y)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(8, activation="gelu")(y)))


def batches(worker):
    """Yields (examples, targets, size of the joined batch); those of all workers for None."""
    rng = np.random.default_rng(0)
    for sizes in SIZES:
        count = sum(sizes)
        # Neighbours resemble one another: the workers' own statistics differ.
        x = rng.normal(size=(count, 8, 8, 2)) + np.arange(count).reshape(-1, 1, 1, 1)
        y = rng.normal(size=(count, 3))
        if worker is not None:
            start = sum(sizes[:worker])
            x, y = x[start : start + sizes[worker]], y[start : start + sizes[worker]]
        yield x.astype(np.float32), y.astype(np.float32), np.float32(count)


def step_file(path, worker, number):
    """Marks that a worker has ended a step."""
    return pathlib.Path(path).parent / f"{worker}.step{number}"


def fail(fault, path, worker, number):
    """Dies or falls asleep once the others have ended the step before, too."""
    while not all(step_file(path, other, number - 1).exists() for other in range(worker)):
        time.sleep(0.05)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def main(path, fault=None):
    worker = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index")
    strategy = make_strategy(TIMEOUT if fault else PATIENCE)
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def replica(x, y, count):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / count
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    specs = [tf.TensorSpec(shape) for shape in ([None, 8, 8, 2], [None, 3], [])]

    @tfo.function(input_signature=specs)
    def step(*batch):
        return strategy.reduce("sum", strategy.run(replica, batch), axis=None)

    losses = []
    for number, batch in enumerate(batches(worker)):
        if fault and number == 1 and worker == len(SIZES[0]) - 1:
            fail(fault, path, worker, number)
        before = [v.numpy() for v in model.weights]
        start = time.monotonic()
        try:
            losses.append(step(*batch).numpy())
        except tf.errors.OpError as error:
            after = [v.numpy() for v in model.weights]
            unchanged = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
            print(type(error).__name__, number, unchanged, time.monotonic() - start, flush=True)
            # Leaving in order would wait for the lost worker.
            os._exit(3)
        step_file(path, worker, number).touch()
    report = step.remap_reports[-1]
    fused = [op.type for op in step.get_concrete_function().graph.get_operations()]
    np.savez(
        path,
        *[v.numpy() for v in model.weights],
        losses=losses,
        rules=sorted(report.counts().items()),
        ops=sorted(name for name in fused if name.startswith("TfFusedOps>")),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
