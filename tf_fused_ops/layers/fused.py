"""What the fused layers share: when they fuse, and what they say when they do not."""

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_util

from tf_fused_ops._devices import device_type
from tf_fused_ops.layers.activation import fusable
from tf_fused_ops.remapper import kernels, log

_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class FusedLayer:
    """Mixed into a stock layer, before it in the order of bases.

    Attributes:
        fused_ops: The op types that the layer needs: forward, gradient.
        takes_activation: Whether it has an activation.
        takes_side_input: Whether it adds a side input before that.
    """

    fused_ops: tuple
    takes_activation = True
    takes_side_input = True

    def _settle_jit(self):
        """Tells Keras that XLA cannot compile the layer; called at the end of the constructor."""
        self.supports_jit = self._never_fuses() is not None

    def _never_fuses(self):
        """Returns why the layer's configuration rules the fused op out, in words, or None."""
        return None

    def _objection(self, inputs):
        """Returns why a call cannot be fused, in words, or None."""
        return self._never_fuses() or self._unsuited(inputs)

    def _unsuited(self, inputs):
        return unsuited(self.fused_ops, inputs)

    def _tell(self, reason):
        """Logs why the layer runs stock ops."""
        log.vlog(log.NEAR_MISS, f"Not fused: layer {self.name} ({type(self).__name__}): {reason}")

    def get_build_config(self):
        """Returns the stock layer's build configuration with a sentence on loading.

        Keras shows it to those who load the layer without knowing its class.
        """
        config = super().get_build_config()
        return config and {**config, "loading": "import tf_fused_ops.layers before you load this"}

    def load_own_variables(self, store):
        """Loads the weights from a file.

        Raises:
            ValueError: The file has none for this layer, or others.
        """
        own = self._trainable_variables or self._non_trainable_variables
        if own and not store.keys():
            raise ValueError(
                f"The file has no entry for layer {self.name} of class {type(self).__name__}. "
                "Load a file of stock layers into the stock model, then convert that."
            )
        super().load_own_variables(store)

    def _fused_activation(self):
        """Returns (what the op is to apply, what is left to apply to its output or None)."""
        found = fusable(self.activation)
        if found:
            return found, None
        self._tell(f"activation {name_of(self.activation)} follows as an op of its own")
        return fusable(None), self.activation


def name_of(activation):
    """Returns what to call an activation, a function or a layer, in the log."""
    return getattr(activation, "__name__", type(activation).__name__)


def unsuited(fused_ops, inputs):
    """Returns why fused ops cannot take an input, in words, or None."""
    if not isinstance(inputs, tf.Tensor):
        return f"the input is a {type(inputs).__name__}"
    if inputs.dtype not in _DTYPES:
        return f"the input has dtype {inputs.dtype.name}"
    if inputs.shape.rank is None:
        return "the rank of the input is not known"
    if control_flow_util.GraphOrParentsInXlaContext(tf_ops.get_default_graph()):
        return "XLA compiles the graph and has no kernels for the fused ops"
    device = device_type(inputs.device)
    for op_type in fused_ops:
        if not kernels.has_kernel(op_type, inputs.dtype, device):
            return f"{op_type} has no {inputs.dtype.name} kernel on {device}"
    return None


def lora_or_quantized(layer):
    """Returns why a layer with LoRA or quantisation runs stock ops, or None."""
    if layer.lora_enabled or layer.lora_rank:
        return "LoRA changes the kernel"
    if layer.quantization_mode is not None:
        return f"it is quantised ({layer.quantization_mode})"
    return None
