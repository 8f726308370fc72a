"""What the tests of the remapper on transposed convolutions share."""

import numpy as np
import tensorflow as tf
from remapping import FUSED, assert_same, gradient_count, plain, rule_counts, values

from tf_fused_ops.function import function

OP = FUSED["transposed convolution"]
GRAD = f"{OP}Grad"
# Of input, filters, bias and output.
IMAGE = [(2, 3, 4, 3), (3, 3, 5, 3), (5,), (2, 6, 8, 5)]
LINE = [(2, 4, 3), (3, 5, 3), (5,), (2, 8, 5)]
X, W, B, S = values(*IMAGE)
# What is known of input and output.
NO_SIZES = (None, None, None, 3), (None, None, None, 5)
ADDITIONS = {
    "plus": lambda z, side: z + side,
    "side first": lambda z, side: side + z,
    "add_n": lambda z, side: tf.add_n([z, side]),
    "add_n, side first": lambda z, side: tf.add_n([side, z]),
}
BIASES = {
    "bias_add": tf.nn.bias_add,
    "plus": lambda z, b: z + b,
    "bias first": lambda z, b: b + z,
    "raw add": lambda z, b: tf.raw_ops.Add(x=z, y=b),
    "raw add, bias first": lambda z, b: tf.raw_ops.Add(x=b, y=z),
}


def transposed(x, w, shape=IMAGE[-1], strides=2, padding="SAME", **options):
    return tf.nn.conv2d_transpose(x, w, shape, strides, padding, **options)


def line(x, w, shape=LINE[-1], strides=2, padding="SAME", **options):
    return tf.nn.conv1d_transpose(x, w, shape, strides, padding, **options)


def biased(x, w, b, *args, **options):
    return tf.nn.bias_add(transposed(x, w, *args, **options), b)


def raw(sizes, x, w, stride=2):
    """Takes height and width for the sizes, too."""
    return tf.raw_ops.Conv2DBackpropInput(
        input_sizes=sizes, filter=w, out_backprop=x, strides=[1, stride, stride, 1], padding="SAME"
    )


def batched(x, inner=IMAGE[-1][1:]):
    """Returns the shape of an output whose batch is that of x."""
    return [tf.shape(x)[0], *inner]


def scaled(found, expected, units=512):
    """Asserts that gradients agree, given how large each of them is."""
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        scale = 1.0 if b is None else max(1.0, np.abs(b).max())
        assert_same(*(None if v is None else v / scale for v in (a, b)), units)


def as_stock(code, args, units=512, signature=None):
    """Returns the decorated function after it has been found to compute what stock does."""
    compiled = function(code, input_signature=signature)
    with plain():
        scaled(compiled(*args), tf.function(code, input_signature=signature)(*args), units)
    return compiled


def compare(fn, args, known, rules, gradients=0, units=64):
    """Asserts that a function of tensors of which some sizes are not known computes what stock
    does, that as much is known of its outputs, and what was fused.

    Args:
        fn: The function.
        args: Its arguments.
        known: What is known of their shapes while the function is traced.
        rules: {rule name: number of fusions}.
        gradients: The number of fused backward passes.
        units: Tolerance in units in the last place.

    Returns:
        The decorated function.
    """
    signature = [tf.TensorSpec(shape, a.dtype) for shape, a in zip(known, args, strict=True)]
    stock, fused = (f(fn, input_signature=signature) for f in (tf.function, function))
    with plain():
        assert_same(fused(*args), stock(*args), units)
    told = "\n".join(map(str, fused.remap_reports))
    assert rule_counts(fused) == rules, told
    assert gradient_count(fused) == gradients, told
    outputs = (f.get_concrete_function().structured_outputs for f in (stock, fused))
    for expected, y in zip(*map(tf.nest.flatten, outputs), strict=True):
        assert y.shape.is_subtype_of(expected.shape)
    return fused
