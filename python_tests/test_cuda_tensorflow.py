"""The batch-norm ops on TensorFlow's GPU device: placement; results and gradients as the CPU's."""

import numpy as np
import pytest
import tensorflow as tf
from cases import DTYPES
from tolerances import assert_close

import tf_fused_ops as tfo
from tf_fused_ops import _library


def why_not():
    """Returns the reason why the ops cannot run on a GPU here, or None."""
    if not _library.cuda_loaded():
        return f"GPU kernels: {_library.cuda_status()}"
    return None if tf.config.list_physical_devices("GPU") else "no GPU"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


def run(device, dtype, data_format, shape, activation, side, training):
    """The op's outputs and gradients on `device`, as NumPy arrays."""
    random = np.random.default_rng(0)
    channels = shape[-1] if data_format == "NHWC" else shape[1]
    with tf.device(device):
        x, side_input, dy = (tf.constant(random.normal(size=shape), dtype) for _ in range(3))
        scale, offset, mean, variance = (
            tf.constant(random.uniform(0.5, 1.5, channels), tf.float32) for _ in range(4)
        )
        arguments = [x, scale, offset, *([side_input] if side else [])]
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            y, *statistics = tfo.batch_norm_act(
                *(x, scale, offset, mean, variance),
                side_input=side_input if side else None,
                activation=activation,
                training=training,
                data_format=data_format,
            )
        assert device in y.device
        gradients = tape.gradient(y, arguments, dy)
    return [tf.cast(value, tf.float64).numpy() for value in (y, *statistics, *gradients)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "activation,side", [("none", False), ("relu", False), ("relu", True), ("silu", True)]
)
@pytest.mark.parametrize(
    "shape,data_format", [((4, 9, 7, 30), "NHWC"), ((4, 64), "NHWC"), ((3, 5, 8, 24), "NCHW")]
)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float64"])
def test_agrees_with_the_cpu(dtype, shape, data_format, activation, side, training):
    arguments = (dtype, data_format, shape, activation, side, training)
    on_gpu, on_cpu = run("GPU:0", *arguments), run("CPU:0", *arguments)
    for i, (value, expected) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        assert_close(f"output {i}", value, expected, dtype)
    again = run("GPU:0", *arguments)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(on_gpu, again, strict=True))
