"""What the registered gradients share."""

import itertools

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import record

from tf_fused_ops._devices import device_type
from tf_fused_ops.ops import _autodiff, _decimals, activations

# Attributes that are read as they were written.
_DECIMALS = frozenset(
    ("epsilon", "momentum", "scale", "masked", "rate", "dropout_rate", "dropout_scale")
)
# Bytes of an image from which on its gradients are one op.
_LARGE_IMAGE = 1 << 20


def attributes(op, *names):
    """Returns the named attributes of an operation as Python values."""
    values = {name: op.get_attr(name) for name in names}
    for name in values.keys() & _DECIMALS:
        values[name] = _decimals.as_written(values[name])
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def convolution_attributes(op, *names):
    """Returns the named attributes of a convolution as `reference` takes them."""
    values = attributes(op, *names)
    explicit = values.pop("explicit_paddings")
    if values["padding"] == "EXPLICIT":
        values["padding"] = [list(pair) for pair in zip(explicit[::2], explicit[1::2], strict=True)]
    return values


def wanted(op):
    """Returns, an entry an input, whether its gradient is asked for."""
    skipped = getattr(op, "skip_input_indices", None) or ()
    return [i not in skipped for i in range(len(op.inputs))]


def records(*tensors):
    """Whether an eager tape watches any of the tensors, so that their gradient may be asked for."""
    return tf.executing_eagerly() and record.should_record_backprop(list(tensors))


def is_zero(tensor):
    """Whether a gradient is known to be zero: it stands for an output that nobody used."""
    if tensor is None:
        return True
    if not tf.is_symbolic_tensor(tensor):
        return not np.any(np.asarray(tensor))
    node = tensor.op
    if node.type == "ZerosLike":
        return True
    if node.type == "Fill":
        return is_zero(node.inputs[1])
    return node.type == "Const" and not np.any(tf.get_static_value(tensor))


def _node(op, index):
    """Returns the graph operation behind a forward op, None where it ran eagerly.

    Under a tape `op` only imitates it. In forward mode its outputs are the arguments of a function.
    """
    output = op.outputs[index]
    return output.op if tf.is_symbolic_tensor(output) and output.op.type == op.type else None


def has_output(op, index, switch):
    """Whether an output that is computed only on request is there."""
    return (_node(op, index) or op).get_attr(switch)


def optional_output(op, index, switch):
    """Returns an output of a forward op that is computed only on request.

    A graph is turned into the function that runs forward only after the gradient has been built, so
    there the attribute is switched on now. What ran eagerly without it cannot be had any more.

    Args:
        op: The forward operation, as a gradient function receives it.
        index: The output's index.
        switch: The name of the boolean attribute that requests the output.

    Returns:
        The output, or None.
    """
    node = _node(op, index)
    if node is not None and not node.get_attr(switch):
        node._set_attr(switch, attr_value_pb2.AttrValue(b=True))
    return op.outputs[index] if has_output(op, index, switch) else None


def saved_tensors(op, activation, alpha, recompute):
    """Returns the tensors from which the gradient of a contraction's activation is computed.

    Args:
        op: The forward operation; its outputs are y and the pre-activation.
        activation: The activation's name.
        alpha: leaky_relu's slope below zero.
        recompute: Called without arguments for the pre-activation where it was not kept.

    Returns:
        A list of length 0 or 1.
    """
    y = op.outputs[0]
    if activation == "none":
        return []
    if activations.slope_from_value(activation, alpha):
        return [y]
    pre_activation = optional_output(op, 1, "save_pre_activation")
    if pre_activation is None:
        return [recompute()]
    if tf.is_symbolic_tensor(pre_activation):
        pre_activation.set_shape(y.shape)
    return [pre_activation]


def differentiate(function, op, output_gradients):
    """Returns the gradient of an op, given as a function of its inputs in stock TensorFlow ops.

    Args:
        function: Takes the inputs of op, returns its outputs.
        op: The operation, as a gradient function receives it.
        output_gradients: One gradient an output.

    Returns:
        A list, one gradient an input, None where there is none.
    """
    used = [i for i, gradient in enumerate(output_gradients) if not is_zero(gradient)]
    floating = [i for i, value in enumerate(op.inputs) if value.dtype.is_floating]
    needed = [i for i in floating if wanted(op)[i]]

    def used_outputs(*values):
        inputs = list(op.inputs)
        for i, value in zip(needed, values, strict=True):
            inputs[i] = value
        outputs = function(*inputs)
        return [outputs[i] for i in used]

    result = [None] * len(op.inputs)
    if used and needed:
        gradients = _autodiff.pull_back(
            used_outputs, [op.inputs[i] for i in needed], [output_gradients[i] for i in used]
        )
        for i, gradient in zip(needed, gradients, strict=True):
            result[i] = gradient
    return result


def parts(switches, device, dy, awaited=True):
    """Divides what is asked for of a contraction's gradient among the ops that compute it.

    TensorFlow runs ops beside each other that do not wait for one another, and what comes before
    waits for the gradient of the left operand alone. Measured on two cores, whole training steps:
    ResNet50 takes 0.93 of the time, VGG16 0.95, transformer encoders 0.89 to 1.0; with nothing to
    run beside them 0.97 to 1.1, 1x1 convolutions of few channels 1.13. A GPU runs ops in turn, so
    there one prepares the gradient of the pre-activation for both operands; and so does one of
    large images, where gradients of filters that wait hold much: a stack of VGG's kind takes 0.7 of
    the memory and the same time.

    Args:
        switches: Whether the gradients of left and right operand, bias and side input are wanted.
        device: The device string of the forward op.
        dy: The incoming gradient.
        awaited: Whether other ops wait for the gradient of the left operand.

    Returns:
        A list of such switches.
    """
    left, right, bias, side_input = switches
    alone = tf.executing_eagerly() or not awaited or _has_large_images(dy)
    if alone or not (left and right) or device_type(device) != "CPU":
        return [switches]
    return [[True, False, False, side_input], [False, True, bias, False]]


def _has_large_images(tensor):
    image = tensor.shape[1:]
    known = image.rank in (3, 4) and image.is_fully_defined()
    return known and image.num_elements() * tensor.dtype.size >= _LARGE_IMAGE


def of_convolution(gradient_op):
    """Returns what `contraction_gradient` runs, of the gradient op of a convolution."""

    def run(dy, x, filters, saved, switches, attributes):
        return gradient_op(
            dy=dy,
            input=x,
            filters=filters,
            saved=saved,
            input_gradient=switches[0],
            filters_gradient=switches[1],
            bias_gradient=switches[2],
            side_input_gradient=switches[3],
            **attributes,
        )

    return run


def contraction_gradient(op, dy, dpre_activation, names, optional, forward, gradient_op):
    """The gradient of a convolution or matrix product with bias, side input, scale and activation.

    Args:
        op: The forward operation; its inputs are two operands, then what `optional` counts, then
            those without a gradient.
        dy: The gradient of y.
        dpre_activation: The gradient of the pre-activation output; not zero only in gradients of
            gradients.
        names: The attributes that forward and gradient op share.
        optional: The attributes that count the optional inputs: bias, side input, and scale where
            the op may have one.
        forward: Runs the forward op on lists of inputs and attributes and returns y.
        gradient_op: Runs the gradient op: dy, operands, saved tensors, four switches, attributes.

    Returns:
        A list, one gradient an input that has one.
    """
    shared = attributes(op, *names)
    counts = [op.get_attr(name) for name in optional]
    ends = list(itertools.accumulate(counts, initial=2))
    left, right = op.inputs[:2]
    lists = [list(op.inputs[begin:end]) for begin, end in itertools.pairwise(ends)]
    bias, side_input, *scales = lists
    (scale,) = scales[0] if scales and scales[0] else (None,)
    want = wanted(op)
    switches = [
        want[0],
        want[1] or (scale is not None and want[-1]),
        bool(bias) and want[2],
        bool(side_input) and want[2 + len(bias)],
    ]
    # Scaled outputs are those of scaled filters.
    factor = right if scale is None else right * scale

    def recompute():
        return forward([left, right, *lists], {**shared, "activation": "none"})

    divided = parts(switches, op.outputs[0].device, op.outputs[0])

    def run(dz, saved, attributes):
        found = [None] * 4
        for part in divided:
            outputs = gradient_op(dz, left, factor, saved, part, attributes)
            found = [new if on else old for old, new, on in zip(found, outputs, part, strict=True)]
        return found

    gradients = [None] * 4
    linear = has_output(op, 1, "save_pre_activation") and not is_zero(dpre_activation)
    if linear:
        gradients = run(dpre_activation, [], {**shared, "activation": "none"})
    if not linear or not is_zero(dy):
        saved = saved_tensors(op, shared["activation"], shared["alpha"], recompute)
        more = run(tf.convert_to_tensor(dy), saved, shared)
        gradients = [v if u is None else u + v for u, v in zip(gradients, more, strict=True)]
    dleft, dfactor, *rest = gradients
    result = [dleft, dfactor, *rest[:1] * len(bias), *rest[1:] * len(side_input)]
    if scale is None:
        return result
    result[1] = dfactor * scale if want[1] else None
    return [*result, _sum_over_rows(dfactor, right) if want[-1] else None]


def _sum_over_rows(a, b):
    """Returns the sum of a * b over all dimensions but the last, at least in float32."""
    wide = tf.float32 if a.dtype.size == 2 else a.dtype
    product = tf.cast(a, wide) * tf.cast(b, wide)
    return tf.cast(tf.reduce_sum(product, [0, 1, 2]), a.dtype)
