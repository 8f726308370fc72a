"""Max pooling with activation."""

import tensorflow as tf

from tf_fused_ops.ops.reference.elementwise import wide

# The index of a pooled pixel through which no gradient flows.
NO_INDEX = 255


def max_pool_act(x, ksize, strides, padding, activation):
    """activation(max_pool(x)), and where in its window each output was found.

    Args:
        x: [batch, height, width, channels].
        ksize: [1, height, width, 1]; so are strides.
        strides: The windows' distances.
        padding: "SAME" or "VALID".
        activation: "none" or "relu".

    Returns:
        (y, indices): the pixel of the window, row by row, as uint8; 255 where relu stops the
        gradient.
    """
    y, found = tf.nn.max_pool_with_argmax(x, ksize, strides, padding, output_dtype=tf.int64)
    starts = _window_starts(tf.shape(x), ksize, strides, padding)
    shape = tf.cast(tf.shape(x), tf.int64)
    pixel = found // shape[3]
    (top, left), width = starts, shape[2]
    indices = (pixel // width - top) * ksize[2] + pixel % width - left
    if activation == "relu":
        indices = tf.where(y > 0, indices, NO_INDEX)
        y = tf.nn.relu(y)
    return y, tf.cast(indices, tf.uint8)


def max_pool_act_grad(dy, indices, input_sizes, ksize, strides, padding):
    """The gradient of `max_pool_act`.

    Args:
        dy: The gradient of y.
        indices: Those of the forward function.
        input_sizes: The shape of x.
        ksize: As in the forward function; so are strides and padding.
        strides: As in the forward function.
        padding: As in the forward function.

    Returns:
        The gradient of x.
    """
    top, left = _window_starts(input_sizes, ksize, strides, padding)
    batch, height, width, channels = tf.unstack(tf.cast(input_sizes, tf.int64))
    index = tf.cast(indices, tf.int64)
    row, column = top + index // ksize[2], left + index % ksize[2]
    image = tf.range(batch)[:, tf.newaxis, tf.newaxis, tf.newaxis]
    flat = ((image * height + row) * width + column) * channels + tf.range(channels)
    # Segments below zero are left out.
    flat = tf.where(index == NO_INDEX, tf.constant(-1, tf.int64), flat)
    size = batch * height * width * channels
    sums = tf.math.unsorted_segment_sum(wide(dy), flat, size)
    return tf.cast(tf.reshape(sums, input_sizes), dy.dtype)


def _window_starts(input_sizes, ksize, strides, padding):
    """The first row and the first column of every window, which may lie outside the image."""
    starts = []
    for axis in (1, 2):
        size, window, stride = tf.cast(input_sizes[axis], tf.int64), ksize[axis], strides[axis]
        count, before = (size - window) // stride + 1, 0
        if padding == "SAME":
            count = -(-size // stride)
            before = tf.maximum((count - 1) * stride + window - size, 0) // 2
        starts.append(tf.range(count) * stride - before)
    top, left = starts
    return top[:, tf.newaxis, tf.newaxis], left[:, tf.newaxis]
