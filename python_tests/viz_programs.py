"""Programs that the tests of the pictures draw."""

import tensorflow as tf

CONV_SPECS = [tf.TensorSpec(shape) for shape in ([2, 8, 8, 4], [3, 3, 4, 8], [8])]
MATMUL_SPECS = [tf.TensorSpec(shape) for shape in ([4, 16], [16, 32], [32])]
LOOP_SPECS = [tf.TensorSpec(shape) for shape in ([2, 8, 8, 4], [3, 3, 4, 4], [4])]


def conv_bias_relu(x, w, b):
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))


def matmul_bias_gelu(a, w, b):
    return tf.nn.gelu(tf.nn.bias_add(tf.matmul(a, w), b), approximate=True)


def step(x, w, b):
    """Forward and backward, in one graph."""
    with tf.GradientTape() as tape:
        tape.watch([w, b])
        loss = tf.reduce_sum(conv_bias_relu(x, w, b))
    return tape.gradient(loss, [w, b])


def loop(x, w, b):
    """Convolutions in the body of a while loop."""
    for _ in tf.range(tf.constant(3)):
        x = conv_bias_relu(x, w, b)
    return x


def two_convolutions(x, w, b):
    """The first is used twice, so that it cannot be fused with its activation."""
    z = tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)
    return tf.nn.relu(z) + tf.exp(z)


def untraceable(x):
    raise ValueError("this one is broken.\nwith a second line")


NOT_A_FUNCTION = 3
