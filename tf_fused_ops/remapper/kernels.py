"""Asks TensorFlow's registry whether a kernel exists, before an op is emitted."""

import functools

from tensorflow.python.framework import kernels


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
