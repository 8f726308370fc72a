"""Asks TensorFlow's registry whether a kernel exists, before an op is emitted."""

import functools

import tensorflow as tf
from tensorflow.python.framework import kernels


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


@functools.cache
def has_kernel(op_type, dtype, device):
    """Returns whether a kernel is registered.

    Args:
        op_type: The registered op name.
        dtype: The tf.DType of attribute T.
        device: "CPU" or "GPU".
    """
    return any(
        kernel.device_type == device
        and all(
            dtype.as_datatype_enum in constraint.allowed_values.list.type
            for constraint in kernel.constraint
            if constraint.name == "T"
        )
        for kernel in kernels.get_registered_kernels_for_op(op_type).kernel
    )
