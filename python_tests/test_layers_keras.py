"""The layers under the checks that Keras runs on its own."""

import keras
import numpy as np
import pytest
from keras.src.testing import TestCase
from layer_cases import CASES
from remapping import assert_same, values

from tf_fused_ops import layers

WEIGHTS = {"conv": (2, 0), "conv_grouped": (2, 0), "conv_strided": (1, 0), "conv_dilated": (2, 0)}
WEIGHTS |= {"conv_channels_first": (2, 0), "dense": (2, 0), "dense_rank_3": (1, 0)}
WEIGHTS |= {"batch_norm": (2, 2), "batch_norm_rank_2": (1, 2), "batch_norm_channels_first": (1, 2)}
WEIGHTS |= {"depthwise_conv": (2, 0), "depthwise_conv_strided": (1, 0)}
WEIGHTS |= {"depthwise_conv_channels_first": (2, 0), "separable_conv": (3, 0)}
WEIGHTS |= {"separable_conv_strided": (2, 0), "separable_conv_channels_first": (3, 0)}
WEIGHTS |= {"conv_transpose": (2, 0), "conv_transpose_padded": (1, 0)}
WEIGHTS |= {"conv_transpose_dilated": (2, 0), "conv_transpose_channels_first": (2, 0)}
WEIGHTS |= {"conv1d": (2, 0), "conv1d_causal": (2, 0)}
WEIGHTS |= {"conv3d": (2, 0), "conv3d_strided": (1, 0), "conv3d_dilated": (2, 0)}
FAMILIES = ("conv", "batch_norm", "dense")
ACTIVATIONS = [None, "relu", "gelu", "softmax", layers.gelu_tanh, keras.layers.LeakyReLU(0.1)]


@pytest.mark.parametrize("name", CASES)
def test_keras_checks(name):
    case = CASES[name]
    trainable, fixed = WEIGHTS[name]
    TestCase("run_layer_test").run_layer_test(
        case.fused,
        init_kwargs={**case.options, "activation": "relu"},
        input_shape=case.shape,
        expected_output_shape=case.output_shape,
        expected_num_trainable_weights=trainable,
        expected_num_non_trainable_weights=fixed,
        expected_num_losses=0,
        supports_masking="conv" not in name,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: getattr(a, "__name__", str(a)))
@pytest.mark.parametrize("family", FAMILIES)
def test_config_round_trip(family, activation):
    case = CASES[family]
    options = {**case.options, "dtype": "mixed_bfloat16", "name": "x", "trainable": False}
    layer = case.fused(activation=activation, **options)
    config = layer.get_config()
    again = case.fused.from_config(config)
    assert again.get_config() == config
    stock = case.stock(**options).get_config()
    assert {**config, "activation": 0} == {**stock, "activation": 0}
    serialized = keras.saving.serialize_keras_object(layer)
    assert serialized["registered_name"] == f"tf_fused_ops>{case.fused.__name__}"
    restored = keras.saving.deserialize_keras_object(serialized)
    assert type(restored) is case.fused
    assert restored.get_config() == config


def test_other_arguments_are_kept():
    layer = layers.FusedConv2D(
        4,
        3,
        kernel_regularizer=keras.regularizers.L2(0.1),
        bias_constraint="non_neg",
        kernel_initializer=keras.initializers.HeNormal(seed=3),
        activity_regularizer="l1",
    )
    stock = keras.layers.Conv2D.from_config(layer.get_config())
    (x,) = values((1, 5, 5, 2))
    assert_same(layer(x), stock(x))
    assert_same(layer.losses, stock.losses)
    assert len(layer.losses) == 2


def test_unknown_argument():
    with pytest.raises(ValueError, match="sideways"):
        layers.FusedDense(3, sideways=True)


def test_seed_gives_the_same_initial_weights():
    weights = []
    for kind in (layers.FusedDense, keras.layers.Dense):
        keras.utils.set_random_seed(5)
        layer = kind(3)
        layer.build((None, 4))
        weights.append(layer.get_weights()[0])
    np.testing.assert_array_equal(*weights)
