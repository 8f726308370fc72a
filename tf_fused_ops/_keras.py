"""The Keras backend that there must be."""

import keras


def check_backend(what):
    """Checks that Keras computes with TensorFlow.

    Args:
        what: What needs it.

    Raises:
        ValueError: Keras uses another backend.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"{what} needs Keras's TensorFlow backend, but Keras uses {backend!r}: set "
            "KERAS_BACKEND=tensorflow before keras is imported."
        )
