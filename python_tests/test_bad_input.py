"""Wrong calls end in an error that names the argument; none of them crashes."""

import functools
import itertools

import cases
import numpy as np
import pytest
import tensorflow as tf

from tf_fused_ops import _library
from tf_fused_ops.ops import (
    act,
    attention,
    batch_norm_act,
    conv2d_bias_act,
    dropout,
    group_norm_act,
    gru,
    layer_norm,
    lstm,
    matmul_bias_act,
    simple_rnn,
    softmax,
    sparse_softmax_cross_entropy,
)

ERRORS = (ValueError, tf.errors.InvalidArgumentError)
CONV = {"x": (2, 5, 5, 3), "filters": (3, 3, 3, 4), "bias": (4,)}
MATMUL = {"a": (2, 5, 3), "b": (3, 4), "bias": (4,)}
BATCH_NORM = {"x": (2, 5, 3), **dict.fromkeys(("scale", "offset", "mean", "variance"), (3,))}
LAYER_NORM = {"x": (2, 5, 3), "scale": (3,), "offset": (3,)}
GROUP_NORM = {"x": (2, 5, 6), "scale": (6,), "offset": (6,)}
SOFTMAX = {"x": (2, 5, 3)}
RNN = {
    **{"x": (2, 5, 3), "kernel": (3, 4), "recurrent_kernel": (4, 4), "bias": (4,)},
    **{"h": (2, 4), "mask": (2, 5)},
}
GRU = RNN | {"kernel": (3, 12), "recurrent_kernel": (4, 12)}
GRU |= dict.fromkeys(("bias", "recurrent_bias"), (12,))
H = tf.ones((2, 4))
LSTM = RNN | {"kernel": (3, 16), "recurrent_kernel": (4, 16), "bias": (16,), "c": (2, 4)}
ATTENTION = {"query": (2, 5, 3, 4), "key": (2, 6, 3, 4), "value": (2, 6, 3, 7)}


def of_tensors(layer):
    """A recurrent layer as a function of tensors alone."""

    def call(h=None, c=None, mask=None, **values):
        mask = None if mask is None else mask > 0
        return layer(**values, initial_state=h if c is None else (h, c), mask=mask)

    return call


OPS = {
    "act": (act, {"x": (2, 5)}),
    "conv": (conv2d_bias_act, CONV),
    "matmul": (matmul_bias_act, MATMUL),
    "batch_norm": (batch_norm_act, BATCH_NORM),
    "layer_norm": (layer_norm, LAYER_NORM),
    "group_norm": (functools.partial(group_norm_act, groups=3), GROUP_NORM),
    "softmax": (softmax, SOFTMAX),
    "attention": (attention, ATTENTION),
    "cross_entropy": (
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
}
OPS |= {
    "simple_rnn": (of_tensors(simple_rnn), RNN),
    "gru": (of_tensors(gru), GRU),
    "lstm": (of_tensors(lstm), LSTM),
}
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
    ("matmul", {"a": (3,)}, "a"),
    ("matmul", {"a": (2, 5, 4)}, "a"),
    ("matmul", {"b": (1, 3, 4)}, "b"),
    ("matmul", {"b": (3,)}, "b"),
    ("matmul", {"transpose_b": True}, "a"),
    ("matmul", {"transpose_a": True}, "a"),
    ("matmul", {"bias": (3,)}, "bias"),
    ("matmul", {"bias": (4, 1)}, "bias"),
    ("matmul", {"side_input": (5, 4)}, "side_input"),
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
    ("cross_entropy", {"logits": ()}, "logits"),
    *[("cross_entropy", {"labels": v}, "labels") for v in ((), (2,), (5, 2), (2, 5, 3), (2, 1))],
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
    *[("conv", {"strides": v}, "strides") for v in (0, -1, [1, 1, 1], [2, 1, 1, 1], 2**40, "two")],
    *[("conv", {"dilations": v}, "dilations") for v in (0, -1, [1, 1, 1], [1, 1, 1, 2], 2**31)],
    *[
        ("conv", {"padding": v}, "padding|explicit_paddings")
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
        for op in ("act", "conv", "matmul", "batch_norm", "group_norm", *RECURRENT)
        for v in ("swoosh", 3, "")
    ],
    *[(op, {"data_format": "NHCW"}, "data_format") for op in ("conv", "batch_norm", "group_norm")],
    *[("group_norm", {"groups": v}, "groups") for v in (2**40, "two", 1.5, None)],
    *[(op, {"activation": v}, "activation") for op in RECURRENT for v in ("none", "relu6", None)],
    *[("softmax", {name: v}, name) for name in ("scale", "masked") for v in ("two", None)],
    *[("attention", {name: "two"}, name) for name in ("scale", "masked")],
    *[
        ("dropout", {"rate": v}, "rate")
        for v in ("two", None, -0.1, 1, 1.5, float("nan"), float("inf"))
    ],
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
    ("matmul", {"a": tf.int8}, "a"),
    ("matmul", {"b": tf.bfloat16}, "b"),
    ("matmul", {"bias": tf.float64}, "bias"),
    ("group_norm", {"x": tf.int32}, "x"),
    ("softmax", {"x": tf.int32}, "x"),
    ("dropout", {"x": tf.int32}, "x"),
    ("cross_entropy", {"logits": tf.int32}, "logits"),
    ("attention", {"query": tf.int32}, "query"),
    ("attention", {"key": tf.float64}, "key"),
    ("attention", {"value": tf.float16}, "value"),
    ("biased_attention", {"bias": tf.float64}, "bias"),
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
    return {k: tf.ones(v) for k, v in tensors.items()}, attributes


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
        "batch_norm": {"side_input": (2, 5, 3)},
    }
    shapes = {**optional.get(op, {}), **OPS[op][1]}
    tensors = {k: tf.zeros(v, wrong.get(k, tf.float32)) for k, v in shapes.items()}
    function = tf.function(OPS[op][0]) if graph else OPS[op][0]
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        function(**tensors)


@pytest.mark.parametrize("value", [object(), "text", [[1.0], [1.0, 2.0]], None])
@pytest.mark.parametrize(
    ("op", "name"), [("act", "x"), ("conv", "filters"), ("matmul", "b"), ("matmul", "a")]
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


def raw(name):
    return getattr(_library.ops, f"tf_fused_ops_{name}")


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
    "mat_mul_bias_act_grad": {
        "dy": (2, 5, 4),
        "a": (2, 5, 3),
        "b": (3, 4),
        "saved": [(2, 5, 4)],
        "activation": "gelu_erf",
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
    "softmax": SOFTMAX | {"mask": []},
    "softmax_grad": {**dict.fromkeys(("dy", "y"), (2, 5, 3)), "mask": []},
    "dropout": {"x": (2, 5), "rng_key": (1,), "rng_counter": (2,), "rate": 0.5, "scale": 2.0},
    "random_words": {"shape": [2, 3]},
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
    ("mat_mul_bias_act_grad", {"dy": (2, 5, 3)}, "dy"),
    ("mat_mul_bias_act_grad", {"dy": (10, 4)}, "dy"),
    ("mat_mul_bias_act_grad", {"a": (3,)}, "a"),
    ("mat_mul_bias_act_grad", {"saved": [(0,)]}, "saved"),
    ("mat_mul_bias_act_grad", {"saved": []}, "saved"),
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
    *[("random_words", {"shape": v}, "shape") for v in (3, [[1]], [-1], [2**31 - 1] * 4)],
    ("attention", {"rng_key": [(1,)] * 2, "rng_counter": [(2,)] * 2}, "rng"),
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
        dtypes |= dict.fromkeys(("rng_key", "rng_counter"), tf.uint64) | {"labels": tf.int64}
        return tf.ones(value, dtypes.get(name, tf.float32))
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


@pytest.mark.parametrize("op", RAW)
def test_raw_ops_called_rightly(op):
    raw(op)(**{k: ones(op, k, v) for k, v in RAW[op].items()})


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("op", "name"),
    [
        *itertools.product(["conv2d_bias_act", "mat_mul_bias_act"], ["bias", "side_input"]),
        ("conv2d_bias_act", "scale"),
    ],
)
def test_more_than_one_optional_tensor(op, name, graph):
    x, w = np.ones((1, 2, 2, 1), np.float32), np.ones((1, 1, 1, 1), np.float32)
    conv = {"input": x, "filters": w, "strides": [1, 1, 1, 1], "padding": "SAME"}
    arguments = conv | {"scale": []} if op.startswith("conv") else {"a": x[0, 0], "b": w[0, 0]}
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
