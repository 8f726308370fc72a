"""Wrong calls end in an error that names the argument; none of them crashes."""

import functools
import itertools

import pytest
import tensorflow as tf
from bad_calls import (
    ATTENTION,
    BATCH_NORM,
    CONV,
    CONV_TRANSPOSE,
    CROSS_ENTROPY,
    ERRORS,
    GROUP_NORM,
    LAYER_NORM,
    MATMUL,
    PRELU,
    QUANTIZED_MATMUL,
    SOFTMAX,
    UPDATE_CACHE,
    WEIGHT_ONLY_MATMUL,
    dtype_of,
)

from tf_fused_ops.ops import (
    act,
    attention,
    batch_norm_act,
    conv2d_bias_act,
    conv2d_transpose_bias_act,
    dropout,
    group_norm_act,
    gru,
    layer_norm,
    lstm,
    matmul_bias_act,
    prelu,
    quantized_matmul_bias_act,
    simple_rnn,
    softmax,
    softmax_cross_entropy,
    sparse_softmax_cross_entropy,
    update_cache,
    weight_only_matmul_bias_act,
)

RNN = {
    **{"x": (2, 5, 3), "kernel": (3, 4), "recurrent_kernel": (4, 4), "bias": (4,)},
    **{"h": (2, 4), "mask": (2, 5)},
}
GRU = RNN | {"kernel": (3, 12), "recurrent_kernel": (4, 12)}
GRU |= dict.fromkeys(("bias", "recurrent_bias"), (12,))
H = tf.ones((2, 4))
LSTM = RNN | {"kernel": (3, 16), "recurrent_kernel": (4, 16), "bias": (16,), "c": (2, 4)}


def of_tensors(layer):
    """A recurrent layer as a function of tensors alone."""

    def call(h=None, c=None, mask=None, **values):
        mask = None if mask is None else mask > 0
        return layer(**values, initial_state=h if c is None else (h, c), mask=mask)

    return call


OPS = {
    "act": (act, {"x": (2, 5)}),
    "conv": (conv2d_bias_act, CONV),
    "conv_transpose": (
        functools.partial(conv2d_transpose_bias_act, output_shape=[2, 5, 5, 4], strides=2),
        CONV_TRANSPOSE,
    ),
    "matmul": (matmul_bias_act, MATMUL),
    "quantized_matmul": (quantized_matmul_bias_act, QUANTIZED_MATMUL),
    "weight_only_matmul": (
        functools.partial(weight_only_matmul_bias_act, bits=4),
        WEIGHT_ONLY_MATMUL,
    ),
    "batch_norm": (batch_norm_act, BATCH_NORM),
    "layer_norm": (layer_norm, LAYER_NORM),
    "group_norm": (functools.partial(group_norm_act, groups=3), GROUP_NORM),
    "softmax": (softmax, SOFTMAX),
    "prelu": (prelu, PRELU),
    "attention": (attention, ATTENTION),
    "cross_entropy": (softmax_cross_entropy, CROSS_ENTROPY),
    "sparse_cross_entropy": (
        lambda logits, labels: sparse_softmax_cross_entropy(tf.cast(labels, tf.int32), logits),
        {"logits": (2, 5, 3), "labels": (2, 5)},
    ),
    "dropout": (functools.partial(dropout, rate=0.1, seed=[1, 2]), {"x": (2, 5)}),
    "dropped_attention": (
        functools.partial(attention, dropout_rate=0.1, seed=[1, 2]),
        ATTENTION,
    ),
    "masked_attention": (
        lambda query, key, value, mask: attention(query, key, value, mask > 0),
        ATTENTION | {"mask": (2, 1, 5, 6)},
    ),
    "biased_attention": (attention, ATTENTION | {"bias": (2, 1, 5, 6)}),
    "masked_softmax": (lambda x, mask: softmax(x, mask > 0), SOFTMAX | {"mask": (2, 1, 3)}),
    "update_cache": (functools.partial(update_cache, index=0), UPDATE_CACHE),
}
OPS |= {
    "simple_rnn": (of_tensors(simple_rnn), RNN),
    "gru": (of_tensors(gru), GRU),
    "lstm": (of_tensors(lstm), LSTM),
}
CONVOLUTIONS = ("conv", "conv_transpose")
RECURRENT = ("simple_rnn", "gru", "lstm")
DROPPING = ("dropout", "dropped_attention")

# (op, what is wrong, the argument that the error names). A tuple of integers is a tensor's shape.
WRONG_SHAPES = [
    ("conv", {"x": (5, 5, 3)}, "input|x"),
    ("conv", {"x": ()}, "input|x"),
    ("conv", {"x": (2, 5, 5, 2)}, "filters"),
    ("conv", {"filters": (3, 3, 3)}, "filters"),
    ("conv", {"filters": (3, 3, 2, 4)}, "filters"),
    ("conv", {"filters": (3, 3, 0, 4)}, "filters"),
    ("conv", {"filters": (3, 3, 6, 4)}, "filters"),
    ("conv", {"filters": (3, 3, 1, 4)}, "filters"),
    ("conv", {"filters": (0, 3, 3, 4)}, "filters"),
    ("conv", {"filters": (9, 9, 3, 4), "padding": "VALID"}, "filters"),
    ("conv", {"bias": (3,)}, "bias"),
    ("conv", {"bias": ()}, "bias"),
    ("conv", {"bias": (1, 4)}, "bias"),
    ("conv", {"bias": (0,)}, "bias"),
    ("conv", {"scale": (3,)}, "scale"),
    ("conv", {"scale": ()}, "scale"),
    ("conv", {"scale": (1, 4)}, "scale"),
    ("conv", {"scale": (1,)}, "scale"),
    ("conv", {"side_input": (2, 5, 5, 3)}, "side_input"),
    ("conv", {"side_input": (1, 5, 5, 4)}, "side_input"),
    ("conv", {"side_input": (4,)}, "side_input"),
    ("conv", {"data_format": "NCHW"}, "filters"),
    *[
        ("conv_transpose", {"output_shape": v}, "output_shape")
        for v in (
            *(3, [], [5, 5], [2, 5, 5], [2, 5, 5, 4, 1], [[2, 5, 5, 4]]),
            *([2, 4, 5, 4], [2, 7, 5, 4], [2, 5, 4, 4], [2, 5, 7, 4], [2, 0, 5, 4], [2, 5, 0, 4]),
            *([1, 5, 5, 4], [0, 5, 5, 4], [-2, 5, 5, 4], [2, -5, 5, 4]),
            *([2, 2**31 - 1, 5, 4], [2, 5, 2**40, 4], [2**31 - 1] * 4, [2**63 - 1] * 4),
        )
    ],
    # Which of the two is wrong is a matter of taste.
    *[
        ("conv_transpose", {"output_shape": v}, "output_shape|filters")
        for v in (*([2, 5, 5, 3], [2, 5, 5, 0], [2, 5, 5, -4], [2, 5, 5, 2**31 - 1], [2, 4, 5, 5]),)
    ],
    *[("conv_transpose", {"x": v}, "input|x") for v in ((), (3,), (3, 3, 3), (2, 3, 3, 3, 1))],
    *[
        ("conv_transpose", {"x": v}, "output_shape")
        for v in ((1, 3, 3, 3), (2, 2, 3, 3), (2, 3, 4, 3), (2, 0, 3, 3))
    ],
    ("conv_transpose", {"x": (2, 3, 3, 4)}, "filters"),
    *[
        ("conv_transpose", {"filters": v}, "filters")
        for v in (
            *((), (3,), (3, 3, 4), (3, 3, 4, 3, 1), (3, 3, 4, 4), (3, 3, 4, 0), (3, 3, 4, 1)),
            *((3, 3, 2, 3), (3, 3, 0, 3), (3, 3, 3, 4), (0, 3, 4, 3), (3, 0, 4, 3)),
        )
    ],
    ("conv_transpose", {"filters": (9, 9, 4, 3), "padding": "VALID"}, "filters"),
    *[("conv_transpose", {"bias": v}, "bias") for v in ((), (0,), (1,), (3,), (1, 4), (4, 1))],
    *[
        ("conv_transpose", {"side_input": v}, "side_input")
        for v in ((), (4,), (1, 5, 5, 4), (2, 5, 5, 3), (2, 3, 3, 3), (2, 5, 5, 4, 1))
    ],
    ("conv_transpose", {"data_format": "NCHW"}, "output_shape|filters"),
    ("conv_transpose", {"strides": 1}, "output_shape"),
    ("conv_transpose", {"strides": 3}, "output_shape"),
    ("conv_transpose", {"padding": "VALID"}, "output_shape"),
    ("conv_transpose", {"padding": [[0, 0], [2, 2], [0, 0], [0, 0]]}, "output_shape"),
    ("conv_transpose", {"padding": "VALID", "dilations": 2}, "output_shape"),
    ("matmul", {"a": (3,)}, "a"),
    ("matmul", {"a": (2, 5, 4)}, "a"),
    ("matmul", {"b": (1, 3, 4)}, "b"),
    ("matmul", {"b": (3,)}, "b"),
    ("matmul", {"transpose_b": True}, "a"),
    ("matmul", {"transpose_a": True}, "a"),
    ("matmul", {"bias": (3,)}, "bias"),
    ("matmul", {"bias": (4, 1)}, "bias"),
    ("matmul", {"side_input": (5, 4)}, "side_input"),
    *[
        ("quantized_matmul", {name: v}, names)
        for name, names, values in (
            ("a", "a must have rank", ((), (3,))),
            ("a", "inner dimension of [ab]", ((2, 5, 4), (5, 0))),
            ("b", "b must have rank", ((), (3,), (1, 3, 4))),
            ("b", "inner dimension of [ab]", ((4, 4), (0, 4))),
            ("b_scale", "b_scale", ((), (1,), (3,), (1, 4))),
            ("bias", "bias", ((), (1,), (3,), (4, 1))),
        )
        for v in values
    ],
    ("quantized_matmul", {"transpose_b": True}, "b|b_scale"),
    *[
        ("weight_only_matmul", {name: v}, names)
        for name, names, values in (
            ("a", "a must have rank", ((), (6,))),
            ("a", "group|b (must|has)", ((2, 5, 7), (5, 0))),
            ("b", "b must have rank", ((), (12,), (1, 6, 2))),
            ("b", "b (must|has)", ((5, 2), (7, 2), (0, 2), (6, 1), (6, 3), (6, 4), (6, 0), (3, 4))),
            ("scale", "scale must have rank", ((), (1, 3, 4))),
            ("scale", "zero|scale", ((4,), (2, 4), (3, 5), (3, 1), (0, 4), (4, 3))),
            ("zero", "zero", ((), (4,), (1, 4), (3, 5), (3, 1), (4, 3), (3, 4, 1))),
            ("group", "group", ((), (5,), (7,), (1,), (0,), (6, 1))),
            ("bias", "bias", ((), (1,), (3,), (8,), (4, 1))),
        )
        for v in values
    ],
    ("weight_only_matmul", {"transpose_b": True}, "b (must|has)|group|bias"),
    ("weight_only_matmul", {"packed_axis": 0}, "b (must|has)"),
    ("weight_only_matmul", {"packed_axis": -2}, "b (must|has)"),
    ("weight_only_matmul", {"bits": 8}, "b (must|has)"),
    ("weight_only_matmul", {"scale": (0, 4), "zero": (0, 4)}, "scale must have a group"),
    *[("weight_only_matmul", {"scale": (4,), "zero": v}, "zero|scale") for v in ((), (3,), (3, 4))],
    *[
        (
            "weight_only_matmul",
            {"b": (4, 3), "transpose_b": True, "scale": (4,), "zero": v},
            "zero|scale",
        )
        for v in ((), (3,), (4, 1))
    ],
    ("layer_norm", {"x": ()}, "x"),
    ("layer_norm", {"x": (2, 5, 4)}, "scale"),
    ("layer_norm", {"scale": (4,)}, "scale"),
    ("layer_norm", {"scale": (1,)}, "scale"),
    ("layer_norm", {"scale": ()}, "scale"),
    ("layer_norm", {"offset": (4,)}, "offset"),
    ("layer_norm", {"offset": (1, 3)}, "offset"),
    ("group_norm", {"x": (6,)}, "x"),
    ("group_norm", {"x": ()}, "x"),
    ("group_norm", {"x": (1, 1, 1, 1, 1, 6)}, "x"),
    ("group_norm", {"x": (2, 5, 3)}, "scale"),
    ("group_norm", {"groups": 4}, "groups"),
    ("group_norm", {"groups": 12}, "groups"),
    ("group_norm", {"groups": 0}, "groups"),
    ("group_norm", {"groups": -3}, "groups"),
    ("group_norm", {"data_format": "NCHW"}, "scale"),
    ("group_norm", {"scale": (3,)}, "scale"),
    ("group_norm", {"scale": ()}, "scale"),
    ("group_norm", {"offset": (1, 6)}, "offset"),
    ("softmax", {"x": ()}, "x"),
    *[("prelu", {"alpha": v}, "alpha") for v in ((2, 3), (4,), (5, 1), (1, 2, 5, 3), (0,))],
    ("prelu", {"x": ()}, "alpha"),
    ("masked_softmax", {"x": (3,)}, "mask"),
    *[("masked_softmax", {"mask": v}, "mask") for v in ((), (1,), (2,), (3, 3), (2, 5, 1))],
    ("masked_softmax", {"mask": (1, 2, 5, 3)}, "mask"),
    *[("attention", {"query": v}, "query") for v in ((), (4,), (2, 5, 4), (1, 2, 5, 3, 4))],
    ("attention", {"query": (3, 5, 3, 4)}, "key"),
    ("attention", {"query": (2, 5, 3, 0)}, "key"),
    *[("attention", {"key": v}, "key") for v in ((), (2, 6, 3), (2, 6, 1, 4), (2, 6, 3, 5))],
    *[("attention", {"value": v}, "value") for v in ((), (6, 7), (2, 5, 3, 7), (1, 6, 3, 7))],
    ("attention", {"heads_first": True}, "key"),
    *[("masked_attention", {"mask": v}, "mask") for v in ((), (1,), (5, 1), (5, 3, 6, 6))],
    ("masked_attention", {"mask": (1, 2, 1, 5, 6)}, "mask"),
    *[("biased_attention", {"bias": v}, "bias") for v in ((), (1,), (5, 1), (5, 3, 6, 6))],
    ("biased_attention", {"bias": (1, 2, 1, 5, 6)}, "bias"),
    *[(f"{kind}cross_entropy", {"logits": ()}, "logits") for kind in ("", "sparse_")],
    *[
        ("sparse_cross_entropy", {"labels": v}, "labels")
        for v in ((), (2,), (5, 2), (2, 5, 3), (2, 1))
    ],
    *[
        ("cross_entropy", {"labels": v}, "labels")
        for v in ((), (3,), (2, 5), (5, 3), (2, 5, 1), (2, 1, 3), (1, 5, 3), (2, 5, 3, 1))
    ],
    *[
        ("cross_entropy", {"logits": (5, 3), "labels": v}, "labels")
        for v in ((3,), (5,), (5, 1), (1, 1), (4, 3), (0, 3), (3, 5), (1, 5, 3))
    ],
    *[("update_cache", {"cache": v}, "cache") for v in ((), (2,), (2, 6), (2, 6, 4, 5))],
    *[("update_cache", {"cache": (*v, 6, 4, 5)}, "slot") for v in ((2, 1), (2, 0), (2, 1, 1))],
    *[
        ("update_cache", {"cache": v}, "key")
        for v in ((1, 2, 6, 4, 5), (2, 2, 6, 4, 1), (2, 2, 6, 5, 4), (2, 2, 0, 4, 5))
    ],
    *[
        ("update_cache", {name: v}, name)
        for name in ("key", "value")
        for v in ((), (2,), (2, 1, 4), (2, 1, 1, 5), (2, 7, 4, 5), (1, 1, 4, 5), (2, 6, 1, 4, 5))
    ],
    ("batch_norm", {"x": (3,)}, "x"),
    ("batch_norm", {"x": (1, 1, 1, 1, 1, 3)}, "x"),
    ("batch_norm", {"x": (2, 5, 4)}, "scale"),
    ("batch_norm", {"data_format": "NCHW"}, "scale"),
    ("batch_norm", {"scale": (4,)}, "scale"),
    ("batch_norm", {"offset": (4,)}, "offset"),
    ("batch_norm", {"mean": (1,)}, "mean"),
    ("batch_norm", {"variance": (3, 1)}, "variance"),
    ("batch_norm", {"variance": ()}, "variance"),
    ("batch_norm", {"side_input": (2, 5, 1)}, "side_input"),
    ("batch_norm", {"side_input": (3,)}, "side_input"),
    # Also as the ops call it that a layer consists of.
    *[
        (op, {name: v}, names)
        for op in RECURRENT
        for name, names, values in (
            ("x", "x|a", ((), (5, 3), (2, 5, 3, 1))),
            ("x", "kernel|b", ((2, 5, 2),)),
            ("kernel", "kernel|b", ((), (3,), (3, 4, 4), (2, 4))),
            ("kernel", "(recurrent_)?kernel|bias", ((3, 5),)),
            ("recurrent_kernel", "(recurrent_)?kernel", ((), (4,), (4, 4, 4), (4, 5))),
            ("bias", "bias", ((), (3,), (1, 4))),
            ("h", "initial_state|states", ((), (4,), (2, 3), (1, 4), (2, 1, 4))),
            ("mask", "mask", ((), (5,), (2, 1), (5, 2), (2, 5, 1))),
        )
        for v in values
    ],
    *[("gru", {"recurrent_bias": v}, "(recurrent_)?bias") for v in ((), (3,), (4,), (1, 12))],
    *[("lstm", {"c": v}, "initial_state|states") for v in ((), (4,), (2, 3), (1, 4))],
]
WRONG_ATTRIBUTES = [
    *[
        (op, {"strides": v}, "strides")
        for op in CONVOLUTIONS
        for v in (0, -1, [1, 1, 1], [2, 1, 1, 1], 2**40, "two")
    ],
    *[
        (op, {"dilations": v}, "dilations")
        for op in CONVOLUTIONS
        for v in (0, -1, [1, 1, 1], [1, 1, 1, 2], 2**31)
    ],
    *[
        (op, {"padding": v}, "padding|explicit_paddings")
        for op in CONVOLUTIONS
        for v in (
            "FULL",
            "EXPLICIT",
            3,
            None,
            [[1, 1], [1, 1]],
            [[0, 0], [-1, 0], [0, 0], [0, 0]],
            [[1, 0], [0, 0], [0, 0], [0, 0]],
            [[0, 0], [0, 0], [0, 0], [0, 1]],
            [[0, 0], [0], [0, 0], [0, 0]],
            [[0, 0], [2**31, 0], [0, 0], [0, 0]],
        )
    ],
    *[
        (op, {"activation": v}, "activation")
        for op in (
            *("act", *CONVOLUTIONS, "matmul", "quantized_matmul", "batch_norm", "group_norm"),
            *("weight_only_matmul", *RECURRENT),
        )
        for v in ("swoosh", 3, "")
    ],
    *[
        (op, {"data_format": "NHCW"}, "data_format")
        for op in (*CONVOLUTIONS, "batch_norm", "group_norm")
    ],
    *[
        ("conv_transpose", {"output_shape": v}, "output_shape")
        for v in (
            None,
            "text",
            [2.0, 5.0, 5.0, 4.0],
            [None, 5, 5, 4],
            [[2], [5, 5, 4]],
            [2**80] * 4,
        )
    ],
    *[("group_norm", {"groups": v}, "groups") for v in (2**40, "two", 1.5, None)],
    *[(op, {"activation": v}, "activation") for op in RECURRENT for v in ("none", "relu6", None)],
    *[("softmax", {name: v}, name) for name in ("scale", "masked") for v in ("two", None)],
    *[
        ("quantized_matmul", {"epsilon": v}, "epsilon")
        for v in ("two", None, 1e39, -1.0, float("nan"), float("inf"))
    ],
    *[
        ("weight_only_matmul", {name: v}, name)
        for name, values in {
            "bits": (5, 0, -4, 16, 2**40, 4.0, "four", None),
            "packed_axis": (2, -3, 2**40, 1.0, "one", None),
        }.items()
        for v in values
    ],
    *[("attention", {name: "two"}, name) for name in ("scale", "masked")],
    *[
        ("dropout", {"rate": v}, "rate")
        for v in ("two", None, -0.1, 1, 1.5, float("nan"), float("inf"))
    ],
    *[("update_cache", {"slot": v}, "slot") for v in (-1, 5, 2**31 - 2, 2**80, 1.5, "two", None)],
    *[("update_cache", {"index": v}, "index") for v in (None, 1.5, [], [1, 2], [[1]], "one")],
    *[("dropped_attention", {"dropout_rate": v}, "dropout_rate") for v in ("two", -1, 1)],
    *[
        (op, {"seed": v}, "seed")
        for op in DROPPING
        for v in (None, 3, [1], [1, 2, 3], [[1, 2]], [1.0, 2.0], "ab")
    ],
    *[
        (op, wrong, next(iter(wrong)))
        for op in ("softmax", "attention")
        for wrong in (
            *({"scale": v} for v in (1e39, float("nan"), float("inf"))),
            *({"masked": v} for v in (-1e39, float("nan"))),
        )
    ],
]
WRONG_DTYPES = [
    ("act", {"x": tf.int32}, "x"),
    ("act", {"x": tf.string}, "x"),
    ("conv", {"x": tf.int32}, "x"),
    ("conv", {"x": tf.complex64}, "x"),
    ("conv", {"x": tf.string}, "x"),
    ("conv", {"filters": tf.float64}, "filters"),
    ("conv", {"bias": tf.float16}, "bias"),
    ("conv", {"scale": tf.float64}, "scale"),
    ("conv", {"side_input": tf.float64}, "side_input"),
    *[("conv_transpose", {"x": v}, "x") for v in (tf.int32, tf.complex64, tf.string)],
    ("conv_transpose", {"filters": tf.float64}, "filters"),
    ("conv_transpose", {"bias": tf.float16}, "bias"),
    ("conv_transpose", {"side_input": tf.bfloat16}, "side_input"),
    ("matmul", {"a": tf.int8}, "a"),
    ("matmul", {"b": tf.bfloat16}, "b"),
    ("matmul", {"bias": tf.float64}, "bias"),
    *[("quantized_matmul", {"a": v}, "a") for v in (tf.float64, tf.int8, tf.string)],
    *[("quantized_matmul", {"b": v}, "b") for v in (tf.float32, tf.uint8, tf.int32)],
    *[("quantized_matmul", {"b_scale": v}, "b_scale") for v in (tf.float64, tf.float16)],
    ("quantized_matmul", {"bias": tf.bfloat16}, "bias"),
    *[
        ("weight_only_matmul", {name: v}, name)
        for name, values in {
            "a": (tf.float64, tf.int8, tf.string),
            "b": (tf.float32, tf.int32, tf.int16, tf.bool),
            "scale": (tf.float64, tf.float16),
            "zero": (tf.int8, tf.float64),
            "group": (tf.int64, tf.float32),
            "bias": (tf.bfloat16,),
        }.items()
        for v in values
    ],
    ("group_norm", {"x": tf.int32}, "x"),
    ("softmax", {"x": tf.int32}, "x"),
    *[("prelu", {name: tf.int32}, name) for name in PRELU],
    ("dropout", {"x": tf.int32}, "x"),
    *[(f"{kind}cross_entropy", {"logits": tf.int32}, "logits") for kind in ("", "sparse_")],
    *[("cross_entropy", {"labels": v}, "labels") for v in (tf.int32, tf.float16, tf.float64)],
    ("attention", {"query": tf.int32}, "query"),
    ("attention", {"key": tf.float64}, "key"),
    ("attention", {"value": tf.float16}, "value"),
    ("biased_attention", {"bias": tf.float64}, "bias"),
    *[("update_cache", {"cache": v}, "cache") for v in (tf.int8, tf.int32, tf.string)],
    *[("update_cache", {name: tf.float64}, name) for name in ("key", "value")],
    ("group_norm", {"scale": tf.float64}, "scale"),
    ("group_norm", {"offset": tf.float16}, "offset"),
    ("batch_norm", {"x": tf.bool}, "x"),
    ("batch_norm", {"scale": tf.float64}, "scale"),
    ("batch_norm", {"variance": tf.float16}, "variance"),
    ("batch_norm", {"side_input": tf.float64}, "side_input"),
    ("lstm", {"x": tf.int32}, "x"),
    ("lstm", {"kernel": tf.float64}, "kernel"),
    ("lstm", {"recurrent_kernel": tf.bfloat16}, "recurrent_kernel"),
    ("lstm", {"bias": tf.float64}, "bias"),
    ("lstm", {"c": tf.float16}, "initial_state"),
    ("gru", {"recurrent_bias": tf.float16}, "recurrent_bias"),
    ("simple_rnn", {"h": tf.int32}, "initial_state"),
]
WRONG_VALUES = [*WRONG_SHAPES, *WRONG_ATTRIBUTES]


def arguments(op, wrong):
    """Tensors and attributes of a call."""
    tensors, attributes = dict(OPS[op][1]), {}
    for name, value in wrong.items():
        is_shape = isinstance(value, tuple)
        (tensors if is_shape else attributes)[name] = value
    return {k: tf.ones(v, dtype_of(op, k)) for k, v in tensors.items()}, attributes


@pytest.mark.parametrize(("op", "wrong", "name"), WRONG_VALUES, ids=str)
def test_eager(op, wrong, name):
    tensors, attributes = arguments(op, wrong)
    with pytest.raises(ERRORS, match=rf"\b({name})\b"):
        OPS[op][0](**tensors, **attributes)


@pytest.mark.parametrize(("op", "wrong", "name"), WRONG_VALUES, ids=str)
def test_known_shapes(op, wrong, name):
    tensors, attributes = arguments(op, wrong)
    function = tf.function(lambda **v: OPS[op][0](**v, **attributes))
    with pytest.raises(ValueError, match=rf"\b({name})\b"):
        function.get_concrete_function(**tensors)


@pytest.mark.parametrize("known_rank", [True, False])
@pytest.mark.parametrize(("op", "wrong", "name"), WRONG_SHAPES, ids=str)
def test_unknown_shapes(op, wrong, name, known_rank):
    tensors, attributes = arguments(op, wrong)
    specs = {
        k: tf.TensorSpec([None] * v.shape.rank if known_rank else None, v.dtype)
        for k, v in tensors.items()
    }
    function = tf.function(lambda **v: OPS[op][0](**v, **attributes))
    with pytest.raises(ERRORS, match=rf"\b({name})\b"):
        function.get_concrete_function(**specs)(**tensors)


@pytest.mark.parametrize(("op", "wrong", "name"), WRONG_DTYPES, ids=str)
@pytest.mark.parametrize("graph", [False, True])
def test_dtypes(op, wrong, name, graph):
    optional = {
        "conv": {"side_input": (2, 5, 5, 4), "scale": (4,)},
        "conv_transpose": {"side_input": (2, 5, 5, 4)},
        "batch_norm": {"side_input": (2, 5, 3)},
    }
    shapes = {**optional.get(op, {}), **OPS[op][1]}
    tensors = {k: tf.zeros(v, wrong.get(k, dtype_of(op, k))) for k, v in shapes.items()}
    function = tf.function(OPS[op][0]) if graph else OPS[op][0]
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        function(**tensors)


@pytest.mark.parametrize("value", [object(), "text", [[1.0], [1.0, 2.0]], None])
@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("act", "x"), ("conv", "filters"), ("matmul", "b"), ("matmul", "a")),
        *(("conv_transpose", "x"), ("conv_transpose", "filters")),
        *itertools.product(["quantized_matmul"], ["a", "b", "b_scale"]),
        *itertools.product(["weight_only_matmul"], ["a", "b", "scale"]),
        *itertools.product(["update_cache"], UPDATE_CACHE),
    ],
)
def test_what_does_not_convert(op, name, value):
    tensors, _ = arguments(op, {})
    with pytest.raises(ValueError, match=name):
        OPS[op][0](**{**tensors, name: value})


@pytest.mark.parametrize(
    ("layer", "wrong", "name"),
    [
        *[(lstm, {"initial_state": v}, "initial_state") for v in ((), (H,), (H,) * 3, H[None])],
        *[
            (layer, {"initial_state": (H, H)}, "initial_state|states")
            for layer in (gru, simple_rnn)
        ],
        *[(layer, {"mask": tf.ones((2, 5))}, "mask") for layer in (lstm, gru, simple_rnn)],
        # Of known sizes, not only as the op of the inputs' product has it.
        *[(lstm, {"kernel": tf.ones(v)}, "kernel") for v in ((), (3,), (2, 16), (3, 16, 1))],
        (lstm, {"mask": "text"}, "mask"),
        (gru, {"recurrent_kernel": None}, "recurrent_kernel"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("graph", [False, True])
def test_recurrent_layers(layer, wrong, name, graph):
    shapes = {"lstm": LSTM, "gru": GRU, "simple_rnn": RNN}[layer.__name__]
    values = {k: tf.ones(shapes[k]) for k in ("x", "kernel", "recurrent_kernel")} | wrong
    with pytest.raises(ERRORS, match=rf"\b({name})\b"):
        (tf.function(layer) if graph else layer)(**values)
