"""Fused convolution, batch-norm and matmul ops for TensorFlow, for training as well as inference.

`function` is a drop-in for `tf.function` that replaces chains of stock ops by fused ones, `remap`
does the same to a finished graph, `accelerate` to the `fit` of a Keras model; `layers` has Keras
layers with fused ops in them; the other functions call the fused ops directly.
"""

import importlib

from tf_fused_ops import _library, distribute
from tf_fused_ops._version import __version__
from tf_fused_ops.accelerate import accelerate
from tf_fused_ops.function import function
from tf_fused_ops.ops import (
    act,
    attention,
    batch_norm_act,
    conv2d_bias_act,
    conv2d_transpose_bias_act,
    conv3d_bias_act,
    dropout,
    group_norm_act,
    gru,
    layer_norm,
    lstm,
    matmul_bias_act,
    max_pool2d_act,
    prelu,
    quantized_matmul_bias_act,
    rms_norm,
    simple_rnn,
    softmax,
    softmax_cross_entropy,
    sparse_softmax_cross_entropy,
    sync_batch_norm_act,
    update_cache,
    weight_only_matmul_bias_act,
)
from tf_fused_ops.remapper import RemapOptions, remap

LibraryError = _library.LibraryError

__all__ = [
    "LibraryError",
    "RemapOptions",
    "__version__",
    "accelerate",
    "act",
    "attention",
    "batch_norm_act",
    "conv2d_bias_act",
    "conv2d_transpose_bias_act",
    "conv3d_bias_act",
    "distribute",
    "dropout",
    "function",
    "group_norm_act",
    "gru",
    "layer_norm",
    "layers",
    "lstm",
    "matmul_bias_act",
    "max_pool2d_act",
    "prelu",
    "quantized_matmul_bias_act",
    "remap",
    "rms_norm",
    "simple_rnn",
    "softmax",
    "softmax_cross_entropy",
    "sparse_softmax_cross_entropy",
    "sync_batch_norm_act",
    "update_cache",
    "viz",
    "weight_only_matmul_bias_act",
]


def __getattr__(name):
    # Keras with the check of its backend, and the drawing tools, only for those who use them.
    if name in ("layers", "viz"):
        return importlib.import_module(f"tf_fused_ops.{name}")
    raise AttributeError(f"module 'tf_fused_ops' has no attribute {name!r}")
