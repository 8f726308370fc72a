"""Dropout's GPU kernels: the bits of the CPU's op, memory, where random words begin, bad input."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from cuda_backends import PLANS, device_fixture

from tf_fused_ops import _library

DTYPES = ["float16", "bfloat16", "float32"]
# Parts of a block of four words, of a vector and of what a block takes at a time; many of these.
SHAPES = [(), (1,), (3,), (4,), (7, 5), (4096,), (3, 8191), (8193,), (16, 8192), (7, 40001)]
KEY, COUNTER = 2**63 + 12345, (2**64 - 700, 7)

# One kernel for a tensor is batch norm's alone.
device = device_fixture(list(PLANS)[1:])


def numbers(shape, dtype):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def scale_of(rate, dtype):
    """Returns the scale for a rate, a number of the dtype."""
    return float(np.dtype(dtype).type(1 / (1 - rate) if 0 <= rate < 1 else 2))


def put_words(device, key=KEY, counter=COUNTER):
    return device.put(np.array([key], np.uint64)), device.put(np.array(counter, np.uint64))


def run(device, x, rate, misaligned=False, in_place=False, key=KEY, counter=COUNTER):
    source = device.put(x, misaligned)
    y = source if in_place else device.poisoned(x.shape, x.dtype, misaligned)
    words = put_words(device, key, counter)
    options = {"rate": rate, "scale": scale_of(rate, x.dtype), "stream": device.stream}
    device.module.dropout(source, *words, y, **options)
    return device.get(y)


def expected(x, rate, key=KEY, counter=COUNTER):
    """The CPU's op."""
    with tf.device("CPU:0"):
        words = tf.constant([key], tf.uint64), tf.constant(counter, tf.uint64)
        y = _library.ops.tf_fused_ops_dropout(
            *(tf.constant(x), *words), rate=rate, scale=scale_of(rate, x.dtype)
        )
    return y.numpy()


def assert_bits(found, wanted):
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(*(np.atleast_1d(v).view(np.uint8) for v in (found, wanted)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, shape, dtype):
    x = numbers(shape, dtype)
    for reverse in (False, True):
        if device.plan is not None:
            device.module.set_device(**PLANS[device.plan], reverse=reverse)
        assert_bits(run(device, x, 0.25), expected(x, 0.25))


# Less than the step between uniform numbers of each type, that step, and as near to 1.
@pytest.mark.parametrize(
    "rate",
    [0.0, 1e-9, 2**-23, 2**-10, 2**-7, 0.3, 0.99, 1 - 2**-7, 1 - 2**-10, 1 - 2**-23],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rates(device, rate, dtype):
    rate = float(np.dtype(dtype).type(rate))
    x = numbers((5003,), dtype)
    assert_bits(run(device, x, rate), expected(x, rate))


@pytest.mark.parametrize("rate", [-1.0, 1.0, np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rates_that_no_number_is_below_or_that_all_are(device, rate, dtype):
    x = np.ones((37,), dtype)
    assert_bits(run(device, x, rate), np.full_like(x, 2 if rate < 0 else 0))


@pytest.mark.parametrize(
    "counter",
    [(2**32 - 3, 0), (2**64 - 3, 7), (2**64 - 1, 2**64 - 1), (0, 2**32 - 1)],
    ids=str,
)
def test_counters_that_carry(device, counter):
    x = numbers((997,), "float32")
    for key in (0, 2**32 - 1, 2**64 - 1):
        assert_bits(run(device, x, 0.5, key=key, counter=counter), expected(x, 0.5, key, counter))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9001,), (2, 16384)], ids=str)
def test_memory_that_is_not_a_multiple_of_16_bytes_or_taken_over(device, shape, dtype):
    x = numbers(shape, dtype)
    for options in ({"misaligned": True}, {"in_place": True}):
        assert_bits(run(device, x, 0.4, **options), expected(x, 0.4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers(device, dtype):
    """What is dropped out is zero, be it no number; what becomes too large is infinite."""
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.array([np.nan, np.inf, -np.inf, -0.0, largest] * 50).astype(dtype)
    y, wanted = run(device, x, 0.5), expected(x, 0.5)
    np.testing.assert_array_equal(y.astype(np.float32), wanted.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(y[3::5]), np.signbit(wanted[3::5]))
    assert (y[::5] == 0).any() and np.isnan(y[::5]).any() and np.isinf(y[4::5]).any()


@pytest.mark.parametrize("shape", [(0,), (0, 5)])
def test_empty(device, shape):
    assert run(device, numbers(shape, "float32"), 0.5).shape == shape


def test_random_words(device):
    key, counter = (device.poisoned(shape, np.uint64) for shape in ((1,), (2,)))
    device.module.store_random_words(KEY, COUNTER, key, counter, stream=device.stream)
    assert (device.get(key).tolist(), device.get(counter).tolist()) == ([KEY], list(COUNTER))


def test_wrong_arguments(device):
    def zeros(*shape, dtype=np.float32):
        return device.put(np.zeros(shape, dtype))

    key, counter = put_words(device)
    good = {"x": zeros(2, 3), "rng_key": key, "rng_counter": counter, "y": zeros(2, 3)}
    for wrong in (
        *({"x": zeros(2, 3, dtype=dtype)} for dtype in (np.float64, np.uint8, np.uint64)),
        *({"y": y} for y in (zeros(3, 2), zeros(2, 3, dtype=ml_dtypes.bfloat16), None)),
        *({"rng_key": key} for key in (counter, zeros(1), zeros(dtype=np.uint64), None)),
        *({"rng_counter": wrong} for wrong in (key, zeros(2), zeros(1, 2, dtype=np.uint64), None)),
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
            device.module.dropout(**(good | wrong), rate=0.5, scale=2.0, stream=device.stream)
