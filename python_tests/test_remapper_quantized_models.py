"""Models that Keras has quantized to 8 bits, and what is in them: programs and SavedModels."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import assert_same, gradient_count, reasons, saved_op_counts, step_of, values
from test_remapper_quantized import (
    CHAIN,
    LAYERS,
    OP,
    dense,
    quantize,
    quantized,
    run,
    sizes_of,
    the_op,
)

import tf_fused_ops as tfo
from tf_fused_ops.remapper import convert


def test_training_of_what_is_around():
    """The gradient of the quantized layer is stock's, those of its neighbours are fused."""
    layers = [keras.layers.Dense(8, activation="relu"), dense(), keras.layers.Dense(3)]
    (x,) = values((6, 8))
    model = keras.Sequential(layers)
    model.build(x.shape)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    rules = {"matmul_bias_relu": 1, "quantized_matmul_bias": 1, "matmul_bias": 1}
    compiled, *_ = run(step, x, rules)
    assert gradient_count(compiled) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("tied", [True, False])
def test_reversible_embedding(tied, soft_cap, dtype):
    """The product is with weights as they are stored; no gradient goes through it."""
    options = {"logit_soft_cap": soft_cap, "dtype": dtype}
    layer = keras.layers.ReversibleEmbedding(50, 8, tie_weights=tied, **options)
    layer = quantized(layer, None, 3)
    weights = layer._embeddings if tied else layer.reverse_embeddings
    code = functools.partial(layer, reverse=True)
    (x,) = values((2, 3, 8), dtype=dtype)
    for spec in (None, tf.TensorSpec([None, None, 8], dtype)):
        units = 4 if dtype == "bfloat16" else 64
        compiled, stock, fused = run(code, x, {"quantized_matmul": 1}, spec, units)
        # That which is left is of the scale, which is a vector.
        assert (stock["Transpose"], fused["Transpose"]) == ((2, 1) if tied else (0, 0))
        assert fused["BatchMatMulV3"] == 0
        op = the_op(compiled)
        assert op.get_attr("transpose_b") == tied and not op.get_attr("straight_through")
        assert op.inputs[1].op.type != "Transpose" and op.inputs[1].shape == weights.shape


def test_reversible_embedding_in_two_precisions():
    """Which Keras divides in float32 what it has rounded to bfloat16 before."""
    layer = keras.layers.ReversibleEmbedding(50, 8, dtype="mixed_bfloat16")
    code = functools.partial(quantized(layer, None, 3), reverse=True)
    compiled, *_ = run(code, *values((2, 3, 8)), {})
    assert not reasons(compiled)


def quantized_attention():
    layer = keras.layers.MultiHeadAttention(2, 4)
    layer.build((None, 3, 8), (None, 3, 8))
    for part in layer._flatten_layers(include_self=False):
        if isinstance(part, keras.layers.EinsumDense):
            part.bias.assign(*values(part.bias.shape, seed=1))
            quantize(part)
    return layer


def test_attention():
    layer = quantized_attention()
    rules = {"quantized_matmul_bias": 4, "attention": 1}
    (x,) = values((2, 3, 8))
    for sizes in ((2, 3, 8), (None, 3, 8), (None, None, 8)):
        _, _, fused = run(lambda x: layer(x, x), x, rules, tf.TensorSpec(sizes))
        assert fused[OP] == 4 and not CHAIN & fused.keys()
        compiled, *_ = run(step_of(lambda x: layer(x, x)), x, rules, tf.TensorSpec(sizes))
        assert gradient_count(compiled) == 1


@pytest.mark.parametrize("name", ["dense", "abc,cde->abde"])
def test_lora(name):
    """It is added to the product before the bias."""
    layer = LAYERS[name](activation="relu")
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(*values(layer.lora_kernel_b.shape, seed=2))
    variables = [v.value for v in layer.trainable_variables]
    assert len(variables) == 3

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x) ** 3)
        return loss, tape.gradient(loss, [x, *variables])

    (x,) = values(sizes_of(name))
    # Gradients of the input are added up.
    sums = {"matmul_add" if name == "dense" else "batch_matmul_add": 1}
    for code, others in ((layer, {}), (step, sums)):
        compiled, *_ = run(code, x, {"quantized_matmul": 1} | others)
        assert the_op(compiled).get_attr("straight_through")


def sequential():
    layers = [keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((3, 8)), *layers])


def functional():
    """With a residual connection and two layers on one input."""
    inputs = keras.Input((3, 8))
    sides = [keras.layers.Dense(8, activation=name)(inputs) for name in ("silu", None)]
    x = keras.layers.Multiply()(sides) + inputs
    return keras.Model(inputs, keras.layers.EinsumDense("abc,cd->abd", (3, 4), bias_axes="d")(x))


# With the fusions, and those of a SavedModel.
MODELS = {
    "sequential": (
        sequential,
        {"quantized_matmul_bias": 1, "quantized_matmul_bias_gelu_erf": 1},
        {"quantized_matmul": 2, "act_gelu_erf": 1},
    ),
    "functional": (
        functional,
        {"quantized_matmul_bias": 2, "quantized_matmul_bias_silu": 1},
        {"quantized_matmul": 3, "act_silu": 1},
    ),
}


def quantized_model(name):
    keras.utils.set_random_seed(0)
    model = MODELS[name][0]()
    for layer in model.layers:
        if layer.weights:
            quantize(layer)
    model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("name", MODELS)
def test_accelerated_model(name):
    model = quantized_model(name)
    x, target = (v.numpy() for v in values((10, 3, 8), (10, 3, 4)))

    def results():
        predicted = model.predict(x, batch_size=4, verbose=0)
        return predicted, model.evaluate(x, target, batch_size=4, verbose=0)

    expected = results()
    tfo.accelerate(model)
    for found, given in zip(results(), expected, strict=True):
        np.testing.assert_allclose(found, given, rtol=1e-5, atol=1e-6)
    for step in (model.predict_step, model.test_step):
        assert step.remap_reports[-1].counts() == MODELS[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_exported_model(name, tmp_path):
    """Products are fused in a SavedModel, and back; Keras's gradient stays around them."""
    paths = [str(tmp_path / folder) for folder in ("stock", "fused", "portable", "again")]
    quantized_model(name).export(paths[0], verbose=False)
    stock, fused, portable = paths[:3]
    rules = MODELS[name][2]
    for source, target in ((stock, fused), (portable, paths[3])):
        if source is portable:
            convert(fused, portable, to_stock=True)
        told = collections.Counter()
        for report in convert(source, target):
            told.update(report.counts())
        assert told == rules
    products = rules["quantized_matmul"]
    assert [saved_op_counts(path)[OP] for path in paths] == [0, products, 0, products]
    assert [saved_op_counts(path)["IdentityN"] for path in paths[1:]] == [products] * 3
    assert not any("TfFused" in op_type for op_type in saved_op_counts(portable))
    (x,) = values((2, 3, 8))

    def step(path):
        model = tf.saved_model.load(path)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model.serve(x)
        return y, tape.gradient(y, x)

    expected, *others = map(step, paths)
    for found in others:
        assert_same(found, expected)
