"""The transposed convolution layer: what the stock layer computes, in one op each way."""

import keras
import layer_cases
import numpy as np
import pytest
import tensorflow as tf
from layer_cases import (
    Case,
    check_conversion,
    check_training,
    classes,
    fused_counts,
    pair,
    randomize,
    trained,
)
from remapping import FUSED, assert_same, op_counts, values

from tf_fused_ops import layers
from tf_fused_ops.layers import fused

LAYER, STOCK = layers.FusedConv2DTranspose, keras.layers.Conv2DTranspose
OP = FUSED["transposed convolution"]
# The operands of a product have a gradient op each.
BOTH_WAYS = {OP: 1, f"{OP}Grad": 2}
IMAGES = (2, 5, 6, 3)
OPTIONS = {
    "same": {"kernel_size": 3, "padding": "same"},
    "same, strides": {"kernel_size": 4, "strides": 2, "padding": "same"},
    "same, odd strides": {"kernel_size": 5, "strides": (1, 3), "padding": "same"},
    "same, strides over the kernel": {"kernel_size": (2, 1), "strides": 3, "padding": "same"},
    "same, padded": {
        "kernel_size": 3, "strides": 2, "padding": "same", "output_padding": 1,
    },
    "same, padded unevenly": {
        "kernel_size": (3, 5), "strides": 3, "padding": "same", "output_padding": (0, 2),
    },
    "same, dilated": {"kernel_size": (2, 3), "padding": "same", "dilation_rate": (2, 1)},
    "valid": {"kernel_size": (2, 4)},
    "valid, strides": {"kernel_size": (3, 5), "strides": (2, 4)},
    "valid, strides over the kernel": {"kernel_size": 2, "strides": (3, 5)},
    "valid, padded": {"kernel_size": 3, "strides": (2, 3), "output_padding": (1, 2)},
    "valid, not padded": {"kernel_size": 2, "strides": 3, "output_padding": 0},
    "valid, dilated": {"kernel_size": 3, "dilation_rate": (2, 3), "use_bias": False},
    "points": {"kernel_size": 1},
}  # fmt: skip
EACH = pytest.mark.parametrize("name", OPTIONS)
LAYOUT = pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
SAME = OPTIONS["same, strides"]


@pytest.fixture
def told(monkeypatch):
    """The lines that the layers and the conversion log."""
    lines = []
    monkeypatch.setattr(fused.log, "vlog", lambda level, line: lines.append(line))
    return lines


def case(layout="channels_last", images=IMAGES, **options):
    """Returns what `pair` takes."""
    options = {"filters": 4, "data_format": layout, **options}
    shape = images if layout == "channels_last" else tuple(images[i] for i in (0, 3, 1, 2))
    output_shape = tuple(STOCK(**options).compute_output_shape(shape))
    return Case(LAYER, STOCK, options, shape, output_shape, OP)


def check(of, activation=None, side=False, specs=None, sizes=None):
    """Asserts outputs and gradients of the stock layer, from one op each way.

    Args:
        of: The `Case`.
        activation: The activation.
        side: Whether there is a side input.
        specs: What is known of the shapes of input and output while the step is traced.
        sizes: More shapes of input and output, for the same trace.
    """
    layer, stock, reference = pair(of, activation)
    known = (of.shape, of.output_shape)
    specs = [tf.TensorSpec(shape) for shape in specs or known]
    specs = specs if not side else [*specs, specs[-1]]

    @tf.function(input_signature=specs)
    def step(x, *others):
        return trained(layer, layer, x, *others)

    for shapes in (known, *(sizes or ())):
        given = values(*shapes, shapes[-1])[: len(specs)]
        assert_same(step(*given), trained(reference, stock, *given), units=128)
    counts = fused_counts(lambda *given: trained(layer, layer, *given), *specs)
    assert counts == BOTH_WAYS


@pytest.mark.parametrize("side", [False, True])
@LAYOUT
@EACH
def test_as_stock(name, layout, side, told):
    check(case(layout, **OPTIONS[name]), "relu", side)
    assert told == []


@LAYOUT
@EACH
def test_sizes_known_when_it_runs(name, layout):
    """Gradients too, and one trace for all sizes."""
    of = case(layout, **OPTIONS[name])
    other = case(layout, (3, 7, 4, 3), **OPTIONS[name])
    image = [None] * 4
    image[-1 if layout == "channels_last" else 1] = 3
    check(of, "tanh", True, (image, [None] * 4), [(other.shape, other.output_shape)])


@pytest.mark.parametrize("unknown", [(), (0,), (1,), (2,), (1, 2), (0, 1, 2)])
@EACH
def test_what_is_known_of_the_shape(name, unknown):
    """While functions are traced as much as of stock layers."""
    layer, stock, _ = pair(case(**OPTIONS[name]))
    spec = tf.TensorSpec([None if i in unknown else size for i, size in enumerate(IMAGES)])
    shapes = [tf.function(f).get_concrete_function(spec).outputs[0].shape for f in (layer, stock)]
    assert shapes[0].as_list() == shapes[1].as_list()
    assert shapes[0][3] == 4


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_points_with_strides(padding):
    """As kernels that are zero but for a point: TensorFlow's own gradient of the others aborts, or
    writes where it should not."""
    options = {"filters": 4, "strides": 2, "padding": padding, "activation": "tanh"}
    layer, stock = LAYER(kernel_size=1, **options), STOCK(kernel_size=2, **options)
    x, dy = values(IMAGES, (2, 10, 12, 4))
    for made in (layer, stock):
        made.build(x.shape)
    randomize(layer)
    stock.bias.assign(layer.bias)
    stock.kernel.assign(tf.pad(layer.kernel, [[0, 1], [0, 1], [0, 0], [0, 0]]))
    y, (dx, *gradients) = trained(layer, layer, x, dy)
    expected, (expected_dx, dkernel, dbias) = trained(stock, stock, x, dy)
    assert_same([y, dx], [expected, expected_dx])
    assert_same(gradients, [dkernel[:1, :1], dbias])


def test_images_of_any_size():
    """A model that is told no sizes."""
    kinds = (LAYER, STOCK)
    models = []
    for kind in kinds:
        inputs = keras.Input((None, None, 3))
        x = kind(6, 3, strides=2, activation="relu", padding="same", output_padding=1)(inputs)
        models.append(keras.Model(inputs, kind(2, 4, strides=(2, 3))(x)))
        assert models[-1].output.shape == (None, None, None, 2)
    models[1].set_weights(models[0].get_weights())
    for shape in (IMAGES, (1, 1, 9, 3), (3, 2, 2, 3)):
        (x,) = values(shape)
        assert_same(models[0](x), models[1](x))
        assert_same(models[0].predict(x, verbose=0), models[1].predict(x, verbose=0))
    assert fused_counts(models[0], tf.TensorSpec((None, None, None, 3))) == {OP: 2}


@pytest.mark.parametrize("shape", [(0, 5, 6, 3), (2, 0, 6, 3)])
@pytest.mark.parametrize("known", [True, False])
def test_no_pixels(shape, known):
    layer, stock, _ = pair(case(kernel_size=3, padding="valid"), "relu")
    (x,) = values(shape)
    spec = tf.TensorSpec(shape if known else (None, None, None, 3))
    assert_same(tf.function(layer, input_signature=[spec])(x), stock(x))
    (dy,) = values(stock(x).shape)
    _, (dx, dkernel, dbias) = trained(layer, layer, x, dy)
    assert dx.shape == shape
    assert_same([dkernel, dbias], [tf.zeros((3, 3, 4, 3)), tf.reduce_sum(dy, (0, 1, 2))])


@pytest.mark.parametrize("function", [lambda f: f, tf.function])
def test_sizes_that_do_not_fit(function):
    """Keras takes an `output_padding` for which there is no such convolution."""
    options = {"kernel_size": 2, "strides": 2, "padding": "same", "output_padding": 0}
    (x,) = values(IMAGES)
    with pytest.raises((ValueError, tf.errors.OpError)):
        function(STOCK(4, **options))(x)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="output_shape"):
        function(LAYER(4, **options))(x)


ACTIVATIONS = {
    **{name: name for name in ("relu6", "elu", "leaky_relu", "tanh", "silu", "hard_silu")},
    "none": None,
    "mish": "mish",
    "gelu": "gelu",
    "gelu_tanh": layers.gelu_tanh,
    "leaky_layer": keras.layers.LeakyReLU(0.3),
    "relu6_layer": keras.layers.ReLU(6.0),
}


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name, side, told):
    check(case(**SAME), ACTIVATIONS[name], side)
    assert told == []


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax", "softsign"])
def test_activation_that_the_op_does_not_know(activation, side, told):
    check(case(**SAME), activation, side)
    assert f"activation {activation} follows as an op of its own" in told[-1]


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("policy", ["float64", "mixed_float16", "mixed_bfloat16", "float16"])
@pytest.mark.parametrize("side", [False, True])
def test_policy(policy, activation, side):
    """The op rounds to half precision once, not before the activation, too."""
    of = case(**SAME)
    layer = LAYER(activation=activation, dtype=policy, **of.options)
    wide = "float64" if policy == "float64" else "float32"
    stock = STOCK(dtype=wide, **of.options)
    for made in (layer, stock):
        made.build(of.shape)
    randomize(layer)
    dtype = layer.compute_dtype
    for given, variable in zip(layer.weights, stock.weights, strict=True):
        given.assign(tf.cast(given.value, dtype))
        variable.assign(given)
    x, dy, s = values(of.shape, *[of.output_shape] * 2, dtype=dtype)
    given = [x, dy, s][: 2 + side]

    y, gradients = trained(layer, layer, *given)
    assert y.dtype == dtype
    activate = keras.activations.get(activation)

    def reference(x, side=0):
        return activate(stock(x) + side)

    expected, exact = trained(reference, stock, *[tf.cast(v, wide) for v in given])
    assert_same(y, tf.cast(expected, dtype), units=64)
    for gradient, other in zip(gradients, exact, strict=True):
        assert_same(tf.cast(gradient, dtype), tf.cast(other, dtype), units=64)
    counts = fused_counts(lambda *given: trained(layer, layer, *given), *given)
    assert counts == BOTH_WAYS
    if policy.startswith("mixed"):
        assert {v.dtype for v in layer.variables} == {"float32"}
        assert {g.dtype for g in gradients[1 + side :]} == {tf.float32}


def test_gradients_of_gradients():
    layer, _, reference = pair(case(**SAME), "silu")
    (x,) = values(IMAGES)

    def penalty(function):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(function(x) ** 2)
            slope = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(slope, x)

    found, expected = tf.function(penalty)(layer), penalty(reference)
    scale = np.abs(expected).max()
    assert_same(found / scale, expected / scale, units=256)


@EACH
def test_config_is_that_of_the_stock_layer(name):
    options = {
        "filters": 4,
        "activation": "silu",
        "kernel_regularizer": keras.regularizers.L2(0.1),
        "bias_constraint": "non_neg",
        "dtype": "mixed_bfloat16",
        "name": "x",
        **OPTIONS[name],
    }
    layer = LAYER(**options)
    assert layer.get_config() == STOCK(**options).get_config()
    serialized = keras.saving.serialize_keras_object(layer)
    assert serialized["registered_name"] == "tf_fused_ops>FusedConv2DTranspose"
    restored = keras.saving.deserialize_keras_object(serialized)
    assert type(restored) is LAYER
    assert restored.get_config() == layer.get_config()


def test_regularizers_and_initial_weights():
    losses, weights = [], []
    for kind in (LAYER, STOCK):
        keras.utils.set_random_seed(5)
        layer = kind(4, 3, kernel_regularizer="l2", activity_regularizer="l1", activation="relu")
        layer(*values(IMAGES))
        losses.append(layer.losses)
        weights.append([w.value for w in layer.weights])
    assert len(losses[0]) == 2
    assert_same(losses[0], losses[1])
    assert_same(weights[0], weights[1], units=0)


@pytest.mark.parametrize("side", [False, True])
@EACH
def test_another_device(name, side, told, monkeypatch):
    """Stock ops compute the same there."""
    monkeypatch.setattr(fused, "device_type", lambda _: "GPU")
    of = case(**OPTIONS[name])
    layer, _, reference = pair(of, "gelu")
    given = values(of.shape, *[of.output_shape] * side)
    assert_same(layer(*given), reference(*given))
    assert fused_counts(layer, *given) == {}
    reason = f"{OP} has no float32 kernel on GPU"
    assert set(told) == {f"Not fused: layer {layer.name} (FusedConv2DTranspose): {reason}"}


def test_channels_first_on_another_device(monkeypatch):
    """The graph alone, which TensorFlow runs where there is such a device."""
    monkeypatch.setattr(fused, "device_type", lambda _: "GPU")
    of = case("channels_first", **SAME)
    layer, _, _ = pair(of, "gelu")
    compiled = tf.function(layer).get_concrete_function(*values(of.shape, of.output_shape))
    assert tuple(compiled.outputs[0].shape) == of.output_shape
    assert op_counts(compiled)["Conv2DBackpropInput"] == 1


@pytest.mark.parametrize("side", [False, True])
def test_compiled_by_xla(told, side):
    of = case(**SAME)
    layer, _, reference = pair(of, "relu")
    given = values(of.shape, *[of.output_shape] * side)
    assert_same(tf.function(layer, jit_compile=True)(*given), reference(*given))
    assert "XLA" in told[-1]
    assert not layer.supports_jit


def test_unsuited_inputs():
    layer = LAYER(4, 3)
    assert layer._objection(tf.ones(IMAGES)) is None
    assert "dtype int32" in layer._objection(tf.ones(IMAGES, tf.int32))
    with tf.Graph().as_default():
        assert "rank" in layer._objection(tf.compat.v1.placeholder(tf.float32))


def unet(size, join):
    """Down and up again; what went down is joined to what comes up."""
    inputs = keras.Input((size, size, 3))
    kept, x = [], inputs
    for filters in (4, 8):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        kept.append(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    for filters in (8, 4):
        x = STOCK(filters, 2, strides=2, name=f"up_{filters}")(x)
        if join is keras.layers.Add:
            x = keras.layers.ReLU()(join()([x, kept.pop()]))
        else:
            x = join()([keras.layers.ReLU()(x), kept.pop()])
            x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, keras.layers.Conv2D(2, 1)(x))


def generator():
    """That of a DCGAN."""
    up = {"padding": "same", "use_bias": False}
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4 * 4 * 8, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.LeakyReLU(),
            keras.layers.Reshape((4, 4, 8)),
            STOCK(8, 5, strides=1, **up),
            keras.layers.BatchNormalization(),
            keras.layers.LeakyReLU(),
            STOCK(4, 5, strides=2, **up),
            keras.layers.BatchNormalization(),
            keras.layers.LeakyReLU(),
            STOCK(3, 5, strides=2, activation="tanh", **up),
        ]
    )


DOWN = ["FusedConv2D", "MaxPooling2D"] * 2 + ["FusedConv2D"]
UP, NORM = "FusedConv2DTranspose", "FusedBatchNormalization"
# Model, input, output, layers of the converted model.
MODELS = {
    "U-Net": (
        lambda: unet(8, keras.layers.Concatenate),
        (8, 8, 3), (8, 8, 2),
        [*DOWN, *[UP, "Concatenate", "FusedConv2D"] * 2, "FusedConv2D"],
    ),
    "U-Net of any size": (
        lambda: unet(None, keras.layers.Concatenate),
        (8, 12, 3), (8, 12, 2),
        [*DOWN, *[UP, "Concatenate", "FusedConv2D"] * 2, "FusedConv2D"],
    ),
    "LinkNet": (
        lambda: unet(8, keras.layers.Add), (8, 8, 3), (8, 8, 2), [*DOWN, UP, UP, "FusedConv2D"]
    ),
    "LinkNet of any size": (
        lambda: unet(None, keras.layers.Add),
        (8, 12, 3), (8, 12, 2),
        [*DOWN, *[UP, "Add", "ReLU"] * 2, "FusedConv2D"],
    ),
    "DCGAN": (
        generator, (6,), (16, 16, 3), ["FusedDense", NORM, "Reshape", *[UP, NORM] * 2, UP]
    ),
}  # fmt: skip
EACH_MODEL = pytest.mark.parametrize("name", MODELS)


def filled(name):
    """Returns the stock model of a name, inputs and targets, and the layers it is converted to."""
    make, shape, target, expected = MODELS[name]
    return *layer_cases.filled(make, shape, target), expected


@EACH_MODEL
def test_convert_and_revert(name, told):
    model, x, _, expected = filled(name)
    assert check_conversion(model, x, "Conv2DTranspose", OP) == expected
    assert told == [] or "any size" in name
    converted = layers.convert(model)
    assert converted.outputs[0].shape == model.outputs[0].shape
    counts = op_counts(tf.function(converted).get_concrete_function(x))
    assert "Conv2DBackpropInput" not in counts


@EACH_MODEL
def test_training_as_stock(name):
    model, x, y, expected = filled(name)
    converted = check_training(model, x, y)
    counts = fused_counts(lambda x, y: trained(converted, converted, x, y), x, y)
    assert [counts[op] for op in BOTH_WAYS] == [
        number * expected.count(UP) for number in BOTH_WAYS.values()
    ]


@EACH_MODEL
def test_saving(name, tmp_path):
    model, x, _, _ = filled(name)
    model = layers.convert(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert classes(loaded) == classes(model)
    assert_same(loaded(x), model(x))
    model.save_weights(tmp_path / "model.weights.h5")
    other = type(model).from_config(model.get_config())
    assert np.abs(other(x) - model(x)).max() > 1e-3
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same(other(x), model(x))


@pytest.mark.parametrize("name", ["LinkNet", "U-Net of any size"])
def test_saved_model(name, tmp_path):
    model, x, _, expected = filled(name)
    layers.convert(model).export(str(tmp_path / "saved"), verbose=False)
    archive = tf.saved_model.load(str(tmp_path / "saved"))
    assert_same(archive.serve(x), model(x), units=512)
    assert op_counts(archive.signatures["serving_default"])[OP] == expected.count(UP)


def test_side_inputs_and_activations_in_converted_models(told):
    """What is taken in, and what stays by itself."""
    inputs = keras.Input((4, 4, 6))
    x = keras.activations.gelu(STOCK(6, 3, padding="same")(inputs), approximate=True)
    x = keras.ops.silu(STOCK(6, 3, padding="same")(x) + inputs)
    x = keras.layers.Activation("sigmoid")(STOCK(6, 3, padding="same")(x))
    x = keras.layers.ReLU()(STOCK(6, 3, padding="same", activation="tanh")(x))
    model = keras.Model(inputs, x)
    converted = layers.convert(model)
    assert classes(converted) == [UP, UP, UP, "Activation", UP, "ReLU"]
    fused_layers = [layer for layer in converted.layers if type(layer) is LAYER]
    assert [layer.activation for layer in fused_layers] == [
        layers.gelu_tanh,
        keras.activations.silu,
        keras.activations.linear,
        keras.activations.tanh,
    ]
    (x,) = values((2, 4, 4, 6))
    assert_same(converted(x), model(x), units=256)
    assert fused_counts(converted, x)[OP] == 4
    assert told == []


class Subclass(STOCK):
    """May compute anything."""


def test_other_classes_are_not_converted():
    model = keras.Sequential(
        [keras.Input((5, 5, 3)), Subclass(4, 3), keras.layers.ReLU(), STOCK(2, 3)]
    )
    assert classes(layers.convert(model)) == ["Subclass", "ReLU", UP]
    volumes = keras.Sequential([keras.Input((3, 3, 3, 2)), keras.layers.Conv3DTranspose(4, 2)])
    assert classes(layers.convert(volumes)) == ["Conv3DTranspose"]


def test_time_distributed():
    layer = STOCK(4, 2, strides=2, activation="relu")
    model = keras.Sequential([keras.Input((3, 4, 4, 2)), keras.layers.TimeDistributed(layer)])
    converted = layers.convert(model)
    assert type(converted.layers[0].layer) is LAYER
    (x,) = values((2, 3, 4, 4, 2))
    assert_same(converted(x), model(x))
    assert fused_counts(converted, x) == {OP: 3}


@pytest.fixture
def half_precision():
    """Layers compute in bfloat16."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


def test_mixed_precision_model(half_precision):
    losses = []
    for change in (lambda model: model, layers.convert):
        keras.utils.set_random_seed(2)
        model = change(unet(8, keras.layers.Add))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        x, y = values((4, 8, 8, 3), (4, 8, 8, 2))
        losses.append([model.train_on_batch(x, y) for _ in range(4)])
    assert classes(model).count(UP) == 2
    assert fused_counts(model, x)[OP] == 2
    assert model(x).dtype == "bfloat16"
    np.testing.assert_allclose(*losses, rtol=2e-2)
    assert losses[1][3] < losses[1][0]
