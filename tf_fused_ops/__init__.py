"""Fused convolution, batch-norm and matmul ops for TensorFlow, for training as well as inference."""

from tf_fused_ops import _library
from tf_fused_ops._version import __version__

LibraryError = _library.LibraryError

__all__ = ["LibraryError", "__version__"]
