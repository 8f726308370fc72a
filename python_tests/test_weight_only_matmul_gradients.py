"""Gradients of products with weights of 4 and 8 bits, of every order; shapes; Keras."""

import dataclasses

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import WeightOnlyOpCase
from gradient_problems import (
    ACTIVATIONS,
    assert_all_close,
    gradients_of,
    second_order,
    weight_only_matmul_problem,
    weights_for,
)
from remapping import op_counts
from test_weight_only_matmul import fused, integers, tensors, wide
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import weight_only_matmul_bias_act
from tf_fused_ops.ops import activations, reference
from tf_fused_ops.remapper import convert

DTYPES = cases.QUANTIZED_DTYPES
WRAPS = [lambda function: function, lambda function: tf.function(function, autograph=False)]
everywhere = pytest.mark.parametrize("wrap", WRAPS, ids=["eager", "graph"])


def formula(case, dtype, saved, a, b, scale, zero, group, bias, dy):
    """The gradients of a, scale, zero and bias, computed in a dtype and at least float32, slopes
    being those of what the op keeps."""
    numbers = "float32" if dtype[-2:] == "16" else dtype
    groups = scale.shape[1 if case.tb else 0]
    if group is None:
        group = np.arange(case.k) // max(1, -(-case.k // max(1, groups)))
    group = np.where(group < 0, group + groups, group)
    scale, zero = (None if v is None else v.T if case.tb else v for v in (scale, zero))
    q = integers(case, b)
    q = tf.constant(q.T if case.tb else q, numbers)
    centred = q if zero is None else q - tf.cast(zero, numbers).numpy()[group]
    each = tf.cast(scale, numbers).numpy()[group]
    w = tf.cast(centred * each, dtype)
    dz = reference.act_grad(tf.cast(dy, dtype), tf.cast(saved, dtype), case.act, cases.ALPHA)
    rows, dz_rows = (
        tf.reshape(v, [np.prod(v.shape[:-1]), v.shape[-1]]) for v in (tf.cast(a, dtype), dz)
    )
    dw = tf.cast(tf.matmul(rows, dz_rows, transpose_a=True), numbers)

    def of_groups(values):
        return tf.math.unsorted_segment_sum(values, group, groups)

    found = [tf.matmul(dz, w, transpose_b=True), of_groups(dw * centred)]
    found += [] if zero is None else [of_groups(-dw * each)]
    if case.tb:
        found[1:] = map(tf.transpose, found[1:])
    if bias is not None:
        found.append(tf.cast(tf.reduce_sum(tf.cast(dz_rows, numbers), 0), dtype))
    return found


def check(case, wrap=WRAPS[0], seed=0):
    """Asserts that gradients are as exact as stock TensorFlow's."""
    a, b, scale, zero, group, bias, dy = tensors(case, seed)
    values = [a, b, scale, zero, group, bias]
    kept = case.act if activations.slope_from_value(case.act, cases.ALPHA) else "none"
    saved = fused(dataclasses.replace(case, act=kept), *values)
    names = [i for i in (0, 2, 3, 5) if values[i] is not None]

    def function(op):
        def call(*watched):
            given = dict(zip(names, watched, strict=True))
            return op(*(given.get(i, v) for i, v in enumerate(values)), **case.attributes())

        return lambda *watched: gradients_of(call, list(watched), dy)

    watched = [tf.convert_to_tensor(values[i]) for i in names]
    found = wrap(function(weight_only_matmul_bias_act))(*watched)
    autodiff = function(reference.weight_only_matmul_bias_act)(*watched)
    stock, exact = (formula(case, dtype, saved, *values, dy) for dtype in (case.dtype, "float64"))
    scales = [0.0] * (len(names) - 1) + [np.linalg.norm(wide(dy)) / np.sqrt(max(1, case.n))]
    labels = [f"d{('a', 'b', 'scale', 'zero', 'group', 'bias')[i]}" for i in names]
    for name, value, *others, theirs, of, scale in zip(
        labels, found, stock, exact, autodiff, watched, scales, strict=True
    ):
        assert tf.is_tensor(value) and value.dtype == of.dtype and value.shape == of.shape
        # Numbers that come from products of a's dtype are no more exact than these.
        assert_as_exact(name, value, *others, case.dtype, scale)
        # Half precision decides otherwise on which side of a kink some are.
        if case.dtype == "float32" or case.act not in cases.KINKS:
            assert_close(name, value, tf.convert_to_tensor(theirs), case.dtype, 64)


@pytest.mark.parametrize(
    ("dtype", "wrap"),
    [*((dtype, WRAPS[0]) for dtype in DTYPES), ("bfloat16", WRAPS[1])],
    ids=[*DTYPES, "bfloat16-graph"],
)
@pytest.mark.parametrize("act", cases.ACTIVATIONS)
def test_activations(act, dtype, wrap):
    for tb in (False, True) if wrap is WRAPS[0] else (True,):
        case = WeightOnlyOpCase((2, 3), 5, 17, 33, tb=tb, part=5, group="any", act=act, dtype=dtype)
        check(case, wrap)


@pytest.mark.parametrize("case", cases.weight_only_cases()[::4], ids=str)
def test_sizes(case):
    check(case)


@everywhere
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0, 0, 0), (2, 0, 4), (0, 0, 4)], ids=str)
@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
@pytest.mark.parametrize("tb", [False, True])
def test_empty(tb, lead, shape, wrap):
    """Sums of nothing are zero."""
    if tb and shape == (0, 0, 0):
        pytest.skip("TensorFlow's own gradient of what gathers nothing from columns fails")
    check(WeightOnlyOpCase(lead, *shape, tb=tb, part=2, act="silu"), wrap)


FORMS = [
    {"bits": 8, "signed": False, "group": "none", "tb": True},
    {"packed_axis": 0, "group": "parts", "tb": True},
]


@pytest.mark.parametrize(
    ("act", "alpha", "form"),
    [
        *((*activation, {}) for activation in ACTIVATIONS),
        *(("silu", cases.ALPHA, form) for form in FORMS),
    ],
    ids=str,
)
def test_second_order(act, alpha, form):
    case = WeightOnlyOpCase(**{"lead": (2,), "m": 2, "k": 3, "n": 2, "part": 2} | form)
    ours, theirs, inputs, dy = weight_only_matmul_problem(act, alpha, case=case)
    weights = weights_for(inputs)

    @tf.autograph.experimental.do_not_convert
    def found(function):
        # Of what is gathered they are slices.
        return list(map(tf.convert_to_tensor, second_order(function, inputs, dy, weights)))

    wanted = found(theirs)
    assert_all_close(found(ours), wanted, 64)
    assert_all_close(tf.function(found)(ours), wanted, 64)


@pytest.mark.parametrize("act", ["none", "relu", "gelu_erf"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_second_order_in_half_precision(dtype, act):
    """As near to stock's as its own roundings are to float32."""
    case = WeightOnlyOpCase(m=3, k=17, n=5, part=5, group="any", act=act, dtype=dtype)
    a, b, scale, zero, group, bias, dy = tensors(case)
    inputs = [a, *map(tf.constant, (scale, zero)), bias]
    weights = weights_for(inputs)

    def found(op):
        def function(a, scale, zero, bias):
            return op(a, b, scale, zero, group, bias, **case.attributes())

        def summed(*values):
            with tf.GradientTape() as tape:
                tape.watch([*values, dy])
                gradients = gradients_of(function, list(values), dy)
                terms = zip(gradients, weights, strict=True)
                total = tf.add_n([tf.reduce_sum(tf.cast(g * w, "float32")) for g, w in terms])
            zero = tf.UnconnectedGradients.ZERO
            return tape.gradient(total, [*values, dy], unconnected_gradients=zero)

        return summed(*inputs)

    # Of what is gathered they are slices.
    ours, theirs = (
        list(map(tf.convert_to_tensor, found(op)))
        for op in (weight_only_matmul_bias_act, reference.weight_only_matmul_bias_act)
    )
    for name, value, other in zip(("a", "scale", "zero", "bias", "dy"), ours, theirs, strict=True):
        assert value.dtype == other.dtype
        assert_close(name, wide(value), wide(other), dtype, 32)


@everywhere
@pytest.mark.parametrize("act", ["none", "relu", "gelu_erf"])
def test_integers_and_groups_have_none(act, wrap):
    *inputs, _ = map(tf.constant, tensors(WeightOnlyOpCase(part=2, group="any")))

    def gradients(*values):
        with tf.GradientTape() as tape:
            tape.watch([value for value in values if value.dtype.is_floating])
            y = weight_only_matmul_bias_act(*values, activation=act, bits=4)
        found = tape.gradient(y, list(values))
        assert [gradient is None for gradient in found] == [False, True, False, False, True, False]
        return [gradient for gradient in found if gradient is not None]

    found = wrap(gradients)(*inputs)
    assert [g.shape for g in found] == [inputs[i].shape for i in (0, 2, 3, 5)]


@pytest.mark.parametrize(
    ("watched", "products"),
    [((0,), 1), ((2,), 1), ((3,), 1), ((5,), 0), ((0, 2, 3, 5), 2)],
    ids=str,
)
def test_of_some_alone(watched, products):
    """Takes no product that others need, and has the same numbers."""
    case = WeightOnlyOpCase(part=2, group="any", act="relu")
    *inputs, dy = map(tf.constant, tensors(case))

    def gradients(*values):
        def function(*some):
            given = dict(zip(watched, some, strict=True))
            return fused(case, *(given.get(i, v) for i, v in enumerate(inputs)))

        return gradients_of(function, list(values), dy)

    every = gradients_of(
        lambda a, scale, zero, bias: fused(case, a, inputs[1], scale, zero, inputs[4], bias),
        [inputs[i] for i in (0, 2, 3, 5)],
        dy,
    )
    alone = tf.function(gradients).get_concrete_function(*(inputs[i] for i in watched))
    found = [op.type for op in alone.graph.get_operations()]
    assert found.count("TfFusedOps>MatMulBiasAct") == products
    wanted = [every[(0, 2, 3, 5).index(i)] for i in watched]
    assert_all_close(alone(*(inputs[i] for i in watched)), wanted, 16)


@pytest.mark.parametrize("block", [-1, 8, 16])
@pytest.mark.parametrize(("act", "use_bias"), [("linear", False), ("relu", True), ("gelu", True)])
def test_against_keras(act, use_bias, block):
    """A layer after `quantize` to 4 bits, in training as well."""
    rng = np.random.default_rng(0)
    layer = keras.layers.Dense(33, activation=act, use_bias=use_bias, bias_initializer="normal")
    layer.build((None, 17))
    config = keras.quantizers.Int4QuantizationConfig(block_size=block, activation_quantizer=None)
    layer.quantize("int4", config=config)
    x, dy = (tf.constant(rng.normal(size=(5, 7, n)), tf.float32) for n in (17, 33))
    kernel, scale = layer._kernel.value, layer.kernel_scale.value
    if block < 0:
        scale, zero, group = 1 / scale, None, None
    else:
        zero, group = layer.kernel_zero.value, layer.g_idx.value
        zero, group = tf.cast(zero, "float32"), tf.cast(group, "int32")
    bias = layer.bias.value if use_bias else None

    def ours(x):
        return weight_only_matmul_bias_act(x, kernel, scale, zero, group, bias, act, bits=4)

    (found, theirs) = (
        [function(x), *gradients_of(function, [x], dy)] for function in (ours, layer)
    )
    assert_all_close(found, theirs, 16)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("optional", [True, False])
def test_portable_conversion(optional, known, tmp_path):
    """Stock ops stand for the op where the package is not installed."""
    case = WeightOnlyOpCase(zero=optional, part=2, group="any" if optional else "none", act="silu")
    *inputs, _ = map(tf.constant, (v for v in tensors(case) if v is not None))
    keywords = ("zero", "group", "bias") if optional else ("bias",)
    module, paths = tf.Module(), [str(tmp_path / name) for name in ("fused", "portable")]

    @tf.autograph.experimental.do_not_convert
    def forward(a, b, scale, *rest):
        rest = dict(zip(keywords, rest, strict=True))
        return weight_only_matmul_bias_act(a, b, scale, **rest, **case.attributes())

    specs = [tf.TensorSpec(v.shape if known else None, v.dtype) for v in inputs]
    module.forward = tf.function(forward, input_signature=specs)
    tf.saved_model.save(module, paths[0])
    convert(*paths, to_stock=True)
    for path, count in zip(paths, (1, 0), strict=True):
        loaded = tf.saved_model.load(path).forward
        assert_close("y", loaded(*inputs), forward(*inputs).numpy(), "float32")
        (concrete,) = loaded.concrete_functions
        assert op_counts(concrete)["TfFusedOps>WeightOnlyMatMulBiasAct"] == count


RANKS = {"a": 3, "b": 2, "scale": 2, "zero": 2, "group": 1, "bias": 1, "dy": 3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("known_rank", [True, False])
@pytest.mark.parametrize("act", ["none", "relu", "silu"])
def test_unknown_sizes(act, known_rank, dtype):
    """One trace serves all."""
    dtypes = {"b": "int8", "scale": "float32", "zero": "float32", "group": "int32"}
    signature = [
        tf.TensorSpec([None] * rank if known_rank else None, dtypes.get(name, dtype))
        for name, rank in RANKS.items()
    ]

    @tf.autograph.experimental.do_not_convert
    def run(a, b, scale, zero, group, bias, dy):
        def function(a, scale, zero, bias):
            return weight_only_matmul_bias_act(a, b, scale, zero, group, bias, act, bits=4)

        inputs = [a, scale, zero, bias]
        return [function(*inputs), *gradients_of(function, inputs, dy)]

    traced = tf.function(run, input_signature=signature)
    for sizes in ({"m": 5, "k": 4, "n": 3}, {"m": 31, "k": 130, "n": 17}, {"m": 0}):
        case = WeightOnlyOpCase(lead=(2,), part=16, group="parts", **sizes, dtype=dtype)
        inputs = list(map(tf.constant, tensors(case)))
        for value, other in zip(traced(*inputs), run(*inputs), strict=True):
            np.testing.assert_array_equal(value, other)


def traced_shape(*shapes, **attributes):
    """What is known of the shape of a result whose a, b, scale, zero, group and bias have these
    shapes, those that are not given being unknown."""
    dtypes = ("float32", "int8", "float32", "float32", "int32", "float32")
    shapes = [*shapes, *[None] * (len(dtypes) - len(shapes))]
    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    @tf.autograph.experimental.do_not_convert
    def function(*values):
        return weight_only_matmul_bias_act(*values, **attributes)

    shape = tf.function(function).get_concrete_function(*specs).outputs[0].shape
    return None if shape.rank is None else shape.as_list()


@pytest.mark.parametrize("rows", [(), (2,), (None, 3)], ids=str)
def test_shapes_in_graphs(rows):
    """What is known of one tensor is known of all."""
    a, plain = (*rows, None, 3), (*rows, None, None)
    for known in (
        traced_shape(a, None, (None, 4)),
        traced_shape(a, None, (1, 4)),
        traced_shape(a, None, None, (None, 4)),
        traced_shape(a, None, None, None, None, (4,)),
        traced_shape(a, (None, 4), None, None, (None,), (None,)),
        traced_shape(plain, (3, 4), None),
        traced_shape(a, (4, None), (None, None), transpose_b=True),
        traced_shape(a, None, (4, None), transpose_b=True),
        traced_shape(a, None, None, (4, 2), transpose_b=True),
        traced_shape(a, (2, 4), bits=4, packed_axis=0),
        traced_shape(a, (None, 4), bits=4, packed_axis=0),
        traced_shape(a, (4, 2), transpose_b=True, bits=4),
        traced_shape(a, (3, 2), (None, 4), bits=4),
        traced_shape(a, (2, 3), (4, None), transpose_b=True, bits=4, packed_axis=0),
    ):
        assert known == [*rows, None, 4]
    assert traced_shape(a) == [*rows, None, None]
    # Half of the last byte may be empty.
    assert traced_shape(a, (3, 2), bits=4) == [*rows, None, None]
    assert traced_shape((*rows, 7, None), (None, None), (None, None)) == [*rows, 7, None]
    assert traced_shape(None, (3, 4), (1, 4), (1, 4), (3,), (4,)) is None


@pytest.mark.parametrize("transpose", [False, True])
def test_shapes_of_scale_as_a_vector(transpose):
    assert traced_shape((None, 3), None, (4,), (4,), transpose_b=transpose) == [None, 4]


@pytest.mark.parametrize(
    ("shapes", "attributes", "names"),
    [
        (((None, 3), (4, None)), {}, "a|b"),
        (((None, 3), (None, 4)), {"transpose_b": True}, "a|b"),
        (((None, 3), (1, None)), {"bits": 4, "packed_axis": 0}, "b"),
        (((None, 3), (3, None)), {"bits": 4, "packed_axis": 0}, "b"),
        (((None, 3), (None, 3)), {"bits": 4, "transpose_b": True}, "b"),
        ((None, (None, 3), (None, 4)), {"bits": 4}, "b"),
        ((None, (None, 3), None, None, None, (4,)), {"bits": 4}, "b"),
        ((None, (None, 5), (None, 4)), {}, "b"),
        ((None, (5, None), (4, None)), {"transpose_b": True}, "b"),
        ((None, None, (3, 4), (3, 5)), {}, "zero|scale"),
        ((None, None, (3, None), (2, None)), {}, "zero|scale"),
        ((None, None, (3, 4), (4,)), {}, "zero"),
        (((None, 3), None, None, None, (4,)), {}, "group"),
        ((None, (3, None), None, None, (4,)), {}, "group|b"),
        ((None, None, None, None, (3, 1)), {}, "group"),
        ((None, None, (3, 4), None, None, (5,)), {}, "bias"),
        ((None, None, (4, 3), None, None, (3,)), {"transpose_b": True}, "bias"),
        ((None, None, None, None, None, ()), {}, "bias"),
        ((None, (None, None, 5)), {}, "b"),
        ((None, None, (None, 1, 1)), {}, "scale"),
        (((None, 3), None, (0, 4)), {}, "scale"),
        (((None,),), {}, "a"),
    ],
    ids=str,
)
def test_what_is_known_to_be_wrong(shapes, attributes, names):
    """Is said before running."""
    with pytest.raises(ValueError, match=rf"^({names}) (must|has) "):
        traced_shape(*shapes, **attributes)
