"""Fused convolution, batch-norm and matmul ops for TensorFlow, for training as well as inference.

`function` is a drop-in for `tf.function` that replaces chains of stock ops by fused ones, `remap`
does the same to a finished graph; the other functions call the fused ops directly.
"""

from tf_fused_ops._library import LibraryError
from tf_fused_ops._version import __version__
from tf_fused_ops.function import function
from tf_fused_ops.ops import batch_norm_act, conv2d_bias_act, matmul_bias_act
from tf_fused_ops.remapper import RemapOptions, remap

__all__ = [
    "LibraryError",
    "RemapOptions",
    "__version__",
    "batch_norm_act",
    "conv2d_bias_act",
    "function",
    "matmul_bias_act",
    "remap",
]
