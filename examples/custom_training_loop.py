"""A training loop of one's own: change the decorator, and the step fuses forward and backward.

Run it with `python examples/custom_training_loop.py`.
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_fused_ops as tfo

BATCH = 64


def make_model():
    """Returns a small convolutional network, of stock layers."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="silu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 100 if parser.parse_args().quick else 300
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000, seed=0)
    batches = batches.repeat().batch(BATCH).take(steps)

    model = make_model()
    optimizer = keras.optimizers.Adam(2e-3)
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tfo.function  # was: @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for number, (x, y) in enumerate(batches, 1):
        loss = step(x, y)
        if number % 50 == 0:
            print(f"step {number:3d}  loss {float(loss):.4f}")

    print(step.remap_reports[-1])
    predictions = keras.ops.argmax(model.predict(images, verbose=0), axis=1)
    accuracy = float(tf.reduce_mean(tf.cast(predictions == labels, tf.float32)))
    print(f"accuracy on the training images {accuracy:.4f}")
    assert accuracy > 0.9, "the network should have learnt the digits"


if __name__ == "__main__":
    main()
