"""Functions that compute the same, and such as do not."""

import pytest
import tensorflow as tf

from tf_fused_ops.remapper.fingerprints import fingerprint


def traced(code):
    return fingerprint(tf.function(code).get_concrete_function(tf.TensorSpec([3])).graph)


def code(depth=3, factor=2.0, power=lambda x: x * x, output=1):
    """Returns code with a branch, in which a value is read in several places."""

    def function(x):
        for _ in range(depth):
            x = tf.identity(x) + power(x)
        return tf.cond(tf.reduce_any(x > 0), lambda: factor * x, lambda: tf.unstack(x)[output])

    return function


def test_the_same():
    """Whatever it is called; of code so deep that parts of parts were endless."""
    assert traced(code(200)) == traced(code(200))


@pytest.mark.parametrize(
    "other", [{"depth": 4}, {"factor": 3.0}, {"power": tf.square}, {"output": 2}], ids=",".join
)
def test_others(other):
    """Also in what a function calls."""
    assert traced(code()) != traced(code(**other))
