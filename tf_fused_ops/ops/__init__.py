"""The fused ops as Python functions, with gradients of every order."""

from tf_fused_ops.ops.attention import attention
from tf_fused_ops.ops.batch_norm import batch_norm_act
from tf_fused_ops.ops.cache import update_cache
from tf_fused_ops.ops.conv import conv2d_bias_act
from tf_fused_ops.ops.conv3d import conv3d_bias_act
from tf_fused_ops.ops.conv_transpose import conv2d_transpose_bias_act
from tf_fused_ops.ops.cross_entropy import softmax_cross_entropy, sparse_softmax_cross_entropy
from tf_fused_ops.ops.dropout import dropout
from tf_fused_ops.ops.elementwise import act
from tf_fused_ops.ops.group_norm import group_norm_act
from tf_fused_ops.ops.layer_norm import layer_norm, rms_norm
from tf_fused_ops.ops.matmul import matmul_bias_act
from tf_fused_ops.ops.max_pool import max_pool2d_act
from tf_fused_ops.ops.prelu import prelu
from tf_fused_ops.ops.quantized_matmul import quantized_matmul_bias_act
from tf_fused_ops.ops.recurrent import gru, lstm, simple_rnn
from tf_fused_ops.ops.softmax import softmax
from tf_fused_ops.ops.sync_batch_norm import sync_batch_norm_act
from tf_fused_ops.ops.weight_only_matmul import weight_only_matmul_bias_act

__all__ = [
    "act",
    "attention",
    "batch_norm_act",
    "conv2d_bias_act",
    "conv2d_transpose_bias_act",
    "conv3d_bias_act",
    "dropout",
    "group_norm_act",
    "gru",
    "layer_norm",
    "lstm",
    "matmul_bias_act",
    "max_pool2d_act",
    "prelu",
    "quantized_matmul_bias_act",
    "rms_norm",
    "simple_rnn",
    "softmax",
    "softmax_cross_entropy",
    "sparse_softmax_cross_entropy",
    "sync_batch_norm_act",
    "update_cache",
    "weight_only_matmul_bias_act",
]
