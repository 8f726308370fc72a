"""Rules for matrix products with bias, side input and activation."""

import abc
import dataclasses
import math
from typing import ClassVar

import tensorflow as tf
from tensorflow.python.framework import tensor_util

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper import shapes, spellings
from tf_fused_ops.remapper.contraction import AddAct, ContractionBiasAct
from tf_fused_ops.remapper.emission import reshape
from tf_fused_ops.remapper.rule import LAST

# The attributes by which an anchor says that b is transposed.
_TRANSPOSES_B = ("transpose_b", "adj_y")
# More rows are multiplied as fast by stock.
_MOST_FEW_ROWS = 16


class MatMulBiasAct(ContractionBiasAct):
    """act(bias_add(matmul(a, b), bias)).

    Attributes:
        marks: The attributes by which the anchor says that it is a gradient.
    """

    family = "matmul_bias"
    anchor = "MatMul"
    operands: ClassVar = {"a": (2,), "b": (2,), "bias": (1,)}
    contraction = ("a", "b")
    differentiable = ("a", "b", "bias")
    captured: ClassVar = {"MatMul": {"transpose_a": False, "transpose_b": False}}
    marks = ("grad_a", "grad_b")
    fused_ops = ("TfFusedOps>MatMulBiasAct", "TfFusedOps>MatMulBiasActGrad")

    @property
    def backward_alone(self):
        # float32, 2048x768x3072, in times of stock gradients: gelu_tanh 0.78, gelu_erf 0.94, mish
        # 0.93, hard_swish 0.99, silu 1.02; but relu 1.12, tanh 1.13, leaky_relu 1.16, none 1.19.
        return not self.activation.slope_from_output

    def variants(self, view, anchor):
        if not any(view.attr(anchor, name) for name in self.marks):
            yield from super().variants(view, anchor)

    def has_ranks(self, anchor):
        """Returns whether both factors have ranks that they may have."""
        factors = zip(self.contraction, anchor.inputs, strict=False)
        return all(tensor.shape.rank in self.operands[name] for name, tensor in factors)

    def fuse(self, match, training):
        return super().fuse(match if training else _untransposed(match), training)

    def linear(self, attrs, a, b, bias=None):
        z = tf.raw_ops.MatMul(
            a=a, b=b, transpose_a=attrs["transpose_a"], transpose_b=attrs["transpose_b"]
        )
        return self.add_bias(attrs, z, bias)


class BatchMatMulBiasAct(MatMulBiasAct):
    """act(bias_add(matmul(a, b), bias)) with one matrix b for a batch of matrices a."""

    family = "batch_matmul_bias"
    anchor = "BatchMatMulV2"
    operands: ClassVar = {"a": (3, 4, 5, 6), "b": (2,), "bias": (1,)}
    captured: ClassVar = {"BatchMatMulV2": {"adj_x": False, "adj_y": False}}
    marks = ("grad_x", "grad_y")

    def variants(self, view, anchor):
        # What autodiff makes of a batch depends on the ranks.
        ranks = {"a_rank": anchor.inputs[0].shape.rank}
        if self.has_ranks(anchor):
            yield from (attrs | ranks for attrs in super().variants(view, anchor))

    def operand_shape(self, name, attrs):
        if name == "a" or name == "side_input":
            return [None] * attrs["a_rank"]
        return super().operand_shape(name, attrs)

    def linear(self, attrs, a, b, bias=None):
        z = tf.raw_ops.BatchMatMulV2(x=a, y=b, adj_x=attrs["adj_x"], adj_y=attrs["adj_y"])
        return self.add_bias(attrs, z, bias)

    def attributes(self, match):
        attrs = super().attributes(match)
        attrs |= {"transpose_a": attrs.pop("adj_x"), "transpose_b": attrs.pop("adj_y")}
        return attrs


class _ReshapedBiasAct(MatMulBiasAct):
    """A product of matrices once its operands are reshaped; the bias may have several dimensions.

    A variant also says the ranks of the operands, on which depends what autodiff makes of the sum.
    """

    captured: ClassVar = {}

    @property
    def gradient_operands(self):
        # Their shapes may be read.
        return tuple(self.operands)

    def operand_shape(self, name, attrs):
        return [None] * attrs[f"{name}_rank"]

    def check(self, match):
        b = match.operands["b"]
        if not b.shape.is_fully_defined():
            return f"the shape of {b.name} is not known: {b.shape}"
        return super().check(match)

    @abc.abstractmethod
    def contracted(self, match):
        """Returns over how many dimensions is summed."""

    @abc.abstractmethod
    def channels(self, match):
        """Returns the dimensions that b adds."""

    @abc.abstractmethod
    def shape(self, match):
        """Returns the shape of the result for `tf.reshape`."""

    def widen(self, match, tensor):
        return reshape(tensor, [-1, self.channels(match).num_elements()])

    def flat_bias(self, bias):
        return reshape(bias, [-1])

    def narrow(self, match, tensor):
        return reshape(tensor, self.shape(match))

    def narrow_gradient(self, match, name, gradient):
        return reshape(gradient, shapes.sizes(match.operands[name]))

    def factors(self, match):
        b, columns = match.operands["b"], self.channels(match).num_elements()
        rows = b.shape[: self.contracted(match)].num_elements()
        return [reshape(match.operands["a"], [-1, rows]), reshape(b, [rows, columns])]


class EinsumBiasAct(_ReshapedBiasAct):
    """act(einsum("…K,KN->…N", a, b) + bias); K and N are one or more dimensions each."""

    family = "einsum_bias"
    anchor = "Einsum"
    operands: ClassVar = {"a": (2, 3, 4, 5, 6), "b": (2, 3, 4), "bias": (1, 2, 3)}
    keyed = ("equation",)
    marks = ()

    def default_attrs(self):
        return super().default_attrs() | {"equation": b"abc,cd->abd"}

    def variants(self, view, anchor):
        if _contracted(anchor.get_attr("equation")) and self.has_ranks(anchor):
            tensors = (anchor.inputs[0], anchor.inputs[1])
            ranks = {f"{k}_rank": t.shape.rank for k, t in zip("ab", tensors, strict=True)}
            ranks["bias_rank"] = self.bias_rank(anchor)
            yield from (attrs | ranks for attrs in super().variants(view, anchor))

    def bias_rank(self, anchor):
        return anchor.inputs[1].shape.rank - _contracted(anchor.get_attr("equation"))

    def linear(self, attrs, a, b, bias=None):
        equation = attrs["equation"]
        return self.add_bias(attrs, tf.raw_ops.Einsum(inputs=[a, b], equation=equation), bias)

    def contracted(self, match):
        return _contracted(match.attrs["equation"])

    def channels(self, match):
        return match.operands["b"].shape[self.contracted(match) :]

    def shape(self, match):
        sizes = shapes.sizes(match.operands["a"])[: -self.contracted(match)]
        channels = self.channels(match).as_list()
        return sizes + channels if isinstance(sizes, list) else tf.concat([sizes, channels], 0)


class HeadsBiasAct(_ReshapedBiasAct):
    """act(reshape(matmul(a, b), shape) + bias), as Keras spells an einsum onto several heads."""

    family = "heads_bias"
    anchor = "BatchMatMulV2"
    operands: ClassVar = {"a": (3, 4, 5, 6), "b": (2,), "bias": (2,)}
    marks = BatchMatMulBiasAct.marks

    def default_attrs(self):
        return super().default_attrs() | {"bias_op": "AddV2", "shape": [-1, 1, 1]}

    def variants(self, view, anchor):
        ranks = {"a_rank": anchor.inputs[0].shape.rank, "b_rank": 2, "bias_rank": 2}
        if self.has_ranks(anchor):
            yield from (attrs | ranks for attrs in super().variants(view, anchor))

    def parameters(self, attrs):
        return {"shape": (1, tf.int32)}

    def bias_rank(self, anchor):
        return 2

    def product(self, view, anchor):
        return _reshaped(view, anchor)

    def linear(self, attrs, a, b, bias=None):
        z = tf.reshape(tf.raw_ops.BatchMatMulV2(x=a, y=b), attrs["shape"])
        return self.add_bias(attrs, z, bias)

    def check(self, match):
        columns = match.operands["b"].shape[-1]
        if math.prod(match.attrs["shape"][-2:]) != columns:
            return f"reshaping to {match.attrs['shape']} mixes the {columns} columns with the rows"
        return super().check(match)

    def contracted(self, match):
        return 1

    def channels(self, match):
        return tf.TensorShape(match.attrs["shape"][-2:])

    def shape(self, match):
        return match.attrs["shape"]


class MatMulAct(MatMulBiasAct):
    """act(matmul(a, b))."""

    family = "matmul"
    operands: ClassVar = {"a": (2,), "b": (2,)}
    differentiable = ("a", "b")


class _AddAct(AddAct):
    """act(product + side_input).

    Without an activation the gradients are nothing but products, which are left to stock (measured
    on two cores with AVX-512, 1024x512x512 to 2048x3072x768: the sum alone 0.85 to 0.97 of stock's
    time forward, with fused gradients 0.98 to 1.08).
    """

    def __init__(self, *chain, **options):
        super().__init__(*chain, **options)
        if self.activation is spellings.NONE:
            self.differentiable = ()

    def has_inner_shape(self, match, tensor):
        # Of the product, which stock gradients of the sum ask for.
        summands = () if self.differentiable else match.outputs["y"].op.inputs
        return any(tensor is summand for summand in summands)

    def inner_shape(self, match, dtype):
        # Not the side input's, which may be made from this one.
        a, b = (tf.shape(match.operands[name], dtype) for name in self.contraction)
        transposed = [match.attrs[name] for name in self.captured.get(self.anchor, ())]
        of_a, of_b = transposed or (False, False)
        return tf.concat([a[:-2], [a[-1 if of_a else -2], b[0 if of_b else 1]]], 0)


class MatMulAddAct(_AddAct, MatMulAct):
    """act(matmul(a, b) + side_input)."""

    family = "matmul_add"
    operands: ClassVar = MatMulAct.operands | {"side_input": (2,)}
    differentiable = (*MatMulAct.differentiable, "side_input")


class BatchMatMulAct(BatchMatMulBiasAct):
    """act(matmul(a, b)) with one matrix b for a batch of matrices a."""

    family = "batch_matmul"
    operands: ClassVar = {"a": BatchMatMulBiasAct.operands["a"], "b": (2,)}
    differentiable = ("a", "b")


class BatchMatMulAddAct(_AddAct, BatchMatMulAct):
    """act(matmul(a, b) + side_input) with one matrix b for a batch of matrices a."""

    family = "batch_matmul_add"
    operands: ClassVar = BatchMatMulAct.operands | {"side_input": BatchMatMulAct.operands["a"]}
    differentiable = (*BatchMatMulAct.differentiable, "side_input")


class BatchMatMulBiasAddAct(AddAct, BatchMatMulBiasAct):
    """act(bias_add(matmul(a, b), bias) + side_input) with one matrix b for a batch of a."""

    family = "batch_matmul_bias_add"
    operands: ClassVar = BatchMatMulBiasAct.operands | {
        "side_input": BatchMatMulBiasAct.operands["a"]
    }
    differentiable = (*BatchMatMulBiasAct.differentiable, "side_input")


class _FewRows:
    """Products of a few rows with a large matrix alone, which is read once.

    Otherwise bare products stay TensorFlow's. Measured on two cores with AVX-512, 1 to 16 rows, 768
    x 768 to 768 x 8000: stock takes 1.1 to 2.6 times as long in float32, 1.2 to 2.6 in bfloat16 and
    1.3 to 4 in float16; with 32 rows or smaller matrices 0.7 to 1.3.

    Attributes:
        large: From how many bytes on.
    """

    large: int

    differentiable = ()
    turn = LAST

    def variants(self, view, anchor):
        a, b = anchor.inputs
        numbers = a.shape.num_elements(), b.shape.num_elements()
        if None in numbers or numbers[1] * b.dtype.size < self.large:
            return
        _, transposes_b = self.captured[self.anchor]
        depth = b.shape[-1 if view.attr(anchor, transposes_b) else 0]
        if numbers[0] <= _MOST_FEW_ROWS * depth:
            yield from super().variants(view, anchor)

    def check(self, match):
        device = device_type(match.nodes[0].device)
        if device != "CPU":
            return f"a product alone is TensorFlow's on {device}"
        return super().check(match)


class FewRowsMatMul(_FewRows, MatMulAct):
    """matmul(a, b) of a few rows with a large matrix."""

    family = "few_rows_matmul"
    large = 1 << 20


class FewRowsBatchMatMul(_FewRows, BatchMatMulAct):
    """matmul(a, b) of a batch of matrices with few rows together and one large matrix."""

    family = "few_rows_batch_matmul"
    large = 1 << 18


class EinsumAct(EinsumBiasAct):
    """act(einsum("…K,KN->…N", a, b)); K and N are one or more dimensions each."""

    family = "einsum"
    operands: ClassVar = {name: EinsumBiasAct.operands[name] for name in ("a", "b")}
    differentiable = ("a", "b")


class MatMulBiasAddAct(AddAct, MatMulBiasAct):
    """act(bias_add(matmul(a, b), bias) + side_input)."""

    family = "matmul_bias_add"
    operands: ClassVar = MatMulBiasAct.operands | {"side_input": (2,)}
    differentiable = (*MatMulBiasAct.differentiable, "side_input")


class DenseBiasAct(MatMulBiasAct):
    """act(bias_add(tensordot(a, b), bias)): a dense layer on rank > 2.

    Variants, by attribute:
        a_shape, b_shape: The static shapes; what tensordot emits depends on them.
    """

    family = "dense_bias"
    operands: ClassVar = {"a": (3, 4, 5, 6), "b": (2,), "bias": (1,)}
    captured: ClassVar = {}

    def scalable(self, attrs, shapes):
        return True

    def variants(self, view, anchor):
        flat, b = anchor.inputs
        if flat.op.type != "Reshape" or b.shape.rank != 2:
            return
        a = flat.op.inputs[0]
        # That of tensordot, for shapes that are not known; any other is the user's.
        if a.op.type == "Transpose" and view.constant(a.op.inputs[1]) is None:
            a = a.op.inputs[0]
        if a.shape.rank in self.operands["a"] and a.shape[-1:].is_compatible_with(b.shape[:1]):
            known = {"a_shape": a.shape.as_list(), "b_shape": b.shape.as_list()}
            yield from (attrs | known for attrs in super().variants(view, anchor))

    def product(self, view, anchor):
        return _reshaped(view, anchor)

    def operand_shape(self, name, attrs):
        return attrs.get(f"{name}_shape", super().operand_shape(name, attrs))

    def scale(self, attrs, sizes):
        scaled = {
            name: [sizes.get(size, size) for size in attrs[name]] for name in ("a_shape", "b_shape")
        }
        return attrs | scaled

    def linear(self, attrs, a, b, bias=None):
        return self.add_bias(attrs, tf.tensordot(a, b, 1), bias)


class DenseBiasAddAct(AddAct, DenseBiasAct):
    """act(bias_add(tensordot(a, b), bias) + side_input)."""

    scalable = DenseBiasAct.scalable

    family = "dense_bias_add"
    operands: ClassVar = DenseBiasAct.operands | {"side_input": (3, 4, 5, 6)}
    differentiable = (*DenseBiasAct.differentiable, "side_input")

    def operand_shape(self, name, attrs):
        if name == "side_input":
            return [*attrs["a_shape"][:-1], attrs["b_shape"][1]]
        return super().operand_shape(name, attrs)

    def check(self, match):
        a, b, side = (match.operands[name] for name in ("a", "b", "side_input"))
        rank = a.shape.rank
        sizes = [*(shapes.dimension(a, axis) for axis in range(rank - 1)), b.shape[1]]
        if side.shape.rank != rank or sizes != [shapes.dimension(side, i) for i in range(rank)]:
            return f"{side.name} of shape {side.shape} may broadcast to the product with {a.name}"
        return DenseBiasAct.check(self, match)


class DenseAct(DenseBiasAct):
    """act(tensordot(a, b)): a dense layer without bias on rank > 2."""

    family = "dense"
    operands: ClassVar = {name: DenseBiasAct.operands[name] for name in ("a", "b")}
    differentiable = ("a", "b")


class DenseAddAct(_AddAct, DenseBiasAddAct):
    """act(tensordot(a, b) + side_input)."""

    family = "dense_add"
    operands: ClassVar = DenseAct.operands | {"side_input": DenseBiasAddAct.operands["side_input"]}
    differentiable = (*DenseAct.differentiable, "side_input")


def _contracted(equation):
    """Returns over how many dimensions an einsum "…K,KN->…N" sums; 0 for other ones."""
    operands, _, result = equation.decode().partition("->")
    a, _, b = operands.partition(",")
    for count in range(1, min(len(a), len(b))):
        letters = a[:-count] + b
        if (
            a[-count:] == b[:count]
            and result == a[:-count] + b[count:]
            and len(set(letters)) == len(letters)
            and letters.isalpha()
        ):
            return count
    return 0


def _untransposed(match):
    """Returns the match with the matrix that b is the transpose of, if it is one.

    TensorFlow does that to its own products: a copy of all weights would take longer than these.
    """
    op = match.operands["b"].op
    name = next((name for name in _TRANSPOSES_B if name in match.attrs), None)
    if name is None or op.type != "Transpose":
        return match
    order = tensor_util.constant_value(op.inputs[1])
    if order is None or list(order) != [1, 0]:
        return match
    operands = match.operands | {"b": op.inputs[0]}
    attrs = match.attrs | {name: not match.attrs[name]}
    return dataclasses.replace(match, operands=operands, attrs=attrs)


def _reshaped(view, anchor):
    """Returns the product as its consumers see it: reshaped, if it is."""
    reshapes = (op for op in view.users(anchor.outputs[0]) if op.type == "Reshape")
    return next((op.outputs[0] for op in reshapes), anchor.outputs[0])
