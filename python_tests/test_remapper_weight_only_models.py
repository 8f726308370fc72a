"""Models whose weights Keras has quantized to 4 bits: predicted, exported, saved and trained."""

import collections
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.quantizers.quantization_config import Int4QuantizationConfig
from remapping import assert_same, plain, rule_counts, saved_op_counts, values
from test_remapper_weight_only import layer_of
from test_remapper_weight_only_forms import OP, dense

import tf_fused_ops as tfo
from tf_fused_ops import function
from tf_fused_ops.cli import main
from tf_fused_ops.remapper import convert

WIDTH, HEADS, TOKENS = 16, (2, 8), 37


class Attention(keras.layers.Layer):
    def call(self, query, key, value):
        return keras.ops.dot_product_attention(query, key, value)


def block(x):
    """A transformer's: attention and two dense layers, with residual connections."""
    layers = keras.layers
    y = layers.LayerNormalization()(x)
    onto_heads = [
        layers.EinsumDense("bqm,mhd->bqhd", (None, *HEADS), bias_axes="hd") for _ in range(3)
    ]
    y = Attention()(*(layer(y) for layer in onto_heads))
    x = x + layers.EinsumDense("bqhd,hdm->bqm", (None, WIDTH), bias_axes="m")(y)
    y = layers.Dense(3 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
    return x + layers.Dense(WIDTH)(y)


def transformer(config=None, blocks=1):
    """Returns a model of blocks between an embedding and the same in reverse, quantized."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((None,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(TOKENS, WIDTH)
    x = embedding(tokens)
    for _ in range(blocks):
        x = block(x)
    x = keras.layers.LayerNormalization()(x)
    model = keras.Model(tokens, embedding(x, reverse=True))
    rng = np.random.default_rng(0)
    for v in model.trainable_variables:
        v.assign(v + rng.normal(0, 0.05, v.shape))
    with mock.patch("gc.collect"):
        model.quantize("int4", config=config)
    return model


def some_tokens(rows=6):
    return np.random.default_rng(1).integers(0, TOKENS, (rows, 5)).astype(np.int32)


CONFIGS = {
    "default": None,
    "groups": Int4QuantizationConfig(block_size=6),
    "columns": Int4QuantizationConfig(block_size=-1, activation_quantizer=None),
}
PRODUCTS = 7


def fusions(blocks=1):
    """Returns the fusions of a model."""
    of_a_block = {
        "layer_norm": 2,
        "attention": 1,
        "weight_only_heads_bias": 3,
        "weight_only_batch_matmul_bias": 1,
        "weight_only_dense_bias_gelu_erf": 1,
        "weight_only_dense_bias": 1,
    }
    around = {"layer_norm": 1, "packed_lookup": 1, "weight_only_dense": 1}
    counted = collections.Counter({name: blocks * n for name, n in of_a_block.items()})
    return dict(counted + collections.Counter(around))


def of_einsums():
    """Returns the fusions where Keras does not know how long sequences are: it has einsums then."""
    found = fusions()
    products = (found.pop(f"weight_only_{name}_bias") for name in ("heads", "batch_matmul"))
    return found | {"weight_only_einsum_bias": sum(products)}


def products(rules):
    return sum(n for name, n in rules.items() if name.startswith("weight_only"))


@pytest.mark.parametrize("config", CONFIGS)
def test_transformer(config):
    model, tokens = transformer(CONFIGS[config], blocks=2), tf.constant(some_tokens())
    compiled = function(model)
    with plain():
        assert_same(compiled(tokens), model(tokens), units=256)
    assert rule_counts(compiled) == fusions(blocks=2)


@pytest.mark.parametrize("config", ["groups", "columns"])
def test_sequences_of_unknown_length(config):
    model, tokens = transformer(CONFIGS[config]), tf.constant(some_tokens())
    compiled = function(model, input_signature=[tf.TensorSpec([None, None], tf.int32)])
    with plain():
        assert_same(compiled(tokens), model(tokens), units=256)
    assert rule_counts(compiled) == of_einsums()


def test_accelerated_model():
    model, tokens = transformer(CONFIGS["groups"]), some_tokens(10)
    expected = model.predict(tokens, batch_size=4, verbose=0)
    tfo.accelerate(model)
    found = model.predict(tokens, batch_size=4, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert fusions().items() <= model.predict_step.remap_reports[-1].counts().items()


def test_generation():
    """Tokens one after the other: weights are read before a loop and in it."""
    model = transformer(CONFIGS["groups"])

    def generate(tokens):
        first = tf.argmax(model(tokens)[:, -1], -1, tf.int32)

        def body(i, tokens, logits):
            logits = model(tokens)[:, -1]
            new = tf.argmax(logits, -1, tf.int32)
            return i + 1, tf.concat([tokens[:, 1:], new[:, None]], 1), logits

        start = tf.concat([tokens[:, 1:], first[:, None]], 1)
        logits = tf.zeros([tokens.shape[0], TOKENS])
        return tf.while_loop(lambda i, *_: i < 4, body, (tf.constant(0), start, logits))[1:]

    tokens = tf.constant(some_tokens())
    compiled = function(generate)
    with plain():
        assert_same(compiled(tokens)[1], generate(tokens)[1], units=256)
    assert rule_counts(compiled) == {name: 2 * n for name, n in fusions().items()}
    concrete = compiled.get_concrete_function(tokens)
    definition = concrete.graph.as_graph_def()
    inner = [node for f in definition.library.function for node in f.node_def]
    fused = [node for node in (*definition.node, *inner) if node.op == OP]
    assert len(fused) == 2 * PRODUCTS and {node.attr["bits"].i for node in fused} == {4}


def test_exported_model(tmp_path):
    """Products are fused in a SavedModel, and back."""
    paths = [str(tmp_path / folder) for folder in ("stock", "fused", "portable", "again")]
    stock, fused, portable, again = paths
    spec = keras.InputSpec(shape=(None, 5), dtype="int32")
    transformer(CONFIGS["groups"]).export(stock, input_signature=[spec], verbose=False)
    told = collections.Counter()
    for report in convert(stock, fused):
        told.update(report.counts())
    assert products(told) == PRODUCTS and told["packed_lookup"] == 1
    assert main(["convert", fused, portable, "--portable"]) == 0
    assert main(["convert", portable, again]) == 0
    assert not any("TfFused" in op_type for op_type in saved_op_counts(portable))
    assert [saved_op_counts(path)[OP] for path in (fused, again)] == [PRODUCTS, PRODUCTS]
    tokens = tf.constant(some_tokens())
    models = [tf.saved_model.load(path) for path in paths]
    expected, *others = (model.serve(tokens) for model in models)
    for found in others:
        assert_same(found, expected, units=256)


@pytest.mark.parametrize("form", ["gptq of 4 bits", "awq"])
def test_exported_layer(form, tmp_path):
    """Which reads its weights twice."""
    layer, x, rule = layer_of(form, "dense", activation="relu")
    module = tf.Module()
    module.layer = layer
    spec = tf.TensorSpec([None, x.shape[1]])
    module.serve = tf.function(lambda x: layer(x), input_signature=[spec])
    stock, fused = (str(tmp_path / folder) for folder in ("stock", "fused"))
    tf.saved_model.save(module, stock)
    (report,) = (report for report in convert(stock, fused) if report.fused)
    assert report.counts() == {rule: 1}
    left = saved_op_counts(fused)
    assert not left.keys() & {"BitwiseAnd", "RightShift", "SelectV2"} and left[OP] == 1
    loaded = tf.saved_model.load(fused)
    assert_same(loaded.serve(x), layer(x))


@pytest.mark.parametrize("config", ["groups", "columns"])
def test_keras_file(config, tmp_path):
    model, tokens = transformer(CONFIGS[config]), tf.constant(some_tokens())
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", {"Attention": Attention})
    compiled = function(loaded)
    assert_same(compiled(tokens), model(tokens), units=256)
    assert rule_counts(compiled) == fusions()
    # Weights that are loaded later are those that it takes.
    other = transformer(CONFIGS[config])
    for v in other.trainable_variables:
        v.assign(v * 1.5)
    other.save_weights(tmp_path / "other.weights.h5")
    loaded.load_weights(tmp_path / "other.weights.h5")
    assert_same(compiled(tokens), other(tokens), units=256)


def adapted(config):
    """Returns a model whose layers have adapters of low rank."""
    model = transformer(config)
    for i, layer in enumerate(model.layers):
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
            for name in ("lora_kernel_b", "lora_embeddings_b"):
                if hasattr(layer, name):
                    v = getattr(layer, name)
                    v.assign(values(v.shape, seed=i)[0] / 8)
    return model


@pytest.mark.parametrize("config", ["groups", "columns"])
def test_lora(config):
    """A training step has the loss and the gradients of stock."""
    model, tokens = adapted(CONFIGS[config]), tf.constant(some_tokens())
    variables = [v.value for v in model.trainable_variables]
    assert sum("lora" in v.path for v in model.trainable_variables) == 2 * PRODUCTS

    def loss(tokens):
        logits = model(tokens, training=True)[:, :-1]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], logits))

    def step(tokens):
        with tf.GradientTape() as tape:
            found = loss(tokens)
        return found, tape.gradient(found, variables)

    def outside(fn):
        with tf.GradientTape() as tape:
            found = fn(tokens)
        return found, tape.gradient(found, variables)

    compiled, inside = function(loss), function(step)
    with plain():
        expected = dense(step(tokens))
        for found in (inside(tokens), outside(compiled)):
            assert_same(dense(found), expected, units=256)
    for fn in (compiled, inside):
        assert products(rule_counts(fn)) >= PRODUCTS - 1


def test_training_with_adapters():
    """Several steps of an optimizer."""
    losses = []
    for wrapped in (False, True):
        model = adapted(CONFIGS["groups"])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if wrapped:
            tfo.accelerate(model)
        tokens = some_tokens()
        losses.append(model.fit(tokens, tokens, 3, epochs=2, shuffle=False, verbose=0).history)
    np.testing.assert_allclose(losses[1]["loss"], losses[0]["loss"], rtol=1e-5)
    assert losses[0]["loss"][1] < losses[0]["loss"][0]
