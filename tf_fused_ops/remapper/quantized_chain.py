"""What the ops around a Round tell of the product of quantized rows that it may belong to."""

import dataclasses
import itertools
import sys
import types

import numpy as np
import tensorflow as tf

from tf_fused_ops.remapper.custom_gradients import ATTRIBUTE as GRADIENT

MATMUL = "BatchMatMulV3"
# What tf.custom_gradient adds.
WRAPPER = "IdentityN"
# What may give scales of rows the shape of the result: the type of an op, and the stock code.
STEPS = {
    "Transpose": tf.transpose,
    "ExpandDims": tf.expand_dims,
    "Squeeze": tf.squeeze,
}


@dataclasses.dataclass(frozen=True)
class Chain:
    """What the ops around a Round tell of the chain that it belongs to.

    Attributes:
        b: The weights.
        z: The tensor to which a bias is added.
        attrs: What a variant says.
    """

    b: tf.Tensor
    z: tf.Tensor
    attrs: dict


def find(view, anchor):
    """Returns the Chain of a Round, or None."""
    tensor = follow(view, anchor.outputs[0], "Minimum", "Maximum", "Cast")
    if tensor is None:
        return None
    of_a, tensor = _reshaped(view, tensor)
    if (y := follow(view, tensor, MATMUL)) is not None:
        attrs, b = {"equation": None, "transposed": view.attr(y.op, "adj_y")}, y.op.inputs[1]
        b, of_b = _above(view, b, "Reshape")
        b, order = _above(view, b, "Transpose")
        of_y, y = _reshaped(view, y)
        attrs |= {"shapes": (of_a, of_b, of_y), "permutation": order}
    elif (y := follow(view, tensor, "Cast", "Einsum")) is not None:
        equation = view.attr(y.op, "equation")
        order = order_of(equation)
        if order is None or y.op.inputs[1].op.type != "Cast":
            return None
        b, y = y.op.inputs[1].op.inputs[0], follow(view, y, "Cast")
        if y is None:
            return None
        attrs = {"equation": equation, "transposed": False, "permutation": order[1]}
        attrs["shapes"] = (of_a, None, None)
    else:
        return None
    z = follow(view, y, "Cast", "RealDiv")
    if z is None or None in (a_rank := anchor.outputs[0].shape.rank, b.shape.rank):
        return None
    scaled, scale = anchor.inputs[0].op, z.op.inputs[1].op
    if scaled.type != "Mul" or scale.type != "Mul":
        return None
    attrs |= {"a_rank": a_rank, "b_rank": b.shape.rank, "gradient": gradient_of(view, z)}
    if attrs["gradient"] is not None:
        z = follow(view, z, WRAPPER)
    for a_scale, last in itertools.product(scaled.inputs, scale.inputs):
        steps, axes = _steps(view, a_scale, last), _reduced(view, a_scale)
        if steps is not None and axes is not None and 0 < np.size(axes) < b.shape.rank:
            return Chain(b, z, attrs | {"axes": axes, "steps": steps})
    return None


def follow(view, tensor, *op_types):
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
    found = follow(view, tensor, "Reshape")
    shape = None if found is None else view.constant(found.op.inputs[1])
    return (None, tensor) if shape is None else (_plain(shape), found)


def _above(view, tensor, op_type):
    """Returns the input of an op of a type that makes a tensor, and its constant argument; the
    tensor and None where there is none."""
    argument = view.constant(tensor.op.inputs[1]) if tensor.op.type == op_type else None
    return (tensor, None) if argument is None else (tensor.op.inputs[0], _plain(argument))


def order_of(equation):
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


def _steps(view, first, last):
    """Returns the steps that make one tensor of another, the first first, or None."""
    steps = []
    while last is not first:
        op = last.op
        if op.type == "Squeeze":
            argument = tuple(view.attr(op, "squeeze_dims"))
        elif op.type in STEPS:
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


def moved(steps, rank, rows):
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


def gradient_of(view, z):
    """Returns the code of the custom gradient around the ops that make z, None if there is none or
    it is not known, so that it has to stay."""
    wrapped = follow(view, z, WRAPPER)
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
    calls = itertools.product(layers, ("_int8_call", "_int4_call"))
    methods = (getattr(layer, call, None) for layer, call in calls)
    codes = itertools.chain.from_iterable(_nested(m.__code__) for m in methods if m is not None)
    return [code for code in codes if code.co_name == "grad_fn"]


def _nested(code):
    """Yields the codes of the functions that a function defines."""
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield value
            yield from _nested(value)


def function_of(code):
    """Returns a function of some code that is there to be compared."""
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, {}, closure=cells)
