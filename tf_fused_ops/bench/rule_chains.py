"""The chains that rules are for, in plain TensorFlow code."""

import tensorflow as tf

from tf_fused_ops.bench.cases import EPSILON


def _conv(x, filters):
    return tf.nn.conv2d(x, filters, 1, "SAME")


def _conv3d(x, filters):
    return tf.nn.conv3d(x, filters, [1] * 5, "SAME")


def _pad_conv(x, filters):
    """One after which the image has half the size."""
    size = filters.shape[0] // 2
    paddings = [[0, 0], [size, size], [size, size], [0, 0]]
    return tf.nn.conv2d(tf.pad(x, paddings), filters, 2, "VALID")


def _causal_conv1d(x, filters):
    paddings = [[0, 0], [filters.shape[0] - 1, 0], [0, 0]]
    return tf.nn.conv1d(tf.pad(x, paddings), filters, 1, "VALID")


def _conv_transpose(x, filters):
    """One after which the image has twice the size."""
    batch, height, width, _ = x.shape
    shape = [batch, 2 * height, 2 * width, filters.shape[2]]
    return tf.nn.conv2d_transpose(x, filters, shape, 2)


def _conv1d_transpose(x, filters):
    """One after which the line has twice the length."""
    batch, length, _ = x.shape
    return tf.nn.conv1d_transpose(x, filters, [batch, 2 * length, filters.shape[1]], 2)


def _moments_batch_norm(x, scale, offset):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, EPSILON)


def _group_norm(x, scale, offset, groups=32):
    """As Keras has it."""
    images, height, width, channels = x.shape
    x = tf.reshape(x, [images, height, width, groups, channels // groups])
    mean, variance = tf.nn.moments(x, [1, 2, 4], keepdims=True)
    vectors = (tf.reshape(v, [1, 1, 1, groups, -1]) for v in (offset, scale))
    y = tf.nn.batch_normalization(x, mean, variance, *vectors, EPSILON)
    return tf.reshape(y, [images, height, width, channels])


def _layer_norm(x, scale, offset):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, EPSILON)


def rms_norm(x, scale):
    mean_square = tf.reduce_mean(tf.square(x), -1, keepdims=True)
    return x * tf.math.rsqrt(mean_square + EPSILON) * scale


def _given_batch_norm(x, scale, offset, mean, variance):
    mean, variance = tf.stop_gradient(mean), tf.stop_gradient(variance)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, EPSILON)


def _conv_batch_norm(op):
    """A convolution, and batch norm in inference by a version of TensorFlow's op."""

    def chain(x, filters, scale, offset, *statistics):
        mean, variance = map(tf.stop_gradient, statistics)
        vectors = {"scale": scale, "offset": offset, "mean": mean, "variance": variance}
        return op(x=_conv(x, filters), **vectors, epsilon=EPSILON, is_training=False).y

    return chain


def _attention(query, key, value):
    scores = tf.einsum("bqhd,bkhd->bhqk", query, key)
    return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores * 0.125), value)


def _grouped_attention(query, key, value):
    from keras import ops

    scores = ops.einsum("btkgh,bskh->bkgts", query, key)
    return ops.einsum("bkgts,bskh->btkgh", tf.nn.softmax(scores * 0.125), value)


def _cross_entropy(logits, labels):
    """Which is not differentiated with respect to the labels."""
    labels = tf.stop_gradient(labels)
    return tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def _sparse_cross_entropy(logits):
    labels = tf.range(logits.shape[0], dtype=tf.int64)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def _dropout(x):
    return tf.nn.experimental.stateless_dropout(x, 0.1, seed=[1, 2])


# Family -> its chain without the activation, as a function of the inputs; where there is a second
# summand it comes last.
FAMILIES = {
    "act": lambda x: x,
    "conv2d": _conv,
    "trained_conv2d": _conv,
    "trained_conv2d_transpose": _conv_transpose,
    "trained_conv3d": _conv3d,
    "grouped_conv2d": _conv,
    "pad_conv2d": _pad_conv,
    "pad_conv2d_bias": lambda x, w, b: tf.nn.bias_add(_pad_conv(x, w), b),
    "pad_conv1d": _causal_conv1d,
    "pad_conv1d_bias": lambda x, w, b: tf.nn.bias_add(_causal_conv1d(x, w), b),
    "conv2d_bias": lambda x, w, b: tf.nn.bias_add(_conv(x, w), b),
    "conv2d_transpose": _conv_transpose,
    "conv2d_transpose_bias": lambda x, w, b: tf.nn.bias_add(_conv_transpose(x, w), b),
    "conv1d_transpose_bias": lambda x, w, b: tf.nn.bias_add(_conv1d_transpose(x, w), b),
    "conv3d": _conv3d,
    "conv3d_bias": lambda x, w, b: tf.nn.bias_add(_conv3d(x, w), b),
    "conv1d": lambda x, w: tf.nn.conv1d(x, w, 1, "SAME"),
    "conv1d_bias": lambda x, w, b: tf.nn.bias_add(tf.nn.conv1d(x, w, 1, "SAME"), b),
    "row_conv2d_bias": lambda x, w, b: tf.nn.bias_add(tf.squeeze(_conv(x, w), [1]), b),
    "matmul": tf.matmul,
    "few_rows_matmul": tf.matmul,
    "few_rows_batch_matmul": tf.matmul,
    "dense": lambda a, w: tf.tensordot(a, w, 1),
    "batch_matmul": tf.matmul,
    "einsum": lambda a, w: tf.einsum("abc,cde->abde", a, w),
    "matmul_bias": lambda a, w, b: tf.nn.bias_add(tf.matmul(a, w), b),
    "dense_bias": lambda a, w, b: tf.nn.bias_add(tf.tensordot(a, w, 1), b),
    "batch_matmul_bias": lambda a, w, b: tf.matmul(a, w) + b,
    "einsum_bias": lambda a, w, b: tf.einsum("abc,cde->abde", a, w) + b,
    "heads_bias": lambda a, w, b: tf.reshape(tf.matmul(a, w), [-1, a.shape[1], *b.shape]) + b,
    "moments_batch_norm": _moments_batch_norm,
    "given_batch_norm": _given_batch_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "rms_norm": rms_norm,
    "attention": _attention,
    "grouped_attention": _grouped_attention,
    "softmax": lambda x: tf.nn.softmax(x * 0.125),
    "dropout": _dropout,
    "cross_entropy": _cross_entropy,
    "sparse_cross_entropy": _sparse_cross_entropy,
    "prelu": lambda x, alpha: tf.nn.relu(x) + -alpha * tf.nn.relu(-x),
    "relu_max_pool": lambda x: tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID"),
    "conv2d_moments": lambda x, w, *vectors: _moments_batch_norm(_conv(x, w), *vectors),
    "conv2d_batch_norm": _conv_batch_norm(tf.raw_ops.FusedBatchNormV3),
    "conv2d_batch_norm_v1": _conv_batch_norm(tf.raw_ops.FusedBatchNorm),
    "conv2d_batch_norm_v2": _conv_batch_norm(tf.raw_ops.FusedBatchNormV2),
    "conv2d_given_batch_norm": lambda x, w, *vectors: _given_batch_norm(_conv(x, w), *vectors),
    "conv1d_given_batch_norm": lambda x, w, *vectors: _given_batch_norm(
        tf.nn.conv1d(x, w, 1, "SAME"), *vectors
    ),
}
