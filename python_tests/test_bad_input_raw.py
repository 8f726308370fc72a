"""Raw ops called wrongly end in an error that names the argument; none of them crashes."""

import itertools

import cases
import numpy as np
import pytest
import tensorflow as tf
from bad_calls import (
    ATTENTION,
    BATCH_NORM,
    CROSS_ENTROPY,
    ERRORS,
    GROUP_NORM,
    LAYER_NORM,
    PRELU,
    QUANTIZED_MATMUL,
    SOFTMAX,
    UPDATE_CACHE,
    WEIGHT_ONLY_MATMUL,
    dtype_of,
)

from tf_fused_ops import _library, attention, conv2d_bias_act


def raw(name):
    return getattr(_library.ops, f"tf_fused_ops_{name}")


CONV_TRANSPOSED = {
    **{"input": (2, 3, 3, 3), "filters": (3, 3, 4, 3), "activation": "relu"},
    **{"strides": [1, 2, 2, 1], "padding": "SAME"},
}
QUANTIZED, WEIGHT_ONLY = "quantized_mat_mul_bias_act", "weight_only_mat_mul_bias_act"
TRANSPOSING = ("conv2d_transpose_bias_act", "conv2d_transpose_bias_act_grad")
RAW = {
    "act": {"x": (2, 5), "activation": "mish"},
    "act_grad": {"dy": (2, 5), "saved": (2, 5), "activation": "mish"},
    "conv2d_bias_act_grad": {
        "dy": (2, 5, 5, 4),
        "input": (2, 5, 5, 3),
        "filters": (3, 3, 3, 4),
        "saved": [(2, 5, 5, 4)],
        "strides": [1, 1, 1, 1],
        "padding": "SAME",
        "activation": "relu",
    },
    "conv2d_transpose_bias_act": CONV_TRANSPOSED
    | {"bias": [(4,)], "side_input": [(2, 5, 5, 4)], "output_shape": [2, 5, 5, 4]},
    "conv2d_transpose_bias_act_grad": CONV_TRANSPOSED
    | {"dy": (2, 5, 5, 4), "saved": [(2, 5, 5, 4)]},
    "mat_mul_bias_act_grad": {
        "dy": (2, 5, 4),
        "a": (2, 5, 3),
        "b": (3, 4),
        "saved": [(2, 5, 4)],
        "activation": "gelu_erf",
    },
    "quantized_mat_mul_bias_act": QUANTIZED_MATMUL | {"bias": [(4,)], "activation": "gelu_erf"},
    "weight_only_mat_mul_bias_act": {
        **WEIGHT_ONLY_MATMUL,
        **{name: [WEIGHT_ONLY_MATMUL[name]] for name in ("zero", "group", "bias")},
        **{"bits": 4, "activation": "gelu_erf"},
    },
    "batch_norm_act_grad": {
        "dy": (2, 5, 3),
        "x": (2, 5, 3),
        **dict.fromkeys(("scale", "offset", "saved_mean", "saved_inv_std"), (3,)),
        "side_input": [],
        "mask": [],
        "activation": "relu",
    },
}
RAW_RECURRENT = {
    **{"kernel": (4, 16), "states": [(2, 4)] * 2, "mask": [(2, 5)]},
    **{"cell": "lstm", "activation": "tanh", "backwards": False},
}
RAW |= {
    "layer_norm": LAYER_NORM,
    "layer_norm_grad": {
        **dict.fromkeys(("dy", "x"), (2, 5, 3)),
        "scale": (3,),
        **dict.fromkeys(("mean", "inv_std"), (2, 5)),
    },
    "group_norm_act": GROUP_NORM | {"groups": 3},
    "group_norm_act_grad": {
        **dict.fromkeys(("dy", "x"), (2, 5, 6)),
        **dict.fromkeys(("scale", "offset"), (6,)),
        **dict.fromkeys(("mean", "inv_std"), (2, 3)),
        "groups": 3,
    },
    "prelu": PRELU,
    "prelu_grad": PRELU | {"dy": (2, 5, 3)},
    "softmax": SOFTMAX | {"mask": []},
    "softmax_grad": {**dict.fromkeys(("dy", "y"), (2, 5, 3)), "mask": []},
    "dropout": {"x": (2, 5), "rng_key": (1,), "rng_counter": (2,), "rate": 0.5, "scale": 2.0},
    "random_words": {"shape": [2, 3]},
    "softmax_cross_entropy": CROSS_ENTROPY,
    "softmax_cross_entropy_grad": {
        **CROSS_ENTROPY,
        **dict.fromkeys(("dloss", "largest", "inverse_sum"), (2, 5)),
    },
    "sparse_softmax_cross_entropy": {"logits": (2, 5, 3), "labels": (2, 5)},
    "sparse_softmax_cross_entropy_grad": {
        "logits": (2, 5, 3),
        **dict.fromkeys(("dloss", "labels", "largest", "inverse_sum"), (2, 5)),
    },
    "attention": ATTENTION | {"mask": [], "bias": [], "rng_key": [], "rng_counter": []},
    "attention_grad": {
        **ATTENTION,
        **dict.fromkeys(("dy", "y"), (2, 5, 3, 7)),
        **dict.fromkeys(("largest", "inverse_sum"), (2, 3, 5)),
        **{"mask": [], "bias": [], "rng_key": [], "rng_counter": []},
    },
    "update_cache": UPDATE_CACHE | {"index": ()},
    "batch_norm_moments": {"x": (2, 5, 3)},
    "batch_norm_apply": {**BATCH_NORM, "moments": (2, 3, 3), "side_input": []},
    "batch_norm_grad_sums": RAW["batch_norm_act_grad"],
    "batch_norm_grad_apply": {**RAW["batch_norm_act_grad"], "sums": (3, 3)},
    "recurrent": RAW_RECURRENT | {"x": (2, 5, 16), "bias": [(16,)]},
    "recurrent_grad": {
        **RAW_RECURRENT,
        **dict.fromkeys(("dy", "y"), (2, 5, 4)),
        **{"dlast": [(2, 4)] * 2, "saved": (2, 5, 20)},
    },
}
WRONG_RAW_CALLS = [
    ("act", {"activation": "swoosh"}, "activation"),
    ("act_grad", {"activation": "swoosh"}, "activation"),
    ("act_grad", {"dy": (5, 2)}, "dy"),
    ("act_grad", {"dy": (2, 1)}, "dy"),
    ("act_grad", {"saved": ()}, "dy"),
    ("conv2d_bias_act_grad", {"dy": (2, 5, 5, 3)}, "dy"),
    ("conv2d_bias_act_grad", {"dy": (2, 4, 5, 4)}, "dy"),
    ("conv2d_bias_act_grad", {"dy": ()}, "dy"),
    ("conv2d_bias_act_grad", {"saved": []}, "saved"),
    ("conv2d_bias_act_grad", {"saved": [(0,)]}, "saved"),
    ("conv2d_bias_act_grad", {"saved": [(2, 5, 5, 4)] * 2}, "saved"),
    ("conv2d_bias_act_grad", {"activation": "none"}, "saved"),
    ("conv2d_bias_act_grad", {"filters": (3, 3, 2, 4)}, "filters"),
    ("conv2d_bias_act_grad", {"strides": [1, -2, 1, 1]}, "strides"),
    *[
        ("conv2d_transpose_bias_act", {"output_shape": v}, "output_shape")
        for v in (
            *(3, [], [2, 5, 5], [[2, 5, 5, 4]], [2, 5, 5, 4, 1]),
            *([2, 7, 5, 4], [2, 5, 4, 4], [1, 5, 5, 4], [2, 0, 5, 4]),
            *([2, 2**31 - 1, 5, 4], [2**31 - 1] * 4),
        )
    ],
    *[
        ("conv2d_transpose_bias_act", {"output_shape": v}, "(output_shape|filters)")
        for v in ([2, 5, 5, 3], [2, 5, 5, 0])
    ],
    ("conv2d_transpose_bias_act", {"input": (2, 3, 4, 3)}, "output_shape"),
    *[("conv2d_transpose_bias_act", {"bias": v}, "bias") for v in ([()], [(3,)], [(1, 4)])],
    ("conv2d_transpose_bias_act", {"side_input": [(2, 3, 3, 3)]}, "side_input"),
    *[
        (op, {name: v}, name)
        for op in TRANSPOSING
        for name, values in {
            "input": ((), (3, 3, 3), (2, 3, 3, 3, 1)),
            "filters": ((), (3, 3, 4), (3, 3, 4, 4), (3, 3, 4, 1), (0, 3, 4, 3), (3, 3, 4, 0)),
            "strides": ([], [2, 2], [1, 0, 2, 1], [1, -2, 2, 1], [2, 2, 2, 1], [1, 2**40, 2, 1]),
            "dilations": ([], [1, 0, 1, 1], [1, 1, 1, 3], [1, 2**31, 1, 1], [1] * 5),
            "padding": ("FULL", ""),
            "explicit_paddings": ([0] * 8, [1]),
            "data_format": ("NHCW", ""),
            "activation": ("swoosh", ""),
        }.items()
        for v in values
    ],
    *[
        (op, {"padding": "EXPLICIT", "explicit_paddings": v}, "explicit_padding")
        for op in TRANSPOSING
        for v in (
            *([], [1] * 4, [0, 0, -1, 1, 1, 1, 0, 0], [0, 0, 2**31, 0, 0, 0, 0, 0]),
            *([1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]),
        )
    ],
    ("conv2d_transpose_bias_act_grad", {"filters": (3, 3, 2, 3)}, "(filters|dy)"),
    *[
        ("conv2d_transpose_bias_act_grad", {"dy": v}, "dy")
        for v in ((), (5, 5, 4), (2, 7, 5, 4), (2, 5, 4, 4), (1, 5, 5, 4), (2, 0, 5, 4))
    ],
    ("conv2d_transpose_bias_act_grad", {"dy": (2, 5, 5, 3)}, "(filters|dy)"),
    ("conv2d_transpose_bias_act_grad", {"activation": "none"}, "saved"),
    *[
        ("conv2d_transpose_bias_act_grad", {"saved": v}, "saved")
        for v in ([], [(0,)], [(2, 3, 3, 3)], [(2, 5, 5, 1)], [(2, 5, 5, 4)] * 2)
    ],
    ("mat_mul_bias_act_grad", {"dy": (2, 5, 3)}, "dy"),
    ("mat_mul_bias_act_grad", {"dy": (10, 4)}, "dy"),
    ("mat_mul_bias_act_grad", {"a": (3,)}, "a"),
    ("mat_mul_bias_act_grad", {"saved": [(0,)]}, "saved"),
    ("mat_mul_bias_act_grad", {"saved": []}, "saved"),
    *[
        ("quantized_mat_mul_bias_act", {name: v}, names)
        for name, names, values in (
            ("a", "a must have rank", ((), (3,))),
            ("a", "inner dimension of [ab]", ((2, 5, 4), (3, 5))),
            ("b", "b must have rank", ((), (12,), (1, 3, 4))),
            ("b", "inner dimension of [ab]", ((4, 4),)),
            ("b", "b_scale", ((3, 5),)),
            ("b_scale", "b_scale", ((), (1,), (3,), (4, 1))),
            ("bias", "bias", ([()], [(1,)], [(1, 4)], [(4,)] * 2)),
            ("activation", "activation", ("swoosh", "")),
        )
        for v in values
    ],
    *[
        ("weight_only_mat_mul_bias_act", {name: v}, names)
        for name, names, values in (
            ("a", "a must have rank", ((), (6,))),
            ("a", "(group|b (must|has).*)", ((2, 5, 7), (6, 5))),
            ("b", "b must have rank", ((), (12,), (1, 6, 2))),
            ("b", "b (must|has).*", ((5, 2), (7, 2), (6, 1), (6, 3), (6, 4), (2, 6))),
            ("scale", "scale must have rank", ((), (4,), (1, 3, 4))),
            ("scale", "(zero|scale)", ((2, 4), (3, 5), (0, 4), (4, 3))),
            ("zero", "zero", ([()], [(4,)], [(1, 4)], [(3, 5)], [(3, 4)] * 2)),
            ("group", "group", ([()], [(5,)], [(7,)], [(0,)], [(6, 1)], [(6,)] * 2)),
            ("bias", "bias", ([()], [(1,)], [(1, 4)], [(8,)], [(4,)] * 2)),
            ("bits", "bits", (5, 0, -4, 2**40)),
            ("packed_axis", "packed_axis", (2, -1, -2, 2**40)),
            ("packed_axis", "b (must|has).*", (0,)),
            ("activation", "activation", ("swoosh", "")),
        )
        for v in values
    ],
    ("weight_only_mat_mul_bias_act", {"scale": (0, 4), "zero": []}, "scale must have a group"),
    ("batch_norm_act_grad", {"dy": (2, 5, 4)}, "dy"),
    ("batch_norm_act_grad", {"saved_mean": (4,)}, "saved_mean"),
    ("batch_norm_act_grad", {"saved_inv_std": ()}, "saved_inv_std"),
    ("batch_norm_act_grad", {"side_input": [(2, 5, 1)], "activation": "tanh"}, "side_input"),
    ("batch_norm_act_grad", {"mask": [(3,)]}, "mask"),
    ("batch_norm_act_grad", {"mask": [(4,)], "activation": "tanh"}, "mask"),
    ("batch_norm_act_grad", {"mask": [(4,)] * 2}, "mask"),
    ("layer_norm", {"x": ()}, "x"),
    ("layer_norm_grad", {"x": ()}, "x"),
    ("group_norm_act", {"x": ()}, "x"),
    ("group_norm_act", {"groups": 4}, "groups"),
    ("group_norm_act", {"activation": "swoosh"}, "activation"),
    ("group_norm_act_grad", {"x": (6,)}, "x"),
    ("group_norm_act_grad", {"dy": (2, 5, 3)}, "dy"),
    ("group_norm_act_grad", {"scale": (3,)}, "scale"),
    ("group_norm_act_grad", {"offset": (3,)}, "offset"),
    ("group_norm_act_grad", {"mean": (2, 1)}, "mean"),
    ("group_norm_act_grad", {"inv_std": (6,)}, "inv_std"),
    ("group_norm_act_grad", {"groups": 4}, "groups"),
    ("prelu_grad", {"dy": (2, 5, 1)}, "dy"),
    *[("prelu_grad", {"alpha": v}, "alpha") for v in ((2, 3), (4,), (5, 1), (1, 2, 5, 3), (0,))],
    ("softmax", {"x": ()}, "x"),
    ("softmax_grad", {"dy": (2, 5, 1)}, "dy"),
    ("softmax_grad", {"dy": (), "y": ()}, "y"),
    ("attention", {"query": (5, 4), "key": (6, 4), "value": (6, 7)}, "query"),
    ("attention_grad", {"dy": (2, 5, 3, 4)}, "dy"),
    ("attention_grad", {"y": (2, 6, 3, 7)}, "y"),
    ("attention_grad", {"key": (2, 6, 3, 3)}, "key"),
    ("attention_grad", {"largest": (2, 5, 3)}, "largest"),
    ("attention_grad", {"inverse_sum": ()}, "inverse_sum"),
    ("attention_grad", {"bias": [(5,)]}, "bias"),
    ("attention_grad", {"bias_gradient": True}, "bias"),
    *[("dropout", {"rng_key": v}, "rng_key") for v in ((), (0,), (2,), (1, 1))],
    *[("dropout", {"rng_counter": v}, "rng_counter") for v in ((), (1,), (3,), (2, 1))],
    *[
        (op, {"rng_key": [(2,)], "rng_counter": [(2,)]}, "rng_key")
        for op in ("attention", "attention_grad")
    ],
    *[
        (op, {"rng_key": [(1,)], "rng_counter": [(1, 2)]}, "rng_counter")
        for op in ("attention", "attention_grad")
    ],
    ("sparse_softmax_cross_entropy", {"logits": (), "labels": ()}, "logits"),
    ("sparse_softmax_cross_entropy", {"logits": (2, 5, 0)}, "logits"),
    ("sparse_softmax_cross_entropy", {"logits": (0, 0), "labels": (0,)}, "logits"),
    *[
        ("sparse_softmax_cross_entropy_grad", {name: v}, name)
        for name in ("dloss", "labels", "largest", "inverse_sum")
        for v in ((), (2, 1), (10,))
    ],
    *[
        (f"softmax_cross_entropy{grad}", {"logits": v}, "logits")
        for grad in ("", "_grad")
        for v in ((), (2, 5, 1), (1, 5, 3), (5, 3))
    ],
    *[
        ("softmax_cross_entropy_grad", {name: v}, name)
        for name in ("dloss", "labels", "largest", "inverse_sum")
        for v in ((), (2, 1), (10,), (1, 5), (2, 5, 1))
    ],
    # A single row of logits or labels, beside which there is a loss for each of the other's.
    *[
        (
            "softmax_cross_entropy_grad",
            {
                **dict.fromkeys(("dloss", "largest", "inverse_sum"), (4,)),
                **{"logits": (4, 3), "labels": (4, 3), one: (1, 3), name: v},
            },
            name,
        )
        for one in ("logits", "labels")
        for name in ("dloss", "largest", "inverse_sum")
        for v in ((1,), (3,), (4, 1))
    ],
    *[("random_words", {"shape": v}, "shape") for v in (3, [[1]], [-1], [2**31 - 1] * 4)],
    ("attention", {"rng_key": [(1,)] * 2, "rng_counter": [(2,)] * 2}, "rng"),
    *[("update_cache", {"index": v}, "index") for v in ((0,), (1,), (2,), (1, 1))],
    *[("update_cache", {"slot": v}, "slot") for v in (-1, 5, 2**31 - 1, 2**31)],
    # Of a constant TensorFlow itself says it while tracing.
    ("conv2d_transpose_bias_act", {"output_shape": [-(2**31)] * 4}, "output_shape|used for shape"),
    ("update_cache", {"cache": (2, 6, 4, 5)}, "cache"),
    ("update_cache", {"key": (2, 1, 4, 1)}, "key"),
    ("update_cache", {"value": (2, 2, 4, 5)}, "value"),
    ("layer_norm_grad", {"dy": (2, 5, 1)}, "dy"),
    ("layer_norm_grad", {"dy": (10, 3)}, "dy"),
    ("layer_norm_grad", {"scale": (1,)}, "scale"),
    ("layer_norm_grad", {"mean": (2, 5, 1)}, "mean"),
    ("layer_norm_grad", {"inv_std": (10,)}, "inv_std"),
    ("layer_norm_grad", {"inv_std": ()}, "inv_std"),
    ("batch_norm_moments", {"x": (3,)}, "x"),
    ("batch_norm_moments", {"x": (1, 1, 1, 1, 1, 3)}, "x"),
    ("batch_norm_moments", {"data_format": "NHCW"}, "data_format"),
    ("batch_norm_apply", {"x": (2, 5, 4)}, "scale"),
    ("batch_norm_apply", {"moments": (3, 3)}, "moments"),
    ("batch_norm_apply", {"moments": (2, 2, 3)}, "moments"),
    ("batch_norm_apply", {"moments": (2, 3, 4)}, "moments"),
    ("batch_norm_apply", {"side_input": [(2, 5, 1)]}, "side_input"),
    ("batch_norm_grad_sums", {"dy": (2, 5, 4)}, "dy"),
    ("batch_norm_grad_sums", {"saved_mean": (4,)}, "saved_mean"),
    ("batch_norm_grad_sums", {"mask": [(3,)]}, "mask"),
    ("batch_norm_grad_apply", {"sums": (2, 3)}, "sums"),
    ("batch_norm_grad_apply", {"sums": (3, 4)}, "sums"),
    ("batch_norm_grad_apply", {"sums": (3,)}, "sums"),
    ("batch_norm_grad_apply", {"mask": [(4,)], "activation": "tanh"}, "mask"),
    *[("recurrent", {"x": v}, "x") for v in ((), (2, 16), (2, 5, 12), (2, 5, 16, 1))],
    ("recurrent", {"x": (2, 5, 12), "kernel": (4, 12)}, "kernel"),
    ("recurrent", {"x": (2, 5, 15), "kernel": (4, 15)}, "kernel"),
    *[("recurrent", {"bias": v}, "bias") for v in ([()], [(4,)], [(1, 16)], [(16,)] * 2)],
    *[("recurrent", {"cell": v}, "cell") for v in ("LSTM", "")],
    *[
        (op, {name: v}, name)
        for op in ("recurrent", "recurrent_grad")
        for name, values in {
            "kernel": ((), (16,), (5, 16), (4, 4, 16)),
            "mask": ([()], [(5,)], [(2, 1)], [(5, 2)], [(2, 5)] * 2),
            "states": ([], [(2, 4)], [(2, 4)] * 3, [(2, 4), (2, 5)], [(4,)] * 2, [(3, 4)] * 2),
            "activation": ("sigmoid", ""),
        }.items()
        for v in values
    ],
    # Of one state.
    *[
        (op, {"cell": v}, "states")
        for op in ("recurrent", "recurrent_grad")
        for v in ("rnn", "gru")
    ],
    *[
        ("recurrent_grad", {name: v}, name)
        for name, values in {
            "dy": ((), (2, 5), (2, 5, 5), (2, 1, 4)),
            "y": ((), (2, 20), (2, 5, 5)),
            "saved": ((), (0,), (2, 5, 16), (2, 1, 20)),
            "dlast": ([(2, 4), (2, 5)], [(4,)] * 2, [(3, 4)] * 2),
        }.items()
        for v in values
    ],
]


def ones(op, name, value):
    if isinstance(value, tuple):
        mask = tf.bool if op.startswith("recurrent") else tf.uint8
        dtypes = {"mask": mask, "moments": tf.float64, "sums": tf.float64}
        dtypes |= dict.fromkeys(("rng_key", "rng_counter"), tf.uint64)
        dtypes |= {"index": tf.int32}
        if op.startswith("sparse"):
            dtypes["labels"] = tf.int64
        return tf.ones(value, dtypes.get(name, dtype_of(op, name)))
    if isinstance(value, list):
        return [ones(op, name, v) for v in value]
    return value


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("op", "wrong", "name"), WRONG_RAW_CALLS, ids=str)
def test_raw_ops(op, wrong, name, graph):
    arguments = {k: ones(op, k, v) for k, v in {**RAW[op], **wrong}.items()}

    def call():
        raw(op)(**arguments)

    with pytest.raises(ERRORS, match=rf"\b(num_)?{name}s?\b"):
        (tf.function(call) if graph else call)()


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"key": (0, 2**62, 1, 4)}, "key"), ({"value": (0, 2**62, 1, 4)}, "value")],
)
def test_sizes_that_no_shape_has(wrong, name):
    arguments = dict.fromkeys(("query", "key", "value"), (1, 1, 1, 4)) | wrong
    with pytest.raises(ERRORS, match=rf"\b({name})\b"):
        attention(**{k: tf.zeros(v) for k, v in arguments.items()})


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("op", "name", "dtype"),
    [
        *itertools.product([QUANTIZED, WEIGHT_ONLY], ["a"], ["float64", "int8"]),
        *itertools.product([QUANTIZED], ["b"], ["uint8", "float32"]),
        *itertools.product([QUANTIZED], ["b_scale", "bias"], ["float16", "float64"]),
        *itertools.product([WEIGHT_ONLY], ["b"], ["int16", "int32", "float32"]),
        *itertools.product([WEIGHT_ONLY], ["scale", "zero", "bias"], ["float16", "float64"]),
        *itertools.product([WEIGHT_ONLY], ["group"], ["int64", "float64"]),
    ],
)
def test_dtypes_of_products_with_few_bits(op, name, dtype, graph):
    """TensorFlow's own errors, of any kind: no op of another type runs."""
    arguments = {k: ones(op, k, v) for k, v in RAW[op].items()}
    arguments[name] = tf.nest.map_structure(lambda v: tf.cast(v, dtype), arguments[name])

    @tf.autograph.experimental.do_not_convert
    def call():
        raw(op)(**arguments)

    with pytest.raises((*ERRORS, TypeError, AssertionError)):
        (tf.function(call) if graph else call)()


RIGHT = [0, 1, 2, -1, -2, -3]


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("known", ["eager", "rank", "nothing"])
@pytest.mark.parametrize("at", [0, 3, 5])
@pytest.mark.parametrize("number", [3, -4, 2**31 - 1, -(2**31)])
def test_numbers_of_groups_that_there_are_not(number, at, known, rows):
    """The error tells which one and where."""
    tensors = {k: ones(WEIGHT_ONLY, k, v) for k, v in WEIGHT_ONLY_MATMUL.items()}
    tensors["a"] = tf.ones((rows, 6))
    tensors["group"] = tf.constant([*RIGHT[:at], number, *RIGHT[at + 1 :]])

    @tf.autograph.experimental.do_not_convert
    def call(zero, group, bias, **others):
        return raw(WEIGHT_ONLY)(zero=[zero], group=[group], bias=[bias], bits=4, **others)

    specs = {
        k: tf.TensorSpec([None] * v.shape.rank if known == "rank" else None, v.dtype)
        for k, v in tensors.items()
    }
    if known != "eager":
        call = tf.function(call).get_concrete_function(**specs)
    with pytest.raises(ERRORS, match=rf"group must be .*got {number} at {at}"):
        call(**tensors)
    assert call(**tensors | {"group": tf.constant(RIGHT)}).shape == (rows, 4)


@pytest.mark.parametrize("op", RAW)
def test_raw_ops_called_rightly(op):
    raw(op)(**{k: ones(op, k, v) for k, v in RAW[op].items()})


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("op", "name"),
    [
        *itertools.product(
            ["conv2d_bias_act", "conv2d_transpose_bias_act", "mat_mul_bias_act"],
            ["bias", "side_input"],
        ),
        ("conv2d_bias_act", "scale"),
    ],
)
def test_more_than_one_optional_tensor(op, name, graph):
    x, w = np.ones((1, 2, 2, 1), np.float32), np.ones((1, 1, 1, 1), np.float32)
    conv = {"input": x, "filters": w, "strides": [1, 1, 1, 1], "padding": "SAME"}
    arguments = {
        "conv2d_bias_act": conv | {"scale": []},
        "conv2d_transpose_bias_act": conv | {"output_shape": x.shape},
        "mat_mul_bias_act": {"a": x[0, 0], "b": w[0, 0]},
    }[op]
    arguments |= {"bias": [], "side_input": [], name: [[1.0], [1.0]]}

    def call():
        return raw(op)(**arguments)

    with pytest.raises(ERRORS, match=f"num_{name}"):
        (tf.function(call) if graph else call)()


def test_statistics_of_another_type_than_x_asks_for():
    vector, x = tf.ones(3, tf.float64), tf.ones((2, 3))
    with pytest.raises(ValueError, match="scale"):
        tf.function(raw("batch_norm_act"))(x, vector, vector, vector, vector, [], [])
    with pytest.raises(ValueError, match="scale"):
        tf.function(raw("layer_norm"))(x, vector, vector)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_more_elements_than_memory(layout):
    x = tf.zeros((1, 1, 1, 1))
    filters = tf.zeros((1, 1, 1, 1))
    far = 2**31 - 1
    case = cases.ConvCase(layout=layout)
    padding = case.ordered([0, 0], [[far, far], [far, far]], [0, 0])
    with pytest.raises((*ERRORS, tf.errors.ResourceExhaustedError)):
        conv2d_bias_act(x, filters, padding=padding, data_format=layout)
