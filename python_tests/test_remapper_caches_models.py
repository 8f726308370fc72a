"""A whole decoder which chooses tokens by caches of keys and values: programs and SavedModels."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from remapping import assert_same, op_counts, saved_op_counts
from test_remapper_caches import DEPTH, HEADS, OP, assert_equal, specs, written

from tf_fused_ops import function
from tf_fused_ops.remapper import convert, remap


class CachedAttention(keras.layers.MultiHeadAttention):
    """As in KerasHub."""

    def call(self, x, cache, index, mask):
        query = self._query_dense(x)
        keys, positions = written(cache, index, self._key_dense(x), self._value_dense(x))
        y, _ = self._compute_attention(
            query=query, key=keys, value=positions, attention_mask=mask, training=False
        )
        return self._output_dense(y), ops.stack((keys, positions), axis=1)


class Decoder(keras.Model):
    """Two layers, and the greedy choice of the tokens behind a prompt of three."""

    SIZE, WIDTH, PROMPT = 13, 8, 3

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        kernel = keras.initializers.RandomNormal(0.0, 1.0)
        self.embedding = keras.layers.ReversibleEmbedding(
            self.SIZE, self.WIDTH, tie_weights=False, embeddings_initializer="normal"
        )
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.attentions = [
            CachedAttention(HEADS, DEPTH, kernel_initializer=kernel, bias_initializer=kernel)
            for _ in range(2)
        ]
        self.embedding.build()
        for layer in self.attentions:
            layer.build((None, None, self.WIDTH), (None, None, self.WIDTH))

    def call_with_cache(self, tokens, cache, index):
        """Returns logits and the next cache."""
        x, caches = self.embedding(tokens), []
        places = index + ops.arange(tokens.shape[1])[:, None]
        mask = (ops.arange(cache.shape[3])[None, :] <= places)[None]
        for i, (norm, layer) in enumerate(zip(self.norms, self.attentions, strict=True)):
            y, next_cache = layer(norm(x), cache=cache[:, i, ...], index=index, mask=mask)
            x += y
            caches.append(next_cache)
        return self.embedding(x, reverse=True), ops.stack(caches, axis=1)

    def generate(self, tokens):
        batch, length = tokens.shape
        cache = ops.zeros((batch, 2, 2, length, HEADS, DEPTH))
        _, cache = self.call_with_cache(tokens, cache, 0)

        def body(index, tokens, cache):
            token = ops.slice(tokens, [0, index - 1], [batch, 1])
            logits, cache = self.call_with_cache(token, cache, index - 1)
            chosen = ops.cast(ops.argmax(logits, axis=-1), tokens.dtype)
            return index + 1, ops.slice_update(tokens, [0, index], chosen), cache

        start = (ops.convert_to_tensor(self.PROMPT), tokens, cache)
        return ops.while_loop(lambda index, *_: index < length, body, start)[1:]


@pytest.fixture(scope="module", params=[1, 3])
def decoded(request):
    """A decoder, its prompts, and what stock makes of them."""
    decoder, rng = Decoder(), np.random.default_rng(0)
    tokens = tf.constant(rng.integers(Decoder.SIZE, size=(request.param, 10)), tf.int32)
    return decoder, tokens, tf.function(decoder.generate)(tokens)


def check_decoded(found, expected):
    assert_equal(found[0], expected[0])
    assert_same(found[1], expected[1], units=512)


def test_decoder(decoded):
    decoder, tokens, expected = decoded
    assert len(np.unique(expected[0][:, Decoder.PROMPT :])) > 2
    compiled = function(decoder.generate)
    check_decoded(compiled(tokens), expected)
    (told,) = (r.counts() for r in compiled.remap_reports if "while_body" in r.graph)
    assert told["update_cache"] == 1 and told["attention"] == 2
    assert compiled.remap_reports[-1].counts()["update_cache"] == 1
    found = op_counts(compiled.get_concrete_function(tokens))
    # What is left writes the tokens.
    assert found[OP] == 4 and found["XlaDynamicUpdateSlice"] == 1


def test_graph_def_of_a_decoder(decoded):
    decoder, tokens, _ = decoded
    result = remap(tf.function(decoder.generate).get_concrete_function(tokens))
    assert result.report.counts()["update_cache"] == 2
    again = remap(result.graph_def)
    assert "update_cache" not in again.report.counts()


def test_saved_decoder(decoded, tmp_path):
    decoder, tokens, expected = decoded
    decoder.run = tf.function(decoder.generate, input_signature=specs([tokens]))
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable", "again")]
    tf.saved_model.save(decoder, paths[0], signatures=None)
    reports = convert(paths[0], paths[1])
    assert sum(report.counts().get("update_cache", 0) for report in reports) == 2
    convert(paths[1], paths[2], to_stock=True)
    convert(paths[2], paths[3])
    assert [saved_op_counts(path)[OP] for path in paths[:3]] == [0, 4, 0]
    assert not any("TfFused" in name for name in saved_op_counts(paths[2]))
    for model in map(tf.saved_model.load, paths):
        check_decoded(model.run(tokens), expected)
