"""Keras 3 layers on the fused ops, and the conversion of models to and from them.

The layers take the arguments of the stock layers and keep the same weights in the same order.
Importing this module registers them, which is what loading a saved model needs.
"""

from tf_fused_ops import _keras

_keras.check_backend("tf_fused_ops.layers")

from tf_fused_ops.layers.activation import gelu_tanh  # noqa: E402
from tf_fused_ops.layers.batch_norm import FusedBatchNormalization  # noqa: E402
from tf_fused_ops.layers.conv import FusedConv2D  # noqa: E402
from tf_fused_ops.layers.conv1d import FusedConv1D  # noqa: E402
from tf_fused_ops.layers.conv3d import FusedConv3D  # noqa: E402
from tf_fused_ops.layers.conv_transpose import FusedConv2DTranspose  # noqa: E402
from tf_fused_ops.layers.convert import convert, revert  # noqa: E402
from tf_fused_ops.layers.dense import FusedDense  # noqa: E402
from tf_fused_ops.layers.depthwise_conv import (  # noqa: E402
    FusedDepthwiseConv2D,
    FusedSeparableConv2D,
)
from tf_fused_ops.layers.group_norm import FusedGroupNormalization  # noqa: E402
from tf_fused_ops.layers.layer_norm import (  # noqa: E402
    FusedLayerNormalization,
    FusedRMSNormalization,
)
from tf_fused_ops.layers.recurrent import FusedGRU, FusedLSTM, FusedSimpleRNN  # noqa: E402

__all__ = [
    "FusedBatchNormalization",
    "FusedConv1D",
    "FusedConv2D",
    "FusedConv2DTranspose",
    "FusedConv3D",
    "FusedDense",
    "FusedDepthwiseConv2D",
    "FusedGRU",
    "FusedGroupNormalization",
    "FusedLSTM",
    "FusedLayerNormalization",
    "FusedRMSNormalization",
    "FusedSeparableConv2D",
    "FusedSimpleRNN",
    "convert",
    "gelu_tanh",
    "revert",
]
