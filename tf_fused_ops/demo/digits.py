"""A small convolutional network on scikit-learn's handwritten digits, in plain TensorFlow code."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

BATCH = 64
LEARNING_RATE = 0.02
MOMENTUM = 0.9
MOVING_AVERAGE_FACTOR = 0.1


class Split(NamedTuple):
    """Images [n, 8, 8, 1] in 0..1 and their labels [n], for training and for testing."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


class Training(NamedTuple):
    """A network with its own weights: functions (images, labels) -> loss and images -> classes."""

    train_step: object
    predict: object


def load(seed=0):
    """Returns scikit-learn's 1797 digits, every fifth of a shuffled order kept for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(images))
    test = np.arange(len(order)) % 5 == 0
    train_part, test_part = order[~test], order[test]
    return Split(images[train_part], labels[train_part], images[test_part], labels[test_part])


def batches(split, epochs, seed=0):
    """Yields shuffled training batches of BATCH images; the rest of each epoch is left out."""
    rng = np.random.default_rng(seed)
    count = len(split.train_images)
    for _ in range(epochs):
        order = rng.permutation(count)
        for start in range(0, count - BATCH + 1, BATCH):
            part = order[start : start + BATCH]
            yield split.train_images[part], split.train_labels[part]


def steps(split, epochs):
    """Returns the number of batches that `batches` yields."""
    return epochs * (len(split.train_images) // BATCH)


def _weights(seed):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        scale = np.sqrt(2.0 / np.prod(shape[:-1]))
        return tf.Variable(rng.normal(scale=scale, size=shape).astype(np.float32))

    trainable = {
        "conv1": normal(3, 3, 1, 32),
        "bias1": tf.Variable(tf.zeros(32)),
        "conv2": normal(3, 3, 32, 64),
        "scale": tf.Variable(tf.ones(64)),
        "offset": tf.Variable(tf.zeros(64)),
        "hidden": normal(4 * 4 * 64, 128),
        "hidden_bias": tf.Variable(tf.zeros(128)),
        "output": normal(128, 10),
        "output_bias": tf.Variable(tf.zeros(10)),
    }
    moving = {"mean": tf.Variable(tf.zeros(64)), "variance": tf.Variable(tf.ones(64))}
    return trainable, moving


def _network(weights, moving, images, training):
    x = tf.nn.conv2d(images, weights["conv1"], strides=1, padding="SAME")
    x = tf.nn.relu(tf.nn.bias_add(x, weights["bias1"]))
    x = tf.nn.conv2d(x, weights["conv2"], strides=1, padding="SAME")
    x, mean, variance = tf.compat.v1.nn.fused_batch_norm(
        x,
        weights["scale"],
        weights["offset"],
        mean=moving["mean"],
        variance=moving["variance"],
        is_training=training,
        exponential_avg_factor=MOVING_AVERAGE_FACTOR if training else 1.0,
    )
    if training:
        moving["mean"].assign(mean)
        moving["variance"].assign(variance)
    x = tf.nn.max_pool2d(tf.nn.relu(x), ksize=2, strides=2, padding="VALID")
    x = tf.reshape(x, [-1, 4 * 4 * 64])
    x = tf.nn.bias_add(tf.matmul(x, weights["hidden"]), weights["hidden_bias"])
    x = tf.nn.gelu(x)
    return tf.nn.bias_add(tf.matmul(x, weights["output"]), weights["output_bias"])


def make_training(decorate, seed=0):
    """Builds the network and its training step; only `decorate` differs between stock and fused.

    Args:
        decorate: tf.function or tf_fused_ops.function.
        seed: of the initial weights.

    Returns:
        A Training.
    """
    weights, moving = _weights(seed)
    variables = list(weights.values())
    velocities = [tf.Variable(tf.zeros_like(variable)) for variable in variables]

    @decorate
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            logits = _network(weights, moving, images, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        gradients = tape.gradient(loss, variables)
        for variable, velocity, gradient in zip(variables, velocities, gradients, strict=True):
            velocity.assign(MOMENTUM * velocity + gradient)
            variable.assign_sub(LEARNING_RATE * velocity)
        return loss

    @decorate
    def predict(images):
        return tf.argmax(_network(weights, moving, images, training=False), axis=1)

    return Training(train_step, predict)
