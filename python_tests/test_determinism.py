"""Results are bitwise the same from run to run and for any number of threads."""

from conftest import ISAS

PROGRAM = """
import hashlib
import sys
import numpy as np
import tensorflow as tf
from tf_fused_ops import _library
from tf_fused_ops.ops import (
    act, attention, batch_norm_act, conv2d_bias_act, conv2d_transpose_bias_act, dropout,
    group_norm_act, gru, layer_norm, lstm, matmul_bias_act, prelu, quantized_matmul_bias_act,
    softmax, softmax_cross_entropy, sparse_softmax_cross_entropy, update_cache,
    weight_only_matmul_bias_act,
)

rng = np.random.default_rng(0)


def tensor(dtype, *shape):
    return tf.cast(tf.constant(rng.normal(size=shape), tf.float32), dtype)


def digest(function, *inputs):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = tf.nest.flatten(function(*inputs))
        loss = tf.reduce_sum(tf.cast(outputs[0], tf.float32) ** 2)
    values = [*outputs, *tape.gradient(loss, inputs)]
    return hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in values)).hexdigest()


def show(function, *inputs):
    for name in sys.argv[1:]:
        _library.set_isa(name)
        print(_library.isa(), *{digest(function, *inputs) for _ in range(2)})


for dtype in ("float32", "bfloat16"):
    show(lambda x: act(x, "gelu"), tensor(dtype, 301, 307))
    show(lambda x: act(x, "silu"), tensor(dtype, 2111, 1103))
    show(prelu, tensor(dtype, 4, 61, 53, 67), tensor(dtype, 67))
    show(prelu, tensor(dtype, 5, 9001), tensor(dtype, 9001))
    show(
        lambda *v: update_cache(*v, 5, slot=1),
        tensor(dtype, 2, 4, 2053, 67), tensor(dtype, 2, 7, 67), tensor(dtype, 2, 7, 67),
    )
    show(lambda x: dropout(x, 0.1, [3, 4]), tensor(dtype, 2111, 1103))
    for strides in (1, 2):
        show(
            lambda x, w, b: conv2d_bias_act(x, w, b, strides=strides, activation="silu"),
            tensor(dtype, 4, 29, 31, 33), tensor(dtype, 3, 3, 33, 65), tensor(dtype, 65),
        )
    # Filters that overlap, those that do not, and few tasks but those of channels.
    for kernel, shape, channels in (
        (3, (4, 15, 16, 65), 33), (2, (4, 15, 16, 65), 33), (4, (1, 7, 8, 250), 40)
    ):
        batch, height, width, depth = shape
        show(
            lambda x, w, b: conv2d_transpose_bias_act(
                x, w, [batch, 2 * height, 2 * width, channels], b, 2, activation="silu"
            ),
            tensor(dtype, *shape), tensor(dtype, kernel, kernel, channels, depth),
            tensor(dtype, channels),
        )
    # Few tasks but those of channels and of filters.
    show(
        lambda x, w, b: conv2d_bias_act(x, w, b, activation="tanh"),
        tensor(dtype, 1, 13, 14, 250), tensor(dtype, 3, 3, 250, 40), tensor(dtype, 40),
    )
    # Few rows, whose filters are read as they lie or packed block by block.
    for rows in (11, 19, 70):
        show(
            matmul_bias_act,
            tensor(dtype, rows, 605), tensor(dtype, 605, 1300), tensor(dtype, 1300),
        )
    for transpose in (False, True):
        show(
            lambda a, b, bias: matmul_bias_act(a, b, bias, transpose_a=transpose),
            tensor(dtype, 2, 257, 257), tensor(dtype, 257, 300), tensor(dtype, 300),
        )
    # Few rows, with the depth in blocks, and rows that tasks divide.
    for rows, depth, columns in ((3, 3001, 1101), (70, 605, 333), (1100, 130, 65)):
        weights = tf.constant(rng.integers(-128, 128, (depth, columns)), tf.int8)
        b_scale = tf.constant(rng.uniform(50, 200, columns), tf.float32) * depth**0.5
        show(
            lambda a, bias: quantized_matmul_bias_act(a, weights, b_scale, bias, "gelu"),
            tensor(dtype, rows, depth), tensor(dtype, columns),
        )
    # Few rows, which meet the integers, and others, for which these become numbers.
    for rows, depth, columns in ((3, 1027, 555), (70, 605, 333)):
        weights = tf.constant(rng.integers(-128, 128, (depth, (columns + 1) // 2)), tf.int8)
        group = tf.range(depth) // 64
        show(
            lambda a, scale, zero, bias: weight_only_matmul_bias_act(
                a, weights, scale / 100, zero, group, bias, "gelu", bits=4
            ),
            tensor(dtype, rows, depth), tensor("float32", -(-depth // 64), columns),
            tensor("float32", -(-depth // 64), columns), tensor(dtype, columns),
        )
    show(
        layer_norm, tensor(dtype, 5, 301, 203), tensor("float32", 203), tensor("float32", 203)
    )
    show(lambda x: softmax(x, x[:, :1, :1] > 0, 0.125), tensor(dtype, 3, 8, 67, 67))
    labels = tf.constant(rng.integers(0, 5003, 61))
    show(lambda x: sparse_softmax_cross_entropy(labels, x), tensor(dtype, 61, 5003))
    show(softmax_cross_entropy, tensor(dtype, 61, 5003), tensor(dtype, 61, 5003))
    # Heads whose keys are divided among tasks, and several blocks of queries and keys.
    for batch, heads in ((1, 2), (4, 5)):
        show(
            lambda query, key, value: attention(
                query, key, value, key[:, None, None, :, 0, 0] > 0, dropout_rate=0.2, seed=[3, 4]
            ),
            *(tensor(dtype, batch, length, heads, 33) for length in (197, 601, 601)),
        )
    # Images that are shared among threads, and others.
    for images in (8, 3):
        show(
            lambda x, scale, offset: group_norm_act(x, scale, offset, 8, "silu"),
            tensor(dtype, images, 29, 31, 72), tensor("float32", 72), tensor("float32", 72),
        )
    for layout, shape in (("NHWC", (8, 27, 29, 67)), ("NCHW", (8, 67, 27, 29))):
        show(
            lambda x, scale, offset: batch_norm_act(
                x, scale, offset, tf.zeros(67), tf.ones(67), data_format=layout
            ),
            tensor(dtype, *shape), tensor("float32", 67), tensor("float32", 67),
        )
    # Rows whose units workers share, and rows that they divide, for one task and for several.
    for layer, gates in ((lstm, 4), (gru, 3)):
        for batch in (3, 8, 20, 70):
            mask = tf.constant(rng.uniform(size=(batch, 7)) < 0.7)
            show(
                lambda x, w, h, b: layer(x, w, h, b, mask=mask),
                tensor(dtype, batch, 7, 13), tensor(dtype, 13, gates * 150),
                tensor(dtype, 150, gates * 150) / 20, tensor(dtype, gates * 150),
            )
"""


def test_bitwise_equal_for_any_number_of_threads_and_from_run_to_run(run_python):
    first, *others = (run_python(PROGRAM, *ISAS, threads=threads) for threads in (1, 2, 3))
    lines = [line.split() for line in first.splitlines()]
    assert [line[0] for line in lines] == ISAS * 80
    assert all(len(line) == 2 for line in lines), first
    for other in others:
        assert other == first
