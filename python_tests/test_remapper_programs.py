"""Programs that nobody thought of: layers in any order, whose results go more than one way."""

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from remapping import FUSED, op_counts, plain
from tolerances import assert_close

from tf_fused_ops.function import function
from tf_fused_ops.remapper import spellings

CHANNELS = 4
ACTIVATIONS = {a.name: a.spellings[0] for a in spellings.ACTIVATIONS}

# Layers take what a convolution does, and of that what they need.


def convolution(x, filters, bias):
    return tf.nn.bias_add(tf.nn.conv2d(x, filters, 1, "SAME"), bias)


def dense(x, filters, bias):
    rows = tf.reshape(x, [-1, CHANNELS])
    return tf.reshape(tf.nn.bias_add(rows @ filters[0, 0], bias), tf.shape(x))


def norm(x, filters, bias):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return tf.nn.batch_normalization(x, mean, variance, bias, filters[1, 1, 0], 1e-3)


# Layer -> the op that it becomes.
LAYERS = {convolution: "Conv2D", dense: "MatMul", norm: "FusedBatchNormV3"}
STEPS = st.tuples(
    st.sampled_from(list(LAYERS)),
    st.sampled_from(list(ACTIVATIONS)),
    st.booleans(),  # whether the layer's input is added
    st.sampled_from(["nowhere", "sum", "mean"]),  # where the pre-activation goes, too
)


def run(steps, x, parameters):
    for (layer, activation, add, use), own in zip(steps, parameters, strict=True):
        z = layer(x, *own)
        z = z + x if add else z
        y = ACTIVATIONS[activation](z)
        if use == "sum":
            y = tf.add_n([y, z, y])
        elif use == "mean":
            y = tf.reduce_mean(tf.stack([y, z]), axis=0)
        x = y
    return x


# Forty programs, the profile's number, are too few to meet a sum of gradients that loses a part.
@settings(max_examples=150)
@given(st.lists(STEPS, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_program(steps, unknown_batch, tape_outside):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return tf.constant(rng.standard_normal(shape) * 0.5)

    x, dy = normal(2, 5, 6, CHANNELS), normal(2, 5, 6, CHANNELS)
    parameters = [(normal(3, 3, CHANNELS, CHANNELS), normal(CHANNELS)) for _ in steps]

    def differentiated(forward):
        def step(x, dy, parameters):
            with tf.GradientTape() as tape:
                tape.watch([x, parameters])
                y = forward(x, parameters)
            return y, tape.gradient(y, [x, parameters], output_gradients=dy)

        return step

    def forward(x, parameters):
        return run(steps, x, parameters)

    images = tf.TensorSpec([None if unknown_batch else 2, *x.shape[1:]], x.dtype)
    weights = tf.nest.map_structure(lambda v: tf.TensorSpec(v.shape, v.dtype), parameters)
    with plain():
        expected = tf.function(differentiated(forward))(x, dy, parameters)
        if tape_outside:
            fused = function(forward, input_signature=[images, weights])
            found = differentiated(fused)(x, dy, parameters)
        else:
            signature = [images, images, weights]
            fused = function(differentiated(forward), input_signature=signature)
            found = fused(x, dy, parameters)
    counts = op_counts(fused.get_concrete_function())
    for layer, op_type in LAYERS.items():
        assert counts[FUSED[op_type]] == sum(step[0] is layer for step in steps)
    for found_one, expected_one in zip(*map(tf.nest.flatten, (found, expected)), strict=True):
        # TensorFlow's constants of GELU have the precision of float32 in float64, too.
        assert_close("result", found_one, expected_one, "float32", units=64)
