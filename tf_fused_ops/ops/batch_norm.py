"""Batch normalization (+ side input) + activation as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _autodiff, _gradient, activations, reference

_SHARED = ("training", "data_format", "activation", "alpha")
_STATISTICS = ("epsilon", "momentum", "training", "unbiased", "data_format")
_FORWARD = tuple(dict.fromkeys((*_STATISTICS, *_SHARED)))


def batch_norm_act(
    x,
    scale,
    offset,
    mean,
    variance,
    side_input=None,
    activation="relu",
    epsilon=1e-3,
    momentum=0.99,
    training=True,
    unbiased=True,
    data_format="NHWC",
    alpha=0.2,
    name=None,
):
    """Computes activation((x - mu) * r * scale + offset + side_input) in one op.

    r = 1 / sqrt(sigma**2 + epsilon). In training mu and sigma**2 are mean and (biased) variance of
    the batch, a channel (Ioffe and Szegedy, arXiv:1502.03167), otherwise `mean` and `variance`. The
    gradient keeps x and the saved statistics; for relu with a side input one bit an element
    besides, for other activations with a side input the side input.

    Args:
        x: Tensor of rank 2 to 5, channels in the last dimension for "NHWC", in dimension 1 for
            "NCHW"; float16, bfloat16, float32 or float64.
        scale: [channels], float64 for float64 x, otherwise float32; None for ones.
        offset: As scale; None for zeros.
        mean: The moving mean, as scale.
        variance: The moving variance, as scale.
        side_input: Tensor of x's shape and dtype, or None.
        activation: "none", "relu", "relu6", "elu", "selu", "leaky_relu", "sigmoid", "tanh",
            "softplus", "hard_sigmoid", "silu", "hard_swish", "mish", "gelu" or "gelu_erf",
            "gelu_tanh"; None for "none".
        epsilon: Is added to the variance.
        momentum: moving = moving * momentum + batch * (1 - momentum).
        training: Whether to normalise with the statistics of the batch and to update the moving
            ones.
        unbiased: Whether the moving variance takes the batch's with Bessel's correction n / (n -
            1), as TensorFlow's fused op does; Keras takes the biased one.
        data_format: "NHWC" or "NCHW".
        alpha: leaky_relu's slope below zero.
        name: A name for the operation.

    Returns:
        y: Tensor of x's shape and dtype.
        new_mean: The new moving mean; `mean` unless training, or for an empty batch.
        new_variance: The new moving variance; `variance` unless training, or for an empty batch.
        saved_mean: mu.
        saved_inv_std: r.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    activation = activations.canonical_name(activation)
    *operands, side_input = tensors(x, scale, offset, mean, variance, side_input)
    outputs = ops.tf_fused_ops_batch_norm_act(
        *operands,
        side_input=side_input,
        moments=[],
        epsilon=epsilon,
        momentum=momentum,
        training=training,
        unbiased=unbiased,
        data_format=_arguments.data_format(data_format),
        activation=activation,
        alpha=alpha,
        save_mask=mask_wanted(activation, *operands[:3], side_input),
        name=name,
    )
    return tuple(outputs[:5])


def tensors(x, scale, offset, mean, variance, side_input):
    """Converts the arguments of a wrapper; the side input becomes a list of length 0 or 1."""
    x = _arguments.tensor("x", x)
    wide = tf.float64 if x.dtype == tf.float64 else tf.float32
    mean = _arguments.tensor_like("mean", mean, wide, "x")
    variance = _arguments.tensor_like("variance", variance, wide, "x")
    scale = tf.ones_like(mean) if scale is None else scale
    offset = tf.zeros_like(mean) if offset is None else offset
    scale = _arguments.tensor_like("scale", scale, wide, "x")
    offset = _arguments.tensor_like("offset", offset, wide, "x")
    side_input = _arguments.optional("side_input", side_input, x.dtype, "x")
    return x, scale, offset, mean, variance, side_input


def mask_wanted(activation, x, scale, offset, side_input):
    """Whether a forward op that runs now has to keep the mask for its gradient."""
    keep = activation == "relu" and bool(side_input)
    return keep and _gradient.records(x, scale, offset, *side_input)


def slope_source(activation, side_input, mask):
    """Returns the lists side_input and mask from which a gradient op derives the slope.

    Args:
        activation: The activation's name.
        side_input: The forward op's side input in a list of length 0 or 1.
        mask: Called without arguments for the mask.
    """
    if not side_input or activation == "none":
        return [], []
    return (side_input, []) if activation != "relu" else ([], [mask()])


def _lists(op):
    """The inputs side_input and moments of a forward op, lists of length 0 or 1."""
    inputs = list(op.inputs[5:])
    num_side_inputs = op.get_attr("num_side_inputs")
    return inputs[:num_side_inputs], inputs[num_side_inputs:]


def _mask(op):
    mask = _gradient.optional_output(op, 5, "save_mask")
    if mask is not None:
        return mask
    forward = _gradient.attributes(op, *_FORWARD)
    inputs = [*op.inputs[:5], *_lists(op)]
    return ops.tf_fused_ops_batch_norm_act(*inputs, save_mask=True, **forward)[5]


def _statistics_gradient(op, gradients):
    """The gradient of x through new_mean, new_variance, saved_mean and saved_inv_std."""
    attributes = _gradient.attributes(op, *_STATISTICS)

    def statistics(x):
        return reference.batch_norm_statistics(x, *op.inputs[3:5], **attributes)

    return _autodiff.pull_back(statistics, op.inputs[:1], gradients)[0]


def _moving_gradients(op, statistics_gradients, dscale, doffset):
    """The gradients of the inputs mean and variance."""
    dnew_mean, dnew_variance, dsaved_mean, dsaved_inv_std = statistics_gradients
    if op.get_attr("training"):
        (momentum,) = _gradient.attributes(op, "momentum").values()
        return dnew_mean * momentum, dnew_variance * momentum
    scale, inv_std = op.inputs[1], op.outputs[4]
    dmean = dnew_mean + dsaved_mean - scale * inv_std * doffset
    dinv_std = dsaved_inv_std * inv_std + scale * dscale
    return dmean, dnew_variance - 0.5 * inv_std * inv_std * dinv_std


@tf.RegisterGradient("TfFusedOps>BatchNormAct")
def _batch_norm_act_gradient(op, dy, *output_gradients):
    attributes = _gradient.attributes(op, *_SHARED)
    x, scale, offset = op.inputs[:3]
    want = _gradient.wanted(op)
    sides, moments = _lists(op)
    side_input, mask = slope_source(attributes["activation"], sides, lambda: _mask(op))
    has_side_input = bool(sides)
    dx, dscale, doffset, dside = ops.tf_fused_ops_batch_norm_act_grad(
        dy=tf.convert_to_tensor(dy),
        x=x,
        scale=scale,
        offset=offset,
        saved_mean=op.outputs[3],
        saved_inv_std=op.outputs[4],
        side_input=side_input,
        mask=mask,
        side_input_gradient=has_side_input and want[5],
        **attributes,
    )
    statistics_gradients = output_gradients[:4]
    dmean = dvariance = None
    if want[3] or want[4]:
        dmean, dvariance = _moving_gradients(op, statistics_gradients, dscale, doffset)
    if attributes["training"] and want[0]:
        used = [not _gradient.is_zero(gradient) for gradient in statistics_gradients]
        if any(used):
            dx += _statistics_gradient(op, statistics_gradients)
    gradients = [dx, dscale, doffset, dmean, dvariance] + [dside] * has_side_input
    # That of x is also the one through moments.
    gradients += [None] * len(moments)
    return [value if on else None for value, on in zip(gradients, want, strict=True)]


@tf.RegisterGradient("TfFusedOps>BatchNormActGrad")
def _batch_norm_act_grad_gradient(op, *output_gradients):
    attributes = _gradient.attributes(op, *_SHARED)
    num_side_inputs = op.get_attr("num_side_inputs")

    def stock(dy, x, scale, offset, saved_mean, saved_inv_std, *rest):
        side_input = rest[0] if num_side_inputs else None
        mask = rest[0] if rest and not num_side_inputs else None
        return reference.batch_norm_act_grad(
            dy, x, scale, offset, saved_mean, saved_inv_std, side_input, mask, **attributes
        )

    return _gradient.differentiate(stock, op, output_gradients)
