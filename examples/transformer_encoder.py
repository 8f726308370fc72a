"""Transformer encoder blocks with GELU on rows of handwritten digits, in fused layers.

Run it with `python examples/transformer_encoder.py`.

Every image is a sequence of eight rows. The feed-forward half of a block, matrix product + bias +
GELU and matrix product + bias + residual, is two fused ops forward and two backward.
"""

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_fused_ops as tfo

WIDTH, HEADS, HIDDEN, BLOCKS = 32, 4, 128, 2


@keras.saving.register_keras_serializable(package="examples")
class EncoderBlock(keras.layers.Layer):
    """Attention and a feed-forward network, each around layer normalization and a residual."""

    def __init__(self, width, heads, hidden, **kwargs):
        super().__init__(**kwargs)
        self.width, self.heads, self.hidden = width, heads, hidden
        self.attention_norm = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads)
        self.forward_norm = keras.layers.LayerNormalization()
        # BERT and GPT-2 use the tanh form; activation="gelu" is the erf form.
        self.expand = tfo.layers.FusedDense(hidden, activation=tfo.layers.gelu_tanh)
        self.contract = tfo.layers.FusedDense(width)

    def build(self, input_shape):
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.forward_norm.build(input_shape)
        self.expand.build(input_shape)
        self.contract.build((*input_shape[:-1], self.hidden))

    def call(self, x):
        y = self.attention_norm(x)
        x = x + self.attention(y, y)
        # The residual enters the matrix product's own pass over the output.
        return self.contract(self.expand(self.forward_norm(x)), side_input=x)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        own = {"width": self.width, "heads": self.heads, "hidden": self.hidden}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="examples")
class Positions(keras.layers.Layer):
    """Adds a learnt vector a position."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=input_shape[1:], initializer="normal")

    def call(self, x):
        return x + self.table


def make_model():
    """Returns a classifier of sequences of eight rows."""
    inputs = keras.Input((8, 8))
    x = Positions()(tfo.layers.FusedDense(WIDTH)(inputs))
    for _ in range(BLOCKS):
        x = EncoderBlock(WIDTH, HEADS, HIDDEN)(x)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, tfo.layers.FusedDense(10, activation="softmax")(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    epochs = 4 if parser.parse_args().quick else 15
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype("float32")
    train_x, test_x, train_y, test_y = train_test_split(images, labels, random_state=0)
    model = make_model()
    model.compile(
        keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(train_x, train_y, batch_size=64, epochs=epochs, verbose=2)
    loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
    print(f"test loss {loss:.4f}  accuracy {accuracy:.4f}")
    assert accuracy > 0.85, "the encoder should have learnt the digits"


if __name__ == "__main__":
    main()
