"""The ops and their gradients in stock TensorFlow ops.

They compute what the fused ops compute, on every device that TensorFlow knows: for comparison, for
gradients of gradients, and for graphs that must run where tf_fused_ops is not installed.
"""

from tf_fused_ops.ops.reference.attention import (
    attention,
    attention_grad,
    for_each_head,
    over_shared_heads,
)
from tf_fused_ops.ops.reference.batch_norm import (
    batch_norm_act,
    batch_norm_act_grad,
    batch_norm_statistics,
)
from tf_fused_ops.ops.reference.cache import slot_of, update_cache
from tf_fused_ops.ops.reference.channels import pack_mask
from tf_fused_ops.ops.reference.conv import conv2d_bias_act, conv2d_bias_act_grad, ungrouped
from tf_fused_ops.ops.reference.conv3d import conv3d_bias_act, conv3d_bias_act_grad
from tf_fused_ops.ops.reference.conv_transpose import (
    conv2d_transpose_bias_act,
    conv2d_transpose_bias_act_grad,
)
from tf_fused_ops.ops.reference.cross_entropy import (
    softmax_cross_entropy,
    softmax_cross_entropy_grad,
    sparse_softmax_cross_entropy,
    sparse_softmax_cross_entropy_grad,
)
from tf_fused_ops.ops.reference.dropout import dropout
from tf_fused_ops.ops.reference.elementwise import act, act_grad
from tf_fused_ops.ops.reference.group_norm import (
    group_norm_act,
    group_norm_act_grad,
    group_norm_statistics,
)
from tf_fused_ops.ops.reference.layer_norm import (
    layer_norm,
    layer_norm_grad,
    layer_norm_statistics,
)
from tf_fused_ops.ops.reference.matmul import matmul_bias_act, matmul_bias_act_grad
from tf_fused_ops.ops.reference.max_pool import max_pool_act, max_pool_act_grad
from tf_fused_ops.ops.reference.prelu import prelu, prelu_grad
from tf_fused_ops.ops.reference.quantized_matmul import dequantized, quantized_matmul_bias_act
from tf_fused_ops.ops.reference.recurrent import recurrent, recurrent_grad, states_before
from tf_fused_ops.ops.reference.softmax import softmax, softmax_grad
from tf_fused_ops.ops.reference.sync_batch_norm import (
    batch_norm_apply,
    batch_norm_grad_apply,
    batch_norm_grad_sums,
    batch_norm_moments,
)
from tf_fused_ops.ops.reference.weight_only_matmul import (
    equal_groups,
    unpacked,
    weight_only_matmul_bias_act,
    weights,
)

__all__ = [
    "act",
    "act_grad",
    "attention",
    "attention_grad",
    "batch_norm_act",
    "batch_norm_act_grad",
    "batch_norm_apply",
    "batch_norm_grad_apply",
    "batch_norm_grad_sums",
    "batch_norm_moments",
    "batch_norm_statistics",
    "conv2d_bias_act",
    "conv2d_bias_act_grad",
    "conv2d_transpose_bias_act",
    "conv2d_transpose_bias_act_grad",
    "conv3d_bias_act",
    "conv3d_bias_act_grad",
    "dequantized",
    "dropout",
    "equal_groups",
    "for_each_head",
    "group_norm_act",
    "group_norm_act_grad",
    "group_norm_statistics",
    "layer_norm",
    "layer_norm_grad",
    "layer_norm_statistics",
    "matmul_bias_act",
    "matmul_bias_act_grad",
    "max_pool_act",
    "max_pool_act_grad",
    "over_shared_heads",
    "pack_mask",
    "prelu",
    "prelu_grad",
    "quantized_matmul_bias_act",
    "recurrent",
    "recurrent_grad",
    "slot_of",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_grad",
    "softmax_grad",
    "sparse_softmax_cross_entropy",
    "sparse_softmax_cross_entropy_grad",
    "states_before",
    "ungrouped",
    "unpacked",
    "update_cache",
    "weight_only_matmul_bias_act",
    "weights",
]
