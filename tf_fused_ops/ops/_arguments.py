"""Conversion of the arguments that all wrappers take, with errors that name the argument."""

import math
import operator

import tensorflow as tf

from tf_fused_ops.ops import _decimals

# An attribute has room for more, a tensor has not.
_LARGEST_SLOT = 2**31 - 2
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


def tensor(name, value, dtypes=_DTYPES):
    """Returns `value`, of a floating-point type the op knows, as a tensor."""
    result = _converted(name, value)
    if result.dtype not in dtypes:
        known = ", ".join(dtype.name for dtype in dtypes)
        raise ValueError(f"{name} must have one of the dtypes {known}; got {result.dtype.name}")
    return result


def _converted(name, value):
    try:
        return tf.convert_to_tensor(value, name=name)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be converted to a tensor: {error}") from error


def tensor_like(name, value, dtype, other):
    """Returns `value` as a tensor of `dtype`, which argument `other` asks for."""
    try:
        result = tf.convert_to_tensor(value, dtype=dtype, name=name)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a {dtype.name} tensor to go with {other}: {error}"
        ) from error
    # A function captures an eager tensor as it is.
    if result.dtype != dtype:
        raise ValueError(
            f"{name} must be a {dtype.name} tensor to go with {other}; got {result.dtype.name}"
        )
    return result


def optional(name, value, dtype, other):
    """Returns the list, of length 0 or 1, that stands for an optional tensor."""
    return [] if value is None else [tensor_like(name, value, dtype, other)]


def data_format(value):
    """Returns the layout, "NHWC" or "NCHW"."""
    if value not in ("NHWC", "NCHW"):
        raise ValueError(f"data_format must be 'NHWC' or 'NCHW'; got {value!r}")
    return value


def padding(value):
    """Returns the attributes padding and explicit_paddings."""
    if isinstance(value, str) and value.upper() in ("SAME", "VALID"):
        return value.upper(), []
    try:
        pairs = [(int(before), int(after)) for before, after in value]
    except (TypeError, ValueError):
        pairs = []
    if isinstance(value, str) or len(pairs) != 4:
        raise ValueError(
            "padding must be 'SAME', 'VALID' or a list of four pairs, one a dimension in the order "
            f"of data_format; got {value!r}"
        )
    return "EXPLICIT", [amount for pair in pairs for amount in pair]


def scale_and_offset(scale, offset, x, axis):
    """Returns the vectors of a normalization along an axis of x; None stands for ones and zeros."""
    wide = tf.float64 if x.dtype == tf.float64 else tf.float32
    static = None if x.shape.rank is None else x.shape[axis]
    length = [tf.shape(x)[axis] if static is None else static]
    scale = tf.ones(length, wide) if scale is None else scale
    offset = tf.zeros(length, wide) if offset is None else offset
    return tensor_like("scale", scale, wide, "x"), tensor_like("offset", offset, wide, "x")


def integer(name, value):
    """Returns an integer as Python has it."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer; got {value!r}") from None


def slot(name, value):
    """Returns the number of a slot of a cache, which has one behind it."""
    value = integer(name, value)
    if not 0 <= value <= _LARGEST_SLOT:
        raise ValueError(f"{name} must be from 0 to {_LARGEST_SLOT}; got {value}")
    return value


def number(name, value):
    """Returns a number as Python has it."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number; got {value!r}") from None


def attribute(name, value, infinite=False):
    """Returns a number that fits an attribute of an op, which has the range of float32; also an
    infinite one if that is allowed."""
    value = number(name, value)
    if not (abs(value) <= float(tf.float32.max) or (infinite and math.isinf(value))):
        raise ValueError(f"{name} must be a number in float32's range; got {value}")
    return value


def scaled(x, scale, masked):
    """Returns x, the scale, and what takes the place of x * scale where a mask is false, as an op
    has them: x is scaled by what has more digits than an attribute of an op on float64."""
    if x.dtype != tf.float64:
        return x, attribute("scale", scale), attribute("masked", masked, infinite=True)
    scale, masked = number("scale", scale), number("masked", masked)
    if not _decimals.survives(masked):
        raise ValueError(f"masked has more digits than an attribute of the op; got {masked}")
    return (x, scale, masked) if _decimals.survives(scale) else (x * scale, 1.0, masked)


def dropped(name, rate, x):
    """Returns x, the rate called `name` and the scale of what dropout leaves, as an op has them: x
    is scaled by what has more digits than an attribute of an op on float64."""
    rate = number(name, rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1; got {rate}")
    scale = 1 / (1 - rate)
    if x.dtype != tf.float64:
        return x, rate, scale
    if not _decimals.survives(rate):
        raise ValueError(f"{name} has more digits than an attribute of the op; got {rate}")
    return (x, rate, scale) if _decimals.survives(scale) else (x * scale, rate, 1.0)


def integers(name, value):
    """Returns `value`, int32 or int64, as a tensor."""
    result = _converted(name, value)
    if result.dtype not in (tf.int32, tf.int64):
        raise ValueError(f"{name} must be int32 or int64; got {result.dtype.name}")
    return result


def shape(name, value):
    """Returns the sizes of a tensor, int32 or int64, as the int32 tensor that an op takes."""
    sizes = integers(name, value)
    known = tf.get_static_value(sizes)
    if known is not None and (known < 0).any():
        raise ValueError(f"{name} must not be negative; got {known.tolist()}")
    # A size out of range must not become another one.
    return sizes if sizes.dtype == tf.int32 else tf.saturate_cast(sizes, tf.int32)


def random_words(name, seed):
    """Returns key and counter of the random words that stateless ops draw for a seed."""
    seed = integers(name, seed)
    if not seed.shape.is_compatible_with([2]):
        raise ValueError(f"{name} must be two integers; got shape {seed.shape}")
    return tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)


def implicit_padding(value):
    """Returns the attribute padding of ops that take no explicit ones."""
    if isinstance(value, str) and value.upper() in ("SAME", "VALID"):
        return value.upper()
    raise ValueError(f"padding must be 'SAME' or 'VALID'; got {value!r}")


def _integers(name, value):
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    try:
        return [int(v) for v in values]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be an integer or a list of them; got {value!r}") from None


def five(name, value):
    """Returns strides or dilations of volumes as five integers, channels last."""
    values = _integers(name, value)
    if len(values) == 1:
        values *= 3
    if len(values) == 3:
        values = [1, *values, 1]
    if len(values) != 5:
        raise ValueError(f"{name} must have 1, 3 or 5 elements; got {value!r}")
    return values


def four(name, value, data_format):
    """Returns strides or dilations as four integers in the order of data_format."""
    values = _integers(name, value)
    if len(values) == 1:
        values *= 2
    if len(values) == 2:
        values = [1, *values, 1] if data_format == "NHWC" else [1, 1, *values]
    if len(values) != 4:
        raise ValueError(f"{name} must have 1, 2 or 4 elements; got {value!r}")
    return values
