"""Gradients of products of quantized rows with 8-bit weights, of every order; shapes; Keras."""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import QuantizedOpCase
from gradient_problems import (
    ACTIVATIONS,
    assert_all_close,
    gradients_of,
    problem,
    second_order,
    weights_for,
)
from test_quantized_matmul import fused, pre_activation, tensors, wide
from tolerances import UNIT, assert_as_exact

from tf_fused_ops import _library, quantized_matmul_bias_act
from tf_fused_ops.ops import activations, reference

WRAPS = [lambda function: function, lambda function: tf.function(function, autograph=False)]
everywhere = pytest.mark.parametrize("wrap", WRAPS, ids=["eager", "graph"])


def formula(case, dtype, saved, b, b_scale, dy):
    """The gradients of a and bias in a dtype, slopes being those of what the op keeps."""
    weights = b / wide(b_scale[:, None] if case.tb else b_scale)
    dz = reference.act_grad(tf.cast(dy, dtype), tf.cast(saved, dtype), case.act, cases.ALPHA)
    da = tf.matmul(dz, tf.cast(weights, dtype), transpose_b=not case.tb)
    # Of so many that half precision would lose most of them.
    summands = tf.cast(dz, "float32" if dtype[-2:] == "16" else dtype)
    return da, tf.cast(tf.reduce_sum(summands, range(dz.shape.rank - 1)), dtype)


def check(case, wrap=WRAPS[0], seed=0):
    """Asserts that gradients are as exact as stock TensorFlow's."""
    a, b, b_scale, bias, dy = tensors(case, seed)
    saved = tf.constant(pre_activation(case, a, b, b_scale, bias))
    if activations.slope_from_value(case.act, cases.ALPHA):
        saved = reference.act(saved, case.act, cases.ALPHA)
    saved = tf.cast(saved, case.dtype)
    watched = [a] if bias is None else [a, bias]

    def gradients(*values):
        return gradients_of(lambda a, bias=None: fused(case, a, b, b_scale, bias), [*values], dy)

    stock, exact = (
        formula(case, dtype, saved, b, b_scale, dy) for dtype in (case.dtype, "float64")
    )
    scales = 0, np.linalg.norm(wide(dy)) / np.sqrt(max(1, case.n))
    rows = zip(("da", "dbias"), wrap(gradients)(*watched), stock, exact, scales, strict=False)
    for name, value, *others, scale in rows:
        assert value.dtype == case.dtype
        assert_as_exact(name, value, *others, case.dtype, scale)


@everywhere
@pytest.mark.parametrize("dtype", cases.QUANTIZED_DTYPES)
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, wrap):
    for tb in (False, True):
        check(QuantizedOpCase(lead=(2, 3), m=5, k=17, n=33, tb=tb, act=act, dtype=dtype), wrap)


@pytest.mark.parametrize("case", cases.quantized_matmul_cases()[::5], ids=str)
def test_sizes(case, isa):
    check(case)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0, 0, 0), (2, 0, 4), (0, 0, 4)], ids=str)
@pytest.mark.parametrize("lead", [(), (0,), (2,)], ids=str)
@pytest.mark.parametrize("tb", [False, True])
def test_empty(tb, lead, shape, isa):
    """Sums of nothing are zero."""
    m, k, n = shape
    case = QuantizedOpCase(lead=lead, m=m, k=k, n=n, tb=tb, act="silu")
    *inputs, bias, _ = tensors(case)
    y = fused(case, *inputs, bias)
    assert y.shape == (*lead, m, n)
    if k == 0:
        value = reference.act(tf.broadcast_to(bias, y.shape), case.act, cases.ALPHA)
        np.testing.assert_allclose(y, value, rtol=4 * UNIT["float32"])
    check(case)


def test_the_reference_without_depth():
    case = QuantizedOpCase(k=0)
    *inputs, _ = tensors(case)
    stock = reference.quantized_matmul_bias_act(*inputs, **case.attributes())
    np.testing.assert_array_equal(stock, fused(case, *inputs))


@pytest.mark.parametrize("shape", [(2**40, 0), (2**33, 0, 0), (0, 2**20, 0)], ids=str)
def test_huge_but_empty(shape):
    y = quantized_matmul_bias_act(tf.zeros(shape), np.zeros((0, 0), np.int8), np.zeros(0))
    assert y.shape == shape


@pytest.mark.parametrize(("act", "alpha"), ACTIVATIONS)
def test_second_order(act, alpha):
    ours, theirs, inputs, dy = problem("quantized_matmul", act, alpha)
    weights = weights_for(inputs)
    wanted = second_order(theirs, inputs, dy, weights)
    assert_all_close(second_order(ours, inputs, dy, weights), wanted, 64)
    in_function = tf.function(second_order, autograph=False)
    assert_all_close(in_function(ours, inputs, dy, weights), wanted, 64)


@everywhere
@pytest.mark.parametrize("act", ["none", "relu", "gelu_erf"])
def test_weights_have_none(act, wrap):
    *inputs, _ = map(tf.constant, tensors(QuantizedOpCase()))

    def gradients(*values):
        with tf.GradientTape() as tape:
            tape.watch([value for value in values if value.dtype.is_floating])
            y = quantized_matmul_bias_act(*values, activation=act)
        found = tape.gradient(y, list(values))
        assert [gradient is None for gradient in found] == [False, True, True, False]
        return found[0], found[3]

    da, dbias = wrap(gradients)(*inputs)
    assert da.shape == inputs[0].shape and dbias.shape == inputs[3].shape


def test_of_the_bias_alone():
    """Without a product."""
    case = QuantizedOpCase(act="relu")
    a, *weights, bias, dy = tensors(case)

    def function(a, bias):
        return fused(case, a, *weights, bias)

    alone = tf.function(lambda bias: gradients_of(lambda v: function(a, v), [bias], dy))
    graph = alone.get_concrete_function(bias).graph
    assert "TfFusedOps>MatMulBiasAct" not in {op.type for op in graph.get_operations()}
    np.testing.assert_array_equal(alone(bias)[0], gradients_of(function, [a, bias], dy)[1])


@everywhere
@pytest.mark.parametrize("act", ["none", "relu", "gelu_erf"])
def test_where_rounding_has_the_gradient_zero(act, wrap):
    """What stock TensorFlow makes of the reference."""
    case = QuantizedOpCase(act=act)
    a, b, b_scale, bias, dy = map(tf.constant, tensors(case))

    def ours(a, b_scale, bias):
        return _library.ops.tf_fused_ops_quantized_mat_mul_bias_act(
            a=a, b=b, b_scale=b_scale, bias=[bias], straight_through=False, **case.attributes()
        )

    def theirs(a, b_scale, bias):
        return reference.quantized_matmul_bias_act(a, b, b_scale, bias, **case.attributes())

    def gradients(function):
        return wrap(lambda *values: gradients_of(function, list(values), dy))(a, b_scale, bias)

    assert_all_close(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("act", ["linear", "relu", "gelu"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_against_keras(use_bias, act, isa):
    """A layer after `quantize`, in training as well."""
    rng = np.random.default_rng(0)
    layer = keras.layers.Dense(33, activation=act, use_bias=use_bias, bias_initializer="normal")
    layer.build((None, 17))
    layer.quantize("int8")
    x, dy = (tf.constant(rng.normal(size=(5, 7, n)), tf.float32) for n in (17, 33))

    def ours(x):
        return quantized_matmul_bias_act(
            x,
            layer._kernel.value,
            layer.kernel_scale.value,
            layer.bias.value if use_bias else None,
            activation=act,
            epsilon=keras.config.epsilon(),
        )

    (found, theirs) = (
        [function(x), *gradients_of(function, [x], dy)] for function in (ours, layer)
    )
    assert_all_close(found, theirs, 16)


@pytest.mark.parametrize("dtype", cases.QUANTIZED_DTYPES)
@pytest.mark.parametrize("known_rank", [True, False])
@pytest.mark.parametrize("act", ["none", "relu", "silu"])
def test_unknown_sizes(act, known_rank, dtype):
    """One trace serves all."""
    ranks = {"a": 3, "b": 2, "b_scale": 1, "bias": 1, "dy": 3}
    dtypes = {"b": "int8", "b_scale": "float32"}
    signature = [
        tf.TensorSpec([None] * rank if known_rank else None, dtypes.get(name, dtype))
        for name, rank in ranks.items()
    ]

    @tf.autograph.experimental.do_not_convert
    def run(a, b, b_scale, bias, dy):
        def function(a, bias):
            return quantized_matmul_bias_act(a, b, b_scale, bias, act)

        return [function(a, bias), *gradients_of(function, [a, bias], dy)]

    traced = tf.function(run, input_signature=signature)
    for sizes in ({"m": 5, "k": 4, "n": 3}, {"m": 31, "k": 130, "n": 17}, {"m": 0}):
        inputs = tensors(QuantizedOpCase(lead=(2,), **sizes, dtype=dtype))
        for value, other in zip(traced(*inputs), run(*inputs), strict=True):
            np.testing.assert_array_equal(value, other)


def traced_shape(a, b, b_scale, bias, tb=False):
    """What is known of the shape of a result whose inputs have these shapes."""
    specs = [
        tf.TensorSpec(shape, dtype)
        for shape, dtype in ((a, "float32"), (b, "int8"), (b_scale, "float32"), (bias, "float32"))
    ]

    @tf.autograph.experimental.do_not_convert
    def function(*values):
        return quantized_matmul_bias_act(*values, transpose_b=tb)

    shape = tf.function(function).get_concrete_function(*specs).outputs[0].shape
    return None if shape.rank is None else shape.as_list()


@pytest.mark.parametrize("rows", [(), (2,), (None, 3)], ids=str)
def test_shapes_in_graphs(rows):
    """What is known of one tensor is known of all."""
    a = (*rows, None, 3)
    for known in (
        traced_shape(a, None, (4,), None),
        traced_shape(a, None, None, (4,)),
        traced_shape(a, (None, 4), None, (None,)),
        traced_shape((*rows, None, None), (3, 4), None, None),
        traced_shape(a, (4, None), (None,), None, tb=True),
        traced_shape(a, (4, 3), None, None, tb=True),
    ):
        assert known == [*rows, None, 4]
    assert traced_shape(a, None, None, None) == [*rows, None, None]
    assert traced_shape((*rows, 7, None), (None, None), (None,), None) == [*rows, 7, None]
    assert traced_shape(None, (3, 4), (4,), (4,)) is None


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        (((None, 3), (4, None), None, None), "a"),
        (((None, None, 3), (None, 4), None, None, True), "a"),
        (((None, None), None, (3,), (4,)), "b_scale|bias"),
        ((None, (None, 5), (4,), None), "b_scale"),
        ((None, (5, None), None, (4,), True), "bias"),
        ((None, (None, 5), None, (4,)), "bias"),
        ((None, (None, None, 5), None, None), "b"),
        ((None, None, (None, 1), None), "b_scale"),
        ((None, None, None, ()), "bias"),
        (((None,), None, None, None), "a"),
    ],
    ids=str,
)
def test_what_is_known_to_be_wrong(shapes, names):
    """Is said before running."""
    with pytest.raises(ValueError, match=rf"^({names}) (must|has) "):
        traced_shape(*shapes)
