"""Two processes train one model, and its batch norms see the batches of both.

Run it with `python examples/synchronized_batch_norm.py`: it starts the two processes. Across
machines, start it on each of them with TF_CONFIG set, as TensorFlow's multi-worker guide says.
"""

import argparse
import json
import os
import socket
import subprocess
import sys

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_fused_ops as tfo

WORKERS, BATCH = 2, 16


def make_model():
    """Returns a small convolutional network whose batch norms are synchronised."""
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (16, 32):
        model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization(synchronized=True, momentum=0.9))
        model.add(keras.layers.ReLU())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(10))
    # The layer that fuses around the exchange, with the ReLU in it.
    return tfo.layers.convert(model)


def train(worker, steps):
    """Trains on this worker's share of the digits, together with the other workers."""
    # Without a timeout a worker would wait for one that hangs.
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True)) / (WORKERS * BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tfo.function
    def step(x, y):
        return strategy.reduce("sum", strategy.run(replica, (x, y)), axis=None)

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    share = tf.data.Dataset.from_tensor_slices((images, labels)).shard(WORKERS, worker)
    batches = share.shuffle(1000, seed=worker).repeat().batch(BATCH).take(steps)
    for number, (x, y) in enumerate(batches, 1):
        loss = step(x, y)
        if worker == 0 and number % 20 == 0:
            print(f"step {number:3d}  loss {float(loss):.4f}", flush=True)

    # Every worker computes it: reading a variable of a strategy may take all of them.
    predictions = tf.argmax(model(images, training=False), 1)
    accuracy = float(tf.reduce_mean(tf.cast(predictions == labels, tf.float32)))
    statistics = float(tf.reduce_sum(model.layers[1].moving_variance))
    print(f"worker {worker}: accuracy {accuracy:.4f}, moving variances {statistics!r}", flush=True)
    assert accuracy > 0.9, "the network should have learnt the digits"


def start_workers():
    """Starts this script once for every worker and waits for them."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(WORKERS)]
    cluster = {"worker": [f"localhost:{s.getsockname()[1]}" for s in sockets]}
    for free in sockets:
        free.close()
    processes = []
    for index in range(WORKERS):
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        command = [sys.executable, __file__, *sys.argv[1:]]
        processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    sys.exit(any(codes))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 60 if parser.parse_args().quick else 200
    if "TF_CONFIG" in os.environ:
        train(json.loads(os.environ["TF_CONFIG"])["task"]["index"], steps)
    else:
        start_workers()


if __name__ == "__main__":
    main()
