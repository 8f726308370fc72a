"""Keras's ResNet50 on scikit-learn's two sample photographs."""

import numpy as np
import tensorflow as tf

NAMES = ("china.jpg", "flower.jpg")


def load(size):
    """Returns the photographs, float32 [2, size, size, 3], as ResNet50 expects its input."""
    from sklearn.datasets import load_sample_image

    photographs = [load_sample_image(name) for name in NAMES]
    resized = [tf.image.resize(photograph, [size, size]) for photograph in photographs]
    return tf.keras.applications.resnet50.preprocess_input(np.stack(resized))


def make_model(size, seed=0):
    """Returns a ResNet50 of random weights and batch statistics that ends in 1000 logits."""
    tf.keras.utils.set_random_seed(seed)
    model = tf.keras.applications.ResNet50(
        weights=None, input_shape=(size, size, 3), classifier_activation=None
    )
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            shape = layer.gamma.shape
            layer.moving_mean.assign(rng.normal(scale=0.1, size=shape))
            layer.moving_variance.assign(rng.uniform(0.5, 1.5, size=shape))
    return model


def make_inference(model, decorate):
    """Returns a function images -> logits; only `decorate` differs between stock and fused."""

    @decorate
    def infer(images):
        return model(images, training=False)

    return infer
