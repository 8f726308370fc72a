"""Rules for products of rows that are quantized on the way with weights of 8 bits.

That is what Keras 3 makes of its layers `Dense`, `EinsumDense` and `ReversibleEmbedding` after
`quantize("int8")`: x is scaled by 127 / (max|x| + epsilon) of its row, rounded, and multiplied as
integers.
"""

from typing import ClassVar

import numpy as np
import tensorflow as tf

from tf_fused_ops.remapper import quantized_chain, shapes
from tf_fused_ops.remapper.contraction import ContractionBiasAct, sums_with_bias
from tf_fused_ops.remapper.emission import emit, reshape
from tf_fused_ops.remapper.rule import Fused

_LARGEST = 127.0
# As the fused op has it.
_MOST_DEPTH = 2**17


class QuantizedMatMulBiasAct(ContractionBiasAct):
    """act(round(a a_scale) b / (a_scale b_scale) + bias), with 8-bit b.

    Products are over one or more of the last dimensions of a and the first ones of b.

    Variants, by attribute:
        equation: That of an einsum, which stock code computes in float32; None for a product of
            matrices.
        shapes: To which shapes stock code brings the factors and the result of such a product, a
            tuple or None each.
        permutation: In which order stock code takes the dimensions of b, None for their own.
        transposed: Whether its product transposes b.
        axes: Over which dimensions of a the largest magnitude is taken, as stock code has it.
        steps: (type, argument) of the ops that give a's scale the shape of the result.
        gradient: The code of the custom gradient by a that stock code has and the fused op, too;
            None where the gradient is that of the ops, next to none, as that of rounding is zero,
            or where another one around them has to stay.
        a_rank, b_rank: The ranks of the operands.
    """

    family = "quantized_matmul_bias"
    anchor = "Round"
    operands: ClassVar = {
        "a": (2, 3, 4, 5, 6),
        "b": (2, 3, 4),
        "b_scale": (1, 2, 3, 4, 5, 6),
        "bias": (1, 2, 3),
    }
    contraction = ("a", "b", "b_scale")
    # Stock gradients of what is around stay as they are.
    differentiable = ()
    fused_ops = ("TfFusedOps>QuantizedMatMulBiasAct",)

    def parameters(self, attrs):
        return {"epsilon": (0, None)}

    def operand_dtype(self, name, dtype, attrs):
        return tf.int8 if name == "b" else dtype

    def operand_shape(self, name, attrs):
        rank = attrs.get(f"{name}_rank")
        return None if rank is None else [None] * rank

    def variants(self, view, anchor):
        chain = quantized_chain.find(view, anchor)
        if chain is None:
            return
        sums = [{"bias_op": None}]
        if "bias" in self.operands:
            rank = chain.attrs["b_rank"] - np.size(chain.attrs["axes"])
            sums = sums_with_bias(view, chain.z, rank)
        yield from (chain.attrs | form for form in sums)

    def linear(self, attrs, a, b, b_scale, bias=None):
        if attrs["gradient"] is None:
            z = _rounded(attrs, a, b, b_scale)
        else:
            gradient = quantized_chain.function_of(attrs["gradient"])
            z = tf.custom_gradient(lambda *x: (_rounded(attrs, *x), gradient))(a, b, b_scale)
        return self.add_bias(attrs, z, bias)

    def check(self, match):
        a, b, scale = (match.operands[name] for name in ("a", "b", "b_scale"))
        rank, attrs = a.shape.rank, match.attrs
        rows = rank - self._contracted(match)
        axes = sorted(axis % rank for axis in np.atleast_1d(attrs["axes"]).tolist())
        if axes != list(range(rows, rank)):
            return f"{a.name} is scaled over dimensions {axes}, not those of the product"
        if not b.shape.num_elements():
            return f"{b.name} of shape {b.shape} is not known to have elements"
        if self._depth(match) > _MOST_DEPTH:
            return f"sums over {self._depth(match)} products may not fit in 32 bits"
        channels = self.channels(match).as_list()
        if not self._fits(match, rows):
            name = self.contraction_op(match).name
            return f"{name} multiplies in other shapes than rows and columns"
        places = [*range(rows), *[None] * len(channels)]
        if quantized_chain.moved(attrs["steps"], rank, rows) != places:
            return f"the scale of {a.name} is not that of the result's rows"
        ones = scale.shape.rank - len(channels)
        if not 0 <= ones <= rows or scale.shape != [1] * ones + channels:
            return f"{scale.name} of shape {scale.shape} is no scale of {b.name}'s columns"
        if not 0 <= attrs["epsilon"] <= float(np.finfo(np.float32).max):
            return f"{attrs['epsilon']} is added to magnitudes of {a.name}"
        return super().check(match)

    def _fits(self, match, rows):
        """Returns whether the product is over the right dimensions, and reshapes leave rows be."""
        attrs, (of_a, of_b, of_y) = match.attrs, match.attrs["shapes"]
        if attrs["equation"] is not None:
            return quantized_chain.order_of(attrs["equation"])[0] == self._contracted(match)
        a, channels = match.operands["a"].shape, self.channels(match)
        if of_a is not None and a[rows:].num_elements() != self._depth(match):
            return False
        known = a[:rows].as_list()
        expected = [(of_a, [*known, self._depth(match)]), (of_b, self._matrix(match))]
        expected.append((of_y, known + channels.as_list()))
        several, spread = self._contracted(match) > 1, channels.rank > 1
        needed = [of_a] * several + [of_b] * (several or spread) + [of_y] * spread
        return None not in needed and all(
            given is None or (len(given) == len(sizes) and all(map(_is_size, given, sizes)))
            for given, sizes in expected
        )

    def _contracted(self, match):
        return np.size(match.attrs["axes"])

    def _matrix(self, match):
        """Returns the sizes of b as a matrix."""
        sizes = [self._depth(match), self.channels(match).num_elements()]
        return sizes[::-1] if match.attrs["transposed"] else sizes

    def _depth(self, match):
        b = self._weights(match)
        return b[-1] if match.attrs["transposed"] else b[: self._contracted(match)].num_elements()

    def channels(self, match):
        b = self._weights(match)
        return b[:-1] if match.attrs["transposed"] else b[self._contracted(match) :]

    def _weights(self, match):
        """Returns the shape of b as the product takes it."""
        shape, order = match.operands["b"].shape, match.attrs["permutation"]
        return shape if order is None else tf.TensorShape([shape[axis] for axis in order])

    def fuse(self, match, training):
        a, b, scale = (match.operands[name] for name in ("a", "b", "b_scale"))
        order, transposed = match.attrs["permutation"], match.attrs["transposed"]
        if order == (1, 0):
            transposed = not transposed
        elif order is not None:
            b = tf.transpose(b, order)
        flat = self._contracted(match) > 1 or self.channels(match).rank > 1
        if flat:
            a, b = reshape(a, [-1, self._depth(match)]), reshape(b, self._matrix(match))
        outputs = emit(
            self.fused_ops[0],
            a,
            b,
            tf.cast(reshape(scale, [-1]), tf.float32),
            [reshape(bias, [-1]) for bias in self._optional(match, "bias")],
            transpose_b=transposed,
            epsilon=match.attrs["epsilon"],
            straight_through=match.attrs["gradient"] is not None,
            name=match.fused_name(),
            **self.attributes(match),
        )
        return Fused({"y": self._unflattened(match, outputs["y"]) if flat else outputs["y"]})

    def _unflattened(self, match, y):
        sizes = shapes.sizes(match.operands["a"])[: -self._contracted(match)]
        channels = self.channels(match).as_list()
        known = isinstance(sizes, list)
        return reshape(y, sizes + channels if known else tf.concat([sizes, channels], 0))

    def contraction_type(self, match):
        return quantized_chain.MATMUL if match.attrs["equation"] is None else "Einsum"

    def label(self, match):
        return f"Quantized {super().label(match)}"

    def describe(self, match):
        contraction = self.contraction_op(match).name
        return self.label(match), f"contraction={contraction} round={match.node('Round').name}"


class QuantizedMatMulAct(QuantizedMatMulBiasAct):
    """act(round(a a_scale) b / (a_scale b_scale)), with 8-bit b."""

    family = "quantized_matmul"
    operands: ClassVar = {n: QuantizedMatMulBiasAct.operands[n] for n in ("a", "b", "b_scale")}


def _rounded(attrs, a, b, b_scale):
    """The stock code before the bias."""
    largest = tf.reduce_max(tf.abs(a), attrs["axes"], keepdims=True)
    a_scale = _LARGEST / (largest + attrs["epsilon"])
    q = tf.cast(tf.clip_by_value(tf.round(a * a_scale), -_LARGEST, _LARGEST), tf.int8)
    if attrs["equation"] is None:
        of_a, of_b, of_y = attrs["shapes"]
        b = b if attrs["permutation"] is None else tf.transpose(b, attrs["permutation"])
        z = tf.matmul(
            q if of_a is None else tf.reshape(q, of_a),
            b if of_b is None else tf.reshape(b, of_b),
            transpose_b=attrs["transposed"],
            output_type=tf.int32,
        )
        z = z if of_y is None else tf.reshape(z, of_y)
    else:
        factors = [tf.cast(q, tf.float32), tf.cast(b, tf.float32)]
        z = tf.cast(tf.raw_ops.Einsum(inputs=factors, equation=attrs["equation"]), tf.int32)
    for op_type, argument in attrs["steps"]:
        a_scale = quantized_chain.STEPS[op_type](a_scale, argument)
    return tf.cast(z, a.dtype) / (a_scale * b_scale)


def _is_size(given, size):
    """Returns whether a number given to tf.reshape is a size, or stands for one."""
    return given in (-1, size)
