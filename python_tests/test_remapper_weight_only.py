"""Layers whose weights Keras has quantized to 4 or 8 bits but not their inputs: what is fused."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.quantizers.quantization_config import Int4QuantizationConfig, Int8QuantizationConfig
from remapping import assert_same, plain, rule_counts, values
from test_remapper_quantized import ACTIVATIONS, GELU_TANH
from test_remapper_weight_only_forms import OP, the_op
from tolerances import assert_as_exact

from tf_fused_ops import function

# Of what makes integers of bytes, and numbers of integers, none is left.
CHAIN = {"BitwiseAnd", "BitwiseXor", "RightShift", "Pack", "StridedSlice", "SelectV2", "GatherV2"}
DEPTH, HEADS = 21, (3, 7)


def quantized_by(mode, **options):
    """Returns how a layer becomes one that was quantized in a mode.

    Args:
        mode: Keras's name.
        **options: Of the mode's configuration.
    """
    config = {"int4": Int4QuantizationConfig, "int8": Int8QuantizationConfig}[mode]

    def build(make, shape, policy):
        layer = make(dtype=policy)
        layer.build(shape)
        # Which Keras asks for whenever it takes a weight away, and which takes longest.
        with mock.patch("gc.collect"):
            layer.quantize(mode, config=config(**options))
        return layer

    return build


def calibrated(mode):
    """Returns how a layer becomes one that was calibrated: as by GPTQ or AWQ."""

    def build(make, shape, policy):
        layer = make(dtype=f"{mode}_from_{policy}")
        layer.build(shape)
        rng = np.random.default_rng(0)
        name, bits, _ = mode.split("/")
        setattr(layer, f"is_{name}_calibrated", True)
        most = 2 ** int(bits)
        layer.quantized_kernel.assign(rng.integers(0, 256, layer.quantized_kernel.shape))
        layer.kernel_scale.assign(rng.uniform(0.3, 0.6, layer.kernel_scale.shape) / most)
        layer.kernel_zero.assign(
            rng.integers(most // 2 - 3, most // 2 + 3, layer.kernel_zero.shape)
        )
        groups = layer.kernel_scale.shape[-1]
        layer.g_idx.assign(rng.permutation(np.arange(DEPTH) * groups // DEPTH))
        if name == "awq":
            layer.awq_scales.assign(rng.uniform(0.5, 2, layer.awq_scales.shape))
        return layer

    return build


FORMS = {
    "int4": (quantized_by("int4", block_size=8), 4),
    "int4 of long groups": (quantized_by("int4", block_size=18), 4),
    "int4 of one group": (quantized_by("int4", block_size=64), 4),
    "int4 of columns": (quantized_by("int4", block_size=-1, activation_quantizer=None), 4),
    "int8": (quantized_by("int8", activation_quantizer=None), 8),
    "gptq of 4 bits": (calibrated("gptq/4/8"), 4),
    "gptq of 8 bits": (calibrated("gptq/8/17"), 8),
    "awq": (calibrated("awq/4/8"), 4),
}


def dense(**options):
    return keras.layers.Dense(7, **options)


def onto_heads(use_bias=True, **options):
    axes = {"bias_axes": "hd"} if use_bias else {}
    return keras.layers.EinsumDense("bqm,mhd->bqhd", (None, *HEADS), **axes, **options)


def from_heads(use_bias=True, **options):
    axes = {"bias_axes": "m"} if use_bias else {}
    return keras.layers.EinsumDense("bqhd,hdm->bqm", (None, 5), **axes, **options)


# What makes a layer, the sizes of its inputs, and the rule without bias.
LAYERS = {
    "dense": (dense, (6, DEPTH), "matmul"),
    "dense of rank 3": (dense, (2, 3, DEPTH), "dense"),
    "onto heads": (onto_heads, (2, 3, DEPTH), "heads"),
    "from heads": (from_heads, (2, 3, *HEADS), "batch_matmul"),
}


def layer_of(form, name, policy="float32", **options):
    """Returns a quantized layer, inputs, and the rule that fuses it."""
    make, sizes, rule = LAYERS[name]
    build, _ = FORMS[form]
    layer = build(functools.partial(make, **options), (None, *sizes[1:]), policy)
    if layer.bias is not None:
        layer.bias.assign(*values(layer.bias.shape, seed=1))
    activation = options.get("activation")
    activation = "gelu_tanh" if activation is GELU_TANH else ACTIVATIONS[activation or "linear"]
    parts = ["weight_only", rule, "bias" * options.get("use_bias", True), activation]
    (x,) = values(sizes, dtype=layer.compute_dtype)
    return layer, x, "_".join(filter(None, parts))


def needed(concrete):
    """Returns the ops that the outputs of a ConcreteFunction need."""
    seen, todo = set(), [tensor.op for tensor in concrete.outputs]
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            todo += [tensor.op for tensor in op.inputs]
    return seen


def check_bytes(compiled, bits, allowed=()):
    """Asserts that the fused op reads bytes as they are stored, and of how many bits."""
    concrete = compiled.get_concrete_function()
    left = {op.type for op in needed(concrete)}
    assert not left & CHAIN - set(allowed), left
    op = the_op(compiled)
    assert op.get_attr("bits") == bits
    packed = op.inputs[1].op
    packed = packed.inputs[0].op if packed.type == "Reshape" else packed
    assert packed.type == "ReadVariableOp"


def run(code, x, rules, spec=None, units=64):
    """Runs code stock and fused; asserts equal results and exactly these fusions."""
    compiled = function(code, input_signature=[spec or tf.TensorSpec(x.shape, x.dtype)])
    with plain():
        assert_same(compiled(x), code(x), units)
    assert rule_counts(compiled) == rules, "\n".join(map(str, compiled.remap_reports))
    return compiled


BIASES = [(form, True) for form in FORMS]
BIASES += [(form, False) for form in ("int4", "int4 of columns", "gptq of 4 bits")]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("form", "use_bias"), BIASES)
def test_layers(form, name, use_bias):
    activation = "silu" if use_bias else "relu"
    layer, x, rule = layer_of(form, name, activation=activation, use_bias=use_bias)
    compiled = run(layer, x, {rule: 1}, tf.TensorSpec([None, *x.shape[1:]]))
    check_bytes(compiled, FORMS[form][1])
    assert the_op(compiled).get_attr("num_bias") == use_bias


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", ["int4", "int4 of columns", "gptq of 4 bits"])
def test_unknown_sizes(form, name):
    """Of all dimensions but that which is contracted; Keras has an einsum for heads then."""
    layer, x, rule = layer_of(form, name, activation="gelu")
    spec = tf.TensorSpec([*[None] * (x.shape.rank - 1), x.shape[-1]])
    compiled = function(layer, input_signature=[spec])
    with plain():
        assert_same(compiled(x), layer(x))
    if "heads" in name:
        rule = rule.replace(LAYERS[name][2], "einsum")
    assert rule_counts(compiled) == {rule: 1}
    # The result's sizes are read off those of x.
    check_bytes(compiled, FORMS[form][1], allowed=["StridedSlice"])


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "approximate gelu", "softsign"])
def test_activations(activation):
    given = GELU_TANH if activation == "approximate gelu" else activation
    for form, name in (("int4", "dense"), ("awq", "onto heads")):
        if activation == "softsign":
            # Which no rule knows.
            layer, x, rule = layer_of(form, name)
            layer.activation = keras.activations.softsign
        else:
            layer, x, rule = layer_of(form, name, activation=given)
        check_bytes(run(layer, x, {rule: 1}), 4)


# Keras does not quantize to 8 bits in float16.
HALF = [
    (form, policy)
    for form in ("int4", "int4 of columns", "int8", "gptq of 8 bits", "awq")
    for policy in ("mixed_bfloat16", "mixed_float16")
    if (form, policy) != ("int8", "mixed_float16")
]


@pytest.mark.parametrize("name", ["dense", "onto heads"])
@pytest.mark.parametrize(("form", "policy"), HALF)
def test_half_precision(form, name, policy):
    """Stock has all numbers in it, and where weights are integers the product of these as well."""
    found = []
    for dtype in ("float32", policy):
        keras.utils.set_random_seed(0)
        layer, x, rule = layer_of(form, name, policy=dtype, activation="gelu")
        found.append((layer, x))
    (reference, _), (layer, x) = found
    compiled = function(layer, input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)])
    y = compiled(x)
    expected = reference(tf.cast(x, tf.float32))
    assert_as_exact("y", y, layer(x), tf.cast(expected, tf.float64), x.dtype.name)
    assert rule_counts(compiled) == {rule: 1}
    check_bytes(compiled, FORMS[form][1])
    assert the_op(compiled).get_attr("T") == x.dtype


@pytest.mark.parametrize("groups", ["in turn", "from behind", "backwards"])
@pytest.mark.parametrize("form", ["int4", "gptq of 8 bits", "awq"])
def test_order_of_groups(form, groups):
    layer, x, rule = layer_of(form, "dense", activation="relu")
    count = layer.kernel_scale.shape[0 if form == "int4" else 1]
    order = np.arange(DEPTH) % count
    order = {"in turn": order, "from behind": order - count, "backwards": order[::-1]}[groups]
    layer.g_idx.assign(order)
    check_bytes(run(layer, x, {rule: 1}), FORMS[form][1])


@pytest.mark.parametrize("units", [1, 2, 33])
@pytest.mark.parametrize("depth", [1, 2, 40])
def test_sizes(depth, units):
    for form in ("int4", "int4 of columns", "int8"):
        make = functools.partial(keras.layers.Dense, units)
        layer = FORMS[form][0](make, (None, depth), "float32")
        spec = tf.TensorSpec([None, depth])
        compiled = run(layer, *values((5, depth)), {"weight_only_matmul_bias": 1}, spec)
        for rows in (0, 1):
            (x,) = values((rows, depth))
            assert_same(compiled(x), layer(x))


def test_column_of_zeros():
    """Whose scale is infinite in half precision."""
    layer = keras.layers.Dense(4, dtype="mixed_float16")
    layer.build((None, DEPTH))
    layer.kernel.assign(layer.kernel * [[1, 0, 1, 1]])
    layer.quantize("int4", config=Int4QuantizationConfig(block_size=-1, activation_quantizer=None))
    (x,) = values((3, DEPTH), dtype="float16")
    compiled = run(layer, x, {"weight_only_matmul_bias": 1}, units=4)
    np.testing.assert_array_equal(compiled(x)[:, 1], 0)


@pytest.mark.parametrize("equation", ["btd,ndh->btnh", "abc,dc->abd"])
def test_einsum_in_another_order(equation):
    """The weights do not begin with what is contracted."""
    row = (4, 5) if "n" in equation else (6,)
    make = functools.partial(keras.layers.EinsumDense, equation, (None, *row))
    for form in ("int4", "int8"):
        layer = FORMS[form][0](make, (None, 3, DEPTH), "float32")
        (x,) = values((2, 3, DEPTH))
        compiled = function(layer)
        assert_same(compiled(x), layer(x))


# How an embedding is quantized, the bits, and by what its rows are taken.
TABLES = {
    "int4": (FORMS["int4"], {"packed_lookup": 1}),
    "int4 of one group": (FORMS["int4 of one group"], {"packed_lookup": 1}),
    "int4 of columns": (FORMS["int4 of columns"], {"packed_lookup": 1}),
    "int8": (FORMS["int8"], {}),
}


def embedding(form, policy="float32", **options):
    (build, bits), rules = TABLES[form]
    make = functools.partial(keras.layers.ReversibleEmbedding, 50, DEPTH, **options)
    return build(make, (None, 3), policy), bits, rules


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("form", TABLES)
def test_reversed_embedding(form, tied, soft_cap):
    layer, bits, _ = embedding(form, tie_weights=tied, logit_soft_cap=soft_cap)
    code = functools.partial(layer, reverse=True)
    for sizes, rule in (((2, 3, DEPTH), "weight_only_dense"), ((4, DEPTH), "weight_only_matmul")):
        spec = tf.TensorSpec([*[None] * (len(sizes) - 1), DEPTH])
        compiled = run(code, *values(sizes), {rule: 1}, spec)
        check_bytes(compiled, bits)
        assert the_op(compiled).get_attr("transpose_b") == tied


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("form", TABLES)
def test_reversed_embedding_in_half_precision(form, tied):
    found = []
    for policy in ("float32", "mixed_bfloat16"):
        keras.utils.set_random_seed(0)
        layer, bits, _ = embedding(form, policy, tie_weights=tied)
        layer.reverse_dtype = None
        found.append(functools.partial(layer, reverse=True))
    (x,) = values((2, 3, DEPTH), dtype="bfloat16")
    reference, code = found
    compiled = function(code)
    expected = reference(tf.cast(x, tf.float32))
    assert_as_exact("y", compiled(x), code(x), tf.cast(expected, tf.float64), "bfloat16")
    assert rule_counts(compiled) == {"weight_only_dense": 1}
    assert the_op_of(compiled, x).get_attr("bits") == bits


def the_op_of(compiled, x):
    graph = compiled.get_concrete_function(x).graph
    (op,) = (op for op in graph.get_operations() if op.type == OP)
    return op


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("form", TABLES)
def test_embedding(form, policy):
    layer, _, rules = embedding(form, policy)
    for indices in ([[3, 4, -1], [1, 0, 49]], 7):
        indices = tf.constant(indices, tf.int32)
        for spec in (indices.shape, [None] * indices.shape.rank):
            compiled = function(layer, input_signature=[tf.TensorSpec(spec, tf.int32)])
            found, expected = compiled(indices), layer(indices)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
            assert rule_counts(compiled) == rules
            if rules:
                # Nothing is unpacked but the rows.
                ops = needed(compiled.get_concrete_function())
                read = [t for op in ops if op.type == "BitwiseAnd" for t in op.inputs]
                assert read and not any(t.shape.rank and t.shape[0] == 50 for t in read)


def rounded(tensors, layer):
    """Returns tensors, which may be None, in the precision of a layer."""
    flat = [t if t is None else tf.reshape(t, [-1]) for t in tf.nest.flatten(tensors)]
    return [t if t is None else tf.cast(t, layer.compute_dtype) for t in flat]


@pytest.mark.parametrize(
    ("activation", "policy"), [("gelu", "float32"), ("relu", "mixed_bfloat16")]
)
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("int4", name) for name in LAYERS),
        *[("int4 of columns", "dense"), ("int4 of columns", "from heads")],
        *[("int8", "dense of rank 3"), ("int8", "onto heads")],
        *[("gptq of 4 bits", "dense of rank 3"), ("gptq of 4 bits", "onto heads")],
    ],
)
def test_gradients(form, name, activation, policy):
    """Those of inputs, of the bias and of scales where stock has them."""
    layer, x, rule = layer_of(form, name, policy, activation=activation)
    sources = [layer.bias.value]
    if "gptq" in form:
        sources += [layer.kernel_scale.value, layer.kernel_zero.value]

    def loss(x):
        y = tf.cast(layer(x), tf.float32)
        return tf.reduce_sum(y * y * y) / 16

    def step(x, loss=loss):
        with tf.GradientTape() as tape:
            tape.watch([x, *sources])
            found = loss(x)
        return found, tape.gradient(found, [x, *sources])

    inside, forward = function(step), function(loss)
    with plain():
        expected, *others = (rounded(t, layer) for t in (step(x), inside(x), step(x, forward)))
    for found in others:
        assert_same(found, expected, units=256 if policy == "float32" else 4)
    assert rule_counts(forward) == {rule: 1}
    # Without Keras's own gradient that of the activation or of tensordot may read what is inside.
    assert "gptq" in form or "weight_only" in "".join(rule_counts(inside))
