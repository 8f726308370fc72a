"""All families of keras.applications, shortened to one block of each kind."""

import keras
from keras.src.applications import convnext, densenet, efficientnet, efficientnet_v2, nasnet, resnet

SIZE = 32
# Smaller images do not survive the stem.
SIZES = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
CLASSES = 3


def _cut(network, layer, **options):
    """Returns a function that builds a network up to one of its layers."""

    def build(**common):
        model = network(**common, **options)
        return keras.Model(model.inputs, model.get_layer(layer).output)

    return build


def _resnet(stack, preact):
    def build(**common):
        def blocks(x):
            return stack(stack(x, 8, 2, stride1=1, name="conv2"), 16, 2, name="conv3")

        return resnet.ResNet(blocks, preact, True, weights_name="resnet", **common)

    return build


FAMILIES = {
    "ResNet": _resnet(resnet.stack_residual_blocks_v1, False),
    "ResNetV2": _resnet(resnet.stack_residual_blocks_v2, True),
    "VGG16": _cut(keras.applications.VGG16, "block3_pool"),
    "Xception": _cut(keras.applications.Xception, "block5_sepconv3_bn"),
    "InceptionV3": _cut(keras.applications.InceptionV3, "mixed4"),
    "InceptionResNetV2": _cut(keras.applications.InceptionResNetV2, "block35_2_ac"),
    "MobileNet": _cut(keras.applications.MobileNet, "conv_pw_4_relu", alpha=0.25),
    "MobileNetV2": _cut(keras.applications.MobileNetV2, "block_4_add", alpha=0.35),
    "MobileNetV3": _cut(keras.applications.MobileNetV3Small, "expanded_conv_4_add"),
    "DenseNet": lambda **common: densenet.DenseNet([2, 1, 1, 2], **common),
    "NASNet": _cut(
        nasnet.NASNet,
        "normal_concat_0",
        penultimate_filters=96,
        num_blocks=1,
        stem_block_filters=8,
        skip_reduction=False,
    ),
    "EfficientNet": lambda **common: efficientnet.EfficientNet(
        0.5, 0.1, SIZE, blocks_args=efficientnet.DEFAULT_BLOCKS_ARGS[:3], **common
    ),
    "EfficientNetV2": lambda **common: efficientnet_v2.EfficientNetV2(
        0.5,
        0.1,
        SIZE,
        blocks_args=efficientnet_v2.DEFAULT_BLOCKS_ARGS["efficientnetv2-b0"][::3],
        **common,
    ),
    "ConvNeXt": lambda **common: convnext.ConvNeXt([1, 1, 1, 1], [8, 8, 16, 16], **common),
}


def build(name):
    """Returns a classifier of images of `shape(name)` with random weights."""
    keras.utils.set_random_seed(0)
    trunk = FAMILIES[name](weights=None, include_top=False, input_shape=shape(name))
    x = keras.layers.GlobalAveragePooling2D()(trunk.output)
    return keras.Model(trunk.inputs, keras.layers.Dense(CLASSES, activation="softmax")(x))


def shape(name):
    """Returns the shape of an image."""
    return (*[SIZES.get(name, SIZE)] * 2, 3)
