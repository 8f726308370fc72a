"""Matrix product with weights of 8 bits + bias + activation as one op, and its gradient."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, activations, reference
from tf_fused_ops.ops.matmul import matmul_bias_act

_ATTRIBUTES = ("transpose_b", "epsilon")
_DTYPES = (tf.float16, tf.bfloat16, tf.float32)


def quantized_matmul_bias_act(
    a,
    b,
    b_scale,
    bias=None,
    activation="none",
    approximate=False,
    transpose_b=False,
    epsilon=1e-7,
    alpha=0.2,
    name=None,
):
    """Computes activation(a b / b_scale + bias) with 8-bit weights b in one pass. On CPUs.

    Rows of a are quantized on the way, as Keras does after `quantize("int8")`: with
    a_scale = 127 / (max|a| + epsilon), a row a_scale times a is rounded to integers, whose products
    with b are summed up exactly and divided by a_scale and b_scale. Half precision is quantized in
    float32.

    The gradient of a is that of the product with the numbers b / b_scale, as if nothing were
    rounded (a straight-through estimator, as in Keras); b and b_scale have none.

    Args:
        a: Tensor [..., m, k]; float16, bfloat16 or float32. k is at most 2^17,
            as sums have 32 bits.
        b: int8 [k, n], or [n, k] with transpose_b.
        b_scale: float32 [n]: b is a matrix whose columns were multiplied with it, and rounded.
        bias: [n], of a's dtype, or None.
        activation: As for `matmul_bias_act`.
        approximate: Whether "gelu" is the tanh form.
        transpose_b: Whether to swap b's dimensions.
        epsilon: Added to the largest magnitude of a row.
        alpha: leaky_relu's slope below zero.
        name: A name for the operation.

    Returns:
        Tensor [..., m, n], of a's dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    activation = activations.canonical_name(activation, approximate)
    a = _arguments.tensor("a", a, _DTYPES)
    b = _arguments.tensor_like("b", b, tf.int8, "a")
    b_scale = _arguments.tensor_like("b_scale", b_scale, tf.float32, "a")
    return ops.tf_fused_ops_quantized_mat_mul_bias_act(
        a=a,
        b=b,
        b_scale=b_scale,
        bias=_arguments.optional("bias", bias, a.dtype, "a"),
        transpose_b=transpose_b,
        epsilon=_arguments.attribute("epsilon", epsilon),
        activation=activation,
        alpha=alpha,
        name=name,
    )


def stock(op, values):
    """Returns the output of the op for values of its inputs in stock TensorFlow ops."""
    a, b, b_scale, *bias = values
    names = (*_ATTRIBUTES, "activation", "alpha")
    return reference.quantized_matmul_bias_act(
        *(a, b, b_scale, bias[0] if bias else None), **_gradient.attributes(op, *names)
    )


@tf.RegisterGradient("TfFusedOps>QuantizedMatMulBiasAct")
def _quantized_matmul_bias_act_gradient(op, dy):
    a, b, b_scale, *bias = op.inputs
    if not op.get_attr("straight_through"):
        return _gradient.differentiate(lambda *values: [stock(op, values)], op, [dy])
    attributes = _gradient.attributes(op, *_ATTRIBUTES)
    slope = _gradient.attributes(op, "activation", "alpha")
    dz = dy
    if slope["activation"] != "none":
        saved = op.outputs[0]
        if not activations.slope_from_value(**slope):
            saved = ops.tf_fused_ops_quantized_mat_mul_bias_act(a, b, b_scale, bias, **attributes)
        dz = ops.tf_fused_ops_act_grad(dy=dy, saved=saved, **slope)
    da = None
    if _gradient.wanted(op)[0]:
        weights = reference.dequantized(b, b_scale, attributes["transpose_b"], a.dtype)
        transposed = not attributes["transpose_b"]
        da = matmul_bias_act(dz, weights, activation="none", transpose_b=transposed)
    dbias = [None] * len(bias)
    if bias and _gradient.wanted(op)[3]:
        # Of so many that half precision would lose most of them.
        total = tf.reduce_sum(tf.cast(dz, tf.float32), tf.range(tf.rank(dz) - 1))
        dbias = [tf.cast(total, a.dtype)]
    return [da, None, None, *dbias]
