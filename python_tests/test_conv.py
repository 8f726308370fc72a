"""Convolution + bias + activation: numbers, shapes, and what the wrapper accepts."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import _library
from tf_fused_ops.ops import _arguments, activations, conv, conv2d_bias_act, reference

NAMES = ("dx", "dfilters", "dbias", "dside")


def unscaled(case):
    """The attributes of the gradient op, which knows no scale."""
    return {name: value for name, value in case.attributes().items() if name != "scale"}


def cast(values, dtype):
    return [None if v is None else tf.cast(tf.constant(v), dtype) for v in values]


def fused(case, x, filters, bias, side):
    return conv2d_bias_act(x, filters, bias, side_input=side, **case.attributes())


def fused_gradients(case, dy, x, filters, saved):
    attributes = unscaled(case)
    padding, explicit = _arguments.padding(attributes["padding"])
    attributes |= {"padding": padding, "explicit_paddings": explicit}
    saved = [] if saved is None else [saved]
    return conv._gradient_op(dy, x, filters, saved, (True,) * 4, attributes)


def saved_for(case, x, filters, bias, side):
    """What the forward op keeps for the gradient's slope."""
    attributes = case.attributes()
    if case.act == "none":
        return None
    if not activations.slope_from_value(case.act, cases.ALPHA):
        attributes["activation"] = "none"
    return reference.conv2d_bias_act(x, filters, bias, side, **attributes)


@remembered
def forward_problem(case, seed):
    """Returns the operands of a case, and y of stock code in the dtype and in float64."""
    operands = cast(case.inputs(seed)[:4], case.dtype)
    attributes = case.attributes()
    exact = reference.conv2d_bias_act(*cast(operands, "float64"), **attributes)
    # Stock TensorFlow gives an empty float16 or bfloat16 convolution the wrong shape.
    stock = exact if case.batch == 0 else reference.conv2d_bias_act(*operands, **attributes)
    return operands, stock, exact


def check_forward(case, seed=0, forward=fused):
    """Asserts that a function of a case and its tensors is as exact as stock TensorFlow."""
    operands, *others = forward_problem(case, seed)
    assert_as_exact("y", forward(case, *operands), *others, case.dtype)


@remembered
def gradient_problem(case, seed):
    """Returns dy, input, filters and what is saved; the gradients but for the scale of stock code
    in the dtype and in float64; and how large the sums are of which each may be a small one."""
    *operands, dy = cast(case.inputs(seed), case.dtype)
    wide = cast(operands, "float64")
    # The same saved tensor for all: next to a kink rounding decides the slope.
    saved = saved_for(case, *wide)
    (saved,) = cast([saved], case.dtype)
    wide_dy, wide_saved = cast([dy, saved], "float64")
    attributes = unscaled(case)
    exact = reference.conv2d_bias_act_grad(wide_dy, *wide[:2], wide_saved, **attributes)
    stock = exact
    if case.batch > 0:
        stock = reference.conv2d_bias_act_grad(dy, *operands[:2], saved, **attributes)
    sums = [0, 0, np.linalg.norm(wide_dy) / np.sqrt(case.cout), 0]
    return (dy, *operands[:2], saved), stock, exact, sums


def check(case, seed=0, forward=fused, gradients=fused_gradients):
    """Asserts it for a function and one that computes its gradients but for the scale."""
    check_forward(case, seed, forward)
    given, *others = gradient_problem(case, seed)
    for name, *compared, scale in zip(NAMES, gradients(case, *given), *others, strict=True):
        assert_as_exact(name, *compared, case.dtype, scale)


@pytest.mark.parametrize("case", cases.conv_cases(), ids=str)
def test_forward_and_gradients(case, isa):
    check(case)
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, isa):
    check(cases.ConvCase(act=act, dtype=dtype, cin=17, cout=33, side=True))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize(("cin", "cout", "groups"), [(34, 34, 34), (16, 32, 2), (6, 4, 2)])
def test_groups(cin, cout, groups, strides, layout, dtype, isa):
    """Also of channels that are groups of their own."""
    for act, side in (("none", False), ("silu", True)):
        check(
            cases.ConvCase(
                image=(6, 7), cin=cin, cout=cout, groups=groups, strides=strides, layout=layout,
                dtype=dtype, act=act, side=side,
            )
        )  # fmt: skip


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
@pytest.mark.parametrize("cout", [31, 64])
@pytest.mark.parametrize("act", ["none", "relu", "silu"])
def test_scale(act, cout, kernel, layout, dtype, isa):
    """In tiles that are written from registers, and in those that are staged."""
    for bias, side in ((False, False), (True, False), (True, True)):
        check_forward(
            cases.ConvCase(
                image=(6, 7), cin=16, cout=cout, kernel=kernel, layout=layout, dtype=dtype,
                act=act, bias=bias, side=side, scale=True,
            )
        )  # fmt: skip


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("act", ["none", "tanh", "silu"])
def test_gradients_with_scale(act, layout, dtype):
    case = cases.ConvCase(act=act, layout=layout, dtype=dtype, cin=5, cout=7, side=True, scale=True)
    attributes = unscaled(case)

    def gradients(function, dtype):
        *operands, dy = cast((*case.inputs()[:4], case.factors(), case.inputs()[4]), dtype)
        with tf.GradientTape() as tape:
            tape.watch(operands)
            x, filters, bias, side, scale = operands
            y = function(x, filters, bias, side_input=side, scale=scale, **attributes)
        return tape.gradient(y, operands, output_gradients=dy)

    values = gradients(conv2d_bias_act, dtype)
    stock = gradients(reference.conv2d_bias_act, dtype)
    expected = gradients(reference.conv2d_bias_act, "float64")
    names = ("dx", "dfilters", "dbias", "dside", "dscale")
    for row in zip(names, values, stock, expected, strict=True):
        assert_as_exact(*row, dtype)


def test_graphs_of_builds_without_scale():
    """The attribute that counts scales has a default, so graphs that lack it load."""
    x, filters, bias, _, _ = cast(cases.ConvCase().inputs(), "float32")
    concrete = tf.function(conv2d_bias_act).get_concrete_function(x, filters, bias)
    graph_def = concrete.graph.as_graph_def()
    (node,) = (node for node in graph_def.node if node.op == "TfFusedOps>Conv2DBiasAct")
    del node.attr["num_scale"]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        (y,) = tf.import_graph_def(graph_def, return_elements=[concrete.outputs[0].name])
        feeds = zip((t.name for t in concrete.inputs), (x, filters, bias), strict=True)
        found = session.run(y, {f"import/{name}": value.numpy() for name, value in feeds})
    np.testing.assert_array_equal(found, conv2d_bias_act(x, filters, bias))


def test_published_example(isa):
    x = np.arange(9, dtype=np.float32).reshape(1, 3, 3, 1)
    ones = np.ones((2, 2, 1, 1), np.float32)
    w = np.array([[0, 1], [2, 3]], np.float32).reshape(2, 2, 1, 1)
    y = conv2d_bias_act(x, ones, padding="VALID", activation="none")
    np.testing.assert_array_equal(y[0, :, :, 0], [[8, 12], [20, 24]])

    x, ones, w = tf.constant(x), tf.constant(ones), tf.constant(w)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, ones, w])
        y1 = conv2d_bias_act(x, ones, padding="VALID", activation="none")
        y2 = conv2d_bias_act(x, w, padding="VALID", activation="none")
    np.testing.assert_array_equal(tape.gradient(y1, ones)[:, :, 0, 0], [[8, 12], [20, 24]])
    expected = [[0, 1, 1], [2, 6, 4], [2, 5, 3]]
    np.testing.assert_array_equal(tape.gradient(y2, x)[0, :, :, 0], expected)


@st.composite
def random_cases(draw, dtypes, groups=(1, 1, 2, 3, 19)):
    def pair(low, high):
        return (draw(st.integers(low, high)), draw(st.integers(low, high)))

    image, kernel, strides, dilations = pair(1, 9), pair(1, 5), pair(1, 6), pair(1, 3)
    padding = draw(st.sampled_from(["SAME", "VALID", None]))
    padding = padding or (pair(0, 5), pair(0, 5))
    groups = draw(st.sampled_from(groups))
    most = 40 // groups
    return cases.ConvCase(
        batch=draw(st.integers(0, 3)),
        image=image,
        kernel=kernel,
        strides=strides,
        dilations=dilations,
        padding=padding,
        cin=groups * draw(st.integers(1, most)),
        cout=groups * draw(st.integers(1, most)),
        groups=groups,
        layout=draw(st.sampled_from(cases.LAYOUTS)),
        bias=draw(st.booleans()),
        side=draw(st.booleans()),
        scale=draw(st.booleans()),
        act=draw(st.sampled_from(cases.ACTIVATIONS)),
        dtype=draw(st.sampled_from(dtypes)),
    )


@given(case=random_cases(["float32", "float64"]), seed=st.integers(0, 1000))
def test_random_shapes(case, seed):
    if min(case.output_image()) > 0:
        check(case, seed)


# Stock TensorFlow refuses these where the shape is known before running.
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_window_larger_than_the_image_gives_an_empty_output(layout, isa):
    case = cases.ConvCase(
        image=(2, 9), kernel=(3, 3), padding="VALID", layout=layout, dtype="float64"
    )
    x, filters, bias, _, _ = cast([*case.inputs()[:3], None, None], "float64")
    with tf.GradientTape() as tape:
        tape.watch([x, filters, bias])
        y = fused(case, x, filters, bias, None)
    assert y.shape == case.ordered(2, (0, 7), 4)
    for gradient, value in zip(
        tape.gradient(y, [x, filters, bias]), [x, filters, bias], strict=True
    ):
        np.testing.assert_array_equal(gradient, np.zeros(value.shape))


@pytest.mark.parametrize(("cin", "cout"), [(0, 3), (3, 0)])
def test_no_channels(cin, cout, isa):
    x, filters = tf.ones((2, 4, 4, cin)), tf.ones((3, 3, cin, cout))
    bias = tf.range(cout, dtype=tf.float32)
    with tf.GradientTape() as tape:
        tape.watch([x, filters, bias])
        y = conv2d_bias_act(x, filters, bias, activation="none")
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (2, 4, 4, cout)))
    dx, dfilters, dbias = tape.gradient(y, [x, filters, bias])
    np.testing.assert_array_equal(dx, tf.zeros_like(x))
    np.testing.assert_array_equal(dfilters, tf.zeros_like(filters))
    np.testing.assert_array_equal(dbias, np.full(cout, 32))


ACCEPTED = [
    {"strides": 2},
    {"strides": [2]},
    {"strides": (2, 1)},
    {"strides": [1, 2, 1, 1]},
    {"dilations": 2},
    {"dilations": [1, 1, 2, 1]},
    {"padding": "VALID"},
    {"padding": [[0, 0], [1, 2], [0, 3], [0, 0]]},
]


@pytest.mark.parametrize("keywords", ACCEPTED, ids=str)
def test_arguments_of_tf_nn_conv2d(keywords):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 6, 7, 3)), rng.normal(size=(3, 3, 3, 4))
    expected = tf.nn.conv2d(x, w, **{"strides": 1, "padding": "SAME", **keywords})
    value = conv2d_bias_act(x, w, activation=None, **keywords)
    assert_close("y", value, expected, "float64")


@pytest.mark.parametrize("static", [True, False])
def test_more_batch_dimensions(static):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 5, 6, 3)), rng.normal(size=(3, 3, 3, 4))
    side = rng.normal(size=(2, 3, 5, 6, 4))
    dims = (2, 3, 5, 6, 3) if static else (None, None, None, 6, 3)

    @tf.function(input_signature=[tf.TensorSpec(dims, tf.float64)])
    def run(x):
        return conv2d_bias_act(x, w, activation="relu", side_input=side)

    expected = tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME") + side)
    assert_close("y", run(x), expected, "float64")
    assert run.get_concrete_function().output_shapes.rank == 5


def test_what_converts_to_tensors():
    x, w = np.ones((1, 2, 2, 1), np.float32), tf.Variable(np.ones((1, 1, 1, 1), np.float32))
    y = conv2d_bias_act(x, w, [3.0], side_input=x.tolist())
    np.testing.assert_array_equal(y, np.full((1, 2, 2, 1), 5))


@pytest.mark.parametrize("name", ["gelu", "swish", "linear", "hard_silu"])
def test_other_names_of_activations(name):
    x = np.linspace(-4, 4, 16).reshape(1, 4, 4, 1)
    value = conv2d_bias_act(x, np.ones((1, 1, 1, 1)), activation=name)
    stock = {
        "gelu": lambda z: 0.5 * z * (1 + tf.math.erf(z / np.sqrt(2))),
        "swish": tf.nn.swish,
        "linear": tf.identity,
        "hard_silu": tf.keras.activations.hard_silu,
    }
    assert_close("y", value, stock[name](tf.constant(x)), "float64")


def test_nan_and_infinity_pass_through(isa):
    x = tf.constant([np.nan, np.inf, -np.inf, 1.0])[None, None, :, None]
    for act in cases.ACTIVATIONS:
        y = conv2d_bias_act(x, tf.ones((1, 1, 1, 1)), activation=act, alpha=cases.ALPHA)
        expected = activations.STOCK[act](x, cases.ALPHA)
        assert np.isnan(y[0, 0, 0, 0]), act
        np.testing.assert_allclose(y[0, 0, 1:2, 0], expected[0, 0, 1:2, 0], err_msg=act)
