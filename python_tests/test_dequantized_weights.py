"""Weights of 4 and 8 bits as numbers: the op, and where the pass puts it."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from cases import QUANTIZED_DTYPES, WeightOnlyOpCase
from remapping import op_counts
from test_weight_only_matmul import tensors, weights, wide
from tolerances import UNIT

import tf_fused_ops as tfo
from tf_fused_ops import _library
from tf_fused_ops.ops import reference
from tf_fused_ops.ops.weight_only_matmul import dequantized_weights
from tf_fused_ops.remapper import convert

CASES = [
    WeightOnlyOpCase(
        k=k, n=n, bits=bits, packed_axis=axis, signed=signed, tb=tb, zero=zero, part=16, group=group
    )
    for k, n in ((1, 1), (49, 67), (130, 33))
    for bits, axis in ((8, 0), (4, 0), (4, 1))
    for signed, zero, group in ((True, True, "parts"), (False, True, "any"), (True, False, "any"))
    for tb in (False, True)
]


def inputs(case):
    """Returns b, scale, zero and group."""
    return tensors(case)[1:5]


def op(case, b, scale, zero, group, dtype="float32"):
    return dequantized_weights(
        b, scale, zero, group, case.tb, case.bits, case.packed_axis, tf.as_dtype(dtype)
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case, isa):
    given = inputs(case)
    exact = weights(case, *given)
    for dtype in QUANTIZED_DTYPES:
        w = op(case, *given, dtype)
        assert w.dtype == dtype
        # Rounded as zero is taken, as it is scaled, and as the result is stored.
        size = np.abs(exact).max()
        expected = exact.T if case.tb else exact
        np.testing.assert_allclose(
            wide(w), expected, rtol=UNIT[dtype] + 2 * UNIT["float32"], atol=UNIT["float32"] * size
        )
    assert _library.isa() == isa


@pytest.mark.parametrize("tb", [False, True])
def test_gradients(tb):
    case = WeightOnlyOpCase(k=37, n=19, tb=tb, part=16, group="any")
    b, scale, zero, group = inputs(case)
    sources = tf.constant(scale), tf.constant(zero)
    dw = tf.random.normal([19, 37] if tb else [37, 19])

    def gradients(function):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            w = function(b, *sources, group)
        return [tf.convert_to_tensor(g) for g in tape.gradient(w, sources, dw)]

    def stock(b, scale, zero, group):
        return reference.weights(
            b, scale, zero, group, depth=37, transpose_b=tb, bits=4, packed_axis=1
        )

    for found, expected in zip(gradients(lambda *x: op(case, *x)), gradients(stock), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("b", lambda b, s, z, g: (b[:-1], s, z, g)),
        ("b", lambda b, s, z, g: (b[0], s, z, g)),
        ("scale", lambda b, s, z, g: (b, s[0], z, g)),
        ("zero", lambda b, s, z, g: (b, s, z[:, :-1], g)),
        ("group", lambda b, s, z, g: (b, s, z, g + 3)),
        ("group", lambda b, s, z, g: (b, s, z, g[None])),
        ("scale", lambda b, s, z, g: (b, s[:0], z[:0], g)),
    ],
)
def test_bad_input(name, change, known):
    case = WeightOnlyOpCase(k=37, n=18, part=16, group="parts")
    b, scale, zero, group = inputs(case)
    values = [tf.constant(v) for v in change(b, scale, zero, group % 3)]
    specs = [tf.TensorSpec(v.shape if known else None, v.dtype) for v in values]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=rf"\b{name}\b"):
        tf.function(lambda *v: op(case, *v), input_signature=specs)(*values)


def test_static_shapes():
    case = WeightOnlyOpCase(k=37, n=19, part=16, group="parts")
    b, scale, zero, group = (tf.constant(v) for v in inputs(case))
    for tb, expected in ((False, [37, 19]), (True, [19, 37])):
        other = dataclasses.replace(case, tb=tb)
        turned = [tf.constant(v) for v in inputs(other)]
        with tf.Graph().as_default():
            w = op(other, *(tf.constant(v.numpy()) for v in turned))
            unknown = op(
                other,
                tf.compat.v1.placeholder(tf.int8, [None, None]),
                *(tf.compat.v1.placeholder(tf.float32, [None, None]) for _ in range(2)),
                tf.compat.v1.placeholder(tf.int32, [None]),
            )
        assert w.shape == expected and unknown.shape.as_list() == [None, None]
    assert op(case, b, scale, zero, group).shape == [37, 19]


keras = pytest.importorskip("keras")


def gemma(policy=None):
    """A projection whose kernel does not begin with what is summed over, and its input."""
    quantization = pytest.importorskip("keras.src.quantizers.quantization_config")
    layer = keras.layers.EinsumDense("btd,ndh->btnh", (None, 4, 16), dtype=policy)
    layer.build((None, None, 48))
    layer.quantize("int4", config=quantization.Int4QuantizationConfig(block_size=16))
    return layer, tf.random.normal([2, 5, 48])


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_numbers_that_others_read(policy):
    layer, x = gemma(policy)
    fused, stock = tfo.function(lambda x: layer(x)), tf.function(lambda x: layer(x))
    y, expected = fused(x), stock(x)
    assert [f.rule for f in fused.remap_reports[-1].fused] == ["dequantized_weights"]
    unit = UNIT[y.dtype.name]
    size = np.abs(wide(expected)).max()
    np.testing.assert_allclose(wide(y), wide(expected), rtol=0, atol=16 * unit * size)
    (node,) = (
        o
        for o in fused.get_concrete_function(x).graph.get_operations()
        if o.type == "TfFusedOps>DequantizedWeights"
    )
    assert node.get_attr("bits") == 4
    # The scales have not been rounded to 16 bits.
    assert all(value.op.type == "ReadVariableOp" for value in list(node.inputs)[:2])


def test_gradients_of_stock_with_numbers_of_the_op():
    """Also Keras's own gradient makes the numbers anew."""
    layer, x = gemma()

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, tape.gradient(y, x, output_gradients=tf.cos(y))

    fused = tfo.function(step)
    for found, expected in zip(fused(x), tf.function(step)(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert {f.rule for f in fused.remap_reports[-1].fused} == {"dequantized_weights"}


def test_other_differences_stay():
    """Groups of the zeros that are not those of the scales, and numbers that are no integers."""
    b = tf.constant(np.arange(-32, 32).reshape(8, 8), tf.int8)
    scale, zero = (tf.random.uniform([2, 8], seed=i) for i in range(2))
    groups = tf.range(8) // 4

    def wrapped(g):
        return tf.where(g < 0, g + 2, g)

    def numbers(q, of_scale, of_zero):
        difference = tf.cast(q, tf.float32) - tf.gather(zero, wrapped(of_zero))
        return difference * tf.gather(scale, wrapped(of_scale))

    for function, rules in [
        (lambda b, g: tf.sin(numbers(b, g, g)), ["dequantized_weights"]),
        (lambda b, g: tf.sin(numbers(b, g, g[::-1])), []),
        (lambda b, g: tf.sin(numbers(tf.cast(b, tf.float16), g, g)), []),
    ]:
        fused = tfo.function(function)
        np.testing.assert_allclose(fused(b, groups), function(b, groups), rtol=1e-5, atol=1e-5)
        assert [f.rule for f in fused.remap_reports[-1].fused] == rules


def test_zeros_that_were_cut_off():
    """Zeros are the integers that numbers became, not those numbers."""
    b = tf.constant(np.arange(-32, 32).reshape(8, 8), tf.int8)
    scale, zero = tf.random.uniform([2, 8]), tf.random.uniform([2, 8], -5, 5)

    def function(g):
        group = tf.where(g < 0, g + 2, g)
        zeros = tf.cast(tf.gather(tf.cast(zero, tf.int8), group), tf.float32)
        return tf.sin((tf.cast(b, tf.float32) - zeros) * tf.gather(scale, group))

    fused, g = tfo.function(function), tf.range(8) // 4
    np.testing.assert_allclose(fused(g), function(g), rtol=1e-5, atol=1e-5)
    assert [f.rule for f in fused.remap_reports[-1].fused] == ["dequantized_weights"]


def test_float64_stays():
    b = tf.constant(np.arange(-32, 32).reshape(8, 8), tf.int8)
    scale = tf.random.uniform([2, 8], dtype=tf.float64)

    def function(g):
        group = tf.where(g < 0, g + 2, g)
        difference = tf.cast(b, tf.float64) - tf.gather(scale, group)
        return tf.sin(difference * tf.gather(scale, group))

    fused, g = tfo.function(function), tf.range(8) // 4
    np.testing.assert_allclose(fused(g), function(g), rtol=1e-12, atol=1e-12)
    report = fused.remap_reports[-1]
    assert not report.fused
    assert [r.rule for r in report.refused] == ["dequantized_weights"]


def test_portable_conversion(tmp_path):
    """Stock ops stand for the op where the package is not installed."""
    case = WeightOnlyOpCase(k=37, n=19, part=16, group="any")
    module, given = tf.Module(), [tf.constant(v) for v in inputs(case)]
    module.numbers = tf.function(
        lambda *values: op(case, *values),
        input_signature=[tf.TensorSpec(v.shape, v.dtype) for v in given],
    )
    paths = [str(tmp_path / name) for name in ("fused", "portable")]
    tf.saved_model.save(module, paths[0])
    convert(*paths, to_stock=True)
    for path, count in zip(paths, (1, 0), strict=True):
        loaded = tf.saved_model.load(path).numbers
        np.testing.assert_allclose(loaded(*given), op(case, *given), rtol=1e-6, atol=1e-6)
        (concrete,) = loaded.concrete_functions
        assert op_counts(concrete)["TfFusedOps>DequantizedWeights"] == count


def with_integers(case, floats):
    """Returns b, scale, zeros that are integers, and groups, numbers with fractions if asked."""
    b, scale, zero, group = inputs(case)
    zero = tf.cast(tf.round(zero), tf.int8 if case.signed else tf.uint8)
    if floats:
        # Which are cut off as `tf.cast` does, towards zero.
        group = tf.cast(group, tf.float32) + tf.where(group < 0, -0.25, 0.75)
    return b, scale, zero, tf.constant(group)


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("m", [3, 31])
def test_zeros_and_groups_of_other_types(m, signed, floats):
    """As Keras has them; also in the gradient, and of the product."""
    case = WeightOnlyOpCase(m=m, k=48, n=35, signed=signed, part=16, group="any", bits=8)
    b, scale, zero, group = with_integers(case, floats)
    w = weights(case, b, scale, zero.numpy(), tf.cast(group, tf.int32).numpy())
    np.testing.assert_allclose(op(case, b, scale, zero, group), w, rtol=1e-6)
    a = tf.random.normal([m, 48])

    @tf.function
    def product(a, scale):
        outputs = _library.ops.tf_fused_ops_weight_only_mat_mul_bias_act(
            a=a, b=b, scale=scale, zero=[zero], group=[group], bias=[], bits=8
        )
        return outputs, tf.gradients(outputs, [a, scale])

    y, (da, dscale) = product(a, tf.constant(scale))
    np.testing.assert_allclose(y, wide(a) @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(da, np.tile(w.sum(1), (m, 1)), rtol=1e-5, atol=1e-5)
    of_one = weights(case, b, np.ones_like(scale), zero.numpy(), tf.cast(group, tf.int32).numpy())
    rows = wide(a).sum(0)[:, None] * of_one
    found = np.stack([rows[(tf.cast(group, tf.int32) % 3).numpy() == g].sum(0) for g in range(3)])
    np.testing.assert_allclose(dscale, found, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("number", [3.0, -4.0, np.nan, np.inf, -np.inf, 3e38])
def test_floats_that_are_no_groups(number):
    case = WeightOnlyOpCase(k=48, n=35, part=16, group="parts")
    b, scale, zero, group = inputs(case)
    given = tf.tensor_scatter_nd_update(tf.cast(group, tf.float32), [[7]], [number])
    with pytest.raises(tf.errors.InvalidArgumentError, match="group must be at least -3 and less"):
        op(case, b, scale, zero, given)


def test_as_keras_has_them():
    """Neither zeros nor numbers of groups are cast to other types on the way."""
    layer, x = gemma()
    fused = tfo.function(lambda x: layer(x))
    fused(x)
    (node,) = (
        o
        for o in fused.get_concrete_function(x).graph.get_operations()
        if o.type == "TfFusedOps>DequantizedWeights"
    )
    assert [v.dtype for v in node.inputs] == [tf.int8, tf.float32, tf.int8, tf.float32]
    assert all(value.op.type == "ReadVariableOp" for value in node.inputs)


HUGE = 1 << 40


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tb", [False, True])
def test_sizes_that_memory_has_no_room_for(tb, bits):
    """Of empty tensors, whose other sizes would be too large for a tensor or for a list of rows."""

    def turned(*shape):
        return shape[::-1] if tb else shape

    def product(b, scale, group=None):
        a, b, scale = tf.zeros([0, HUGE]), tf.zeros(turned(*b), tf.int8), tf.zeros(turned(*scale))
        keywords = {"transpose_b": tb, "bits": bits, "packed_axis": 0 if tb else 1}
        return tfo.weight_only_matmul_bias_act(a, b, scale, group=group, **keywords)

    assert product((HUGE, 0), (1, 0)).shape == [0, 0]
    for b, scale, name in [
        ((HUGE, 0), (0, HUGE), "b"),
        ((0, HUGE), (0, HUGE), "b"),
        ((HUGE, 0), (0, 0), "scale"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"\b{name}\b"):
            product(b, scale)
    with pytest.raises(tf.errors.InvalidArgumentError, match="group"):
        product((HUGE, 0), (1, 0), tf.zeros([3], tf.int32))
    group = tf.zeros([0], tf.int32)
    w = op(
        WeightOnlyOpCase(bits=8, tb=tb),
        *(tf.zeros(turned(0, HUGE), tf.int8), tf.zeros(turned(0, HUGE)), None, group),
    )
    assert w.shape == turned(0, HUGE)
