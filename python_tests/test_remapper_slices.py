"""Gradients of slices, which stock code writes element by element: what is padded or joined
instead, with the same digits, and what is left to stock."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from remapping import check, op_counts, reasons, rule_counts, values

from tf_fused_ops import RemapOptions, function

WHAT = "StridedSliceGrad"
(X,) = values((6, 5, 4, 7))
new = tf.newaxis
SLICES = {
    "behind": lambda x: x[1:],
    "in front": lambda x: x[:, :-1],
    "both sides": lambda x: x[:, 1:3, 1:],
    "an index": lambda x: x[:, 2],
    "the last index": lambda x: x[..., -1],
    "indices": lambda x: x[-6, ..., 0, 6],
    "a new dimension": lambda x: x[new, :, 1, new, ..., 2:, new],
    "beyond": lambda x: x[:, -9:9, 2:99],
    "nothing": lambda x: x[:, 3:2],
    "all of it": lambda x: x[:, ..., :],
    "an element": lambda x: x[5, 4, 3, 0],
}


STEPS = {
    "from the first": lambda x: x[::2],
    "from another": lambda x: x[1::2],
    "up to one": lambda x: x[:, 2::3],
    "up to the last": lambda x: x[2::3],
    "in several dimensions": lambda x: x[1::3, :, ::2],
    "and others": lambda x: x[:5:2, 1:4, new, 1::2, 3],
    "far": lambda x: x[3::9],
    "none": lambda x: x[5:2:2],
}


def gradient_of(code):
    """The gradient of a function of one tensor, with another for every element."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = code(x)
        dy = tf.reshape(tf.range(1, tf.size(y) + 1), tf.shape(y))
        return tape.gradient(y, x, tf.cast(dy, x.dtype))

    return gradient


def compared(code, x, rules, shape=None, left=None):
    """Asserts that the gradient has stock's digits, what became of it and how many stock ops are
    left, all where no rule applies and otherwise none; returns it."""
    signature = [tf.TensorSpec(x.shape if shape is None else shape, x.dtype)]
    gradient = gradient_of(code)
    expected = tf.function(gradient, input_signature=signature)(x)
    compiled = function(gradient, input_signature=signature)
    found = compiled(x)
    assert rule_counts(compiled) == rules, "\n".join(map(str, compiled.remap_reports))
    concrete = compiled.get_concrete_function()
    assert op_counts(concrete)[WHAT] == (int(not rules) if left is None else left)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert concrete.output_shapes.is_compatible_with(x.shape)
    np.testing.assert_array_equal(found, expected)
    return compiled


@pytest.mark.parametrize("batch", [6, None])
@pytest.mark.parametrize("name", SLICES)
def test_slices(name, batch):
    compared(SLICES[name], X, {"slice_gradient": 1}, [batch, *X.shape[1:]])


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    compared(STEPS[name], X, {"slice_gradient": 1})


def test_steps_beside_unknown_sizes():
    compared(
        lambda x: x[:, 1::2, 1:, ::2],
        tf.ones([2, 4, 3, 6, 2]),
        {"slice_gradient": 1},
        [None, 4, 3, 6, None],
    )


@pytest.mark.parametrize("name", SLICES)
def test_unknown_sizes(name):
    """Of a dimension that is cut on both sides there is no telling where."""
    cut_twice = name in ("both sides", "beyond", "nothing")
    rules = {} if cut_twice else {"slice_gradient": 1}
    compiled = compared(SLICES[name], X, rules, [None] * 4)
    if cut_twice:
        reason = "a dimension of unknown size is cut on both sides"
        assert reasons(compiled) == {"slice_gradient": reason}
    found = function(gradient_of(lambda x: x[::2]), input_signature=[tf.TensorSpec([None, 2])])
    found.get_concrete_function()
    assert reasons(found) == {"slice_gradient": "a dimension of unknown size is cut in steps"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    compared(SLICES["indices"], tf.cast(X, dtype), {"slice_gradient": 1})


@pytest.mark.parametrize("shape", [X.shape, [None] * 4])
def test_long_integers(shape):
    begin, end, strides = (tf.constant(v, tf.int64) for v in ([0, 1], [0, -1], [1, 1]))

    def code(x):
        return tf.strided_slice(x, begin, end, strides, begin_mask=1, end_mask=3)

    compared(code, X, {"slice_gradient": 1}, shape)


ENTRY = st.one_of(
    st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.sampled_from([None, 1, 2, 3])),
    st.integers(-3, 2),
    st.just(new),
)


@given(
    st.lists(ENTRY, max_size=4),
    st.integers(0, 4),
    st.booleans(),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_any_slice(entries, ellipsis, has_ellipsis, known):
    if sum(entry is not new for entry in entries) > 3:
        entries = entries[:3]
    if has_ellipsis:
        entries = [*entries[:ellipsis], ..., *entries[ellipsis:]]
    (x,) = values((3, 4, 5, 3))
    gradient = gradient_of(lambda x: x[tuple(entries)])
    shape = [size if is_known else None for size, is_known in zip(x.shape, known, strict=True)]
    signature = [tf.TensorSpec(shape, x.dtype)]
    stock = tf.function(gradient, input_signature=signature)
    compiled = function(gradient, input_signature=signature)
    np.testing.assert_array_equal(compiled(x), stock(x), err_msg=f"x[{entries}] of {shape}")
    reports = compiled.remap_reports[-1]
    fused = [fusion.rule for fusion in reports.fused]
    left = [refusal.reason for refusal in reports.refused]
    assert len(fused) + len(left) <= 1 and set(fused) <= {"slice_gradient"}
    assert not left or re.search(r"unknown size|cut in steps|whole number of steps", left[0])
    # With no entry there is no slice, and TensorFlow leaves some out by itself.
    assert fused or left or op_counts(compiled.get_concrete_function())[WHAT] == 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (lambda x, i: x[:, ::2], "5 indices are no whole number of steps of 2"),
        (lambda x, i: x[..., 1::2], "the last dimension is cut in steps"),
        (lambda x, i: x[::-1], "the step -1 is negative"),
        (lambda x, i: x[:, i:], r"begin \S+ is no constant"),
        (lambda x, i: x[:, :i], r"end \S+ is no constant"),
    ],
)
def test_left_to_stock(code, reason):
    compiled = function(lambda x, i: gradient_of(lambda x: code(x, i))(x))
    expected = gradient_of(lambda x: code(x, 2))(X)
    np.testing.assert_array_equal(compiled(X, tf.constant(2)), expected)
    assert rule_counts(compiled) == {}
    assert re.fullmatch(reason, reasons(compiled)["slice_gradient"])


def test_many_dimensions():
    (x,) = values((4, 1, 4, 1, 1, 3, 1, 2))
    compared(lambda x: x[1:, :, :-1, 0, ..., 1], x, {"slice_gradient": 1})
    compiled = compared(lambda x: x[::2, :, 1::2], x, {})
    assert reasons(compiled) == {"slice_gradient": "there would be more than 8 dimensions"}


@pytest.mark.parametrize("cut", [(2**33, None), (2**33, 2**34, 3)], ids=str)
def test_sizes_beyond_32_bits(cut):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x[:, slice(*cut)]
        return tape.gradient(y, x)

    compiled = function(gradient)
    assert compiled(tf.zeros([3, 2**40, 0])).shape == (3, 2**40, 0)
    assert rule_counts(compiled) == {"slice_gradient": 1}


def test_unknown_rank():
    compiled = compared(lambda x: x[1:], X, {}, tf.TensorShape(None))
    assert re.fullmatch(r"the rank of \S+ is not known", reasons(compiled)["slice_gradient"])


def test_other_devices_are_left_alone():
    def on_gpu(x):
        with tf.device("GPU:0"):
            return gradient_of(lambda x: x[1:])(x) + gradient_of(glu)(x)

    compiled = function(on_gpu)
    compiled.get_concrete_function(tf.TensorSpec(X.shape))
    assert rule_counts(compiled) == reasons(compiled) == {}


def glu(x):
    return x[..., :3] * tf.sigmoid(x[..., 3:6]) + x[..., 6:]


JOINED = {
    "along the last": glu,
    "along the first": lambda x: x[4:] * x[:2] + x[2:4],
    "in pairs": lambda x: x[:, :, 2:] * x[:, :, :-2],
    "indices": lambda x: x[:, :, 0] * x[:, :, 1] + x[:, :, 2] * x[:, :, 3],
    "new dimensions": lambda x: x[new, ..., :6, new] * x[new, ..., -1, new, new],
}
NOT_JOINED = {
    "a gap": lambda x: x[..., :3] * x[..., 4:],
    "overlapping": lambda x: x[..., :4] * x[..., 3:],
    "in steps": lambda x: x[:, :, ::2] * x[:, :, 1::2],
    "along two": lambda x: x[:3, ..., :1] * x[3:, ..., 1:],
}


@pytest.mark.parametrize("name", JOINED)
def test_joined(name):
    compared(JOINED[name], X, {"joined_slice_gradients": 1})


@pytest.mark.parametrize("name", NOT_JOINED)
def test_not_joined(name):
    compared(NOT_JOINED[name], X, {"slice_gradient": 2})


def test_joined_of_unknown_batch():
    compared(glu, X, {"joined_slice_gradients": 1}, [None, 5, 4, 7])
    # The pieces' sizes are not known to be all there is.
    compared(glu, X, {"slice_gradient": 2}, [6, 5, 4, None], left=1)


@pytest.mark.parametrize("first", [False, True])
def test_joined_with_other_gradients(first):
    def code(x):
        y = tf.reduce_sum(x * x, -1, keepdims=True)
        return y + glu(x) if first else glu(x) + y

    # Sums of several are rounded in another order.
    check(gradient_of(code), [X], {"joined_slice_gradients": 1})


def part_of(dy, begin, end):
    """The gradient of a slice of a vector of 5."""
    indices = {"begin": [begin], "end": [end], "strides": [1]}
    return tf.raw_ops.StridedSliceGrad(dy=dy, shape=[5], **indices)


@pytest.mark.parametrize("read", [False, True])
def test_what_others_read_is_padded(read):
    def code(low, high):
        parts = part_of(low, 0, 2), part_of(high, 2, 5)
        total = tf.add_n(parts)
        return (total, tf.sin(parts[1])) if read else total

    rules = {"slice_gradient": 2} if read else {"joined_slice_gradients": 1}
    compiled = check(code, values((2,), (3,)), rules)
    refused = reasons(compiled)
    assert refused.keys() == ({"joined_slice_gradients"} if read else set())
    assert all("is also used by" in reason for reason in refused.values())


@pytest.mark.parametrize("disabled", ["joined_slice_gradients", "slice_gradient", "*slice*"])
def test_disabled(disabled):
    code = gradient_of(lambda x: glu(x) + tf.reduce_sum(x[1:]))
    expected = tf.function(code)(X)
    compiled = function(code, remap=RemapOptions(disable=[disabled]))
    np.testing.assert_array_equal(compiled(X), expected)
    left = {
        "joined_slice_gradients": {"slice_gradient": 4},
        "slice_gradient": {"joined_slice_gradients": 1},
        "*slice*": {},
    }
    assert rule_counts(compiled) == left[disabled]


def test_gradient_of_the_gradient():
    def twice(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            y = tf.reduce_sum(gradient_of(lambda x: glu(x * x))(x) ** 2)
        return y, outer.gradient(y, x)

    compiled = function(twice)
    for found, expected in zip(compiled(X), tf.function(twice)(X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    assert op_counts(compiled.get_concrete_function(X))[WHAT] == 0


def test_tape_outside():
    """TensorFlow makes a backward function, which is its own."""
    found = []
    for decorator in tf.function, function:
        compiled = decorator(lambda x: glu(x) + x[..., :1])
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = compiled(X)
        found.append(tape.gradient(y, X))
    np.testing.assert_array_equal(*found)
    assert rule_counts(compiled) == {}


def test_what_the_log_tells():
    model = keras.Sequential([keras.layers.Cropping2D(((1, 0), (1, 1)))])
    compiled = compared(model, X, {"slice_gradient": 1})
    (fusion,) = compiled.remap_reports[-1].fused
    (message,) = fusion.messages
    assert re.fullmatch(r"Fuse StridedSliceGrad: gradient=\S+", message)
    compiled = function(gradient_of(glu))
    compiled(X)
    (fusion,) = compiled.remap_reports[-1].fused
    (message,) = fusion.messages
    parts = r"sum=\S+ part=\S+ part=\S+ part=\S+"
    assert re.fullmatch(rf"Fuse StridedSliceGrad \+ AddN: {parts}", message)


@pytest.mark.parametrize(
    "code", [lambda x: x[new, ..., new], lambda x: x[:, :, :], lambda x: x[:6]]
)
def test_all_of_it_is_not_padded(code):
    compiled = compared(code, X, {"slice_gradient": 1})
    assert op_counts(compiled.get_concrete_function())["Pad"] == 0
