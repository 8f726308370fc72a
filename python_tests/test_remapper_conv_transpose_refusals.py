"""What is near a transposed convolution and stays: chains that something else reads, and the
gradients of ordinary convolutions by their inputs, which are the same op."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    assert_same,
    check,
    check_left,
    gradient_count,
    op_counts,
    reasons,
    rule_counts,
    values,
)
from test_remapper_refusals import after, guided_relu, keep
from transposing import GRAD, IMAGE, LINE, OP, B, W, X, as_stock, biased, line, raw, transposed

from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions

RELU, SUM_RELU = "conv2d_transpose_bias_relu", "conv2d_transpose_bias_add_relu"
LINEAR = {"conv2d_transpose_bias": 1}


def relu(x, w, b):
    return tf.nn.relu(biased(x, w, b))


def plus(x, w, b):
    return tf.nn.relu(transposed(x, w) + b)


def product_and(use):
    def code(x, w, b):
        z = transposed(x, w)
        return tf.nn.relu(tf.nn.bias_add(z, b)), use(z, x)

    return code


def pre_activation_and(use, layer=biased):
    def code(x, w, b):
        z = layer(x, w, b)
        return tf.nn.relu(z), use(z, x)

    return code


def used_sum(x, w, b, s):
    z = biased(x, w, b) + s
    return tf.nn.relu(z), tf.exp(z)


def elsewhere(x, w, b):
    z = transposed(x, w)
    with tf.device("CPU:0"):
        z = tf.nn.bias_add(z, b)
    return tf.nn.relu(z)


def used_line(x, w, b):
    z = line(x, w)
    return tf.nn.relu(tf.nn.bias_add(z, b)), z


USES = {
    "used": (lambda z, x: tf.exp(z), "is also used by Exp"),
    "fetched": (lambda z, x: z, "is an output of the graph"),
    "waited for": (after, "has a control edge from"),
}
# Code, shapes, what fuses, the rule that must not, and why, unless it does not nearly fit.
NEIGHBOURS = {
    **{
        f"product {name}": (product_and(use), IMAGE[:3], {}, RELU, reason)
        for name, (use, reason) in USES.items()
    },
    **{
        f"pre-activation {name}": (pre_activation_and(use), IMAGE[:3], LINEAR, RELU, reason)
        for name, (use, reason) in USES.items()
    },
    "kept": (
        *(lambda x, w, b: tf.nn.relu(tf.nn.bias_add(keep(transposed(x, w)), b)), IMAGE[:3]),
        *({}, RELU, "is marked _grappler_do_not_remove"),
    ),
    "guided": (
        *(lambda x, w, b: guided_relu(biased(x, w, b)), IMAGE[:3]),
        *(LINEAR, RELU, "the gradient of Relu is overridden"),
    ),
    "two devices": (elsewhere, IMAGE[:3], {}, RELU, "the nodes are on different devices"),
    "two sizes": (
        *(lambda x, w, b: tf.nn.relu(tf.nn.bias_add(raw([6, 8], x, w), b)), IMAGE[:3]),
        *({}, RELU, "of shape (2,) is not the shape of an image"),
    ),
    "bias of one": (plus, [*IMAGE[:2], (1,)], {}, RELU, "may not be a bias"),
    "bias that broadcasts": (
        lambda x, w, b: tf.nn.relu(transposed(x, w, (2, 6, 8, 1)) + b),
        *([IMAGE[0], (3, 3, 1, 3), (5,)], {}, RELU, "may not be a bias"),
    ),
    "bias of four dimensions": (plus, [*IMAGE[:2], (1, 1, 1, 5)], {}, RELU, ""),
    "bias of a line's two dimensions": (
        *(lambda x, w, b: tf.nn.relu(line(x, w) + b), [*LINE[:2], (1, 5)]),
        *({}, "conv1d_transpose_bias_relu", ""),
    ),
    "side that broadcasts": (
        *(lambda x, w, b, s: tf.nn.relu(biased(x, w, b) + s), [*IMAGE[:3], (2, 6, 1, 5)]),
        *(LINEAR, SUM_RELU, "may broadcast"),
    ),
    "side that is larger": (
        lambda x, w, b, s: tf.nn.relu(biased(x, w, b, (1, 6, 8, 5)) + s),
        *([(1, 3, 4, 3), *IMAGE[1:]], LINEAR, SUM_RELU, "may broadcast"),
    ),
    "sum used": (
        *(used_sum, IMAGE, {"conv2d_transpose_bias_add": 1}, SUM_RELU, "is also used by Exp"),
    ),
    "sum of three": (
        lambda x, w, b, s: tf.nn.relu(tf.add_n([biased(x, w, b), s, s])),
        *(IMAGE, LINEAR, SUM_RELU, ""),
    ),
    "sum without bias": (plus, [*IMAGE[:2], IMAGE[-1]], {}, "conv2d_transpose", ""),
    "alone": (transposed, IMAGE[:2], {}, "conv2d_transpose", ""),
    "line used": (
        *(used_line, LINE[:3], {}, "conv1d_transpose_bias_relu", "is an output of the graph"),
    ),
    "line without bias": (
        *(lambda x, w: tf.nn.relu(line(x, w)), LINE[:2], {}, "conv1d_transpose", ""),
    ),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_must_not_fuse(name):
    check_left(*NEIGHBOURS[name])


def none_fused(compiled):
    """Asserts that nothing was taken for a transposed convolution, nor for a gradient of one."""
    assert not any("transpose" in rule for rule in rule_counts(compiled)), compiled.remap_reports
    for concrete in compiled._list_all_concrete_functions():
        assert not op_counts(concrete).keys() & {OP, GRAD}


def test_no_kernel_on_a_gpu():
    @function
    def there(x, w, b):
        with tf.device("GPU:0"):
            return relu(x, w, b)

    there.get_concrete_function(X, W, B)
    assert rule_counts(there) == {}
    assert f"{OP} has no float32 kernel on GPU" in reasons(there)[RELU]


def test_integers():
    """Which TensorFlow has no transposed convolution of, though it multiplies them."""

    @function
    def of_integers(x, w):
        return tf.nn.relu(raw(IMAGE[-1], x, w))

    of_integers.get_concrete_function(*(tf.cast(4 * v, tf.int32) for v in (X, W)))
    assert rule_counts(of_integers) == {}


def test_compiled_functions_stay():
    inner = tf.function(relu, jit_compile=True)
    for compiled in (function(lambda *args: inner(*args)), function(relu, jit_compile=True)):
        assert_same(compiled(X, W, B), inner(X, W, B))
        none_fused(compiled)


@pytest.mark.parametrize("pattern", ["conv2d_transpose_bias*", "*transpose*", "*_relu", "*"])
def test_switched_off(pattern):
    compiled = function(relu, remap=RemapOptions(disable=[pattern]))
    assert_same(compiled(X, W, B), relu(X, W, B))
    assert rule_counts(compiled) == (LINEAR if pattern == "*_relu" else {})


def test_gradients_of_convolutions():
    """By the image, too: no ops are more like those of a transposed convolution. In a block with a
    skip, a projection, groups and layers whose inputs have no activations."""
    inputs = keras.Input((9, 9, 4))
    y = keras.layers.Conv2D(4, (2, 3), padding="same", use_bias=False)(inputs)
    y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
    y = keras.layers.ReLU()(keras.layers.Conv2D(4, 3, padding="same")(y) + inputs)
    z = keras.layers.Conv2D(6, 1, 2, use_bias=False)(y)
    y = keras.layers.Conv2D(6, 3, 2, padding="same", activation="tanh")(y) + z
    y = keras.layers.Conv2D(8, 3, padding="same", groups=2, activation="relu")(y)
    y = keras.layers.DepthwiseConv2D(3, padding="same", activation="relu6")(y)
    y = keras.layers.SeparableConv2D(5, 3, padding="same", activation="silu")(y)
    y = keras.layers.Conv2D(3, 2, dilation_rate=2, activation="gelu")(y)
    model = keras.Model(inputs, y)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x) ** 2)
        return loss, tape.gradient(loss, [x, *model.trainable_variables])

    signature = [tf.TensorSpec([None, 9, 9, 4])]
    compiled = as_stock(step, values((2, 9, 9, 4)), 4096, signature)
    none_fused(compiled)
    assert gradient_count(compiled) >= 4


def critic(x, w, b, v):
    y = tf.nn.leaky_relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 2, "SAME"), b))
    return tf.reduce_sum(tf.tanh(tf.nn.conv2d(y, v, 2, "SAME")), [1, 2, 3])


CRITIC = values((2, 8, 8, 3), (3, 3, 3, 4), (4,), (3, 3, 4, 5))


def test_gradient_penalty():
    """As of WGAN-GP: the gradient by an image is a transposed convolution that is trained."""

    def step(x, *weights):
        with tf.GradientTape() as outer:
            outer.watch(weights)
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = critic(x, *weights)
            slope = inner.gradient(score, x)
            size = tf.sqrt(tf.reduce_sum(slope**2, [1, 2, 3]) + 1e-6)
            loss = tf.reduce_mean(score) + 10.0 * tf.reduce_mean((size - 1.0) ** 2)
        return loss, outer.gradient(loss, weights)

    rules = rule_counts(as_stock(step, CRITIC, 1024))
    ours = {rule: n for rule, n in rules.items() if "transpose" in rule}
    assert ours == {"trained_conv2d_transpose": 1}


def test_gradients_of_a_generator_and_a_critic():
    """What the critic's convolutions tell the generator are no transposed convolutions of it."""

    def step(z, g, c, h, x, w, b, v):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([g, c, h, w, b, v])
            y = tf.nn.relu(biased(z, g, c, (2, 4, 4, 4)))
            made = tf.tanh(transposed(y, h, (2, 8, 8, 3)))
            fooled = -tf.reduce_mean(critic(made, w, b, v))
            judged = -fooled - tf.reduce_mean(critic(x, w, b, v))
        return tape.gradient(fooled, [g, c, h]), tape.gradient(judged, [w, b, v])

    args = [*values((2, 2, 2, 3), (3, 3, 4, 3), (4,), (4, 4, 3, 4)), *CRITIC]
    rules = rule_counts(as_stock(step, args, 4096))
    ours = {rule: n for rule, n in rules.items() if "transpose" in rule}
    assert ours == {RELU: 1, "conv2d_transpose_tanh": 1}


@pytest.mark.parametrize("use", [tf.nn.relu, tf.tanh, tf.nn.silu, lambda dx: dx + tf.range(3.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_activations_of_gradients(use, bias):
    """As of guided backpropagation. Either chain may have the op; the gradients stay together."""

    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            z = tf.nn.conv2d(x, w, 2, "SAME")
            y = tf.nn.relu(tf.nn.bias_add(z, b)) if bias else z + 0.0 * b
        dx, *others = tape.gradient(y, [x, w, b], output_gradients=tf.sin(y))
        return y, use(dx), others

    compiled = as_stock(step, CRITIC[:3])
    if bias:
        assert rule_counts(compiled).get("conv2d_bias_relu") == 1
        assert gradient_count(compiled) == 1
        none_fused(compiled)


def test_grouped_gradients_and_an_activation():
    """Filters of groups are not those of a transposed convolution."""
    dy, w, v = values((2, 6, 5, 6), (3, 3, 2, 6), (3, 3, 4, 1))

    def depthwise(dy, w):
        dx = tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
            input_sizes=[2, 6, 5, 4], filter=w, out_backprop=dy, strides=[1] * 4, padding="SAME"
        )
        return tf.nn.relu(dx)

    none_fused(check(depthwise, [dy[..., :4], v], {}))
    grouped = function(lambda dy, w: tf.nn.relu(raw([2, 6, 5, 4], dy, w, 1)))
    grouped.get_concrete_function(dy, w)
    told = "do not fit: 4 in the output and 6 in the input, 2 and 6"
    assert told in reasons(grouped)["conv2d_transpose_relu"]
    none_fused(grouped)
