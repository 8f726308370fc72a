"""Products of quantized rows as nobody writes them, for which stock has a result nevertheless."""

import numpy as np
import pytest
import tensorflow as tf
from remapping import plain, reasons, rule_counts
from test_remapper_quantized_forms import (
    DENSE,
    PRODUCT,
    SHAPES,
    behind,
    chain,
    inputs,
    matmul,
    onto_heads,
    rounded,
    without,
)
from test_remapper_quantized_refusals import EMPTY, MIXED, OTHER_ROWS, ein, no_scale, turned

from tf_fused_ops import function

ONE_COLUMN = chain(
    lambda a, b: tf.reshape(
        matmul(tf.reshape(a, [-1, 6]), tf.reshape(tf.transpose(b), [6, 1])), [-1]
    ),
    without(1, 2),
    axes=(1, 2),
)
EACH_A_ROW = chain(
    turned([4, 5, 1], lambda a, b: tf.reshape(matmul(a, tf.reshape(b, [1, 6])), [4, 5, 2, 3])),
    lambda scale: behind(3)(behind(2)(scale)),
    axes=np.zeros([0], np.int32),
)


def of_integers(code):
    """Returns code that has no product."""
    return lambda x, w, w_scale: code(tf.cast(rounded(x)[0], tf.float32))


# What nobody writes: code, shapes of its arguments, those in tracing if they differ, and why it is
# not fused.
UNUSUAL = {
    "scale of more dimensions": (DENSE, [*SHAPES[:2], (1, 1, 5)], None, no_scale("(1, 1, 5)")),
    "scale of one number of more dimensions": (
        DENSE,
        [(6, 8), (8, 1), (1, 1, 1)],
        None,
        no_scale("(1, 1, 1)"),
    ),
    "scale of more dimensions, unknown rows": (
        DENSE,
        [*SHAPES[:2], (1, 1, 5)],
        [(None, 8), (8, 5), (1, 1, 5)],
        no_scale("(1, 1, 5)"),
    ),
    "a row as two rows": (chain(turned([-1, 3])), [(1, 6), (3, 5), (5,)], None, MIXED),
    "a row as two rows, unknown": (
        chain(turned([-1, 3])),
        [(1, 6), (3, 5), (5,)],
        [(None, None), (3, 5), (5,)],
        MIXED,
    ),
    "heads as two rows": (
        chain(
            lambda a, b: matmul(tf.reshape(a, [-1, 3, 6]), tf.reshape(b, [6, 5])),
            without(3),
            axes=(2, 3),
        ),
        [(1, 3, 4, 3), (2, 3, 5), (5,)],
        None,
        MIXED,
    ),
    "no dimensions of size 1": (chain(move=tf.squeeze), [(4, 8), (8, 4), (4,)], None, None),
    "no dimensions of size 1 of three": (
        chain(move=tf.squeeze),
        [(1, 4, 8), (8, 4), (4,)],
        None,
        None,
    ),
    "no rows of size 1": (chain(move=without(1)), [(4, 1, 8), *SHAPES[1:]], None, OTHER_ROWS),
    "no rows of size 1, unknown": (
        chain(move=without(1)),
        [(4, 1, 8), *SHAPES[1:]],
        [(None, 1, 8), *SHAPES[1:]],
        OTHER_ROWS,
    ),
    "no first row": (chain(move=without(0)), [(1, 4, 8), *SHAPES[1:]], None, OTHER_ROWS),
    "an axis in a vector": (
        chain(onto_heads, lambda scale: tf.expand_dims(scale, [-1])),
        [(2, 3, 8), (8, 4, 5), (4, 5)],
        None,
        None,
    ),
    "each number a row": (EACH_A_ROW, [(4, 5), (2, 3), (2, 3)], None, None),
    "no axes": (chain(axes=np.zeros([0], np.int32)), [(4, 5), (5, 5), (5,)], None, None),
    "one column of two dimensions": (ONE_COLUMN, [(4, 2, 3), (1, 6), (1,)], None, None),
    "integers in another order": (
        of_integers(lambda a: tf.raw_ops.Einsum(inputs=[a], equation="ab->ba")),
        SHAPES,
        None,
        None,
    ),
    "sum of integers": (of_integers(lambda a: tf.einsum("ab->a", a)), SHAPES, None, None),
    "no columns": (DENSE, [(6, 8), (8, 0), (0,)], None, EMPTY),
    "no columns of unknown rows": (
        ein("abc,cde->abde", behind(3)),
        [(2, 4, 8), (8, 0, 3), (0, 3)],
        [(None, 4, 8), (8, 0, 3), (0, 3)],
        EMPTY,
    ),
    "no numbers in a row": (DENSE, [(4, 0), (0, 5), (5,)], None, EMPTY),
    "no numbers in rows of heads": (
        ein("abcd,cde->abe", without(3), axes=(2, 3)),
        [(2, 4, 0, 3), (0, 3, 5), (5,)],
        None,
        EMPTY,
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_code(name):
    code, shapes, traced, reason = UNUSUAL[name]
    args = inputs(shapes)
    specs = [tf.TensorSpec(s, t.dtype) for s, t in zip(traced or shapes, args, strict=True)]
    compiled = function(code, input_signature=specs)
    with plain():
        expected = tf.function(code, input_signature=specs)(*args)
        found = compiled(*args)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert rule_counts(compiled) == {}
    assert reason in reasons(compiled)[PRODUCT] if reason else not reasons(compiled)
