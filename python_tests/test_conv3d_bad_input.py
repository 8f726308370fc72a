"""Convolutions of volumes in graphs, of no elements, and called wrongly."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from bad_calls import ERRORS
from gradient_problems import gradients_of

from tf_fused_ops import _library
from tf_fused_ops.ops import conv3d_bias_act

FORWARD, GRADIENT = "TfFusedOps>Conv3DBiasAct", "TfFusedOps>Conv3DBiasActGrad"
SWITCHES = ("input_gradient", "filters_gradient", "bias_gradient", "side_input_gradient")


KNOWN = [(2, 5, 6, 7, 3), (3, 3, 3, 3, 4), (4,), (2, 3, 3, 4, 4)]
# What is known of the shapes of x, filters, bias and side input, and what then is of y's.
STATIC_SHAPES = [
    (KNOWN[:3], "SAME", (2, 3, 3, 4, 4)),
    ([(None, 5, 6, 7, 3), None, None], "SAME", (None, 3, 3, 4, None)),
    ([(None, 5, 6, 7, 3), None, (4,)], "VALID", (None, None, None, None, 4)),
    ([KNOWN[0], (3, None, 2, None, 4), None], "VALID", (2, 2, None, 3, 4)),
    ([(2, None, 6, 7, 3), KNOWN[1], None], "SAME", (2, None, 3, 4, 4)),
    ([(2, 5, None, None, 3), KNOWN[1], None], "VALID", (2, 2, None, None, 4)),
    ([(None,) * 5, KNOWN[1], None], "SAME", (None,) * 4 + (4,)),
    ([None, None, None], "SAME", (None,) * 5),
    ([None, None, None, KNOWN[3]], "SAME", KNOWN[3]),
    ([None, None, None, (2, None, 3, None, 4)], "VALID", (2, None, 3, None, 4)),
]


@pytest.mark.parametrize(("known", "padding", "expected"), STATIC_SHAPES, ids=str)
def test_static_shapes(known, padding, expected):
    def layer(x, filters, bias, side=None):
        return conv3d_bias_act(x, filters, bias, 2, padding, "silu", side)

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.float64) for shape in known])
    def step(*inputs):
        y = layer(*inputs)
        assert y.shape.as_list() == list(expected)
        gradients = gradients_of(layer, inputs, tf.ones_like(y))
        for value, gradient in zip(inputs, gradients, strict=True):
            assert gradient.shape.rank == (value.shape.rank or gradient.shape.rank)
            assert value.shape.is_compatible_with(gradient.shape)
        return y, gradients

    rng = np.random.default_rng(0)
    given = [*KNOWN[:3], (2, 3, 3, 4, 4)][: len(known)]
    if padding == "VALID":
        given = [(2, 5, 6, 7, 3), (3, 2, 2, 3, 4), (4,), (2, 2, 3, 3, 4)][: len(known)]
        given[1] = known[1] if known[1] == KNOWN[1] else given[1]
    inputs = [tf.constant(rng.normal(size=shape)) for shape in given]
    y = layer(*inputs)
    right = y, gradients_of(layer, inputs, tf.ones_like(y))
    for found, other in zip(*map(tf.nest.flatten, (step(*inputs), right)), strict=True):
        np.testing.assert_array_equal(found, other)


def gradient_ops(x, asked):
    """The switches that are on in each gradient op of a traced function."""
    filters, bias, side = tf.ones((3, 3, 3, 3, 4)), tf.ones(4), tf.ones((*x.shape[:4], 4))

    def run(*inputs):
        with tf.GradientTape() as tape:
            tape.watch([inputs[i] for i in asked])
            y = conv3d_bias_act(*inputs[:3], side_input=inputs[3])
        return tape.gradient(y, [inputs[i] for i in asked])

    graph = tf.function(run).get_concrete_function(x, filters, bias, side).graph
    ops = [op for op in graph.get_operations() if op.type.startswith("TfFusedOps>")]
    assert [op.type for op in ops] == [FORWARD, *[GRADIENT] * (len(ops) - 1)]
    assert not any("Conv3D" in op.type for op in graph.get_operations() if op not in ops)
    return [tuple(i for i in range(4) if op.get_attr(SWITCHES[i])) for op in ops[1:]]


@pytest.mark.parametrize("asked", [[0], [1], [2], [3], [1, 2], [0, 3]], ids=str)
def test_gradient_ops_of_one_operand(asked):
    assert gradient_ops(tf.ones((2, 4, 5, 6, 3)), asked) == [tuple(asked)]


@pytest.mark.parametrize("size", [6, 128])
def test_gradient_ops_of_both_operands(size):
    """Large volumes have one, as large images: gradients of filters that wait hold much."""
    found = gradient_ops(tf.ones((1, 8, size, size, 3)), range(4))
    assert sorted(itertools.chain(*found)) == [0, 1, 2, 3]
    assert len(found) == (2 if size == 6 else 1)


FAR, MANY = 2**31 - 1, 2**40
# Shapes of x and filters, and attributes. None of the tensors has elements that are computed.
HUGE = [
    *(((0, MANY, 1, 1, 1), (*kernel, 1, 2), {}) for kernel in ((3, 3, 3), (1, 3, 3), (3, 1, 1))),
    ((0, MANY, MANY, MANY, 1), (3, 3, 3, 1, 2), {"strides": 2}),
    ((0, MANY, MANY, MANY, 1), (3, 1, 1, 1, 2), {}),
    ((0, FAR, FAR, FAR, 1), (3, 3, 3, 1, 2), {"strides": FAR, "dilations": FAR}),
    ((0, MANY, 3, 3, 1), (3, 3, 3, 1, 2), {"padding": "VALID", "dilations": (FAR, 1, 1)}),
    ((1, MANY, 0, 1, 1), (3, 3, 3, 1, 2), {}),
    ((MANY, 0, 3, 3, 1), (3, 3, 3, 1, 2), {}),
    ((MANY, 1, 1, 1, 0), (3, 3, 3, 0, 0), {}),
    ((1, 2**20, 2**10, 2**10, 0), (3, 3, 3, 0, 0), {}),
    ((2, 3, 3, 3, 1), (3, 3, 3, 1, 1), {"strides": FAR, "dilations": FAR}),
    ((1, 1, 1, 1, 1), (MANY, 1, 1, 1, 0), {}),
]
# What has elements, of filters that have none.
ENDLESS = """
import faulthandler
import tensorflow as tf
from tf_fused_ops.ops import conv3d_bias_act

x, filters = tf.zeros((1, 2, 2, 2, 0)), tf.zeros((2**20, 2**20, 1, 0, 1))
faulthandler.dump_traceback_later(20, exit=True)
try:
    conv3d_bias_act(x, filters)
except tf.errors.ResourceExhaustedError:
    pass
"""


@pytest.mark.parametrize(("x", "filters", "attributes"), HUGE, ids=str)
def test_huge_sizes(x, filters, attributes):
    x, filters = tf.zeros(x), tf.zeros(filters)
    try:
        with tf.GradientTape() as tape:
            tape.watch([x, filters])
            y = conv3d_bias_act(x, filters, **attributes)
        dx, dfilters = tape.gradient(y, [x, filters], output_gradients=y)
        assert (dx.shape, dfilters.shape) == (x.shape, filters.shape)
    except tf.errors.ResourceExhaustedError:
        assert max(filters.shape) == MANY


def test_huge_windows_without_channels_end(run_python):
    run_python(ENDLESS)


ATTRIBUTES = {"strides": [1] * 5, "padding": "SAME"}
OPERANDS = {"input": (2, 4, 5, 6, 3), "filters": (3, 3, 3, 3, 4)}
RIGHT = OPERANDS | ATTRIBUTES | {"bias": (4,), "side_input": (2, 4, 5, 6, 4)}
RIGHT_GRADIENT = OPERANDS | ATTRIBUTES | dict.fromkeys(("dy", "saved"), (2, 4, 5, 6, 4))
WRONG_LISTS = [
    [],
    [1] * 4,
    [1] * 6,
    *([1, *[1] * i, v, *[1] * (2 - i), 1] for v in (0, -1, 2**31, 2**40) for i in range(3)),
]
WRONG_LISTS += [[2, 1, 1, 1, 1], [1, 1, 1, 1, 2], [0, 1, 1, 1, 1], [1, 1, 1, 1, -(2**31)]]
SHARED = {
    "input": ((), (3,), (4, 5, 6, 3), (2, 4, 5, 6, 3, 1)),
    "filters": (
        *((), (3, 3, 3, 4), (3, 3, 3, 3, 4, 1), (3, 3, 3, 2, 4), (3, 3, 3, 6, 4), (3, 3, 3, 0, 4)),
        *((3, 3, 3, 1, 4), (0, 3, 3, 3, 4), (3, 0, 3, 3, 4), (3, 3, 0, 3, 4)),
    ),
    "strides": WRONG_LISTS,
    "dilations": WRONG_LISTS,
    "padding": ("FULL", "", "EXPLICIT"),
    "activation": ("swoosh", ""),
}
WRONG = {
    "conv3d_bias_act": SHARED
    | {
        "bias": ((), (0,), (1,), (3,), (1, 4)),
        "side_input": ((), (4,), (1, 4, 5, 6, 4), (2, 4, 5, 6, 3), (2, 3, 5, 6, 4), (2, 4, 5, 6)),
    },
    "conv3d_bias_act_grad": SHARED
    | {
        "dy": ((), (4,), (1, 4, 5, 6, 4), (2, 3, 5, 6, 4), (2, 4, 5, 6, 3), (2, 4, 5, 6, 4, 1)),
        "saved": ((), (0,), (2, 4, 5, 6, 3), (2, 4, 1, 6, 4), (1, 4, 5, 6, 4)),
    },
}
CALLS = [
    (op, name, {name: v}) for op, names in WRONG.items() for name in names for v in names[name]
]
# Windows that do not fit.
CALLS += [
    (op, "filters", {"filters": (*kernel, 3, 4), "padding": "VALID", "dilations": [1, d, d, d, 1]})
    for op, kernel, d in itertools.product(WRONG, [(6, 1, 1), (1, 3, 1), (1, 1, 3)], [4, FAR])
]


def call(op, arguments, wrapped):
    """Calls the raw op, or the wrapper, which has other names and wants other errors."""
    lists = ("bias", "side_input", "saved")
    if not wrapped:
        arguments = {k: [v] if k in lists else v for k, v in arguments.items()}
        return getattr(_library.ops, f"tf_fused_ops_{op}")(**{"activation": "relu"} | arguments)
    return conv3d_bias_act(**{"x" if k == "input" else k: v for k, v in arguments.items()})


def check_refusal(op, wrong, name, known, wrapped=False):
    right = RIGHT if op == "conv3d_bias_act" else RIGHT_GRADIENT
    given = right | wrong
    tensors = {k: tf.ones(v) for k, v in given.items() if isinstance(v, tuple)}
    attributes = {k: v for k, v in given.items() if k not in tensors}

    def run(**values):
        return call(op, values | attributes, wrapped)

    with pytest.raises(ERRORS, match=rf"\b{name}\b"):
        if known == "eager":
            run(**tensors)
        traced = {
            "shapes": tensors,
            "ranks": {k: tf.TensorSpec([None] * v.shape.rank) for k, v in tensors.items()},
            "nothing": {k: tf.TensorSpec(None) for k in tensors},
        }[known]
        concrete = tf.function(run, autograph=False).get_concrete_function(**traced)
        assert known != "shapes"
        concrete(**tensors)


@pytest.mark.parametrize("known", ["eager", "shapes", "ranks", "nothing"])
@pytest.mark.parametrize(("op", "name", "wrong"), CALLS, ids=str)
def test_wrong_arguments(op, name, wrong, known):
    check_refusal(op, wrong, name, known)
    if op == "conv3d_bias_act":
        check_refusal(op, wrong, f"({name}|x)" if name == "input" else name, known, True)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"strides": v} for v in ((1, 2), [1] * 4, "text", None, [None] * 3, 0, (1, -1, 1))),
        *({"dilations": v} for v in ((1, 2), [1] * 6, "text", 2**31, (0, 1, 1))),
        *({"padding": v} for v in ([[0, 0]] * 5, None, 1, "full")),
        *({"x": v} for v in ([[1.0], [2.0, 3.0]], None, tf.int32, tf.complex64, tf.string)),
        *({"filters": v} for v in ("text", None, tf.float64)),
        *({"bias": v} for v in ([[1.0], [2.0, 3.0]], "text", tf.float16)),
        {"side_input": tf.bfloat16},
        *({"activation": v} for v in ("swoosh", 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("graph", [False, True])
def test_what_the_wrapper_refuses(wrong, graph):
    """A dtype stands for a tensor of it."""
    ((name, value),) = wrong.items()
    if isinstance(value, tf.DType):
        value = tf.zeros(RIGHT["input" if name == "x" else name], value)
    arguments = {"x": tf.ones(RIGHT["input"]), "filters": tf.ones(RIGHT["filters"]), name: value}

    def run():
        return conv3d_bias_act(**arguments)

    with pytest.raises(ERRORS, match=rf"\b{name}\b"):
        (tf.function(run) if graph else run)()
