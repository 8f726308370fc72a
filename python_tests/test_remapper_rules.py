"""Every row of the table: fused in inference, under an outer and an inner tape; equal to stock."""

import numpy as np
import pytest
import tensorflow as tf
from remapping import assert_same, check, in_training, op_counts, rule_counts, values
from tensorflow.python.framework import op_def_registry

from tf_fused_ops.function import function
from tf_fused_ops.remapper import rules, trained_convs

CONV = [(2, 6, 5, 3), (3, 3, 3, 4), (4,)]
MATMUL = [(6, 7), (7, 5), (5,)]
DENSE = [(2, 3, 7), (7, 5), (5,)]
BATCH_NORM = [(4, 5, 3, 6), (6,), (6,), (6,), (6,)]
CONV_NORM = [*CONV, (4,), (4,), (4,), (4,)]
VOLUME = [(2, 3, 6, 5, 3), (3, 3, 3, 3, 4), (4,)]
CONV1D = [(2, 6, 3), (3, 3, 4), (4,)]
# The last shape is that of the vector that tells the output's.
TRANSPOSE = [(2, 3, 4, 3), (3, 3, 5, 3), (5,), (4,)]
SHAPES = {
    "act": [(6, 7)],
    "conv2d": CONV[:2],
    "conv2d_add": [*CONV[:2], (2, 6, 5, 4)],
    "trained_conv2d": CONV[:2],
    "trained_conv2d_transpose": [*TRANSPOSE[:2], (4,)],
    "trained_conv3d": VOLUME[:2],
    "grouped_conv2d": [(2, 6, 5, 4), (3, 3, 2, 6)],
    "pad_conv2d": CONV[:2],
    "pad_conv2d_bias": CONV,
    "pad_conv1d": CONV1D[:2],
    "pad_conv1d_bias": CONV1D,
    "row_conv2d_bias": [(2, 1, 6, 3), (1, 3, 3, 4), (4,)],
    "conv1d": CONV1D[:2],
    "conv1d_bias": CONV1D,
    "conv1d_bias_add": [*CONV1D, (2, 6, 4)],
    "conv2d_bias": CONV,
    "conv2d_bias_add": [*CONV, (2, 6, 5, 4)],
    "conv2d_transpose": [*TRANSPOSE[:2], (4,)],
    "conv2d_transpose_bias": TRANSPOSE,
    "conv2d_transpose_bias_add": [*TRANSPOSE, (2, 6, 8, 5)],
    "conv3d": VOLUME[:2],
    "conv3d_add": [*VOLUME[:2], (2, 3, 6, 5, 4)],
    "conv3d_bias": VOLUME,
    "conv3d_bias_add": [*VOLUME, (2, 3, 6, 5, 4)],
    "conv1d_transpose_bias": [(2, 4, 3), (3, 5, 3), (5,), (4,)],
    "matmul": MATMUL[:2],
    "matmul_add": [*MATMUL[:2], (6, 5)],
    "matmul_bias": MATMUL,
    "matmul_bias_add": [*MATMUL, (6, 5)],
    "dense": DENSE[:2],
    "dense_add": [*DENSE[:2], (2, 3, 5)],
    "dense_bias": DENSE,
    "dense_bias_add": [*DENSE, (2, 3, 5)],
    "batch_matmul": DENSE[:2],
    "batch_matmul_add": [*DENSE[:2], (2, 3, 5)],
    "batch_matmul_bias": DENSE,
    "batch_matmul_bias_add": [*DENSE, (2, 3, 5)],
    # The smallest matrices that are read so.
    "few_rows_matmul": [(6, 512), (512, 512)],
    "few_rows_batch_matmul": [(2, 3, 256), (256, 256)],
    "einsum": DENSE[:2],
    "einsum_bias": DENSE,
    "heads_bias": [(2, 3, 7), (7, 10), (2, 5)],
    "quantized_matmul": DENSE,
    "quantized_matmul_bias": [*DENSE, (5,)],
    # The last shape is that of the scales of integers that numbers are made of.
    "weight_only_matmul": MATMUL,
    "weight_only_matmul_bias": [*MATMUL, (5,)],
    "weight_only_dense": DENSE,
    "weight_only_dense_bias": [*DENSE, (5,)],
    "weight_only_batch_matmul": DENSE,
    "weight_only_batch_matmul_bias": [*DENSE, (5,)],
    "weight_only_einsum": DENSE,
    "weight_only_einsum_bias": [*DENSE, (5,)],
    "weight_only_heads": [(2, 3, 7), (7, 10), (2, 5)],
    "weight_only_heads_bias": [(2, 3, 7), (7, 10), (2, 5), (2, 5)],
    "batch_norm": BATCH_NORM,
    "batch_norm_add": [*BATCH_NORM, (4, 5, 3, 6)],
    "conv2d_batch_norm": CONV_NORM,
    "conv2d_batch_norm_add": [*CONV_NORM, (2, 6, 5, 4)],
    "conv2d_batch_norm_v1": CONV_NORM,
    "conv2d_batch_norm_v1_add": [*CONV_NORM, (2, 6, 5, 4)],
    "conv2d_batch_norm_v2": CONV_NORM,
    "conv2d_batch_norm_v2_add": [*CONV_NORM, (2, 6, 5, 4)],
    "conv1d_given_batch_norm": [*CONV1D, *[(4,)] * 4],
    "conv1d_given_batch_norm_add": [*CONV1D, *[(4,)] * 4, (2, 6, 4)],
    "conv2d_given_batch_norm": CONV_NORM,
    "conv2d_given_batch_norm_add": [*CONV_NORM, (2, 6, 5, 4)],
    "moments_batch_norm": BATCH_NORM[:3],
    "moments_batch_norm_add": [*BATCH_NORM[:3], (4, 5, 3, 6)],
    "given_batch_norm": BATCH_NORM,
    "given_batch_norm_add": [*BATCH_NORM, (4, 5, 3, 6)],
    "prelu": [(2, 5, 4, 3), (3,)],
    "relu_max_pool": [(2, 5, 4, 3)],
    "group_norm": [(2, 5, 4, 6), (6,), (6,)],
    "layer_norm": [(2, 5, 6), (6,), (6,)],
    "rms_norm": [(2, 5, 6), (6,), (6,)],
    "attention": [(2, 5, 3, 4), (2, 6, 3, 4), (2, 6, 3, 7)],
    "grouped_attention": [(2, 5, 2, 3, 4), (2, 6, 2, 4), (2, 6, 2, 7)],
    "softmax": [(2, 5, 6)],
    "cross_entropy": [(6, 7), (6, 7)],
    "sparse_cross_entropy": [(6, 7), (6,)],
}
DECOMPOSED = {"epsilon": 1e-3, "scaled": True, "centered": True, "reshaped": False, "half": None}
SOFTMAX = {
    **{"scaled": "Mul", "scale": 0.125, "half": None},
    **dict.fromkeys(("masked", "filled", "zeroed", "late"), False),
}
QUANTIZED = {
    **dict.fromkeys(("equation", "permutation", "gradient")),
    **{"epsilon": 1e-7, "axes": -1, "transposed": False, "steps": (), "shapes": (None, None, None)},
}
MOMENTS = DECOMPOSED | {"form": "moments", "scaled_first": False}
UPSAMPLED = {"strides": [1, 2, 2, 1], "y_shape": [2, 6, 8, 5]}
VARIANTS = {
    "conv2d_transpose": UPSAMPLED,
    "trained_conv2d_transpose": UPSAMPLED,
    "conv2d_transpose_bias": UPSAMPLED,
    "conv1d_transpose_bias": UPSAMPLED | {"y_shape": [2, 1, 8, 5]},
    "moments_batch_norm": DECOMPOSED | {"axes": [0, 1, 2]},
    "given_batch_norm": DECOMPOSED,
    "conv1d_given_batch_norm": DECOMPOSED,
    "conv2d_given_batch_norm": DECOMPOSED,
    "group_norm": MOMENTS | {"axes": [1, 2], "flat": False, "after": False},
    "layer_norm": MOMENTS | {"axes": [-1]},
    "rms_norm": MOMENTS | {"axes": -1, "form": "Square"},
    "quantized_matmul": QUANTIZED,
    "quantized_matmul_bias": QUANTIZED,
    "softmax": SOFTMAX,
    "sparse_cross_entropy": {"labels_type": tf.int32},
    "attention": SOFTMAX
    | {
        "to_scores": ("Einsum", "bqhd,bkhd->bhqk", False),
        "to_output": ("Einsum", "bhqk,bkhd->bqhd", False),
        "heads_first": False,
        "rank": 4,
        "dropped": False,
        "biased": None,
    },
    "grouped_attention": SOFTMAX
    | {
        "heads_first": False,
        "rows": [-1, 2, 15, 4],
        "scores": [-1, 2, 3, 5, 6],
        "weights": [-1, 2, 15, 6],
        "sums": [-1, 2, 3, 5, 7],
    },
}
# Every spelling of every activation is tried alone and after one chain; the others take the first.
ALL_SPELLINGS = ("act", "matmul_bias")
# Joins what other rules have made of stock code; has an operand that is the shape of another; have
# one that is made in a certain way; is a gradient itself; and prepare the graph for other rules.
APART = (
    *("conv2d_moments", "dropout", "packed_lookup", "dequantized_weights", "slice_gradient"),
    *("dilated_conv1d", "dilated_conv2d", "dilated_conv3d"),
)
# Whose batch has to be known: whether it is of few rows, or the same in all operands.
OF_KNOWN_BATCH = ("few_rows_matmul", "few_rows_batch_matmul", "grouped_attention")
ROWS = [
    rule
    for rule in rules.RULES
    if rule.family in ALL_SPELLINGS or rule.spelling is rule.activation.spellings[0]
    if rule.family not in APART
]
BATCHED = {"x", "input", "a", "side_input", "query", "key", "value", "logits", "labels"}


def row_id(rule):
    """Names a row: the rule and which of its spellings this is."""
    return f"{rule.name}-{rule.activation.spellings.index(rule.spelling)}"


def operands(rule):
    """Returns example operands by name; scales and variance are positive."""
    names = rule.present(attrs(rule))
    named = dict(zip(names, values(*SHAPES[rule.family]), strict=True))
    if "output_shape" in named:
        named["output_shape"] = tf.constant(attrs(rule)["y_shape"])
    if rule.family == "sparse_cross_entropy":
        named["labels"] = tf.range(6)
    for name in ("scale", "variance", "b_scale", "divisor"):
        if name in named:
            named[name] = tf.abs(named[name]) + 0.5
    if named.keys() & {"b_scale", "divisor"}:
        named["b"] = tf.cast(named["b"] * 9, tf.int8)
    return named


def attrs(rule, **changes):
    """Returns the captured attributes of a rule with their defaults."""
    variant = VARIANTS.get(rule.family.removesuffix("_add"), {})
    if rule.family.startswith("pad_conv2d"):
        variant = {"paddings": [[0, 0], [1, 2], [0, 3], [0, 0]]}
    if rule.family.startswith("pad_conv1d"):
        variant = {"paddings": [[0, 0], [3, 1], [0, 0]]}
    if rule.family.startswith("weight_only"):
        variant = {"divided": 1, "gradient": None, "arguments": ()}
    if "heads_bias" in rule.family or rule.family == "weight_only_heads":
        variant = variant | {"shape": [-1, 3, 2, 5], "divided": 2}
    return rule.default_attrs() | variant | changes


def stock(rule, named):
    """The stock code; where a rule is about numbers made of integers, it makes them."""
    if rule.family.startswith("weight_only"):
        named = named | {"b": tf.cast(named["b"], tf.float32)}
    return rule.stock(attrs(rule), **named)


def dy_like(rule, named):
    y = stock(rule, named)["y"]
    return values(y.shape, seed=1)[0]


@pytest.fixture(autouse=True)
def without_avx512(monkeypatch):
    """With which stock has volumes of float32."""
    monkeypatch.setattr(trained_convs, "isa", lambda: "avx2")


@pytest.fixture(params=ROWS, ids=row_id)
def rule(request):
    """One row of the table."""
    return request.param


def test_inference(rule):
    named = operands(rule)

    def forward(*args):
        return stock(rule, dict(zip(named, args, strict=True)))["y"]

    check(forward, list(named.values()), {rule.name: 1} if rule.forward_alone else {})


def test_outer_tape(rule):
    named = operands(rule)
    dy = dy_like(rule, named)

    def forward(*args):
        return stock(rule, dict(zip(named, args, strict=True)))["y"]

    def gradients(fn):
        sources = [named[name] for name in named if name in type(rule).differentiable]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = fn(*named.values())
        return y, tape.gradient(y, sources, output_gradients=dy)

    fused = function(forward)
    assert_same(gradients(fused), gradients(forward))
    assert rule_counts(fused) == ({rule.name: 1} if rule.forward_alone else {})


def inner_tape_cases():
    """Yields all rows, with an unknown batch only where nothing may broadcast."""
    for rule in ROWS:
        yield pytest.param(rule, "static", id=f"{row_id(rule)}-static")
        if "side_input" not in rule.operands and rule.family not in OF_KNOWN_BATCH:
            yield pytest.param(rule, "unknown batch", id=f"{row_id(rule)}-unknown batch")


@pytest.mark.parametrize(("rule", "batch"), list(inner_tape_cases()))
def test_inner_tape(rule, batch):
    named = operands(rule)
    dy = dy_like(rule, named)

    def step(dy, *args):
        inputs = dict(zip(named, args, strict=True))
        sources = [inputs[name] for name in named if name in type(rule).differentiable]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = stock(rule, inputs)["y"]
        return y, tape.gradient(y, sources, output_gradients=dy)

    unknown = [0] + [i + 1 for i, name in enumerate(named) if name in BATCHED]
    check(
        step,
        [dy, *named.values()],
        *in_training(rule.name),
        unknown_batch=unknown if batch == "unknown batch" else (),
    )


CONV_CASES = {
    "strides": {"strides": [1, 2, 2, 1]},
    "valid": {"padding": b"VALID"},
    "explicit": {"padding": b"EXPLICIT", "explicit_paddings": [0, 0, 1, 2, 0, 1, 0, 0]},
    "dilations": {"dilations": [1, 2, 2, 1]},
}


@pytest.mark.parametrize("name", CONV_CASES)
def test_convolution_attributes_are_kept(name):
    rule = next(r for r in rules.RULES if r.name == "conv2d_bias_relu")

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = rule.stock(attrs(rule, **CONV_CASES[name]), input=x, filters=w, bias=b)["y"]
        return y, tape.gradient(y, [x, w, b])

    check(step, values(*CONV), {rule.name: 1}, gradients=1)


@pytest.mark.parametrize("family", ["matmul_bias", "matmul"])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_transposes(transpose_a, transpose_b, family):
    def step(a, b, *bias):
        with tf.GradientTape() as tape:
            tape.watch([a, b, *bias])
            z = tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
            y = tf.nn.gelu(tf.nn.bias_add(z, *bias) if bias else z)
        return y, tape.gradient(y, [a, b, *bias])

    shapes = [(7, 6) if transpose_a else (6, 7), (5, 7) if transpose_b else (7, 5)]
    shapes += [(5,)] if family == "matmul_bias" else []
    check(step, values(*shapes), {f"{family}_gelu_erf": 1}, gradients=1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.5, -0.5])
def test_leaky_slope_is_kept(alpha):
    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = tf.nn.leaky_relu(tf.nn.bias_add(tf.matmul(x, w), b), alpha)
        return y, tape.gradient(y, [x, w, b])

    check(step, values(*MATMUL), {"matmul_bias_leaky_relu": 1}, gradients=1)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype)
        for family in (
            *("conv2d_bias", "matmul_bias", "batch_norm"),
            *("matmul", "matmul_add", "dense", "dense_add", "batch_matmul", "batch_matmul_add"),
            *("batch_matmul_bias_add", "einsum"),
        )
        for dtype in ("float16", "bfloat16", "float64")
        # FusedBatchNormV3 has no float64.
        if (family, dtype) != ("batch_norm", "float64")
    ],
)
def test_other_dtypes(family, dtype):
    rule = next(r for r in rules.RULES if r.name == f"{family}_relu")
    named = operands(rule)
    args = [tf.cast(v, rule.operand_dtype(k, tf.as_dtype(dtype), {})) for k, v in named.items()]

    def step(*args):
        inputs = dict(zip(named, args, strict=True))
        sources = [inputs[name] for name in rule.differentiable]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = rule.stock(attrs(rule), **inputs)["y"]
        return y, tape.gradient(y, sources)

    check(step, args, {rule.name: 1}, gradients=1)


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_moving_averages_are_kept(training, factor, activation):
    """The updated statistics leave the function; with factor 1 the moving ones may be empty."""
    rule = next(r for r in rules.RULES if r.name == f"batch_norm_{activation}")
    named = operands(rule)
    if training and factor == 1.0:
        named |= {"mean": tf.zeros([0]), "variance": tf.zeros([0])}

    def step(*args):
        inputs = dict(zip(named, args, strict=True))
        sources = [inputs[name] for name in rule.differentiable]
        options = attrs(rule, is_training=training, exponential_avg_factor=factor)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = rule.stock(options, **inputs)
        return outputs, tape.gradient(outputs["y"], sources)

    check(step, list(named.values()), {rule.name: 1}, gradients=1)


def test_two_layers_share_one_pass():
    """The gradient of one fused layer feeds that of the next, and stock ops are gone."""

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([w, b])
            y = x
            for _ in range(3):
                y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(y, w, 1, "SAME"), b))
            loss = tf.reduce_sum(y * y)
        return loss, tape.gradient(loss, [w, b])

    x, w, b = values((2, 6, 6, 4), (3, 3, 4, 4), (4,))
    compiled = check(step, [x, w * 0.2, b], {"conv2d_bias_relu": 3}, gradients=3)
    counts = op_counts(compiled.get_concrete_function())
    assert not counts.keys() & {"Conv2D", "BiasAdd", "Relu", "ReluGrad", "Conv2DBackpropInput"}


def test_commuted_operands():
    """Operands of commutative ops may come in any order."""

    def forward(x, w, b):
        z = tf.nn.bias_add(tf.matmul(x, w), b)
        inner = (tf.pow(z, 3) * 0.044715 + z) * np.float32(np.sqrt(2 / np.pi))
        return (tf.tanh(inner) + 1.0) * (z * 0.5)

    check(forward, values(*MATMUL), {"matmul_bias_gelu_tanh": 1})


def test_every_activation_of_the_ops_has_a_row():
    names = {rule.activation.name for rule in rules.RULES}
    definition = op_def_registry.get("TfFusedOps>Conv2DBiasAct")
    allowed = next(a for a in definition.attr if a.name == "activation").allowed_values.list.s
    assert names == {value.decode() for value in allowed}


def tensordot(x, w):
    return tf.tensordot(x, w, 1)


# The family without side input -> the contraction and shapes for which its output has that of x.
RESIDUAL = {
    "conv2d_bias": (
        lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
        [(2, 6, 5, 4), (3, 3, 4, 4), (4,)],
    ),
    "matmul_bias": (tf.matmul, [(6, 7), (7, 7), (7,)]),
    "matmul": (tf.matmul, [(6, 7), (7, 7)]),
    "batch_matmul_bias": (tf.matmul, [(3, 5, 7), (7, 7), (7,)]),
    "batch_matmul": (tf.matmul, [(3, 5, 7), (7, 7)]),
    "dense_bias": (tensordot, [(3, 5, 7), (7, 7), (7,)]),
    "dense": (tensordot, [(3, 5, 7), (7, 7)]),
}


@pytest.mark.parametrize("side_first", [False, True])
@pytest.mark.parametrize("form", ["add", "add_n"])
@pytest.mark.parametrize("activation", ["relu", "silu", "identity"])
@pytest.mark.parametrize("family", RESIDUAL)
def test_residual(family, activation, form, side_first):
    """A residual connection of unknown batch: the sum in both forms and orders."""
    product, shapes = RESIDUAL[family]

    def step(x, w, *b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, *b])
            z = product(x, w)
            operands = [tf.nn.bias_add(z, *b) if b else z, x]
            operands = operands[::-1] if side_first else operands
            total = tf.add_n(operands) if form == "add_n" else operands[0] + operands[1]
            y = total if activation == "identity" else getattr(tf.nn, activation)(total)
        return y, tape.gradient(y, [x, w, *b])

    rule = f"{family}_add" if activation == "identity" else f"{family}_add_{activation}"
    check(step, values(*shapes), *in_training(rule), unknown_batch=[0])


SUMS = {
    "plus": lambda z, b: z + b,
    "plus_bias_first": lambda z, b: b + z,
    "raw_add": lambda z, b: tf.raw_ops.Add(x=z, y=b),
}


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("form", SUMS)
@pytest.mark.parametrize("family", ["conv2d_bias", "matmul_bias", "dense_bias"])
def test_sum_that_is_a_bias(family, form, unknown_batch):
    shapes = [*SHAPES[family], SHAPES[f"{family}_add"][-1]]

    def linear(x, w, b):
        if family == "conv2d_bias":
            z = tf.nn.conv2d(x, w, 1, "SAME")
        else:
            z = tf.matmul(x, w) if family == "matmul_bias" else tf.tensordot(x, w, 1)
        return SUMS[form](z, b)

    def residual(x, w, b, side):
        return tf.nn.relu(linear(x, w, b) + side)

    def step(x, w, b, side):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = tf.nn.silu(linear(x, w, b))
        return y, tape.gradient(y, [x, w, b])

    unknown = [0] if unknown_batch else []
    check(step, values(*shapes), {f"{family}_silu": 1}, gradients=1, unknown_batch=unknown)
    check(residual, values(*shapes), {f"{family}_add_relu": 1})
