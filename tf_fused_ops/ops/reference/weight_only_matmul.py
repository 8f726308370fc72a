"""Matrix product with quantized weights, bias and activation."""

import tensorflow as tf

from tf_fused_ops.ops.reference.elementwise import bias_act, wide


def weight_only_matmul_bias_act(
    a,
    b,
    scale,
    zero=None,
    group=None,
    bias=None,
    *,
    transpose_b,
    bits,
    packed_axis,
    activation,
    alpha,
):
    """activation(a w + bias), w being what `weights` returns.

    Args:
        a: [..., m, k].
        b: As for `weights`; so are scale, zero, group, transpose_b, bits and packed_axis.
        scale: Float32 [groups, n], or [n, groups] with transpose_b.
        zero: Of scale's shape, or None.
        group: [k] or None.
        bias: [n] or None.
        transpose_b: Whether the dimensions of b, scale and zero are swapped.
        bits: 4 or 8.
        packed_axis: The dimension of b along which a byte has two numbers of 4 bits.
        activation: A name of `activations.STOCK`.
        alpha: leaky_relu's slope below zero.

    Returns:
        [..., m, n], of a's dtype.
    """
    w = weights(
        b,
        scale,
        zero,
        group,
        depth=tf.shape(a)[-1],
        transpose_b=transpose_b,
        bits=bits,
        packed_axis=packed_axis,
    )
    w = wide(tf.cast(w, a.dtype))
    z = tf.matmul(wide(a), tf.transpose(w) if transpose_b else w)
    z = bias_act(z, None if bias is None else wide(bias), None, activation, alpha)
    return tf.cast(z, a.dtype)


def weights(b, scale, zero, group, *, depth, transpose_b, bits, packed_axis):
    """Returns the numbers that quantized weights stand for.

    Args:
        b: int8 or uint8; integers as they are, or with 4 bits two in a byte that follow each other
            along packed_axis, the first in the lower bits: [k, n], or [n, k] with transpose_b.
        scale: Float32 [groups, n], or [n, groups] with transpose_b.
        zero: Of scale's shape, or None.
        group: [k], from -groups to groups - 1, or None for parts of equal size.
        depth: k.
        transpose_b: Whether the dimensions of b, scale and zero are swapped.
        bits: 4 or 8.
        packed_axis: 0 or 1.

    Returns:
        A float32 tensor of the shape of the integers.
    """
    axis = 1 if transpose_b else 0
    groups = tf.shape(scale)[axis]
    group = equal_groups(depth, groups) if group is None else tf.cast(group, tf.int32)
    group = tf.where(group < 0, group + groups, group)
    size = depth if packed_axis == axis else tf.shape(scale)[1 - axis]
    numbers = tf.cast(b if bits == 8 else unpacked(b, packed_axis, size), tf.float32)
    if zero is not None:
        numbers -= tf.cast(tf.gather(zero, group, axis=axis), tf.float32)
    return numbers * tf.gather(scale, group, axis=axis)


def equal_groups(depth, groups):
    """Returns the number of the group of each of `depth` rows, parts of equal size, as int32."""
    return tf.range(depth) // tf.maximum(-(-depth // tf.maximum(groups, 1)), 1)


def unpacked(b, axis, size):
    """Returns the integers of which two of 4 bits are in a byte.

    Args:
        b: int8 or uint8, a matrix; integers have a sign where it has one.
        axis: Along which dimension, 0 or 1, both of a byte follow each other, the lower bits first.
        size: How many there are along it.

    Returns:
        A matrix of b's dtype.
    """
    if axis == 1:
        return tf.transpose(unpacked(tf.transpose(b), 0, size))
    mask, four, eight = (tf.cast(number, b.dtype) for number in (15, 4, 8))
    halves = [tf.bitwise.bitwise_and(x, mask) for x in (b, tf.bitwise.right_shift(b, four))]
    if b.dtype == tf.int8:
        halves = [tf.bitwise.bitwise_xor(half, eight) - eight for half in halves]
    return tf.reshape(tf.stack(halves, 1), [-1, tf.shape(b)[1]])[:size]
