"""Fused convolution, batch-norm and matmul ops for TensorFlow, for training as well as inference."""

from tf_fused_ops import _library
from tf_fused_ops._version import __version__
from tf_fused_ops.function import function
from tf_fused_ops.ops import batch_norm_act, conv2d_bias_act, matmul_bias_act
from tf_fused_ops.remapper import remap

LibraryError = _library.LibraryError

__all__ = [
    "LibraryError",
    "__version__",
    "batch_norm_act",
    "conv2d_bias_act",
    "function",
    "matmul_bias_act",
    "remap",
]
