"""Recurrent layers, all steps as one op, and their gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, reference
from tf_fused_ops.ops.matmul import matmul_bias_act

_ATTRIBUTES = ("cell", "activation", "backwards")
_ACTIVATIONS = ("tanh", "relu")


def simple_rnn(
    x,
    kernel,
    recurrent_kernel,
    bias=None,
    initial_state=None,
    mask=None,
    activation="tanh",
    go_backwards=False,
    name=None,
):
    """Computes h' = activation(x kernel + bias + h recurrent_kernel) for all steps.

    The inputs' product is one for all steps, the rest one op, whose gradient keeps y. On CPUs.

    Args:
        x: Tensor [batch, steps, features]; float16, bfloat16, float32 or float64.
        kernel: [features, units], of x's dtype.
        recurrent_kernel: [units, units].
        bias: [units], or None.
        initial_state: h before the first step, [batch, units]; None for zeros.
        mask: Boolean tensor [batch, steps]: where it is false, the state stays as it is, and the
            output is that of the step before, or zero where there is none. None for one that is
            true everywhere.
        activation: "tanh" or "relu".
        go_backwards: Whether the last step comes first. Outputs stay with their inputs.
        name: A name for the operation.

    Returns:
        (y, h): [batch, steps, units], the state behind every step, and [batch, units], that behind
        the last to be computed.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    states = None if initial_state is None else [initial_state]
    biases = (bias, None)
    y, (h,) = _run(
        "rnn", x, kernel, recurrent_kernel, biases, states, mask, activation, go_backwards, name
    )
    return y, h


def gru(
    x,
    kernel,
    recurrent_kernel,
    bias=None,
    recurrent_bias=None,
    initial_state=None,
    mask=None,
    activation="tanh",
    go_backwards=False,
    name=None,
):
    """Computes all steps of a gated recurrent unit.

    h' = z h + (1 - z) activation(x_h + r p_h), with z = sigmoid(x_z + p_z), r = sigmoid(x_r + p_r),
    the parts z, r, h, in this order, of x kernel + bias and of p = h recurrent_kernel +
    recurrent_bias (Cho et al., arXiv:1406.1078, with the reset applied after the product, as in
    `keras.layers.GRU` by default). The inputs' product is one for all steps, the rest one op, whose
    gradient keeps y and four values for each of its elements. On CPUs.

    Args:
        x: Tensor [batch, steps, features]; float16, bfloat16, float32 or float64.
        kernel: [features, 3 * units], of x's dtype.
        recurrent_kernel: [units, 3 * units].
        bias: [3 * units], or None.
        recurrent_bias: As bias.
        initial_state: h before the first step, [batch, units]; None for zeros.
        mask: As for `simple_rnn`.
        activation: "tanh" or "relu".
        go_backwards: Whether the last step comes first. Outputs stay with their inputs.
        name: A name for the operation.

    Returns:
        (y, h): [batch, steps, units], the state behind every step, and [batch, units], that behind
        the last to be computed.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    states = None if initial_state is None else [initial_state]
    biases = (bias, recurrent_bias)
    y, (h,) = _run(
        "gru", x, kernel, recurrent_kernel, biases, states, mask, activation, go_backwards, name
    )
    return y, h


def lstm(
    x,
    kernel,
    recurrent_kernel,
    bias=None,
    initial_state=None,
    mask=None,
    activation="tanh",
    go_backwards=False,
    name=None,
):
    """Computes all steps of a long short-term memory.

    c' = f c + i g, h' = o activation(c'), with i, f, o the sigmoid and g the activation of the
    parts i, f, g, o, in this order, of x kernel + bias + h recurrent_kernel (Gers, Schmidhuber and
    Cummins 2000). The inputs' product is one for all steps, the rest one op, whose gradient keeps y
    and five values for each of its elements. On CPUs.

    Args:
        x: Tensor [batch, steps, features]; float16, bfloat16, float32 or float64.
        kernel: [features, 4 * units], of x's dtype.
        recurrent_kernel: [units, 4 * units].
        bias: [4 * units], or None.
        initial_state: (h, c) before the first step, each [batch, units]; None for zeros.
        mask: As for `simple_rnn`.
        activation: "tanh" or "relu".
        go_backwards: Whether the last step comes first. Outputs stay with their inputs.
        name: A name for the operation.

    Returns:
        (y, (h, c)): [batch, steps, units], h behind every step, and the states behind the last to
        be computed, each [batch, units].

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    states = None if initial_state is None else tf.nest.flatten(initial_state)
    if states is not None and len(states) != 2:
        raise ValueError(f"initial_state must hold h and c; got {len(states)} tensors")
    biases = (bias, None)
    y, states = _run(
        "lstm", x, kernel, recurrent_kernel, biases, states, mask, activation, go_backwards, name
    )
    return y, tuple(states)


def _run(cell, x, kernel, recurrent_kernel, biases, states, mask, activation, backwards, name):
    """Returns y and the states behind the last step, after a check of the arguments."""
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"activation must be one of {known}; got {activation!r}")
    x = _arguments.tensor("x", x)
    if not x.shape.is_compatible_with([None] * 3):
        raise ValueError(f"x must have rank 3; got shape {x.shape}")
    like = x.dtype, "x"
    kernel = _arguments.tensor_like("kernel", kernel, *like)
    recurrent_kernel = _arguments.tensor_like("recurrent_kernel", recurrent_kernel, *like)
    bias, recurrent_bias = biases
    bias = None if bias is None else _arguments.tensor_like("bias", bias, *like)
    recurrent_bias = _arguments.optional("recurrent_bias", recurrent_bias, *like)
    batch, _, features = x.shape if x.shape.rank else [None] * 3
    _check_shape("kernel", kernel, [features, None])
    units, _ = recurrent_kernel.shape if recurrent_kernel.shape.rank == 2 else [None] * 2
    _check_shape("recurrent_kernel", recurrent_kernel, [units, kernel.shape[-1]])
    if bias is not None:
        _check_shape("bias", bias, kernel.shape[1:])
    for value in recurrent_bias:
        _check_shape("recurrent_bias", value, kernel.shape[1:])
    mask = _arguments.optional("mask", mask, tf.bool, "x")
    if states is None:
        zeros = tf.zeros([tf.shape(x)[0], tf.shape(recurrent_kernel)[0]], x.dtype)
        states = [zeros] * (2 if cell == "lstm" else 1)
    states = [_arguments.tensor_like("initial_state", state, *like) for state in states]
    for state in states:
        _check_shape("initial_state", state, [batch, units])
    with tf.name_scope(name or cell):
        gates = matmul_bias_act(x, kernel, bias, activation="none")
        y, last, _ = ops.tf_fused_ops_recurrent(
            x=gates,
            kernel=recurrent_kernel,
            states=states,
            bias=recurrent_bias,
            mask=mask,
            cell=cell,
            activation=activation,
            backwards=bool(backwards),
            save=_gradient.records(gates, recurrent_kernel, *states, *recurrent_bias),
        )
    return y, last


def _check_shape(name, value, expected):
    """Checks what the ops have other names for."""
    if not value.shape.is_compatible_with(expected):
        expected = tf.TensorShape(expected)
        raise ValueError(f"{name} must have shape {expected} to go with x; got {value.shape}")


def _cut(op, values, counts):
    """Cuts the inputs of an op behind what it always has: lists of as many as it has of each."""
    values = iter(values)
    return [[next(values) for _ in range(op.get_attr(f"num_{name}"))] for name in counts]


def stock(op, values):
    """Returns the outputs of a Recurrent op for values of its inputs in stock TensorFlow ops."""
    x, kernel, *values = values
    states, bias, mask = _cut(op, values, ("states", "bias", "masks"))
    bias, mask = (value[0] if value else None for value in (bias, mask))
    return reference.recurrent(
        x, kernel, states, bias, mask, **_gradient.attributes(op, *_ATTRIBUTES)
    )


def stock_gradient(op, values):
    """The same of a RecurrentGrad op."""
    dy, *values = values
    dlast, values = _cut(op, values, ("states",))[0], values[op.get_attr("num_states") :]
    kernel, y, saved, *values = values
    states, mask = _cut(op, values, ("states", "masks"))
    return reference.recurrent_grad(
        *(dy, dlast, kernel, y, saved, states, *mask), **_gradient.attributes(op, *_ATTRIBUTES)
    )


@tf.RegisterGradient("TfFusedOps>Recurrent")
def _recurrent_gradient(op, *gradients):
    last = len(op.outputs) - 1
    if _gradient.has_output(op, last, "save") and not _gradient.is_zero(gradients[last]):
        return _gradient.differentiate(lambda *values: stock(op, values), op, gradients)
    x, kernel, *rest = op.inputs
    states, bias, mask = _cut(op, rest, ("states", "bias", "masks"))
    attributes = _gradient.attributes(op, *_ATTRIBUTES)
    saved = _gradient.optional_output(op, last, "save")
    if saved is None:
        again = ops.tf_fused_ops_recurrent(x, kernel, states, bias, mask, save=True, **attributes)
        saved = again.saved
    dy, *dlast = (
        tf.zeros_like(value) if gradient is None else gradient
        for value, gradient in zip(op.outputs[:last], gradients[:last], strict=True)
    )
    y = op.outputs[0]
    dx, dproduct, dstates = ops.tf_fused_ops_recurrent_grad(
        dy=dy,
        dlast=dlast,
        kernel=kernel,
        y=y,
        saved=saved,
        states=states,
        mask=mask,
        **attributes,
    )
    dproduct = dproduct if attributes["cell"] == "gru" else dx
    dkernel = None
    if _gradient.wanted(op)[1]:
        kept = mask[0] if mask else None
        h = reference.states_before(y, states[0], kept, attributes["backwards"])
        # Of known sizes, as there may be no units.
        rows = tf.reduce_prod(tf.shape(h)[:2])
        factors = (tf.reshape(value, [rows, tf.shape(value)[2]]) for value in (h, dproduct))
        dkernel = matmul_bias_act(*factors, activation="none", transpose_a=True)
    # Of so many that half precision would lose most of them.
    wide = tf.float32 if dproduct.dtype.size == 2 else dproduct.dtype
    dbias = [tf.cast(tf.reduce_sum(tf.cast(dproduct, wide), [0, 1]), x.dtype) for _ in bias]
    return [dx, dkernel, *dstates, *dbias, *(None for _ in mask)]


@tf.RegisterGradient("TfFusedOps>RecurrentGrad")
def _recurrent_grad_gradient(op, *gradients):
    return _gradient.differentiate(lambda *values: stock_gradient(op, values), op, gradients)
