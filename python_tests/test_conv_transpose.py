"""Transposed convolution + bias + activation: numbers, shapes, and what the wrapper accepts."""

import dataclasses
import itertools

import cases
import numpy as np
import pytest
import tensorflow as tf
from bad_calls import ERRORS
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from test_conv import cast
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import _library
from tf_fused_ops.ops import (
    _arguments,
    activations,
    conv2d_transpose_bias_act,
    conv_transpose,
    reference,
)

NAMES = ("y", "pre_activation", "dx", "dfilters", "dbias", "dside")
FORWARD = "TfFusedOps>Conv2DTransposeBiasAct"


def channels_last(case, value):
    return value if case.layout == "NHWC" else np.transpose(value, [0, 2, 3, 1])


def as_laid_out(case, value):
    return value if case.layout == "NHWC" else np.transpose(value, [0, 3, 1, 2])


def met_pixels(case):
    """For each tap of the filters, which pixels of padded y the pixels of x meet through it."""
    sizes = case.convolution().output_image()
    for tap in itertools.product(*map(range, case.kernel)):
        rows = zip(tap, case.dilations, case.strides, sizes, strict=True)
        yield tap, tuple(slice(i * d, i * d + (size - 1) * s + 1, s) for i, d, s, size in rows)


def linear(case, x, filters):
    """The transposed convolution by its definition: each pixel of x adds its filters to y."""
    x, pads = channels_last(case, np.asarray(x)), case.convolution().pads()
    sizes = [size + sum(pad) for size, pad in zip(case.image, pads, strict=True)]
    padded = np.zeros((case.batch, *sizes, case.cout))
    for tap, (rows, columns) in met_pixels(case):
        padded[:, rows, columns] += x @ np.asarray(filters)[tap].T
    (top, _), (left, _) = pads
    y = padded[:, top : top + case.image[0], left : left + case.image[1]]
    return as_laid_out(case, y)


def linear_gradients(case, dz, x, filters):
    """The gradients of `linear`."""
    x, dz = (channels_last(case, np.asarray(v)) for v in (x, dz))
    filters = np.asarray(filters)
    padded = np.pad(dz, [(0, 0), *case.convolution().pads(), (0, 0)])
    dx, dfilters = np.zeros(x.shape), np.zeros(filters.shape)
    for tap, (rows, columns) in met_pixels(case):
        met = padded[:, rows, columns]
        dx += met @ filters[tap]
        dfilters[tap] = met.reshape(-1, case.cout).T @ x.reshape(-1, case.cin)
    return as_laid_out(case, dx), dfilters


def pre_activation(case, x, filters, bias, side):
    z = linear(case, x, filters)
    if bias is not None:
        z = z + np.reshape(bias, [-1, 1, 1] if case.layout == "NCHW" else [-1])
    return tf.constant(z if side is None else z + np.asarray(side))


def activated(case, z):
    return reference.act(z, case.act, cases.ALPHA)


def saved_for(case, z):
    """What the forward op keeps for the gradient's slope."""
    if case.act == "none":
        return None
    return activated(case, z) if activations.slope_from_value(case.act, cases.ALPHA) else z


def expected_gradients(case, dy, x, filters, saved):
    dz = reference.act_grad(dy, saved, case.act, cases.ALPHA).numpy()
    dbias = channels_last(case, dz).sum((0, 1, 2))
    return *linear_gradients(case, dz, x, filters), dbias, dz


def fused(case, x, filters, bias, side):
    return conv2d_transpose_bias_act(
        x, filters, case.output_shape(), bias, side_input=side, **case.attributes()
    )


def raw_attributes(case):
    """The attributes of the ops."""
    attributes = case.attributes()
    padding, explicit = _arguments.padding(attributes["padding"])
    return attributes | {"padding": padding, "explicit_paddings": explicit}


def raw(case, x, filters, bias=None, side=None, **attributes):
    """y and the pre-activation as the op has them."""
    return _library.ops.tf_fused_ops_conv2d_transpose_bias_act(
        input=x,
        filters=filters,
        bias=[] if bias is None else [bias],
        side_input=[] if side is None else [side],
        output_shape=case.output_shape(),
        **raw_attributes(case),
        **attributes,
    )


def fused_gradients(case, dy, x, filters, saved, wanted=(True,) * 4):
    saved = [] if saved is None else [saved]
    return conv_transpose._gradient_op(dy, x, filters, saved, wanted, raw_attributes(case))


def stock(case, x, filters, bias, side):
    return reference.conv2d_transpose_bias_act(
        x, filters, case.output_shape(), bias, side, **case.attributes()
    )


def stock_gradients(case, dy, x, filters, saved):
    return reference.conv2d_transpose_bias_act_grad(dy, x, filters, saved, **case.attributes())


@remembered
def problem(case, seed):
    """The inputs of a case, what is saved; what is named in `NAMES`, exact and of stock code; and
    how large the sums are of which each may be a small one."""
    *operands, dy = cast(case.inputs(seed), case.dtype)
    *wide, wide_dy = cast([*operands, dy], "float64")
    z = pre_activation(case, *wide)
    # The same saved tensor for all: next to a kink rounding decides the slope.
    (saved,) = cast([saved_for(case, z)], case.dtype)
    (wide_saved,) = cast([saved], "float64")
    exact = [activated(case, z), z, *expected_gradients(case, wide_dy, *wide[:2], wide_saved)]
    others = exact
    # Stock TensorFlow gives empty gradients the wrong shape, and of bfloat16 images of one pixel it
    # leaves the gradient of filters as the memory was.
    if case.batch > 0 and case.image != (1, 1):
        linear_case = dataclasses.replace(case, act="none")
        others = [stock(case, *operands), stock(linear_case, *operands)]
        others += stock_gradients(case, dy, *operands[:2], saved)
    # Activations cut sums, and biases' gradients may cancel.
    sums = [np.abs(z).max(initial=0), *[0] * 3, np.linalg.norm(wide_dy) / np.sqrt(case.cout), 0]
    return operands, dy, saved, exact, others, sums


def check(case, seed=0):
    """Asserts that y and the gradients of a case are as exact as those of stock TensorFlow."""
    operands, dy, saved, exact, others, sums = problem(case, seed)
    values = [fused(case, *operands), raw(case, *operands, save_pre_activation=True)[1]]
    values += fused_gradients(case, dy, *operands[:2], saved)
    for *row, scale in zip(NAMES, values, others, exact, sums, strict=True):
        assert_as_exact(*row, case.dtype, scale)


CASES = cases.conv_transpose_cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients(case, isa):
    check(case)
    assert _library.isa() == isa


def path(image, kernel, cin, cout, act="relu", **options):
    return cases.ConvTransposeCase(
        image=image, kernel=kernel, cin=cin, cout=cout, act=act, **options
    )


PATHS = [
    # Images that tasks divide, of several blocks of pixels and of channels.
    path((63, 66), (3, 3), 48, 96, "silu"),
    path((64, 65), (2, 2), 130, 67, side=True),
    path((61, 64), (4, 4), 33, 3, "tanh"),
    path((64, 64), (5, 5), 3, 1, layout="NCHW"),
    path((31, 50), (7, 7), 32, 64, strides=(3, 3), layout="NCHW"),
    path((14, 14), (3, 3), 256, 128, "gelu_erf", batch=5),
    # Pixels between the strides as columns of one product.
    path((18, 40), (3, 3), 21, 8, "elu", side=True),
    path((18, 40), (5, 5), 9, 4, layout="NCHW"),
    path((18, 39), (5, 5), 19, 3, "tanh", side=True),
    # Lines of windows side by side, whose pixels are joined.
    path((6, 21), (2, 3), 19, 5, padding="VALID", side=True, strides=(2, 3)),
    path((7, 12), (1, 2), 5, 17, "mish", strides=(1, 2)),
    # Products of few channels, of few rows, and of fewer rows than columns.
    path((12, 50), (3, 3), 70, 2, "sigmoid", strides=(1, 1)),
    path((2, 3), (1, 1), 600, 70, "silu", strides=(1, 1), batch=1),
    path((1, 1), (4, 4), 600, 40, "silu", padding=((1, 2), (1, 2))),
    path((3, 4), (1, 1), 700, 70, "none", strides=(1, 1), bias=False),
    path((3, 4), (1, 1), 700, 70, "silu", strides=(1, 1), bias=False, side=True),
    path((3, 4), (1, 1), 700, 70, strides=(1, 1), side=True),
]


@pytest.mark.parametrize("case", PATHS, ids=str)
def test_paths(case, isa):
    for dtype in cases.DTYPES:
        check(dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, isa):
    for dtype in cases.DTYPES:
        check(cases.ConvTransposeCase(act=act, dtype=dtype, cin=17, cout=33, side=True))


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


RANDOM_CASES = st.builds(
    cases.ConvTransposeCase,
    batch=st.integers(0, 3),
    image=pairs(1, 12),
    kernel=pairs(1, 5),
    strides=pairs(1, 6),
    dilations=pairs(1, 3),
    padding=st.sampled_from(["SAME", "VALID"]) | st.tuples(pairs(0, 5), pairs(0, 5)),
    cin=st.integers(1, 40),
    cout=st.integers(1, 40),
    layout=st.sampled_from(cases.LAYOUTS),
    bias=st.booleans(),
    side=st.booleans(),
    act=st.sampled_from(cases.ACTIVATIONS),
    dtype=st.sampled_from(["float32", "float64"]),
)


@given(case=RANDOM_CASES, seed=st.integers(0, 1000))
def test_random_shapes(case, seed):
    if min(case.convolution().output_image()) > 0:
        check(case, seed)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "float64"], ids=str)
def test_reference(case):
    """What gradients of gradients are made of."""
    operands, dy, saved, (y, _, *gradients), *_ = problem(case, 0)
    assert_close("y", stock(case, *operands), y, "float64", 64)
    found = stock_gradients(case, dy, *operands[:2], saved)
    for name, value, exact in zip(NAMES[2:], found, gradients, strict=True):
        assert_close(name, value, exact, "float64", 1000)


def test_by_hand(isa):
    """Filters as large as the strides lie beside each other, larger ones are summed."""
    x = tf.reshape(tf.constant([1.0, 2, 3, 4]), (1, 2, 2, 1))
    filters = tf.Variable(tf.reshape([1.0, 10, 100, 1000], (2, 2, 1, 1)))
    y = conv2d_transpose_bias_act(x, filters, (1, 4, 4, 1), [0.5], strides=2, activation="none")
    expected = [[1, 10, 2, 20], [100, 1000, 200, 2000], [3, 30, 4, 40], [300, 3000, 400, 4000]]
    np.testing.assert_array_equal(y[0, :, :, 0], np.add(expected, 0.5))
    y = conv2d_transpose_bias_act(x, filters, (1, 3, 3, 1), padding="VALID", activation="none")
    expected = [[1, 12, 20], [103, 1234, 2040], [300, 3400, 4000]]
    np.testing.assert_array_equal(y[0, :, :, 0], expected)


@pytest.mark.parametrize(("layout", "dtype"), [("NHWC", "float32"), ("NCHW", "bfloat16")])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [2, 3])
def test_all_sizes_that_are_convolved_to_the_same(stride, padding, layout, dtype, isa):
    first = 4 * stride + (3 if padding == "VALID" else 1)
    case = cases.ConvTransposeCase(
        strides=(stride, stride), padding=padding, layout=layout, dtype=dtype, act="silu"
    )
    for size in range(first, first + stride):
        case = dataclasses.replace(case, image=(size, first))
        assert case.convolution().output_image() == (5, 5)
        check(case)


def test_pixels_that_no_filter_meets(isa):
    """They are made of bias and side input alone, whatever x holds."""
    x = tf.fill((1, 2, 2, 3), np.float32(np.nan))
    filters, bias = tf.ones((1, 1, 5, 3)), tf.constant([1.0, -2, 3, -4, 5])
    side = tf.reshape(tf.range(80, dtype=tf.float32) - 40, (1, 4, 4, 5))
    for side_input in (None, side):
        y = conv2d_transpose_bias_act(
            x, filters, (1, 4, 4, 5), bias, strides=2, side_input=side_input
        ).numpy()
        met = np.zeros((4, 4), bool)
        met[::2, ::2] = True
        assert np.isnan(y[0, met]).all()
        expected = np.maximum(bias + (0 if side_input is None else side[0]), 0)
        np.testing.assert_array_equal(y[0, ~met], np.broadcast_to(expected, (4, 4, 5))[~met])


def test_nan_and_infinity_pass_through(isa):
    x, filters = tf.constant([np.nan, np.inf, -np.inf, 1.0])[None, None, :, None], tf.ones([1] * 4)
    for act in cases.ACTIVATIONS:
        y = conv2d_transpose_bias_act(x, filters, x.shape, activation=act, alpha=cases.ALPHA)
        expected = activations.STOCK[act](x, cases.ALPHA)
        assert np.isnan(y[0, 0, 0, 0]), act
        np.testing.assert_allclose(y[0, 0, 1:2, 0], expected[0, 0, 1:2, 0], err_msg=act)


# Batch, height of y, channels, and whether windows are larger than y: stock TensorFlow refuses that
# where the shape is known before running.
EMPTY = [
    *((2, 5, 0, 3, False), (2, 5, 3, 0, False), (2, 5, 0, 0, False), (2, 0, 3, 4, False)),
    *((0, 5, 3, 4, False), (0, 0, 0, 0, False), (2, 2, 3, 4, True)),
]


@pytest.mark.parametrize(("layout", "dtype"), [("NHWC", "float32"), ("NCHW", "bfloat16")])
@pytest.mark.parametrize(("batch", "height", "cin", "cout", "large"), EMPTY)
def test_nothing_of_some_dimension(batch, height, cin, cout, large, layout, dtype, isa):
    case = cases.ConvTransposeCase(
        batch=batch, image=(height, 9), cin=cin, cout=cout, layout=layout, dtype=dtype
    )
    if large:
        case = dataclasses.replace(case, strides=(1, 1), padding="VALID")
    conv = case.convolution()
    x = tf.ones(conv.ordered(batch, conv.output_image(), cin), dtype)
    assert 0 in (*x.shape, cout)
    filters, bias = tf.ones((3, 3, cout, cin), dtype), tf.range(-1, cout - 1, dtype=dtype)
    with tf.GradientTape() as tape:
        tape.watch([x, filters, bias])
        y = fused(case, x, filters, bias, None)
    assert y.shape == case.output_shape()
    expected = np.broadcast_to(tf.nn.relu(bias), (batch, height, 9, cout))
    np.testing.assert_array_equal(channels_last(case, y.numpy()), expected)
    dx, dfilters, dbias = tape.gradient(y, [x, filters, bias])
    np.testing.assert_array_equal(dx, tf.zeros_like(x))
    np.testing.assert_array_equal(dfilters, tf.zeros_like(filters))
    np.testing.assert_array_equal(dbias, batch * height * 9 * (bias.numpy() > 0))


NAMES_OF_ACTIVATIONS = {None: "none", "linear": "none", "swish": "silu", "gelu": "gelu_erf"}
ACCEPTED = [
    {"strides": 2, "output_shape": [2, 12, 14, 4]},
    {"strides": [2], "output_shape": (2, 11, 13, 4)},
    {"strides": (2, 1), "output_shape": (2, 12, 7, 4)},
    {"strides": [1, 2, 1, 1], "output_shape": (2, 12, 7, 4)},
    {"dilations": 2},
    {"dilations": [1, 1, 2, 1]},
    {"padding": "VALID", "output_shape": (2, 8, 9, 4)},
    {"padding": "valid", "output_shape": (2, 8, 9, 4)},
    {"padding": [[0, 0], [1, 2], [0, 3], [0, 0]], "output_shape": (2, 5, 6, 4)},
    {"output_shape": tf.TensorShape([2, 6, 7, 4])},
    {"output_shape": np.array([2, 6, 7, 4])},
    {"output_shape": tf.constant([2, 6, 7, 4], tf.int64)},
    {"output_shape": [tf.constant(2), 6, np.int32(7), 4]},
    *({"activation": name} for name in NAMES_OF_ACTIVATIONS),
]


@pytest.mark.parametrize("keywords", ACCEPTED, ids=str)
def test_arguments_of_tf_nn_conv2d_transpose(keywords):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 6, 7, 3)), rng.normal(size=(3, 3, 4, 3))
    attributes = {"output_shape": (2, 6, 7, 4), "strides": 1, "padding": "SAME", "activation": None}
    attributes |= keywords
    value = conv2d_transpose_bias_act(x, w, **attributes)
    attributes = {"data_format": "NHWC", "alpha": 0.0, "dilations": 1, **attributes}
    attributes["activation"] = NAMES_OF_ACTIVATIONS[attributes["activation"]]
    for name in ("strides", "dilations"):
        attributes[name] = _arguments.four(name, attributes[name], "NHWC")
    if attributes["padding"] == "valid":
        attributes["padding"] = "VALID"
    shape = tf.cast(tf.convert_to_tensor(attributes.pop("output_shape")), tf.int32)
    expected = reference.conv2d_transpose_bias_act(
        tf.constant(x), tf.constant(w), shape, None, None, **attributes
    )
    assert_close("y", value, expected, "float64")


KNOWN = [(2, 3, 3, 3), (3, 3, 4, 3), (4,)]
# How the shapes are given, x's, the filters' and the bias's, and what is then known of y's.
STATIC_SHAPES = [
    (lambda x: [2, 5, 6, 4], [None] * 3, (2, 5, 6, 4)),
    (lambda x: [tf.shape(x)[0], 5, 6, 4], [(None, 3, 3, 3), None, None], (None, 5, 6, 4)),
    (
        lambda x: tf.stack([tf.shape(x)[0], 2 * tf.shape(x)[1], 6, 4]),
        [(2, None, 3, 3), (3, 3, 4, 3), None],
        (2, None, 6, 4),
    ),
    (lambda x: tf.shape(x) * [1, 2, 2, 0] + [0, 0, 0, 4], KNOWN, (2, 6, 6, 4)),
    (
        lambda x: tf.cast(tf.shape(x) * [1, 2, 2, 0] + [0, 0, 0, 4], tf.int64),
        [(None, None, None, 3), KNOWN[1], None],
        (None, None, None, 4),
    ),
    (lambda x: tf.shape(x) * [1, 2, 2, 0] + [0, 0, 0, 4], [None] * 3, (None,) * 4),
]


@pytest.mark.parametrize(("output_shape", "known", "expected"), STATIC_SHAPES)
def test_static_shapes(output_shape, known, expected):
    def layer(x, filters, bias):
        return conv2d_transpose_bias_act(
            x, filters, output_shape(x), bias, strides=2, activation="silu"
        )

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.float32) for shape in known])
    def step(*inputs):
        y = layer(*inputs)
        assert y.shape.as_list() == list(expected)
        return y, gradients_of(layer, inputs, tf.ones(tf.shape(y)))

    rng = np.random.default_rng(0)
    inputs = [tf.constant(rng.normal(size=shape), tf.float32) for shape in KNOWN]
    y = layer(*inputs)
    exact = y, gradients_of(layer, inputs, tf.ones_like(y))
    for found, expected in zip(*map(tf.nest.flatten, (step(*inputs), exact)), strict=True):
        np.testing.assert_array_equal(found, expected)


SECOND_ORDER = cases.pairwise(
    {
        "strides": [(1, 1), (3, 2)],
        "padding": ["SAME", "VALID", ((1, 0), (2, 1))],
        "dilations": [(1, 1), (2, 3)],
        "layout": cases.LAYOUTS,
    }
)


@pytest.mark.parametrize("row", SECOND_ORDER, ids=str)
def test_second_order(row):
    case = cases.ConvTransposeCase(
        image=(7, 8), cin=2, cout=3, kernel=(2, 3), side=True, act="tanh", dtype="float64", **row
    )
    *inputs, dy = cast(case.inputs(), "float64")
    weights = weights_for(inputs)
    expected = second_order(lambda *v: stock(case, *v), inputs, dy, weights)
    for run in (second_order, tf.function(second_order, autograph=False)):
        assert_all_close(run(lambda *v: fused(case, *v), inputs, dy, weights), expected)


@pytest.mark.parametrize("act", ["none", "relu", "silu"])
@pytest.mark.parametrize(("bias", "side"), [*itertools.product([False, True], repeat=2)])
def test_gradients_of_the_wrapper(bias, side, act):
    """Of the inputs that are there, the gradient of the shape being none."""
    case = cases.ConvTransposeCase(act=act, bias=bias, side=side, dtype="float64", cin=5, cout=7)
    *operands, dy = cast(case.inputs(), "float64")

    def gradients(layer):
        def run(*given):
            given = iter(given)
            return layer(case, *(None if v is None else next(given) for v in operands))

        return gradients_of(run, [v for v in operands if v is not None], dy)

    assert_all_close(gradients(fused), gradients(stock))


def test_gradients_of_the_op():
    """Without the pre-activation, which is computed again, and through it."""
    case = cases.ConvTransposeCase(act="mish", side=True, dtype="float64", strides=(2, 1))
    *inputs, dy = cast(case.inputs(), "float64")
    expected = gradients_of(lambda *v: stock(case, *v), inputs, dy)
    assert_all_close(gradients_of(lambda *v: raw(case, *v).y, inputs, dy), expected)

    def both(*values):
        outputs = raw(case, *values, save_pre_activation=True)
        return outputs.y * tf.sin(outputs.pre_activation)

    def by_stock(*values):
        z = stock(dataclasses.replace(case, act="none"), *values)
        return activated(case, z) * tf.sin(z)

    assert_all_close(gradients_of(both, inputs, dy), gradients_of(by_stock, inputs, dy))


@pytest.mark.parametrize(("act", "kept"), [("none", False), ("relu", False), ("mish", True)])
def test_the_pre_activation_is_kept_in_training_alone(act, kept, monkeypatch):
    sizes, op = [], _library.ops.tf_fused_ops_conv2d_transpose_bias_act

    def observed(**arguments):
        outputs = op(**arguments)
        sizes.append(int(tf.size(outputs.pre_activation)))
        return outputs

    case = cases.ConvTransposeCase(act=act)
    inputs = cast(case.inputs()[:4], "float32")
    with monkeypatch.context() as patch:
        patch.setattr(_library.ops, op.__name__, observed)
        fused(case, *inputs)
        with tf.GradientTape():
            fused(case, *inputs)
        with tf.GradientTape() as tape:
            tape.watch(inputs[1])
            fused(case, *inputs)
    assert sizes == [0, 0, np.prod(case.output_shape()) * kept]

    def forward(*v):
        return fused(case, *v, None)

    for code, kept_there in ((forward, False), (lambda *v: gradients_of(forward, v, None), kept)):
        graph = tf.function(code).get_concrete_function(*inputs[:3]).graph
        (op,) = (op for op in graph.get_operations() if op.type == FORWARD)
        assert op.get_attr("save_pre_activation") == kept_there


@pytest.mark.parametrize("wanted", [*itertools.product([False, True], repeat=4)], ids=str)
def test_only_what_is_asked_for_is_computed(wanted):
    case = cases.ConvTransposeCase(act="tanh", cin=5, cout=3)
    *operands, dy = cast(case.inputs(), "float32")
    saved = fused(case, *operands)
    every = fused_gradients(case, dy, *operands[:2], saved)
    some = fused_gradients(case, dy, *operands[:2], saved, wanted)
    for name, value, other, is_wanted in zip(NAMES[2:], every, some, wanted, strict=True):
        expected = value if is_wanted else np.zeros(0)
        np.testing.assert_array_equal(other, expected, err_msg=name)


# Outputs with pre-activations of 16 MiB and more are stored past the caches: stride by stride, with
# the pixels between the strides as columns, and with joined lines.
@pytest.mark.parametrize(
    ("kernel", "cout"), [((3, 3), 64), ((3, 3), 8), ((2, 2), 32), ((5, 4), 32)], ids=str
)
def test_large_outputs_have_the_bits_of_small_ones(kernel, cout, isa):
    dtype = "bfloat16" if cout == 32 else "float32"
    size = tf.as_dtype(dtype).size
    height = 2 + 2 * (2**24 // (size * cout * 3 * 96 * 2))
    case = cases.ConvTransposeCase(
        batch=3, image=(height, 96), kernel=kernel, cin=3, cout=cout, side=True, act="silu"
    )
    shapes = (3, height // 2, 48, 3), (*kernel, cout, 3), [cout], case.output_shape()
    x, filters, bias, side = (
        tf.random.stateless_uniform(shape, [1, 2], -1, 1, dtype) for shape in shapes
    )
    y, z = raw(case, x, filters, bias, side, save_pre_activation=True)
    assert 2**24 <= tf.size(y) * size < 2**25
    one = dataclasses.replace(case, batch=1)
    for i in range(case.batch):
        image = slice(i, i + 1)
        parts = raw(one, x[image], filters, bias, side[image], save_pre_activation=True)
        np.testing.assert_array_equal(parts.y, y[image])
        np.testing.assert_array_equal(parts.pre_activation, z[image])


FAR = 2**31 - 1


@pytest.mark.parametrize("graph", [False, True])
def test_more_elements_than_a_tensor_has(graph):
    x, filters = tf.zeros((1, 1, 1, 0)), tf.zeros((1, 1, 2**20, 0))

    def call():
        return conv2d_transpose_bias_act(x, filters, [1, FAR, FAR, 2**20], strides=FAR)

    with pytest.raises((*ERRORS, tf.errors.ResourceExhaustedError)):
        (tf.function(call) if graph else call)()


@pytest.mark.parametrize("act", ["none", "relu"])
def test_large_images_of_which_there_are_none(act, isa):
    x, filters = tf.zeros((0, FAR, FAR, 1)), tf.ones((2, 2, 1, 1))
    with tf.GradientTape() as tape:
        tape.watch([x, filters])
        y = conv2d_transpose_bias_act(x, filters, x.shape, [1.0], activation=act)
    assert y.shape == x.shape
    dx, dfilters = tape.gradient(y, [x, filters])
    assert dx.shape == x.shape
    np.testing.assert_array_equal(dfilters, np.zeros((2, 2, 1, 1)))


WRONG = [
    *([2, -1, 5, 4], [2, 5, -1, 4], [-1, 5, 5, 4], [2, 5, 5, -1], [-1] * 4),
    *([2**32 + 2, 5, 5, 4], [2, 5 + 2**32, 5, 4], [2, 5, 5 - 2**32, 4], [2**63 - 1] * 4),
]


@pytest.mark.parametrize("sizes", WRONG, ids=str)
@pytest.mark.parametrize("known", ["when called", "in the graph", "when run"])
def test_sizes_that_no_tensor_has(sizes, known):
    """In a graph -1 is one that is not known before running; those of 64 bits do not wrap."""
    x, filters = tf.ones((2, 3, 3, 3)), tf.ones((3, 3, 4, 3))

    def call(sizes):
        return conv2d_transpose_bias_act(x, filters, sizes, strides=2)

    with pytest.raises((*ERRORS, tf.errors.ResourceExhaustedError), match="output_shape"):
        if known == "when run":
            tf.function(call)(tf.constant(sizes, tf.int64))
        else:
            (tf.function(call) if known == "in the graph" else call)(sizes)
