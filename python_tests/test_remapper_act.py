"""Activations on their own: what is fused, what is not, and that longer chains come first."""

import keras
import pytest
import tensorflow as tf
from remapping import assert_same, check, op_counts, reasons, rule_counts, values
from test_remapper_refusals import CONV, after, conv, dense, gelu, keep, straight_silu
from test_remapper_refusals import MATMUL as DENSE

from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions

(X,) = values((6, 7))

SPELLINGS = {
    "nn_gelu_tanh": (lambda x: tf.nn.gelu(x, approximate=True), "gelu_tanh"),
    "nn_gelu_erf": (tf.nn.gelu, "gelu_erf"),
    "gelu_tanh": (gelu, "gelu_tanh"),
    "gelu_erf": (lambda x: 0.5 * x * (1.0 + tf.math.erf(x / 1.4142135623730951)), "gelu_erf"),
    "nn_silu": (tf.nn.silu, "silu"),
    "nn_swish": (tf.nn.swish, "silu"),
    "silu": (lambda x: x * tf.sigmoid(x), "silu"),
    "keras_gelu": (keras.activations.gelu, "gelu_erf"),
    "keras_gelu_tanh": (lambda x: keras.activations.gelu(x, approximate=True), "gelu_tanh"),
    "keras_silu": (keras.activations.silu, "silu"),
    "keras_mish": (keras.activations.mish, "mish"),
    "keras_hard_swish": (keras.activations.hard_swish, "hard_swish"),
    "nn_softplus": (tf.nn.softplus, "softplus"),
    "keras_hard_sigmoid": (keras.activations.hard_sigmoid, "hard_sigmoid"),
    "hard_sigmoid": (lambda x: tf.nn.relu6(x + 3.0) * (1.0 / 6.0), "hard_sigmoid"),
    "keras_ops_gelu": (lambda x: keras.ops.gelu(x, approximate=True), "gelu_tanh"),
    "keras_ops_silu": (keras.ops.silu, "silu"),
    "keras_ops_hard_silu": (keras.ops.hard_silu, "hard_swish"),
}


def step_of(activation):
    """A forward and a backward pass."""

    def step(x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = activation(x)
        return y, tape.gradient(y, x, output_gradients=dy)

    return step


COMMUTED = {
    "silu": (lambda x: tf.sigmoid(x) * x, "silu"),
    "mish": (lambda x: tf.tanh(tf.math.softplus(x)) * x, "mish"),
    "gelu": (lambda x: (tf.math.erf(x / 1.4142135623730951) + 1.0) * (x * 0.5), "gelu_erf"),
    "hard_sigmoid": (lambda x: tf.nn.relu6(3.0 + x) / 6.0, "hard_sigmoid"),
    "hard_swish": (lambda x: tf.nn.relu6(3.0 + x) * x / 6.0, "hard_swish"),
}


@pytest.mark.parametrize("spelling", COMMUTED)
def test_commuted(spelling):
    activation, name = COMMUTED[spelling]
    check(step_of(activation), values((6, 7), (6, 7)), {f"act_{name}": 1}, gradients=1)


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling(spelling, unknown_batch):
    activation, name = SPELLINGS[spelling]
    args = values((6, 7), (6, 7))
    check(
        step_of(activation),
        args,
        {f"act_{name}": 1},
        gradients=1,
        unknown_batch=(0, 1) if unknown_batch else (),
    )


# In float64, tf.nn.gelu has constants of float32.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("spelling", ["gelu_tanh", "gelu_erf", "nn_silu", "keras_mish"])
def test_dtypes(spelling, dtype):
    activation, name = SPELLINGS[spelling]
    check(step_of(activation), values((6, 7), (6, 7), dtype=dtype), {f"act_{name}": 1}, gradients=1)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (0, 4), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("spelling", ["nn_gelu_tanh", "nn_gelu_erf", "nn_silu", "keras_hard_swish"])
def test_shapes(spelling, shape):
    activation, name = SPELLINGS[spelling]
    check(step_of(activation), values(shape, shape), {f"act_{name}": 1}, gradients=1)


def test_unknown_rank():
    compiled = function(SPELLINGS["nn_gelu_tanh"][0], input_signature=[tf.TensorSpec(None)])
    assert_same(compiled(X), tf.nn.gelu(X, approximate=True))
    assert rule_counts(compiled) == {"act_gelu_tanh": 1}


def test_two_gradients_of_one_activation():
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.nn.gelu(x)
            first, second = tf.reduce_sum(y * y), tf.reduce_sum(tf.sin(y))
        return tape.gradient(first, x), tape.gradient(second, x)

    check(step, [X], {"act_gelu_erf": 1}, gradients=2)


def test_backward_pass_alone():
    """The sigmoid is an output, so the forward pass stays."""

    def step(x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            s = tf.sigmoid(x)
            y = x * s
        return s, y, tape.gradient(y, x, output_gradients=dy)

    check(step, values((6, 7), (6, 7)), {"act_silu_grad": 1}, gradients=1)


NEAR_MISSES = {
    "gelu_cubic_0.0448": (lambda x: gelu(x, cubic=0.0448), "act_gelu_tanh", "constant"),
    "gelu_half_1.5": (lambda x: gelu(x, half=1.5), "act_gelu_tanh", "constant"),
    "gelu_scale_0.8": (lambda x: gelu(x, scale=0.8), "act_gelu_tanh", "constant"),
    "gelu_other_root": (
        lambda x: 0.5 * x * (1.0 + tf.math.erf(x / 1.4)),
        "act_gelu_erf",
        "constant",
    ),
    "hard_swish_2.9": (lambda x: x * tf.nn.relu6(x + 2.9) / 6.0, "act_hard_swish", "constant"),
    "swish_beta": (lambda x: tf.nn.silu(x, 1.5), "act_silu", "constant"),
    "second_consumer": (
        lambda x: (lambda s: (x * s, tf.exp(s)))(tf.sigmoid(x)),
        "act_silu",
        "is also used by Exp",
    ),
    "fetched_interior": (
        lambda x: (lambda t: (t / 6.0, t))(x * tf.nn.relu6(x + 3.0)),
        "act_hard_swish",
        "is an output of the graph",
    ),
    "control_edge": (
        lambda x: (lambda s: (x * s, after(s, x)))(tf.sigmoid(x)),
        "act_silu",
        "has a control edge from",
    ),
    "kept": (
        lambda x: x * tf.tanh(keep(tf.math.softplus(x))),
        "act_mish",
        "is marked _grappler_do_not_remove",
    ),
    "other_gradient": (
        lambda x: straight_silu(x, tf.constant(1.0)),
        "act_silu",
        "attribute _gradient_op_type",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    fn, rule, reason = NEAR_MISSES[name]
    compiled = check(fn, [X], {})
    assert reason in reasons(compiled)[rule]


ELSEWHERE = {
    "gate": lambda x: x * tf.sigmoid(x + 1.0),
    "other_factor": lambda x: tf.exp(x) * tf.sigmoid(x),
    "broadcast": lambda x: x * tf.sigmoid(x[:1]),
    "tanh": lambda x: x * tf.tanh(x),
    "square_for_cube": lambda x: (
        0.5 * x * (1.0 + tf.tanh(0.7978845608028654 * (x + 0.044715 * (x * x))))
    ),
    "one_op": lambda x: (tf.sigmoid(x), tf.tanh(x), tf.nn.relu6(x), tf.nn.elu(x)),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_code_stays(name):
    check(ELSEWHERE[name], [X], {})


# Other code in which a longer activation's first part is one itself.
SHORTER = {
    "mish_of_other": (lambda x: x * tf.tanh(tf.math.softplus(-x)), "softplus"),
    "hard_gate": (lambda x: tf.exp(x) * (tf.nn.relu6(x + 3.0) / 6.0), "hard_sigmoid"),
}


@pytest.mark.parametrize("name", SHORTER)
def test_shorter_one_in_other_code(name):
    fn, activation = SHORTER[name]
    check(fn, [X], {f"act_{activation}": 1})


LONGER = {
    "matmul": (lambda x, w, b: tf.nn.gelu(dense(x, w, b)), DENSE, "matmul_bias_gelu_erf"),
    "conv": (lambda x, w, b: tf.nn.silu(conv(x, w, b)), CONV, "conv2d_bias_silu"),
    "sum": (
        lambda x, w, b: (lambda z: z * tf.tanh(tf.math.softplus(z)))(dense(x, w, b) + x),
        [(6, 7), (7, 7), (7,)],
        "matmul_bias_add_mish",
    ),
    "batch_norm": (
        lambda x, scale, offset: tf.nn.silu(
            tf.raw_ops.FusedBatchNormV3(
                x=x, scale=scale, offset=offset, mean=[], variance=[], is_training=True
            ).y
        ),
        [(4, 5, 3, 6), (6,), (6,)],
        "batch_norm_silu",
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", LONGER)
def test_longer_chains_come_first(name, training):
    fn, shapes, rule = LONGER[name]

    def step(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = fn(*args)
        return y, tape.gradient(y, args)

    check(step if training else fn, values(*shapes), {rule: 1}, gradients=int(training))


def test_what_a_longer_chain_must_leave():
    """The bias is an output: the product goes with it, the activation goes alone."""

    def forward(x, w, b):
        z = dense(x, w, b)
        return z, tf.nn.gelu(z)

    check(forward, values(*DENSE), {"matmul_bias": 1, "act_gelu_erf": 1})


def test_a_stack_of_layers():
    """Every activation goes with the layer before it, in whatever order they are met."""

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([w, b])
            y = tf.nn.gelu(x)
            for _ in range(3):
                y = tf.nn.gelu(dense(y, w, b))
            y = tf.nn.silu(tf.reduce_max(y, 0))
        return y, tape.gradient(y, [w, b])

    args = values((6, 7), (7, 7), (7,))
    rules = {"act_gelu_erf": 1, "matmul_bias_gelu_erf": 3, "act_silu": 1}
    compiled = check(step, args, rules, gradients=4)
    assert not op_counts(compiled.get_concrete_function()).keys() & {"Erf", "Erfc", "Sigmoid"}


def test_switched_off():
    compiled = function(tf.nn.gelu, remap=RemapOptions(disable=["act_*"]))
    assert_same(compiled(X), tf.nn.gelu(X))
    assert rule_counts(compiled) == {}
