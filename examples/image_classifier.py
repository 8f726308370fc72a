"""A residual network on handwritten digits with `fit`, stock and accelerated.

Run it with `python examples/image_classifier.py`.
"""

import argparse
import time

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_fused_ops as tfo


def residual(x, filters):
    """Two convolutions with batch norm and a shortcut around them."""
    shortcut = keras.layers.Conv2D(filters, 1)(x)
    for activation in ("relu", None):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        if activation:
            x = keras.layers.Activation(activation)(x)
    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))


def make_model():
    """Returns the network, of stock layers."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    x = residual(residual(inputs, 16), 32)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(64, activation="gelu")(x)
    outputs = keras.layers.Dense(10, activation="softmax")(x)
    return keras.Model(inputs, outputs, name="digits")


def train(title, model, data, epochs):
    """Trains a model and prints its accuracy and the seconds of an epoch."""
    train_x, test_x, train_y, test_y = data
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    keras.utils.set_random_seed(1)
    seconds = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            seconds.append(time.perf_counter() - self.start)

    model.fit(train_x, train_y, batch_size=64, epochs=epochs, verbose=0, callbacks=[Clock()])
    loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
    # The first epoch also traces.
    print(f"{title:<11} loss {loss:.4f}  accuracy {accuracy:.4f}  {min(seconds[1:]):.3f} s/epoch")
    return accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    epochs = 2 if parser.parse_args().quick else 10
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    data = train_test_split(images, labels, random_state=0)
    accuracies = [
        train("stock", make_model(), data, epochs),
        train("accelerated", tfo.accelerate(make_model(), verbose=1), data, epochs),
        train("converted", tfo.layers.convert(make_model()), data, epochs),
    ]
    assert np.ptp(accuracies) < 0.03, "the three should agree to within rounding"


if __name__ == "__main__":
    main()
