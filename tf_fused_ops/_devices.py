"""Where TensorFlow places an op."""

import functools

import tensorflow as tf


def device_type(device):
    """Returns "CPU" or "GPU": where an op with this device string is placed."""
    return _named_type(device or "") or _default_type()


@functools.cache
def _default_type():
    # The list initializes TensorFlow's devices, and stays as it is from then on.
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


@functools.cache
def _named_type(device):
    return tf.DeviceSpec.from_string(device).device_type
