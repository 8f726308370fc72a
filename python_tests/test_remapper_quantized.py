"""Layers that Keras has quantized to 8 bits: what is fused of them, with which gradients."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    op_counts,
    plain,
    reasons,
    rule_counts,
    values,
)

from tf_fused_ops import function
from tf_fused_ops.remapper import RemapOptions

OP = "TfFusedOps>QuantizedMatMulBiasAct"
# Of a chain that is fused none is left.
CHAIN = {"Abs", "Max", "Round", "Maximum", "BatchMatMulV3", "Einsum", "RealDiv", "IdentityN"}
# By the name that Keras has for it, what it is called here.
ACTIVATIONS = {
    **{name: name for name in ("relu", "relu6", "elu", "leaky_relu", "sigmoid", "tanh", "silu")},
    **{"swish": "silu", "hard_silu": "hard_swish", "hard_swish": "hard_swish", "mish": "mish"},
    **{"linear": "", "gelu": "gelu_erf"},
}
GELU_TANH = functools.partial(keras.activations.gelu, approximate=True)
# In units of float32.
OF_BFLOAT16 = 8 * 2**16


def rule_of(use_bias, activation=""):
    parts = ["quantized_matmul", "bias" if use_bias else "", activation]
    return "_".join(filter(None, parts))


def quantize(layer):
    # Which Keras asks for whenever it takes a weight away, and which takes longest.
    with mock.patch("gc.collect"):
        layer.quantize("int8")


def quantized(layer, *shape):
    """Returns a layer after it has been built for inputs of a shape and quantized."""
    layer.build(shape)
    if getattr(layer, "bias", None) is not None:
        layer.bias.assign(*values(layer.bias.shape, seed=1))
    quantize(layer)
    return layer


def dense(units=5, depth=8, **options):
    return quantized(keras.layers.Dense(units, **options), None, depth)


def run(code, x, rules, spec=None, units=64):
    """Runs code on one tensor stock and fused; asserts equal results and exactly these fusions.

    Returns:
        The decorated function, the counts of op types in stock's graph and in the fused one.
    """
    signature = [spec or tf.TensorSpec(x.shape, x.dtype)]
    stock, compiled = (
        decorator(code, input_signature=signature) for decorator in (tf.function, function)
    )
    with plain():
        assert_same(compiled(x), stock(x), units)
    assert rule_counts(compiled) == rules, "\n".join(map(str, compiled.remap_reports))
    return compiled, *(op_counts(f.get_concrete_function()) for f in (stock, compiled))


def the_op(compiled):
    graph = compiled.get_concrete_function().graph
    (op,) = (op for op in graph.get_operations() if op.type == OP)
    return op


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "approximate gelu"])
def test_dense(activation, use_bias):
    name = ACTIVATIONS.get(activation, "gelu_tanh")
    given = GELU_TANH if name == "gelu_tanh" else activation
    layer = dense(activation=given, use_bias=use_bias)
    for shape, spec in (((6, 8), None), ((2, 3, 8), tf.TensorSpec([None, None, 8]))):
        compiled, _, fused = run(layer, *values(shape), {rule_of(use_bias, name): 1}, spec)
        assert not CHAIN & fused.keys()
        op = the_op(compiled)
        assert op.get_attr("straight_through") and op.get_attr("num_bias") == use_bias
        assert op.get_attr("activation").decode() == (name or "none")


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (2, 1, 2, 3, 8), (1, 8), (0, 8)], ids=str)
def test_sizes(shape):
    layer = dense(activation="relu")
    for spec in (shape, [None, *shape[1:]], [None] * len(shape)):
        run(layer, *values(shape), {"quantized_matmul_bias_relu": 1}, tf.TensorSpec(spec))


@pytest.mark.parametrize("shape", [(6, 1), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("units", [1, 5])
def test_one_column(units, shape):
    """Of the inputs, or of the weights."""
    run(dense(units, 1), *values(shape), {"quantized_matmul_bias": 1})
    run(dense(units, 8), *values((*shape[:-1], 8)), {"quantized_matmul_bias": 1})


@pytest.mark.parametrize("activation", ["softsign", "celu", "exponential", "hard_tanh"])
def test_activation_that_no_rule_knows(activation):
    run(dense(activation=activation), *values((6, 8)), {"quantized_matmul_bias": 1})


@pytest.mark.parametrize("slope", [0.0, 0.3, 1.5])
def test_slope_is_kept(slope):
    layer, activation = dense(), keras.layers.LeakyReLU(slope)
    rules = {"quantized_matmul_bias_leaky_relu": 1}
    compiled, *_ = run(lambda x: activation(layer(x)), *values((6, 8)), rules)
    assert the_op(compiled).get_attr("alpha") == np.float32(slope)


# Of einsums: the sizes of the input and of a row of the result, and the axes of a bias.
EQUATIONS = {
    "abc,cde->abde": ((2, 3, 8), (4, 5), "de"),
    "abcd,cde->abe": ((2, 3, 4, 5), (6,), "e"),
    "abc,cd->abd": ((2, 3, 8), (6,), "d"),
    "btd,ndh->btnh": ((2, 3, 8), (4, 5), "nh"),
    "btnh,nhd->btd": ((2, 3, 4, 5), (6,), "d"),
    "abc,dec->abde": ((2, 3, 8), (4, 5), "de"),
    "abcd,ced->abe": ((2, 3, 4, 5), (6,), "e"),
    "abcd,ecd->abe": ((2, 3, 4, 5), (6,), "e"),
    "abc,dc->abd": ((2, 3, 8), (6,), "d"),
}
# These are one product of matrices, whatever the sizes.
OF_MATRICES = {"abc,cd->abd", "abc,dc->abd"}


def einsum_dense(equation, use_bias=True, **options):
    sizes, row, axes = EQUATIONS[equation]
    bias = {"bias_axes": axes} if use_bias else {}
    layer = keras.layers.EinsumDense(equation, (sizes[1], *row), **bias, **options)
    return quantized(layer, None, *sizes[1:])


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_dense(equation, use_bias):
    """Keras has a product of matrices where it knows the sizes, else an einsum in float32."""
    sizes = EQUATIONS[equation][0]
    layer, rules = einsum_dense(equation, use_bias), {rule_of(use_bias): 1}
    (x,) = values(sizes)
    for spec in ((None, *sizes[1:]), [None] * len(sizes)):
        compiled, stock, fused = run(layer, x, rules, tf.TensorSpec(spec))
        matrices = equation in OF_MATRICES or spec[1] is not None
        assert stock["BatchMatMulV3" if matrices else "Einsum"] == 1
        assert not CHAIN & fused.keys()
        assert the_op(compiled).get_attr("straight_through")


@pytest.mark.parametrize("activation", ["relu", "gelu", "hard_silu"])
def test_einsum_dense_with_activation(activation):
    layer = einsum_dense("abc,cde->abde", activation=activation)
    for spec in (None, tf.TensorSpec([None] * 3)):
        run(layer, *values((2, 3, 8)), {rule_of(True, ACTIVATIONS[activation]): 1}, spec)


@pytest.mark.parametrize("equation", ["abc,cd->adb", "abc,bd->acd"])
def test_einsum_dense_that_is_no_product_of_rows(equation):
    sizes = dict(zip("abcd", (2, 3, 8, 5), strict=True))
    row = [sizes[letter] for letter in equation.split("->a")[1]]
    layer = quantized(keras.layers.EinsumDense(equation, row), None, 3, 8)
    for spec in (None, tf.TensorSpec([None] * 3)):
        compiled, *_ = run(layer, *values((2, 3, 8)), {}, spec)
        assert not reasons(compiled)


LAYERS = {"dense": dense} | {
    equation: functools.partial(einsum_dense, equation)
    for equation in ("abc,cde->abde", "btnh,nhd->btd", "abc,dec->abde")
}


def sizes_of(name):
    return EQUATIONS[name][0] if name in EQUATIONS else (6, 8)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision(name, activation):
    """Keras scales and divides in it; the fused op does not."""
    layer = LAYERS[name](dtype="mixed_bfloat16", activation=activation)
    rules = {rule_of(True, ACTIVATIONS[activation or "linear"]): 1}
    (x,) = values(sizes_of(name))
    for spec in (None, tf.TensorSpec([None] * x.shape.rank)):
        compiled, *_ = run(layer, x, rules, spec, units=4)
        assert the_op(compiled).get_attr("T") == tf.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name, activation, dtype):
    """Those of the inputs, of the bias and of a layer before; the rest of the pass is stock's."""
    x, target = values(sizes_of(name), sizes_of(name)[:1])
    before = keras.layers.Dense(x.shape[-1])
    before.build(x.shape)
    layer = LAYERS[name](activation=activation, dtype=dtype)
    variables = [v.value for v in (before.kernel, before.bias, layer.bias)]

    def loss(x):
        y = tf.cast(layer(before(x)), tf.float32)
        return tf.reduce_sum((tf.reduce_mean(y * y, range(1, y.shape.rank)) - target) ** 2)

    def inside(decorator):
        @decorator
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                found = loss(x)
            return found, tape.gradient(found, [x, *variables])

        return step, step(x)

    def outside(decorator):
        fn = decorator(loss)
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = fn(x)
        return fn, (found, tape.gradient(found, [x, *variables]))

    name = ACTIVATIONS[activation]
    for run_step in (inside, outside):
        with plain():
            _, expected = run_step(tf.function)
            compiled, found = run_step(function)
        assert_same(found, expected, units=64 if dtype == "float32" else OF_BFLOAT16)
        told = rule_counts(compiled)
        if run_step is outside or activation == "relu":
            assert told[rule_of(True, name)] == 1
        else:
            # Its gradient reads what it is applied to.
            assert told["quantized_matmul_bias"] == told[f"act_{name}"] == 1
            assert "is also used by" in reasons(compiled)[rule_of(True, name)]


def test_switched_off():
    layer = dense(activation="relu")
    for disabled, rules in (
        (["quantized*"], {}),
        (["quantized_matmul_bias*"], {"quantized_matmul": 1}),
        (["quantized_matmul_bias_relu"], {"quantized_matmul_bias": 1}),
        (["matmul*"], {"quantized_matmul_bias_relu": 1}),
    ):
        compiled = function(layer, remap=RemapOptions(disable=disabled))
        (x,) = values((6, 8))
        assert_same(compiled(x), layer(x))
        assert rule_counts(compiled) == rules
