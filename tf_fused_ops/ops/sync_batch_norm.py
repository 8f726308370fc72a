"""Batch normalization with the statistics of all replicas, fused around the exchange.

Forward and backward are two ops each, with one all-reduce of a tensor of [3, channels] for every
replica in between. What travels forward is count, mean and sum of squared deviations in float64,
to be combined by Chan's formula: sums of x and x * x would cancel where |mean| >> std.
"""

import tensorflow as tf

from tf_fused_ops import distribute
from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, activations, reference
from tf_fused_ops.ops.batch_norm import batch_norm_act, mask_wanted, slope_source, tensors

_SHARED = ("data_format", "activation", "alpha")
_APPLY = ("epsilon", "momentum", "unbiased", *_SHARED)


def sync_batch_norm_act(
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
    communicator=None,
    name=None,
):
    """Computes `batch_norm_act` as if the batches of all replicas were one.

    The sizes of their batches may differ and be zero. All replicas must call it, in the same order,
    for the result as for the gradient; what one of them gets as the gradient of x is that of the
    sum of all replicas' losses. Gradients of scale and offset are those of the own loss alone, to
    be added up with the rest of the variables'.

    Args:
        x: As for `batch_norm_act`; so are the others, but
        training: If not, no replica needs the others.
        communicator: A `tf_fused_ops.distribute.Communicator`; None for that of the replica context
            or of `tf_fused_ops.distribute.set_communicator`. Where there is none either, this is
            `batch_norm_act`.

    Returns:
        What `batch_norm_act` returns: y, new_mean, new_variance, saved_mean, saved_inv_std. All but
        y are the same on all replicas.

    Raises:
        TypeError: `communicator` is not a Communicator.
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
        tf.errors.OpError: A replica is gone, or did not come within the collective's timeout.
    """
    if communicator is not None:
        distribute.check_communicator(communicator)
    communicator = communicator or distribute.current()
    attributes = {"epsilon": epsilon, "momentum": momentum, "unbiased": unbiased}
    shared = {"activation": activation, "data_format": data_format, "alpha": alpha}
    if communicator is None or not training:
        operands = (x, scale, offset, mean, variance, side_input)
        return batch_norm_act(*operands, training=training, name=name, **attributes, **shared)

    shared["activation"] = activations.canonical_name(activation)
    _arguments.data_format(data_format)
    *operands, side_input = tensors(x, scale, offset, mean, variance, side_input)
    x, scale, offset, *_ = operands
    moments = ops.tf_fused_ops_batch_norm_moments(x, data_format=data_format)
    moments = communicator.all_gather(moments)

    def apply(save_mask, name=None):
        return ops.tf_fused_ops_batch_norm_apply(
            *operands, moments, side_input, save_mask=save_mask, name=name, **attributes, **shared
        )

    save_mask = mask_wanted(shared["activation"], x, scale, offset, side_input)
    outputs = apply(save_mask, name)

    def mask():
        if tf.is_symbolic_tensor(outputs.mask):
            return _gradient.optional_output(outputs.mask.op, 5, "save_mask")
        return outputs.mask if save_mask else apply(True).mask

    # The ops' own gradients would go through x twice: for y, and for the moments.
    @tf.custom_gradient
    def with_gradient(*_):
        def gradient(dy):
            slope = slope_source(shared["activation"], side_input, mask)
            inputs = (dy, x, scale, offset, outputs.saved_mean, outputs.saved_inv_std)
            sums, dscale, doffset = ops.tf_fused_ops_batch_norm_grad_sums(*inputs, *slope, **shared)
            dx, dside = ops.tf_fused_ops_batch_norm_grad_apply(
                *inputs,
                communicator.all_reduce(sums),
                *slope,
                side_input_gradient=bool(side_input),
                **shared,
            )
            return [dx, dscale, doffset, None, None] + [dside] * len(side_input)

        return outputs.y, gradient

    return (with_gradient(*operands, *side_input), *outputs[1:5])


@tf.RegisterGradient("TfFusedOps>BatchNormMoments")
def _moments_gradient(op, dmoments):
    attributes = _gradient.attributes(op, "data_format")
    return _gradient.differentiate(
        lambda x: [reference.batch_norm_moments(x, **attributes)], op, [dmoments]
    )[0]


@tf.RegisterGradient("TfFusedOps>BatchNormApply")
def _apply_gradient(op, *output_gradients):
    attributes = _gradient.attributes(op, *_APPLY)

    def stock(x, scale, offset, mean, variance, moments, side_input=None):
        return reference.batch_norm_apply(
            x, scale, offset, mean, variance, moments, side_input, **attributes
        )

    return _gradient.differentiate(stock, op, output_gradients)


def _gradient_op(function, num_vectors):
    """Returns the gradient of a gradient op that `function` computes in stock ops."""

    def gradient(op, *output_gradients):
        attributes = _gradient.attributes(op, *_SHARED)
        has_side_input = op.get_attr("num_side_inputs")

        def stock(*inputs):
            operands, rest = inputs[:num_vectors], inputs[num_vectors:]
            side_input = rest[0] if has_side_input else None
            mask = rest[0] if rest and not has_side_input else None
            return function(*operands, side_input, mask, **attributes)

        return _gradient.differentiate(stock, op, output_gradients)

    return gradient


tf.RegisterGradient("TfFusedOps>BatchNormGradSums")(_gradient_op(reference.batch_norm_grad_sums, 6))
tf.RegisterGradient("TfFusedOps>BatchNormGradApply")(
    _gradient_op(reference.batch_norm_grad_apply, 7)
)
