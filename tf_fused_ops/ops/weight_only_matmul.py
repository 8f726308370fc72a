"""Matrix product with quantized weights + bias + activation as one op, and its gradient."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _autodiff, _gradient, activations, reference
from tf_fused_ops.ops.matmul import matmul_bias_act

_ATTRIBUTES = ("transpose_b", "bits", "packed_axis")
_OPTIONAL = ("num_zero", "num_group", "num_bias")
_DTYPES = (tf.float16, tf.bfloat16, tf.float32)


def weight_only_matmul_bias_act(
    a,
    b,
    scale,
    zero=None,
    group=None,
    bias=None,
    activation="none",
    approximate=False,
    transpose_b=False,
    bits=8,
    packed_axis=-1,
    alpha=0.2,
    name=None,
):
    """Computes activation(a w + bias) with weights w of 8 or 4 bits in one pass. On CPUs.

    w[i, j] = (q[i, j] - zero[g, j]) scale[g, j], where q are the integers that b holds and
    g = group[i] says to which part of the inner dimension a row belongs. Only some columns of w are
    in memory at a time, as numbers of a's dtype. That is what Keras computes after
    `quantize("int4")`, and what GPTQ and AWQ do.

    Of few rows, up to 256 products with integers are added before they are scaled; so numbers of a
    beyond some 1e33 may become infinite there.

    The gradients are those of the product with w, also by scale and zero; b has none.

    Args:
        a: Tensor [..., m, k]; float16, bfloat16 or float32.
        b: int8 or uint8, the integers: [k, n], or [n, k] with transpose_b. With 4 bits a byte has
            two that follow each other along packed_axis, the first in its lower bits; there are
            [ceil(k / 2), n], [k, ceil(n / 2)] and so on.
        scale: float32 [groups, n], or [n, groups] with transpose_b; [n] is one group.
        zero: What is taken from the integers: float32 of scale's shape, or None.
        group: int32 [k], from -groups to groups - 1, negative ones from the last group backwards;
            None: parts of k, one after the other, of ceil(k / groups) each.
        bias: [n], of a's dtype, or None.
        activation: As for `matmul_bias_act`.
        approximate: Whether "gelu" is the tanh form.
        transpose_b: Whether the dimensions of b, scale and zero are swapped.
        bits: 8 or 4.
        packed_axis: That of b, 0, 1, -1 or -2; with 8 bits it does not matter.
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
    b = _arguments.tensor("b", b, (tf.int8, tf.uint8))
    scale = _arguments.tensor_like("scale", scale, tf.float32, "a")
    zero = _arguments.optional("zero", zero, tf.float32, "a")
    if scale.shape.rank == 1:
        axis = -1 if transpose_b else 0
        scale, zero = tf.expand_dims(scale, axis), [tf.expand_dims(z, axis) for z in zero]
    return ops.tf_fused_ops_weight_only_mat_mul_bias_act(
        a=a,
        b=b,
        scale=scale,
        zero=zero,
        group=_arguments.optional("group", group, tf.int32, "a"),
        bias=_arguments.optional("bias", bias, a.dtype, "a"),
        transpose_b=transpose_b,
        bits=_bits(bits),
        packed_axis=_axis(packed_axis),
        activation=activation,
        alpha=alpha,
        name=name,
    )


def dequantized_weights(b, scale, zero, group, transpose_b, bits, packed_axis, dtype, name=None):
    """Computes the numbers of `weight_only_matmul_bias_act`'s weights.

    Args:
        b: As there, as are all but the following.
        scale: A matrix.
        zero: A matrix or None.
        group: int32 [k].
        transpose_b: Whether the dimensions of b, scale and zero, and of the result, are swapped.
        bits: 8 or 4.
        packed_axis: 0 or 1.
        dtype: float16, bfloat16 or float32.
        name: A name for the operation.

    Returns:
        Tensor [k, n], or [n, k] with transpose_b.
    """
    return ops.tf_fused_ops_dequantized_weights(
        b=b,
        scale=scale,
        zero=[] if zero is None else [zero],
        group=group,
        transpose_b=transpose_b,
        bits=bits,
        packed_axis=packed_axis,
        T=dtype,
        name=name,
    )


def stock_weights(op, values):
    """Returns the output of `dequantized_weights` for values of its inputs in stock ops."""
    b, scale, *zero, group = values
    attributes = _gradient.attributes(op, *_ATTRIBUTES)
    zero = zero[0] if zero else None
    w = reference.weights(b, scale, zero, group, depth=tf.shape(group)[0], **attributes)
    return tf.cast(w, op.get_attr("T"))


@tf.RegisterGradient("TfFusedOps>DequantizedWeights")
def _dequantized_weights_gradient(op, dw):
    return _gradient.differentiate(lambda *values: [stock_weights(op, values)], op, [dw])


def _bits(value):
    value = _arguments.integer("bits", value)
    if value not in (4, 8):
        raise ValueError(f"bits must be 4 or 8; got {value}")
    return value


def _axis(value):
    value = _arguments.integer("packed_axis", value)
    if not -2 <= value < 2:
        raise ValueError(f"packed_axis must be 0, 1, -1 or -2; got {value}")
    return value % 2


def _inputs(op, values):
    """Returns a, b and scale, then zero, group and bias, None where they are not given."""
    a, b, scale, *rest = values
    rest = iter(rest)
    optional = [next(rest) if op.get_attr(name) else None for name in _OPTIONAL]
    return [a, b, scale, *optional]


def stock(op, values):
    """Returns the output of the op for values of its inputs in stock TensorFlow ops."""
    return reference.weight_only_matmul_bias_act(
        *_inputs(op, values), **_gradient.attributes(op, *_ATTRIBUTES, "activation", "alpha")
    )


def _matrix(x):
    """Returns x with all dimensions but the last as one; -1 would not do where these are empty."""
    sizes = tf.shape(x)
    return tf.reshape(x, [tf.reduce_prod(sizes[:-1]), sizes[-1]])


@tf.RegisterGradient("TfFusedOps>WeightOnlyMatMulBiasAct")
def _weight_only_matmul_bias_act_gradient(op, dy):
    a, b, scale, zero, group, bias = _inputs(op, op.inputs)
    attributes = _gradient.attributes(op, *_ATTRIBUTES)
    slope = _gradient.attributes(op, "activation", "alpha")
    want = _gradient.wanted(op)
    numbers = {"scale": scale} | ({} if zero is None else {"zero": zero})
    asked = [name for name, wanted in zip(numbers, want[2:], strict=False) if wanted]
    by_number = [name for name in asked if numbers[name].dtype.is_floating]
    dz = dy
    if slope["activation"] != "none":
        saved = op.outputs[0]
        if not activations.slope_from_value(**slope):
            saved = ops.tf_fused_ops_weight_only_mat_mul_bias_act(
                *(a, b, scale),
                *([] if value is None else [value] for value in (zero, group, bias)),
                **attributes,
            )
        dz = ops.tf_fused_ops_act_grad(dy=dy, saved=saved, **slope)

    transposed = attributes["transpose_b"]
    depth = tf.shape(a)[-1]
    if group is None:
        group_of = reference.equal_groups(depth, tf.shape(scale)[1 if transposed else 0])
    else:
        group_of = group

    def weights(*values):
        given = numbers | dict(zip(by_number, values, strict=True))
        scale, zero = given["scale"], given.get("zero")
        w = reference.weights(b, scale, zero, group_of, depth=depth, **attributes)
        return tf.cast(w, a.dtype)

    da = dbias = None
    dnumbers = {}
    if want[0]:
        w = dequantized_weights(b, scale, zero, group_of, **attributes, dtype=a.dtype)
        da = matmul_bias_act(dz, w, activation="none", transpose_b=not transposed)
    if by_number:
        rows, dz_rows = map(_matrix, (a, dz))
        left, right = (dz_rows, rows) if transposed else (rows, dz_rows)
        dw = matmul_bias_act(left, right, activation="none", transpose_a=True)
        values = [numbers[name] for name in by_number]
        found = _autodiff.pull_back(lambda *values: [weights(*values)], values, [dw])
        # What is gathered along the first dimension has gradients that are slices.
        dnumbers = dict(zip(by_number, map(tf.convert_to_tensor, found), strict=True))
    if bias is not None and want[-1]:
        # Of so many that half precision would lose most of them.
        total = tf.reduce_sum(tf.cast(dz, tf.float32), tf.range(tf.rank(dz) - 1))
        dbias = tf.cast(total, a.dtype)
    optional = ((zero, dnumbers.get("zero")), (group, None), (bias, dbias))
    gradients = [gradient for value, gradient in optional if value is not None]
    return [da, None, dnumbers.get("scale"), *gradients]
