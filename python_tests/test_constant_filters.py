"""Filters that do not change: packed once and kept, and never served stale."""

import concurrent.futures
import ctypes

import numpy as np
import pytest
import tensorflow as tf
from cases import DTYPES
from remapping import values
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from tolerances import assert_close

from tf_fused_ops import _library
from tf_fused_ops._library import ops
from tf_fused_ops.remapper import remap

CONV = {"strides": [1, 1, 1, 1], "padding": "SAME", "activation": "relu"}
CONSTANT = {
    "TfFusedOps>Conv2DBiasAct": "constant_filters",
    "TfFusedOps>MatMulBiasAct": "constant_b",
}


def conv(x, w, constant):
    return ops.tf_fused_ops_conv2d_bias_act(
        x, w, bias=[], side_input=[], scale=[], constant_filters=constant, **CONV
    ).y


def product(a, b, constant):
    return ops.tf_fused_ops_mat_mul_bias_act(
        a, b, bias=[], side_input=[], constant_b=constant, activation="relu"
    ).y


OPS = {
    "conv": (conv, (2, 9, 8, 17), (3, 3, 17, 33)),
    "long_sums": (conv, (1, 7, 7, 150), (3, 3, 150, 96)),
    "one_pixel": (conv, (1, 1, 1, 40), (3, 3, 40, 33)),
    "product": (product, (50, 37), (37, 65)),
    "one_row": (product, (1, 300), (300, 129)),
    "twelve_rows": (product, (12, 300), (300, 129)),
    "no_columns": (product, (3, 4), (4, 0)),
}


@pytest.fixture(params=OPS)
def case(request):
    return OPS[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_filters_compute_the_same(case, dtype, isa):
    op, *shapes = case
    x, w = (tf.cast(v / 4, dtype) for v in values(*shapes))
    expected = op(x, w, False)
    for _ in range(2):
        assert_close("y", op(x, w, True), expected, dtype)
    # Kept filters serve inputs of other sizes.
    assert_close("y", op(x[:1], w, True), op(x[:1], w, False), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_filters_of_patches_serve_other_widths(dtype, isa):
    """Where patches fill the lines, these are pixels of twelve channels, whose order is another."""
    (w,) = (tf.cast(v / 4, dtype) for v in values((4, 4, 3, 128)))

    def patches(x, constant):
        return ops.tf_fused_ops_conv2d_bias_act(
            x,
            w,
            bias=[],
            side_input=[],
            scale=[],
            constant_filters=constant,
            **CONV | {"strides": [1, 4, 4, 1], "padding": "VALID"},
        ).y

    for width in (40, 42, 40, 42):
        (x,) = (tf.cast(v / 4, dtype) for v in values((2, 40, width, 3)))
        assert_close("y", patches(x, True), patches(x, False), dtype)


def test_other_filters_are_packed_anew(case):
    op, *shapes = case
    x, w, v = values(*shapes, shapes[1])
    for filters in (w, v, w, w, v):
        assert_close("y", op(x, filters, True), op(x, filters, False), "float32")


def test_memory_of_released_filters_may_serve_others(case):
    op, *shapes = case
    (x,) = values(shapes[0])
    for seed in range(20):
        filters = tf.random.stateless_normal(shapes[1], (seed, 1))
        assert_close("y", op(x, filters, True), op(x, filters, False), "float32")
        del filters


def test_a_variable_may_change(case):
    op, *shapes = case
    x, w = values(*shapes)
    variable = tf.Variable(w)
    optimizer_step = tf.raw_ops.ResourceApplyGradientDescent
    updates = [
        lambda: variable.assign_add(w),
        lambda: variable.assign(-w),
        lambda: optimizer_step(var=variable.handle, alpha=0.5, delta=w),
        lambda: variable.assign_sub(2 * w),
    ]
    for update in updates:
        for _ in range(2):
            assert_close("y", op(x, variable, True), op(x, variable, False), "float32")
        update()


def test_filters_kept_for_another_instruction_set_are_not_used(case):
    op, *shapes = case
    x, w = values(*shapes)
    expected = op(x, w, False)
    best = _library.isa()
    try:
        for name in (*_library.available_isas(), *reversed(_library.available_isas())):
            _library.set_isa(name)
            assert_close(name, op(x, w, True), expected, "float32")
    finally:
        _library.set_isa(best)


def test_concurrent_first_calls(case):
    op, *shapes = case
    x, w = values(*shapes)
    step = tf.function(lambda x: op(x, tf.constant(w.numpy()), True)).get_concrete_function(x)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: step(x).numpy(), range(64)))
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    assert_close("y", results[0], op(x, w, False), "float32")


# Filters with taps that meet no pixel are packed without these, for the image at hand; those of one
# row are read as they are, those of some more only where they change.
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("conv", True),
        ("long_sums", True),
        ("product", True),
        ("twelve_rows", True),
        ("one_row", False),
        ("one_pixel", False),
    ],
)
def test_they_are_kept_where_that_pays(name, kept):
    """What is done to the filters behind TensorFlow's back shows whether they are read again."""
    op, *shapes = OPS[name]
    x, w = values(*shapes)
    before = op(x, w, True)
    memory = w._numpy_internal()
    ctypes.memset(memory.ctypes.data, 0, memory.nbytes)
    assert not np.any(w)
    assert np.any(before)
    np.testing.assert_array_equal(op(x, w, True), before if kept else np.zeros_like(before))
    assert not np.any(op(x, w, False))


def frozen(fn, *inputs):
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
    return convert_variables_to_constants_v2(tf.function(fn).get_concrete_function(*specs))


def marks(result):
    """Returns which fused nodes say that their filters are constant."""
    return [node.attr[CONSTANT[node.op]].b for node in result.graph_def.node if node.op in CONSTANT]


def test_the_remapper_marks_frozen_graphs():
    x, w, b, v = values((2, 5, 5, 3), (3, 3, 3, 4), (4,), (4, 6))
    kernel, head = tf.Variable(w), tf.Variable(v)

    def model(x):
        y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), b))
        return tf.nn.gelu(tf.nn.bias_add(tf.matmul(tf.reshape(y, [-1, 4]), head), tf.ones([6])))

    assert marks(remap(frozen(model, x))) == [True, True]
    assert marks(remap(tf.function(model).get_concrete_function(x))) == [False, False]


def test_the_remapper_sees_through_identities():
    x, w, b = values((2, 5), (5, 3), (3,))

    def model(x):
        filters = tf.identity(tf.identity(tf.constant(w.numpy())))
        return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, filters), b))

    def scaled(x):
        filters = tf.reduce_max(x) * tf.constant(w.numpy())
        return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, filters), b))

    assert marks(remap(tf.function(model).get_concrete_function(x))) == [True]
    assert marks(remap(tf.function(scaled).get_concrete_function(x))) == [False]
