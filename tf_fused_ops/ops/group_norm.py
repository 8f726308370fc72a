"""Group normalization + activation as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _autodiff, _gradient, activations, reference

_SHARED = ("groups", "data_format", "activation", "alpha")
_STATISTICS = ("groups", "epsilon", "data_format")


def group_norm_act(
    x,
    scale=None,
    offset=None,
    groups=32,
    activation="none",
    epsilon=1e-3,
    data_format="NHWC",
    alpha=0.2,
    name=None,
):
    """Computes activation((x - mu) * r * scale + offset) in one op.

    r = 1 / sqrt(sigma**2 + epsilon), where mu and sigma**2 are mean and (biased) variance of an
    image's group of neighbouring channels (Wu and He, arXiv:1803.08494). With as many groups as
    channels it is instance normalization (Ulyanov et al., arXiv:1607.08022). The gradient keeps x,
    mu and r. On the CPU alone.

    Args:
        x: Tensor of rank 2 to 5, images in dimension 0, channels in the last dimension for "NHWC",
            in dimension 1 for "NCHW"; float16, bfloat16, float32 or float64.
        scale: [channels], float64 for float64 x, otherwise float32; None for ones.
        offset: As scale; None for zeros.
        groups: Number of groups; divides the number of channels.
        activation: "none", "relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh",
            "softplus", "hard_sigmoid", "silu", "hard_swish", "mish", "gelu" or "gelu_erf",
            "gelu_tanh"; None for "none".
        epsilon: Is added to the variance.
        data_format: "NHWC" or "NCHW".
        alpha: leaky_relu's slope below zero.
        name: A name for the operation.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    x = _arguments.tensor("x", x)
    data_format = _arguments.data_format(data_format)
    rank = x.shape.rank
    if rank is not None and rank < 2:
        raise ValueError(f"x must have rank 2 to 5; got shape {x.shape}")
    axis = -1 if data_format == "NHWC" else 1
    scale, offset = _arguments.scale_and_offset(scale, offset, x, axis)
    y, _, _ = ops.tf_fused_ops_group_norm_act(
        x=x,
        scale=scale,
        offset=offset,
        groups=_arguments.integer("groups", groups),
        epsilon=epsilon,
        data_format=data_format,
        activation=activations.canonical_name(activation),
        alpha=alpha,
        name=name,
    )
    return y


@tf.RegisterGradient("TfFusedOps>GroupNormAct")
def _group_norm_act_gradient(op, dy, *statistics_gradients):
    attributes = _gradient.attributes(op, *_SHARED)
    dx, dscale, doffset = ops.tf_fused_ops_group_norm_act_grad(
        tf.convert_to_tensor(dy), *op.inputs, *op.outputs[1:], **attributes
    )
    if not all(map(_gradient.is_zero, statistics_gradients)):
        dx += _statistics_gradient(op, statistics_gradients)
    return dx, dscale, doffset


def _statistics_gradient(op, gradients):
    """The gradient of x through mean and inv_std."""
    attributes = _gradient.attributes(op, *_STATISTICS)

    def statistics(x):
        return reference.group_norm_statistics(x, **attributes)

    return _autodiff.pull_back(statistics, op.inputs[:1], gradients)[0]


@tf.RegisterGradient("TfFusedOps>GroupNormActGrad")
def _group_norm_act_grad_gradient(op, *gradients):
    attributes = _gradient.attributes(op, *_SHARED)

    def stock(dy, x, scale, offset, _, inv_std):
        return reference.group_norm_act_grad(dy, x, scale, offset, inv_std, **attributes)

    return _gradient.differentiate(stock, op, gradients)
