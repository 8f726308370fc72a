"""Rules for products of rows that are quantized on the way with weights of 8 bits.

That is what Keras 3 makes of its layers `Dense`, `EinsumDense` and `ReversibleEmbedding` after
`quantize("int8")`: x is scaled by 127 / (max|x| + epsilon) of its row, rounded, and multiplied as
integers.
"""

import dataclasses
import itertools
import sys
import types
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tf_fused_ops.remapper import shapes
from tf_fused_ops.remapper.contraction import ContractionBiasAct
from tf_fused_ops.remapper.custom_gradients import ATTRIBUTE as GRADIENT
from tf_fused_ops.remapper.emission import emit, reshape
from tf_fused_ops.remapper.rule import Fused

_LARGEST = 127.0
_MATMUL = "BatchMatMulV3"
# What tf.custom_gradient adds.
_WRAPPER = "IdentityN"
# What may give scales of rows the shape of the result: the type of an op, and the stock code.
_STEPS = {
    "Transpose": tf.transpose,
    "ExpandDims": tf.expand_dims,
    "Squeeze": tf.squeeze,
}


@dataclasses.dataclass(frozen=True)
class _Place:
    """What the ops around a Round tell of the chain that it belongs to.

    Attributes:
        b: The weights.
        z: The tensor to which a bias is added.
        attrs: What a variant says.
    """

    b: tf.Tensor
    z: tf.Tensor
    attrs: dict


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
        place = _place(view, anchor)
        if place is not None:
            yield from (attrs | place.attrs for attrs in super().variants(view, anchor))

    def product(self, view, anchor):
        return _place(view, anchor).z

    def bias_rank(self, view, anchor):
        place = _place(view, anchor)
        return place.attrs["b_rank"] - np.size(place.attrs["axes"])

    def linear(self, attrs, a, b, b_scale, bias=None):
        if attrs["gradient"] is None:
            z = _rounded(attrs, a, b, b_scale)
        else:
            gradient = _never_called(attrs["gradient"])
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
        channels = self.channels(match).as_list()
        if not self._fits(match, rows):
            name = self.contraction_op(match).name
            return f"{name} multiplies in other shapes than rows and columns"
        if _moved(attrs["steps"], rank, rows) != [*range(rows), *[None] * len(channels)]:
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
            return _order(attrs["equation"])[0] == self._contracted(match)
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

    def contraction_op(self, match):
        return match.node(_MATMUL if match.attrs["equation"] is None else "Einsum")

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
        a_scale = _STEPS[op_type](a_scale, argument)
    return tf.cast(z, a.dtype) / (a_scale * b_scale)


def _place(view, anchor):
    """Returns the _Place of a Round, or None."""
    tensor = _follow(view, anchor.outputs[0], "Minimum", "Maximum", "Cast")
    if tensor is None:
        return None
    of_a, tensor = _reshaped(view, tensor)
    if (y := _follow(view, tensor, _MATMUL)) is not None:
        attrs, b = {"equation": None, "transposed": view.attr(y.op, "adj_y")}, y.op.inputs[1]
        b, of_b = _above(view, b, "Reshape")
        b, order = _above(view, b, "Transpose")
        of_y, y = _reshaped(view, y)
        attrs |= {"shapes": (of_a, of_b, of_y), "permutation": order}
    elif (y := _follow(view, tensor, "Cast", "Einsum")) is not None:
        equation = view.attr(y.op, "equation")
        order = _order(equation)
        if order is None or y.op.inputs[1].op.type != "Cast":
            return None
        b, y = y.op.inputs[1].op.inputs[0], _follow(view, y, "Cast")
        if y is None:
            return None
        attrs = {"equation": equation, "transposed": False, "permutation": order[1]}
        attrs["shapes"] = (of_a, None, None)
    else:
        return None
    z = _follow(view, y, "Cast", "RealDiv")
    if z is None or None in (a_rank := anchor.outputs[0].shape.rank, b.shape.rank):
        return None
    scaled, scale = anchor.inputs[0].op, z.op.inputs[1].op
    if scaled.type != "Mul" or scale.type != "Mul":
        return None
    attrs |= {"a_rank": a_rank, "b_rank": b.shape.rank, "gradient": _gradient(view, z)}
    if attrs["gradient"] is not None:
        z = _follow(view, z, _WRAPPER)
    for a_scale, last in itertools.product(scaled.inputs, scale.inputs):
        steps, axes = _steps(view, a_scale, last), _reduced(view, a_scale)
        if steps is not None and axes is not None and 0 < np.size(axes) < b.shape.rank:
            return _Place(b, z, attrs | {"axes": axes, "steps": steps})
    return None


def _follow(view, tensor, *op_types):
    """Returns the first output of the last of live ops of some types, of which the first reads a
    tensor and each other the one before; None if they are not there."""
    for op_type in op_types:
        readers = (op for op in view.users(tensor) if view.types[op] == op_type)
        op = next(readers, None)
        if op is None:
            return None
        tensor = op.outputs[0]
    return tensor


def _reshaped(view, tensor):
    """Returns to which shape a tensor is brought, None if it is not, and the result."""
    found = _follow(view, tensor, "Reshape")
    shape = None if found is None else view.constant(found.op.inputs[1])
    return (None, tensor) if shape is None else (_plain(shape), found)


def _above(view, tensor, op_type):
    """Returns the input of an op of a type that makes a tensor, and its constant argument; the
    tensor and None where there is none."""
    argument = view.constant(tensor.op.inputs[1]) if tensor.op.type == op_type else None
    return (tensor, None) if argument is None else (tensor.op.inputs[0], _plain(argument))


def _order(equation):
    """Returns over how many dimensions an einsum sums, the last ones of the first operand, and in
    which order the product of matrices takes those of the second, None for their own.

    None for other einsums.
    """
    operands, _, result = equation.decode().partition("->")
    a, _, b = operands.partition(",")
    rows, columns = (
        "".join(letter for letter in result if letter not in other) for other in (b, a)
    )
    depth = a[len(rows) :]
    simple = all(len(set(letters)) == len(letters) for letters in (a, b, result))
    if not (simple and depth and columns and (a + b + result).isalpha()):
        return None
    if a != rows + depth or result != rows + columns or sorted(b) != sorted(depth + columns):
        return None
    order = tuple(map(b.index, depth + columns))
    return len(depth), None if order == tuple(range(len(b))) else order


def _is_size(given, size):
    """Returns whether a number given to tf.reshape is a size, or stands for one."""
    return given in (-1, size)


def _steps(view, first, last):
    """Returns the steps that make one tensor of another, the first first, or None."""
    steps = []
    while last is not first:
        op = last.op
        if op.type == "Squeeze":
            argument = tuple(view.attr(op, "squeeze_dims"))
        elif op.type in _STEPS:
            argument = view.constant(op.inputs[1])
            argument = () if argument is None else _plain(argument)
        else:
            return None
        # Without dimensions given, Squeeze removes whatever is 1.
        if argument == () or (op.type == "ExpandDims" and not isinstance(argument, int)):
            return None
        steps.insert(0, (op.type, argument))
        last = op.inputs[0]
    return tuple(steps)


def _moved(steps, rank, rows):
    """Returns where the dimensions of scales come from: that of a, or None for one of size 1; None
    if one of a's is lost."""
    places = [*range(rows), *[None] * (rank - rows)]
    for op_type, argument in steps:
        if op_type == "Transpose":
            places = [places[axis] for axis in argument]
        elif op_type == "ExpandDims":
            places.insert(argument % (len(places) + 1), None)
        else:
            squeezed = {axis % len(places) for axis in argument}
            if any(places[axis] is not None for axis in squeezed):
                return None
            places = [old for axis, old in enumerate(places) if axis not in squeezed]
    return places


def _reduced(view, a_scale):
    """Returns over which dimensions the magnitudes are taken that a scale is made of, or None."""
    op = a_scale.op
    for op_type, place in (("RealDiv", 1), ("AddV2", None), ("Max", 0)):
        if op.type != op_type:
            return None
        if op_type == "Max":
            axes = view.constant(op.inputs[1])
            return None if axes is None else _plain(axes)
        # A sum has its constant on either side.
        sources = op.inputs if place is None else [op.inputs[place]]
        op = next((t.op for t in sources if view.constant(t) is None), op)
    return None


def _plain(array):
    """Returns an integer or a tuple of them."""
    return int(array) if array.ndim == 0 else tuple(array.tolist())


def _gradient(view, z):
    """Returns the code of the custom gradient around the ops that make z, None if there is none or
    it is not known, so that it has to stay."""
    wrapped = _follow(view, z, _WRAPPER)
    if wrapped is None or wrapped.op.inputs[0] is not z:
        return None
    found = view.signature(wrapped.op).attrs.get(GRADIENT)
    return found if found in _gradients_of_keras() else None


def _gradients_of_keras():
    """Returns the codes of the gradients that Keras's layers define: those of products with the
    numbers that quantized weights stand for, as if nothing were rounded."""
    layers = (
        getattr(sys.modules.get(f"keras.src.layers.core.{module}"), layer, None)
        for module, layer in (("dense", "Dense"), ("einsum_dense", "EinsumDense"))
    )
    methods = (getattr(layer, "_int8_call", None) for layer in layers)
    codes = itertools.chain.from_iterable(_nested(m.__code__) for m in methods if m is not None)
    return [code for code in codes if code.co_name == "grad_fn"]


def _nested(code):
    """Yields the codes of the functions that a function defines."""
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield value
            yield from _nested(value)


def _never_called(code):
    """Returns a function of some code that is there to be compared."""
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, {}, closure=cells)
