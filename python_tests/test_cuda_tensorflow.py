"""Ops on TensorFlow's GPU device: placement; results and gradients as the CPU's."""

import numpy as np
import pytest
import tensorflow as tf
from cases import DTYPES
from remapping import DROPOUT, op_counts
from tolerances import assert_close

import tf_fused_ops as tfo
from tf_fused_ops import _library
from tf_fused_ops.cli import main


def why_not():
    """Returns the reason why the ops cannot run on a GPU here, or None."""
    if not _library.cuda_loaded():
        return f"GPU kernels: {_library.cuda_status()}"
    return None if tf.config.list_physical_devices("GPU") else "no GPU"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


def batch_norm(device, dtype, data_format, shape, activation, side, training):
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


def layer_norm(device, dtype, shape, subtract_mean):
    """The op's outputs and gradients on `device`, as NumPy arrays."""
    random = np.random.default_rng(0)
    with tf.device(device):
        x, dy = (tf.constant(random.normal(size=shape), dtype) for _ in range(2))
        scale, offset = (
            tf.constant(random.uniform(0.5, 1.5, shape[-1]), tf.float32) for _ in range(2)
        )
        with tf.GradientTape() as tape:
            tape.watch([x, scale, offset])
            if subtract_mean:
                y, vectors = tfo.layer_norm(x, scale, offset), [scale, offset]
            else:
                y, vectors = tfo.rms_norm(x, scale), [scale]
        assert device in y.device
        gradients = tape.gradient(y, [x, *vectors], dy)
    return [tf.cast(value, tf.float64).numpy() for value in (y, *gradients)]


def softmax(device, dtype, shape, mask_shape):
    """The op's output and gradient on `device`, as NumPy arrays."""
    random = np.random.default_rng(0)
    with tf.device(device):
        x, dy = (tf.constant(random.normal(size=shape), dtype) for _ in range(2))
        mask = None if mask_shape is None else tf.constant(random.uniform(size=mask_shape) < 0.7)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfo.softmax(x, mask, 0.125)
        assert device in y.device
        values = (y, tape.gradient(y, x, dy))
    return [tf.cast(value, tf.float64).numpy() for value in values]


def cross_entropy(device, dtype, shape, labels_dtype):
    """The op's output and gradient on `device`, as NumPy arrays."""
    random = np.random.default_rng(0)
    with tf.device(device):
        logits = tf.constant(random.normal(1, 4, size=shape), dtype)
        dloss = tf.constant(random.normal(size=shape[:-1]), dtype)
        labels = tf.constant(random.integers(0, shape[-1], shape[:-1]), labels_dtype)
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = tfo.sparse_softmax_cross_entropy(labels, logits)
        assert device in loss.device
        values = (loss, tape.gradient(loss, logits, dloss))
    return [tf.cast(value, tf.float64).numpy() for value in values]


def with_gradient(drop, x, dy):
    """What `drop` makes of x and its gradient, as bytes."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = drop(x)
    return [value.numpy().tobytes() for value in (y, tape.gradient(y, x, dy))]


def check(run, dtype, *arguments):
    """Compares what `run` gives on both devices, and on the GPU twice."""
    on_gpu, on_cpu, again = (
        run(device, dtype, *arguments) for device in ("GPU:0", "CPU:0", "GPU:0")
    )
    for i, (value, expected) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        assert_close(f"output {i}", value, expected, dtype)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(on_gpu, again, strict=True))


DTYPES_OF_GPUS = [dtype for dtype in DTYPES if dtype != "float64"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "activation,side", [("none", False), ("relu", False), ("relu", True), ("silu", True)]
)
@pytest.mark.parametrize(
    "shape,data_format", [((4, 9, 7, 30), "NHWC"), ((4, 64), "NHWC"), ((3, 5, 8, 24), "NCHW")]
)
@pytest.mark.parametrize("dtype", DTYPES_OF_GPUS)
def test_batch_norm_agrees_with_the_cpu(dtype, shape, data_format, activation, side, training):
    check(batch_norm, dtype, data_format, shape, activation, side, training)


@pytest.mark.parametrize("subtract_mean", [True, False])
@pytest.mark.parametrize("shape", [(4, 9, 30), (50, 768), (3, 5000)])
@pytest.mark.parametrize("dtype", DTYPES_OF_GPUS)
def test_layer_norm_agrees_with_the_cpu(dtype, shape, subtract_mean):
    check(layer_norm, dtype, shape, subtract_mean)


@pytest.mark.parametrize("shape", [(), (0, 5), (7, 5, 3), (513, 33), (4, 16384)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES_OF_GPUS)
def test_dropout_has_the_bits_of_the_cpu_and_of_stock(dtype, shape):
    random, seed, results = np.random.default_rng(0), (3, 2**31 - 5), []
    values = [random.normal(size=shape) for _ in range(2)]
    for drop in (tfo.dropout, tf.nn.experimental.stateless_dropout):
        for device in ("GPU:0", "CPU:0"):
            with tf.device(device):
                x, dy = (tf.constant(value, dtype) for value in values)
                y = drop(x, 0.25, seed)
                assert device in y.device
                results.append(with_gradient(lambda x, drop=drop: drop(x, 0.25, seed), x, dy))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("shape_type", [tf.int32, tf.int64])
@pytest.mark.parametrize("seeds", [(3, 0), (5, 2**40)])
def test_random_words_are_where_stock_begins(seeds, shape_type):
    shape, seed = tf.constant([37, 5], shape_type), dict(zip(("seed", "seed2"), seeds, strict=True))
    with tf.device("GPU:0"):
        for _ in range(2):
            expected = tf.raw_ops.RandomUniform(shape=shape, dtype=tf.float32, **seed)
            key, counter = _library.ops.tf_fused_ops_random_words(shape=shape, **seed)
            found = tf.raw_ops.StatelessRandomUniformV2(
                shape=shape, key=key, counter=counter, alg=1
            )
            assert "GPU:0" in key.device
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES_OF_GPUS)
@pytest.mark.parametrize("seed", [7, (1, 2)])
def test_dropout_is_fused_to_the_same_bits(seed, dtype):
    def code(x):
        with tf.device("GPU:0"), tf.GradientTape() as tape:
            tape.watch(x)
            if isinstance(seed, int):
                y = tf.nn.dropout(x, 0.25, seed=seed)
            else:
                y = tf.nn.experimental.stateless_dropout(x, 0.25, seed)
            return y, tape.gradient(y, x)

    x = tf.cast(tf.random.normal([513, 33]), dtype)
    runs = []
    for decorator in (tfo.function, tf.function):
        compiled = decorator(code)
        runs.append([value.numpy().tobytes() for _ in range(2) for value in compiled(x)])
        fused = op_counts(compiled.get_concrete_function(x))[DROPOUT]
        assert fused == (2 if decorator is tfo.function else 0)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "shape,mask_shape", [((2, 4, 9, 30), (2, 1, 1, 30)), ((50, 768), None), ((3, 5000), (3, 5000))]
)
@pytest.mark.parametrize("dtype", DTYPES_OF_GPUS)
def test_softmax_agrees_with_the_cpu(dtype, shape, mask_shape):
    check(softmax, dtype, shape, mask_shape)


@pytest.mark.parametrize("labels_dtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(2, 9, 30), (50, 8192), (20, 50257)])
@pytest.mark.parametrize("dtype", DTYPES_OF_GPUS)
def test_cross_entropy_agrees_with_the_cpu(dtype, shape, labels_dtype):
    check(cross_entropy, dtype, shape, labels_dtype)


@pytest.mark.parametrize("label", [-1, 5, 2**40])
def test_labels_that_are_no_classes_make_nan_as_in_stock(label):
    """Of their rows alone; also behind the rule."""

    def step(code):
        def run(labels, logits):
            with tf.device("GPU:0"), tf.GradientTape() as tape:
                tape.watch(logits)
                loss = code(labels, logits)
                return loss, tape.gradient(loss, logits)

        return run

    stock = step(tf.nn.sparse_softmax_cross_entropy_with_logits)
    fused = tfo.function(stock)
    arguments = (tf.constant([1, label, 2], tf.int64), tf.random.normal([3, 5]))
    expected = stock(*arguments)
    for found in (step(tfo.sparse_softmax_cross_entropy)(*arguments), fused(*arguments)):
        for value, other in zip(found, expected, strict=True):
            assert np.isnan(value[1]).all() and np.isfinite(value[0]).all()
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)
    assert fused.remap_reports[0].counts() == {"sparse_cross_entropy": 1}


def test_benchmark(capsys):
    """Every peer that is TensorFlow computes a layer on the GPU."""
    arguments = ["--cases", "*_tiny", "--quick", "--peers", "stock,ours", "--dtype", "bfloat16"]
    assert main(["bench", "--device", "gpu", *arguments]) == 0
    card, limits, *tables = capsys.readouterr().out.splitlines()
    assert card.endswith("; bfloat16") and "copied" in limits
    assert sum(line.startswith("| conv 3x3 17→33, 2x7x7, relu ") for line in tables) == 2
    assert not any(" - " in line for line in tables), "every peer has a time"
