"""Convolutions with neither bias nor activation: fused in training, left to stock in inference."""

import keras
import pytest
import tensorflow as tf
from remapping import (
    asked_for,
    assert_same,
    check,
    check_training,
    op_counts,
    plain,
    reasons,
    rule_counts,
    step_of,
    taped,
    values,
)
from test_remapper_refusals import keep

from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions, convert, trained_convs

UNTRAINED = "no gradient of it is in the graph"
STOCK = {
    *("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"),
    *("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"),
}
(X, W) = values((2, 7, 6, 5), (3, 3, 5, 4))


def conv(x, w, strides=1, padding="SAME", **options):
    return tf.nn.conv2d(x, w, strides, padding, **options)


def upsampled(x, w):
    images, height, width, _ = x.shape
    return tf.nn.conv2d_transpose(x, w, [images, 2 * height, 2 * width, w.shape[2]], 2)


def volume(x, w, strides=1):
    return tf.nn.conv3d(x, w, [1, strides, strides, strides, 1], "SAME")


# Rule -> its chain, and the shapes of its operands.
CHAINS = {
    "trained_conv2d": (conv, [X.shape, W.shape]),
    "trained_conv2d_transpose": (upsampled, [(2, 5, 3, 4), (3, 2, 7, 4)]),
    "trained_conv3d": (volume, [(2, 3, 6, 5, 3), (2, 3, 3, 3, 4)]),
}
DTYPES = ("float32", "float64", "float16", "bfloat16")


@pytest.fixture(autouse=True)
def without_avx512(monkeypatch):
    """Where volumes are fused in float32, too."""
    monkeypatch.setattr(trained_convs, "isa", lambda: "avx2")


def none_stock(compiled):
    """Asserts that a function of one trace has no stock convolution and no stock gradient of one,
    and that nothing was refused."""
    assert not op_counts(compiled.get_concrete_function()).keys() & STOCK
    assert not reasons(compiled).keys() & CHAINS.keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", CHAINS)
def test_training(rule, dtype):
    chain, shapes = CHAINS[rule]
    operands = values(*shapes, dtype=dtype)
    none_stock(check(step_of(chain), operands, {rule: 1}, gradients=1, units=512))


@pytest.mark.parametrize("rule", CHAINS)
def test_inference_stays(rule):
    """Without a word about it: there is nothing to train in the graph."""
    chain, shapes = CHAINS[rule]
    compiled = check(chain, values(*shapes), {})
    assert not any(refused.startswith("trained") for refused in reasons(compiled))


@pytest.mark.parametrize("batch", ["known", "unknown"])
@pytest.mark.parametrize(
    "options",
    [
        {"strides": 2},
        {"strides": [3, 1], "padding": "VALID"},
        {"dilations": [2, 1]},
        {"padding": [[0, 0], [2, 1], [0, 3], [0, 0]]},
    ],
    ids=["strides", "valid", "dilations", "explicit"],
)
def test_windows(options, batch):
    chain = step_of(lambda x, w: conv(x, w, **options))
    unknown = [0] if batch == "unknown" else []
    none_stock(
        check(chain, [X, W], {"trained_conv2d": 1}, gradients=1, unknown_batch=unknown, units=512)
    )


@pytest.mark.parametrize("strides", [1, 2])
def test_channels_first(strides):
    """Stock has no gradient of it on a CPU, so it is compared with channels last."""

    def first(x, w):
        y = tf.nn.conv2d(tf.transpose(x, [0, 3, 1, 2]), w, strides, "SAME", "NCHW")
        return tf.transpose(y, [0, 2, 3, 1])

    compiled = function(step_of(first))
    expected = tf.function(step_of(lambda x, w: conv(x, w, strides)))(X, W)
    assert_same(compiled(X, W), expected, units=512)
    assert rule_counts(compiled) == {"trained_conv2d": 1}
    assert not op_counts(compiled.get_concrete_function(X, W)).keys() & STOCK


@pytest.mark.parametrize("wanted", ["x", "w"])
def test_one_gradient(wanted):
    """The gradient op computes no more than what is used."""

    def step(x, w):
        source = {"x": x, "w": w}[wanted]
        with tf.GradientTape() as tape:
            tape.watch(source)
            y = conv(x, w)
        return y, tape.gradient(y, source, output_gradients=tf.sin(y))

    compiled = check(step, [X, W], {"trained_conv2d": 1}, gradients=1, units=512)
    none_stock(compiled)
    named = {"input": "x", "filters": "w"}
    found = asked_for(compiled.get_concrete_function(), "TfFusedOps>Conv2DBiasActGrad", named)
    assert found == {name: letter == wanted for name, letter in named.items()}


def test_of_two_layers_the_frozen_one_stays():
    def step(x, frozen, w):
        z = conv(x, frozen)
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = conv(z, w)
        return y, tape.gradient(y, w, output_gradients=tf.sin(y))

    operands = [X, *values((3, 3, 5, 6), (1, 1, 6, 4))]
    compiled = check(step, operands, {"trained_conv2d": 1}, gradients=1, units=512)
    assert op_counts(compiled.get_concrete_function())["Conv2D"] == 1
    assert UNTRAINED in reasons(compiled)["trained_conv2d"]


def test_two_backward_passes():
    def step(x, w):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, w])
            y = conv(x, w)
        return [tape.gradient(y, [x, w], output_gradients=f(y)) for f in (tf.sin, tf.exp)]

    compiled = function(step)
    assert_same(compiled(X, W), tf.function(step)(X, W), units=512)
    assert rule_counts(compiled) == {"trained_conv2d": 1}
    assert not op_counts(compiled.get_concrete_function(X, W)).keys() & STOCK


def test_layers_of_one_input():
    def chain(x, first, second):
        return conv(x, first) * tf.sin(conv(x, second))

    operands = [X, W, W[::-1]]
    none_stock(check(step_of(chain), operands, {"trained_conv2d": 2}, gradients=2, units=4096))


@pytest.mark.parametrize("batch", ["known", "unknown"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_lines(padding, batch):
    """conv1d is conv2d between expand_dims and squeeze."""
    chain = step_of(lambda x, w: tf.nn.conv1d(x, w, 2, padding))
    unknown = [0] if batch == "unknown" else []
    operands = values((2, 9, 5), (3, 5, 4))
    none_stock(check(chain, operands, {"trained_conv2d": 1}, 1, unknown_batch=unknown, units=512))


def test_grouped_ones_have_their_own_rule():
    operands = values((2, 7, 6, 4), (3, 3, 2, 6))
    compiled = check(step_of(conv), operands, {"grouped_conv2d": 1}, gradients=1, units=512)
    assert "trained_conv2d" not in reasons(compiled)


def test_outer_tape():
    """Its gradients are in no graph that is rewritten, so the convolution stays as it is."""
    compiled = function(conv)
    assert_same(taped(compiled, [X, W]), taped(tf.function(conv), [X, W]), units=512)
    assert rule_counts(compiled) == {}
    assert op_counts(compiled.get_concrete_function(X, W))["Conv2D"] == 1


@pytest.mark.parametrize("wanted", ["xw", "w"])
def test_gradient_ops(wanted):
    """As they are in a backward function of a library: without the forward pass."""

    def backward(x, w, dz):
        sizes = tf.raw_ops.ShapeN(input=[x, w])
        window = {"strides": [1, 1, 1, 1], "padding": "SAME"}
        dw = tf.raw_ops.Conv2DBackpropFilter(
            input=x, filter_sizes=sizes[1], out_backprop=dz, **window
        )
        dx = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=sizes[0], filter=w, out_backprop=dz, **window
        )
        return [{"x": dx, "w": dw}[name] for name in wanted]

    operands = [X, W, *values((2, 7, 6, 4), seed=1)]
    none_stock(check(backward, operands, {"trained_conv2d_grad": 1}, gradients=1, units=512))


def test_second_order():
    """The input gradient is a transposed convolution there, whose own gradients are in the graph;
    and what it adds to the gradient by its incoming one is a sum behind a convolution."""

    def second(x, w):
        with tf.GradientTape() as outer:
            outer.watch([x, w])
            with tf.GradientTape() as inner:
                inner.watch([x, w])
                y = conv(x, w)
            gradients = inner.gradient(y, [x, w], output_gradients=tf.sin(y))
        return gradients, outer.gradient(gradients, [x, w])

    compiled = function(second)
    assert_same(compiled(X, W), tf.function(second)(X, W), units=4096)
    rules = {"trained_conv2d": 1, "trained_conv2d_transpose": 1, "conv2d_add": 1}
    assert rule_counts(compiled) == rules
    assert not op_counts(compiled.get_concrete_function(X, W)).keys() & STOCK


@pytest.mark.parametrize("tape", ["inner", "outer"])
def test_gradient_of_a_transposed_convolution_is_not_taken_for_one(tape):
    """It reads what the transposed convolution reads, as a convolution's two gradients do."""
    _, shapes = CHAINS["trained_conv2d_transpose"]
    operands = values(*shapes)
    code = step_of(upsampled) if tape == "inner" else upsampled
    compiled = function(code, remap=RemapOptions(disable=["trained_conv2d_transpose"]))
    stock = tf.function(code)
    if tape == "inner":
        assert_same(compiled(*operands), stock(*operands), units=512)
    else:
        assert_same(taped(compiled, operands), taped(stock, operands), units=512)
    assert rule_counts(compiled) == {}
    assert "trained_conv2d_grad" not in reasons(compiled)


def test_transposed_convolution_before_a_convolution():
    def chain(x, up, w):
        return conv(upsampled(x, up), w)

    operands = values((2, 5, 3, 4), (3, 2, 7, 4), (3, 3, 7, 6))
    rules = {"trained_conv2d_transpose": 1, "trained_conv2d": 1}
    none_stock(check(step_of(chain), operands, rules, gradients=2, units=4096))


def normalized(x, w, scale, offset):
    z = conv(x, w)
    mean, variance = tf.nn.moments(z, [0, 1, 2])
    return tf.nn.relu(tf.nn.batch_normalization(z, mean, variance, offset, scale, 1e-3))


def test_batch_norm_behind_takes_moments_of_it():
    """As in most networks: the convolution yields them, and its gradients are fused."""
    operands = values((2, 9, 8, 6), (3, 3, 6, 32), (32,), (32,))
    compiled = function(step_of(normalized))
    with plain():
        expected = tf.function(step_of(normalized))(*operands)
    assert_same(compiled(*operands), expected, units=4096)
    rules = {"trained_conv2d": 1, "moments_batch_norm_relu": 1, "conv2d_moments": 1}
    assert rule_counts(compiled) == rules
    assert not op_counts(compiled.get_concrete_function(*operands)).keys() & STOCK


def test_network_of_keras():
    """A block of a U-Net, with everything in it fused."""

    def model():
        layers = keras.layers
        inputs = x = layers.Input((8, 8, 3))
        for filters in (16, 16):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
        y = layers.Conv2D(32, 3, 2, padding="same", use_bias=False)(x)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        y = layers.Conv2DTranspose(16, 2, 2, use_bias=False)(y)
        outputs = layers.Conv2D(2, 1, use_bias=False)(layers.Concatenate()([x, y]))
        return keras.Model(inputs, outputs)

    compiled = check_training(model, (4, 8, 8, 2))
    counts = rule_counts(compiled)
    assert counts["trained_conv2d"] == 4
    assert counts["trained_conv2d_transpose"] == 1
    assert counts["conv2d_moments"] == 3
    concrete = compiled.get_concrete_function(*values((4, 8, 8, 3), (4, 8, 8, 2)))
    assert not op_counts(concrete).keys() & STOCK


@pytest.mark.parametrize(
    ("size", "rules"),
    [(3, {"winograd_conv2d": 1}), (1, {"trained_conv2d": 1})],
)
def test_winograd(size, rules):
    """Its rule takes what it can, in inference, too."""
    operands = [X, W[:size, :size]]
    compiled = function(step_of(conv), remap=RemapOptions(winograd=True))
    assert_same(compiled(*operands), tf.function(step_of(conv))(*operands), units=1 << 14)
    assert rule_counts(compiled) == rules


@pytest.mark.parametrize("rule", CHAINS)
@pytest.mark.parametrize("pattern", ["trained_*", "*conv*"])
def test_switched_off(rule, pattern):
    chain, shapes = CHAINS[rule]
    compiled = function(step_of(chain), remap=RemapOptions(disable=[pattern]))
    compiled(*values(*shapes))
    assert rule_counts(compiled) == {}


@pytest.mark.parametrize("rule", CHAINS)
def test_silent_on_other_devices(rule):
    """There, stock's gradients are those of cuDNN."""
    chain, shapes = CHAINS[rule]

    def step(*operands):
        with tf.device("GPU:0"):
            return step_of(chain)(*operands)

    compiled = function(step)
    compiled.get_concrete_function(*values(*shapes))
    assert rule_counts(compiled) == {}
    assert not any(refused.startswith("trained") for refused in reasons(compiled))


class TestRefusals:
    def refused(self, step, *operands):
        compiled = function(step)
        compiled.get_concrete_function(*operands)
        assert "trained_conv2d" not in rule_counts(compiled)
        return reasons(compiled)["trained_conv2d"]

    def test_kept(self):
        step = step_of(lambda x, w: keep(conv(x, w)))
        assert "_grappler_do_not_remove" in self.refused(step, X, W)

    def test_unknown_channels(self):
        told = self.refused(step_of(conv), tf.TensorSpec((2, 7, 6, None)), tf.TensorSpec(W.shape))
        assert "channels are not known" in told

    @pytest.mark.parametrize("isa", ["avx512", "avx512_bf16"])
    def test_volumes_with_avx512(self, isa, monkeypatch):
        monkeypatch.setattr(trained_convs, "isa", lambda: isa)
        chain, shapes = CHAINS["trained_conv3d"]
        told = reasons(check(step_of(chain), values(*shapes), {}))
        assert told["trained_conv3d"] == "stock ops are faster for float32 with AVX-512"
        for of_others in (values(*shapes, dtype="float64"), values(shapes[0], (1, 1, 1, 3, 4))):
            check(step_of(chain), of_others, {"trained_conv3d": 1}, gradients=1, units=512)

    def test_layouts_of_volumes(self):
        def first(x, w):
            return tf.nn.conv3d(x, w, [1] * 5, "SAME", data_format="NCDHW")

        compiled = function(step_of(first))
        compiled.get_concrete_function(*values((2, 3, 3, 6, 5), (2, 3, 3, 3, 4)))
        assert rule_counts(compiled) == {}
        assert "its layout is NCDHW" in reasons(compiled)["trained_conv3d"]


def test_saved_step(tmp_path):
    """A SavedModel of a train step is converted, and back."""
    module = tf.Module()
    module.step = tf.function(
        step_of(conv), input_signature=[tf.TensorSpec(t.shape) for t in (X, W)]
    )
    expected = module.step(X, W)
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable")]
    tf.saved_model.save(module, paths[0])
    convert(paths[0], paths[1])
    convert(paths[1], paths[2], to_stock=True)
    for path in paths[1:]:
        assert_same(tf.saved_model.load(path).step(X, W), expected, units=512)
