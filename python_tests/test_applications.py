"""All families of keras.applications, converted and accelerated, give stock's outputs and training.

In double precision: training amplifies rounding, so float32 would hide mistakes.
"""

import applications
import keras
import numpy as np
import pytest

import tf_fused_ops as tfo
from tf_fused_ops.layers import runs

TOLERANCE = 1e-9

# Family -> layers that conversion fuses, those with a side input, chains that remapping fuses in
# training, convolutions that take moments for a batch norm there, convolutions that take in a batch
# norm in inference, those that take in a pad.
EXPECTED = {
    "ResNet": (31, 4, 31, 11, 15, 1),
    "ResNetV2": (29, 4, 29, 4, 8, 5),
    "VGG16": (8, 0, 11, 0, 0, 0),
    "Xception": (29, 3, 38, 8, 14, 0),
    "InceptionV3": (81, 0, 83, 40, 40, 0),
    "InceptionResNetV2": (51, 0, 53, 24, 24, 0),
    "MobileNet": (19, 0, 19, 7, 9, 2),
    "MobileNetV2": (31, 2, 31, 12, 15, 2),
    "MobileNetV3": (37, 2, 37, 7, 15, 3),
    "DenseNet": (34, 0, 34, 7, 7, 1),
    "NASNet": (75, 11, 98, 0, 34, 7),
    "EfficientNet": (27, 0, 27, 8, 10, 3),
    "EfficientNetV2": (15, 0, 15, 5, 6, 0),
    "ConvNeXt": (18, 0, 26, 0, 0, 0),
}


@pytest.fixture(autouse=True)
def float64():
    set_precision("float64")
    yield
    set_precision("float32")


def set_precision(dtype):
    """Sets the type of layers and of losses."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


def curve(model, images, labels, accelerate):
    """Trains for two steps from a seed; returns the losses and all variables."""
    keras.utils.set_random_seed(1)
    model.compile(
        keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy", run_eagerly=not accelerate
    )
    tfo.accelerate(model, accelerate)
    history = model.fit(images, labels, batch_size=4, epochs=2, verbose=0)
    return history.history["loss"], [v.numpy() for v in model.variables]


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", applications.FAMILIES)
def test_family(name):
    model = applications.build(name)
    start = [v.numpy() for v in model.variables]
    images = np.random.default_rng(0).uniform(-1, 1, (4, *applications.shape(name)))
    labels = np.array([0, 1, 2, 0])

    converted = tfo.layers.convert(model)
    fused = [layer for layer in converted.layers if type(layer) in runs.STOCK]
    sides = [n for layer in fused for n in layer._inbound_nodes if len(n.input_tensors) > 1]
    assert_close(converted(images), model(images))
    reverted = tfo.layers.revert(converted)
    assert_close(reverted.get_weights(), model.get_weights())

    inference = tfo.function(lambda x: model(x, training=False))
    assert_close(inference(images), model(images))
    rules = inference.remap_reports[-1].counts().items()
    folded = sum(n for rule, n in rules if rule.startswith("conv2d_given_batch_norm"))
    operations = inference.get_concrete_function(images).graph.get_operations()
    convolutions = [op for op in operations if op.type == "TfFusedOps>Conv2DBiasAct"]
    padded = sum(op.get_attr("padding") == b"EXPLICIT" for op in convolutions)

    losses, variables = curve(model, images, labels, accelerate=False)
    for variable, value in zip(model.variables, start, strict=True):
        variable.assign(value)
    found, found_variables = curve(model, images, labels, accelerate=True)
    report = model.train_step.remap_reports[-1]
    counts = report.counts()
    assert losses[0] != losses[1]
    assert_close(found, losses)
    assert_close(found_variables, variables)
    layers = [f for f in report.fused if f.gradients and f.rule != "sparse_cross_entropy"]
    moments, updates = counts.get("conv2d_moments", 0), counts["gradient_descent"]
    assert updates == len(model.trainable_variables)
    others = moments + updates + counts["sparse_cross_entropy"] + counts.get("slice_gradient", 0)
    assert len(report.fused) == len(layers) + others
    # Of its cropped images.
    assert counts.get("slice_gradient", 0) == (2 if name == "NASNet" else 0)
    assert (len(fused), len(sides), len(layers), moments, folded, padded) == EXPECTED[name]
