"""Max pooling with relu as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, reference

_ATTRIBUTES = ("ksize", "strides", "padding")


def max_pool2d_act(x, ksize=2, strides=2, padding="VALID", activation="none", name=None):
    """Computes activation(max_pool2d(x)), which for relu is max_pool2d(relu(x)).

    Of every output it is kept which pixel of its window it is, a byte each; the gradient reads that
    and dy, where stock TensorFlow keeps x and y and looks for the largest again. A window's first
    largest pixel, row by row, gets the gradient. On the CPU alone.

    Args:
        x: Tensor [batch, height, width, channels]; float16, bfloat16, float32 or float64.
        ksize: An integer, or [height, width]: the window, of at most 255 pixels.
        strides: An integer, or [height, width].
        padding: "SAME" or "VALID".
        activation: "none" or "relu"; None for "none".
        name: A name for the operation.

    Returns:
        Tensor [batch, out_height, out_width, channels] of x's dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    if padding not in ("SAME", "VALID"):
        raise ValueError(f"padding must be 'SAME' or 'VALID'; got {padding!r}")
    if activation not in (None, "none", "relu"):
        raise ValueError(f"activation must be 'none' or 'relu'; got {activation!r}")
    x = _arguments.tensor("x", x)
    y, _ = ops.tf_fused_ops_max_pool_act(
        x=x,
        ksize=_arguments.four("ksize", ksize, "NHWC"),
        strides=_arguments.four("strides", strides, "NHWC"),
        padding=padding,
        activation=activation or "none",
        save_indices=_gradient.records(x),
        name=name,
    )
    return y


@tf.RegisterGradient("TfFusedOps>MaxPoolAct")
def _max_pool_act_gradient(op, dy, _):
    (x,), attributes = op.inputs, _gradient.attributes(op, *_ATTRIBUTES, "activation")
    indices = _gradient.optional_output(op, 1, "save_indices")
    if indices is None:
        _, indices = ops.tf_fused_ops_max_pool_act(x=x, save_indices=True, **attributes)
    del attributes["activation"]
    return ops.tf_fused_ops_max_pool_act_grad(
        dy=dy, indices=indices, input_sizes=_input_sizes(x, dy), **attributes
    )


def _input_sizes(x, dy):
    """The shape of x, without x where that would be kept for its batch size alone."""
    if x.shape.rank and x.shape[0] is None and x.shape[1:].is_fully_defined():
        return tf.concat([tf.shape(dy)[:1], x.shape[1:]], 0)
    return tf.shape(x)


@tf.RegisterGradient("TfFusedOps>MaxPoolActGrad")
def _max_pool_act_grad_gradient(op, dx_grad):
    _, indices, input_sizes = op.inputs
    attributes = _gradient.attributes(op, *_ATTRIBUTES)

    def stock(dy, *_):
        return [reference.max_pool_act_grad(dy, indices, input_sizes, **attributes)]

    return _gradient.differentiate(stock, op, [dx_grad])
