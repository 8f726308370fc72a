"""Attention: which spellings are fused, what is left to the softmax alone, and to stock."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    check_portable,
    check_training,
    gradient_count,
    plain,
    reasons,
    rule_counts,
    step_of,
    values,
)
from tolerances import assert_close

from tf_fused_ops import function
from tf_fused_ops.remapper import RemapOptions

# Batch, length, heads, depth; and batch, heads, length, depth.
BESIDE = values((2, 5, 3, 4), (2, 6, 3, 4), (2, 6, 3, 7))
FIRST = values((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7))
MASK = tf.constant(np.random.default_rng(0).uniform(size=(1, 1, 5, 6)) < 0.7)
FUSED = ("TfFusedOps>Attention", "TfFusedOps>AttentionGrad")


def by_einsum(to_scores, to_output, scale=lambda z: z * 0.5, swapped=False):
    def chain(query, key, value):
        pair = (key, query) if swapped else (query, key)
        weights = tf.nn.softmax(scale(tf.einsum(to_scores, *pair)))
        return tf.einsum(to_output, *((value, weights) if swapped else (weights, value)))

    return chain


def by_matmul(query, key, value):
    return tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 2.5) @ value


def by_transposition(query, key, value):
    return tf.nn.softmax(query @ tf.linalg.matrix_transpose(key)) @ value


def masked(query, key, value):
    z = tf.einsum("bqhd,bkhd->bhqk", query, key)
    return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(tf.where(MASK, z * 0.5, -1e9)), value)


def zeroed(query, key, value):
    z = tf.where(MASK, tf.einsum("bqhd,bkhd->bhqk", query, key), -1e9)
    weights = tf.where(MASK, tf.nn.softmax(z), 0.0)
    return tf.einsum("bhqk,bkhd->bqhd", weights, value)


def flipped(query, key, value):
    """As Keras spells einsum."""
    keys, columns = (tf.transpose(x, p) for x, p in ((key, [0, 2, 1, 3]), (query, [0, 2, 3, 1])))
    weights = tf.nn.softmax(tf.transpose(keys @ columns, [0, 1, 3, 2]) * 0.5)
    return tf.transpose(weights @ tf.transpose(value, [0, 2, 1, 3]), [0, 2, 1, 3])


def dropping(scores, output, mask=None, **options):
    """With dropout between the products."""

    def chain(query, key, value):
        z = scores(query, key)
        weights = tf.nn.softmax(z if mask is None else tf.where(mask, z, -1e9))
        if mask is not None:
            weights = tf.where(mask, weights, 0.0)
        weights = tf.nn.experimental.stateless_dropout(weights, 0.2, seed=[1, 2], **options)
        return output(weights, value)

    return chain


def by_letters(equation):
    return lambda *factors: tf.einsum(equation, *factors)


def by_keras_einsum(equation):
    """Which is spelled with products of transposed operands."""
    return lambda *factors: keras.ops.einsum(equation, *factors)


def beside(scale=lambda z: z, mask=None):
    """As in KerasHub's models."""

    def chain(query, key, value):
        z = scale(by_keras_einsum("bquh,bkuh->buqk")(query, key))
        weights = tf.nn.softmax(z if mask is None else tf.where(mask, z, -1e9))
        return by_keras_einsum("buqk,bkuh->bquh")(weights, value)

    return chain


# The chain, its operands, and attributes of the fused op: scale, masks, whether heads are first.
FORMS = {
    "einsum": (by_einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"), BESIDE, (0.5, 0, False)),
    "other letters": (by_einsum("BTNH,BSNH->BNTS", "BNTS,BSNH->BTNH"), BESIDE, (0.5, 0, False)),
    "right factors first": (
        by_einsum("aecd,abcd->acbe", "aecd,acbe->abcd", swapped=True),
        BESIDE,
        (0.5, 0, False),
    ),
    "unscaled": (
        by_einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", scale=lambda z: z),
        BESIDE,
        (1.0, 0, False),
    ),
    "divided": (
        by_einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", scale=lambda z: z / 4.5),
        BESIDE,
        (1 / 4.5, 0, False),
    ),
    "heads first": (by_einsum("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"), FIRST, (0.5, 0, True)),
    "matmul": (by_matmul, FIRST, (0.4, 0, True)),
    "transposition": (by_transposition, FIRST, (1.0, 0, True)),
    "three dimensions": (by_matmul, [x[:, 0] for x in FIRST], (0.4, 0, True)),
    "masked": (masked, BESIDE, (0.5, 1, False)),
    "zeros where masked": (zeroed, BESIDE, (1.0, 1, False)),
    "flipped": (flipped, BESIDE, (0.5, 0, False)),
    "beside": (beside(), BESIDE, (1.0, 0, False)),
    "beside, scaled": (beside(lambda z: z * 0.5), BESIDE, (0.5, 0, False)),
    "beside, divided": (beside(lambda z: z / 4.5), BESIDE, (1 / 4.5, 0, False)),
    "beside, masked": (beside(lambda z: z * 0.5, MASK), BESIDE, (0.5, 1, False)),
    "beside, dropout": (
        dropping(by_keras_einsum("bquh,bkuh->buqk"), by_keras_einsum("buqk,bkuh->bquh")),
        BESIDE,
        (1.0, 0, False),
    ),
    "beside, dropout of masked": (
        dropping(by_keras_einsum("bquh,bkuh->buqk"), by_keras_einsum("buqk,bkuh->bquh"), MASK),
        BESIDE,
        (1.0, 1, False),
    ),
    "beside, products of transposed": (
        lambda query, key, value: tf.transpose(
            tf.nn.softmax(tf.transpose(query, [0, 2, 1, 3]) @ tf.transpose(key, [0, 2, 3, 1]))
            @ tf.transpose(value, [0, 2, 1, 3]),
            [0, 2, 1, 3],
        ),
        BESIDE,
        (1.0, 0, False),
    ),
    "dropout": (
        dropping(by_letters("bqhd,bkhd->bhqk"), by_letters("bhqk,bkhd->bqhd")),
        BESIDE,
        (1.0, 0, False),
    ),
    "dropout of masked": (
        dropping(by_letters("bqhd,bkhd->bhqk"), by_letters("bhqk,bkhd->bqhd"), MASK),
        BESIDE,
        (1.0, 1, False),
    ),
    "dropout with heads first": (
        dropping(lambda q, k: tf.matmul(q, k, transpose_b=True), tf.matmul),
        FIRST,
        (1.0, 0, True),
    ),
    "of keras": (
        lambda *a: keras.ops.dot_product_attention(*a, is_causal=True),
        [BESIDE[0], BESIDE[1][:, :5], BESIDE[2][:, :5, :, :4]],
        (0.5, 1, False),
    ),
}


def attributes(compiled, op_type=FUSED[0]):
    """Returns the scale, the number of masks and the layout of the one op of a type."""
    graph = compiled.get_concrete_function().graph
    (op,) = (op for op in graph.get_operations() if op.type == op_type)
    return tuple(op.get_attr(name) for name in ("scale", "num_masks", "heads_first"))


# Whose batches might be broadcast to one another.
BATCHES = (
    *("matmul", "transposition", "three dimensions", "flipped"),
    "dropout with heads first",
    *(name for name in FORMS if name.startswith("beside")),
)


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, unknown_batch):
    chain, operands, expected = FORMS[name]
    unknown = range(3) if unknown_batch and name not in BATCHES else ()
    for code, op_types, gradients in ((chain, FUSED[:1], 0), (step_of(chain), FUSED, 1)):
        compiled = check(code, operands, {"attention": 1}, gradients, unknown)
        for op_type in op_types:
            np.testing.assert_allclose(attributes(compiled, op_type), expected, rtol=1e-6)
        types = {op.type for op in compiled.get_concrete_function().graph.get_operations()}
        assert not types & {"Einsum", "BatchMatMulV2", "Softmax", "SelectV2"}


@pytest.mark.parametrize(
    ("dtype", "cast"),
    [
        ("float64", None),
        *itertools.product(("float16", "bfloat16"), (None, "products", "scores")),
    ],
)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("einsum", [tf.einsum, keras.ops.einsum])
def test_dtypes(dtype, cast, dropped, einsum):
    """Half precision with and without float32 for the softmax, as Keras's layers have it, which
    scale before or after the cast."""

    def chain(query, key, value):
        z = einsum("bqhd,bkhd->bhqk", query, key)
        z = (tf.cast(z, tf.float32) if cast == "products" else z) * 0.5
        weights = tf.nn.softmax(tf.cast(z, tf.float32) if cast == "scores" else z)
        weights = tf.cast(weights, dtype)
        if dropped:
            weights = tf.nn.experimental.stateless_dropout(weights, 0.5, seed=[1, 2])
        return einsum("bhqk,bkhd->bqhd", weights, value)

    operands = [tf.cast(x, dtype) for x in BESIDE]
    check(step_of(chain), operands, {"attention": 1}, gradients=1)


@pytest.mark.parametrize("shared", ["key and value", "all"])
def test_operands_that_are_one_tensor(shared):
    def chain(x, y):
        return masked(x[:, :5] if shared == "all" else y[:, :5], x, x)

    rules = {"attention": 1, "slice_gradient": 1}
    check(step_of(chain), values((2, 6, 3, 4), (2, 6, 3, 4)), rules, gradients=1)


KERAS = {
    "bare": {},
    "causal": {"use_causal_mask": True},
    "mask": {"attention_mask": tf.ones([2, 6, 6], tf.bool)},
    "both": {"attention_mask": tf.ones([1, 6, 6], tf.bool), "use_causal_mask": True},
}


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("unknown", [(), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize("name", KERAS)
def test_keras_layer(name, unknown, policy, rate):
    def make():
        keras.utils.set_random_seed(0)
        layer = keras.layers.MultiHeadAttention(2, 8, dtype=policy, dropout=rate, seed=3)
        layer.build((2, 6, 16), (2, 6, 16))

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, x, training=rate > 0, **KERAS[name])
            return y, tape.gradient(y, [x, *layer.trainable_variables])

        return layer, step

    (layer, step), (_, of_stock) = make(), make()
    (x,) = values((2, 6, 16), dtype=layer.compute_dtype)
    sizes = [None if axis in unknown else size for axis, size in enumerate(x.shape)]
    compiled = function(step, input_signature=[tf.TensorSpec(sizes, x.dtype)])
    with plain():
        expected, found = tf.function(of_stock)(x), compiled(x)
    for i, (value, other) in enumerate(zip(*map(tf.nest.flatten, (found, expected)), strict=True)):
        assert_close(f"output {i}", value, other, layer.compute_dtype)
    # A mask of six keys is no mask of as many as there are, nor one of two entries of a batch.
    given = {"mask": bool(unknown), "both": 1 in unknown}.get(name, False)
    rule = "softmax" if given else "attention"
    dropouts = rule_counts(compiled).get("dropout", 0)
    assert (rule_counts(compiled)[rule], gradient_count(compiled)) == (1, 5 + dropouts)
    assert dropouts == (given and rate > 0)
    if not given:
        for op_type in FUSED:
            assert attributes(compiled, op_type)[1] == (name != "bare")


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("known", [(2, 6), (None, 6), (None, None)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_queries(groups, known, policy, rate):
    """As KerasHub's Llama has them: heads of keys are repeated."""

    def make():
        keras.utils.set_random_seed(0)
        projections = [
            keras.layers.EinsumDense("bqm,muh->bquh", (None, heads, 8), dtype=policy)
            for heads in (4, 4 // groups, 4 // groups)
        ]
        output = keras.layers.EinsumDense("bquh,uhm->bqm", (None, 16), dtype=policy)
        softmax = keras.layers.Softmax(dtype="float32")
        dropout = keras.layers.Dropout(rate, seed=3, dtype=policy)
        for layer in projections:
            layer.build((2, 6, 16))
        output.build((2, 6, 4, 8))
        variables = [v for layer in (*projections, output) for v in layer.trainable_variables]

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                query, *others = (layer(x) for layer in projections)
                key, value = (keras.ops.repeat(t, groups, axis=2) for t in others)
                scores = keras.ops.einsum("bquh,bkuh->buqk", query, key)
                weights = dropout(softmax(scores), training=rate > 0)
                y = output(keras.ops.einsum("buqk,bkuh->bquh", weights, value))
            return y, tape.gradient(y, [x, *variables])

        return step

    (x,) = values((2, 6, 16), dtype=policy.removeprefix("mixed_"))
    signature = [tf.TensorSpec([*known, 16], x.dtype)]
    compiled = function(make(), input_signature=signature)
    with plain():
        expected, found = tf.function(make(), input_signature=signature)(x), compiled(x)
    for i, (value, other) in enumerate(zip(*map(tf.nest.flatten, (found, expected)), strict=True)):
        assert_close(f"output {i}", value, other, x.dtype.name)
    assert (rule_counts(compiled), gradient_count(compiled)) == ({"attention": 1}, 1)
    for op_type in FUSED:
        assert attributes(compiled, op_type) == (1.0, 0, False)


def test_padding_that_an_embedding_tells():
    """The mask is of the tokens' sizes, and so are queries and keys."""
    tokens = keras.Input([12], dtype="int32")
    x = keras.layers.Embedding(50, 16, mask_zero=True)(tokens)
    model = keras.Model(tokens, keras.layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True))
    signature = [tf.TensorSpec([None, 12], tf.int32)]
    compiled = function(lambda x: model(x), input_signature=signature)
    x = tf.constant(np.random.default_rng(0).integers(1, 50, (3, 12)) * (np.arange(12) < 9))
    assert_same(compiled(tf.cast(x, tf.int32)), model(x))
    assert attributes(compiled)[1] == 1


def test_model_trains_as_stock():
    def model():
        inputs = keras.Input((6, 16))
        y = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs, use_causal_mask=True)
        outputs = keras.layers.Dense(5, activation="softmax")(inputs + y)
        return keras.Model(inputs, outputs)

    compiled = check_training(model, (4, 6, 5))
    assert rule_counts(compiled)["attention"] == rule_counts(compiled)["softmax"] == 1
    assert gradient_count(compiled) >= 2


def used_weights(query, key, value):
    weights = tf.nn.softmax(tf.einsum("bqhd,bkhd->bhqk", query, key))
    return tf.einsum("bhqk,bkhd->bqhd", weights, value) * tf.reduce_max(weights)


def halved(query, key, value):
    weights = tf.nn.softmax(tf.einsum("bqhd,bkhd->bhqk", query, key))
    return tf.einsum("bhqk,bkhd->bqhd", weights * 0.5, value)


def biased(query, key, value):
    z = tf.einsum("bqhd,bkhd->bhqk", query, key) + tf.reduce_mean(key)
    return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(z), value)


# What has a softmax of its own, but is no attention.
OTHERS = {
    "beside, one batch of keys": (beside(), [BESIDE[0], BESIDE[1][:1], BESIDE[2]]),
    "beside, weights changed": (
        lambda query, key, value: by_keras_einsum("buqk,bkuh->bquh")(
            0.5 * tf.nn.softmax(by_keras_einsum("bquh,bkuh->buqk")(query, key)), value
        ),
        BESIDE,
    ),
    "beside, the output's heads first": (
        lambda query, key, value: (
            tf.nn.softmax(by_keras_einsum("bquh,bkuh->buqk")(query, key))
            @ tf.transpose(value, [0, 1, 2, 3])
        ),
        [BESIDE[0], BESIDE[1], FIRST[2]],
    ),
    "softmax over queries": (by_einsum("bqhd,bkhd->bhkq", "bhkq,bkhd->bqhd"), BESIDE),
    "output with heads first": (by_einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bhqd"), BESIDE),
    "a letter summed alone": (by_einsum("bqhd,bkhe->bhqk", "bhqk,bkhd->bqhd"), BESIDE),
    "weights used outside": (used_weights, BESIDE),
    "weights changed": (halved, BESIDE),
    "a bias": (biased, BESIDE),
    "numbers of another shape": (
        dropping(
            by_letters("bqhd,bkhd->bhqk"), by_letters("bhqk,bkhd->bqhd"), noise_shape=[2, 1, 5, 6]
        ),
        BESIDE,
    ),
    "one key for all heads": (by_matmul, [FIRST[0], FIRST[1][:, :1], FIRST[2]]),
    "a sum over queries": (
        lambda q, k, v: tf.matmul(tf.nn.softmax(q @ tf.linalg.matrix_transpose(k)), v, True),
        [FIRST[0], FIRST[1], FIRST[2][:, :, :5]],
    ),
}


@pytest.mark.parametrize("rank", [3, 5])
def test_flipped_products_of_other_ranks(rank):
    """Only Keras's own are known."""
    rows, columns = {3: ([1, 0, 2], [1, 2, 0]), 5: ([0, 1, 3, 2, 4], [0, 1, 3, 4, 2])}[rank]
    back = [*range(rank - 2), rank - 1, rank - 2]

    def chain(query, key, value):
        scores = tf.transpose(key, rows) @ tf.transpose(query, columns)
        weights = tf.nn.softmax(tf.transpose(scores, back) * 0.5)
        return tf.transpose(weights @ tf.transpose(value, rows), rows)

    front, heads = {3: ((), 2), 5: ((2, 2), 3)}[rank]
    lengths = (5, 4), (6, 4), (6, 7)
    operands = values(*[(*front, length, heads, depth) for length, depth in lengths])
    check(step_of(chain), operands, {"softmax": 1}, gradients=1)


@pytest.mark.parametrize("inner", range(2))
def test_shapes_inside_flipped_products(inner):
    """Are none of scores."""

    def chain(query, key, value):
        columns = tf.transpose(query, [0, 2, 3, 1])
        products = tf.transpose(key, [0, 2, 1, 3]) @ columns
        weights = tf.nn.softmax(tf.transpose(products, [0, 1, 3, 2]))
        sums = weights @ tf.transpose(value, [0, 2, 1, 3])
        read = tf.shape((products, sums)[inner])
        return tf.transpose(sums, [0, 2, 1, 3]), tf.cast(read, tf.float32)

    signature = [tf.TensorSpec([2, None, *x.shape[2:]]) for x in BESIDE]
    compiled = function(chain, input_signature=signature)
    assert_same(compiled(*BESIDE), chain(*BESIDE))
    assert rule_counts(compiled) == {"softmax": 1}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    chain, operands = OTHERS[name]
    check(step_of(chain), operands, {"softmax": 1}, gradients=1)


def test_shapes_inside_that_code_outside_reads():
    """Those of scores are computed from the operands, that of transposed keys is another."""

    def of_scores(query, key, value):
        z = tf.matmul(query, key, transpose_b=True) * 0.5
        return tf.nn.softmax(z) @ value, tf.cast(tf.shape(z), tf.float32)

    def of_keys(query, key, value):
        columns = tf.linalg.matrix_transpose(key)
        return tf.nn.softmax(query @ columns) @ value, tf.cast(tf.shape(columns), tf.float32)

    specs = [tf.TensorSpec([2, 3, None, x.shape[-1]]) for x in FIRST]
    for code, rule in ((of_scores, "attention"), (of_keys, "softmax")):
        compiled = function(code, input_signature=specs)
        assert_same(compiled(*FIRST), code(*FIRST))
        assert rule_counts(compiled) == {rule: 1}


def test_sizes_that_may_broadcast():
    """Of products of batches; and of masks, where scores may be broadcast to them."""
    specs = [tf.TensorSpec([None, *x.shape[1:]]) for x in FIRST]
    compiled = function(by_matmul, input_signature=specs)
    assert compiled(FIRST[0][:1], *FIRST[1:]).shape == (2, 3, 5, 7)
    assert rule_counts(compiled) == {"softmax": 1}
    assert "may not go with" in reasons(compiled)["attention"]

    def chain(query, key, value, bits):
        z = tf.where(bits > 0, tf.einsum("bqhd,bkhd->bhqk", query, key), -1e9)
        return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(z), value)

    (bits,) = values((2, 1, 1, 6))
    specs = [tf.TensorSpec([None, *x.shape[1:]]) for x in (*BESIDE, bits)]
    compiled = function(chain, input_signature=specs)
    compiled(*BESIDE, bits)
    assert rule_counts(compiled) == {"softmax": 1}
    assert "may not be broadcast to the scores" in reasons(compiled)["attention"]


def test_switched_off():
    compiled = function(masked, remap=RemapOptions(disable=["attention"]))
    compiled(*BESIDE)
    assert rule_counts(compiled) == {"softmax": 1}


def test_portable_conversion(tmp_path):
    check_portable(step_of(masked), BESIDE, tmp_path)
