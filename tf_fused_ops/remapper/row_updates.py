"""Rules for what optimizers do where the gradient is of some rows, as that of an embedding is.

The formulas are those for gradients of all of it, and so is the stock code, which Keras's ops make
of `tf.IndexedSlices` in the place of a tensor.
"""

import functools

import tensorflow as tf
from tensorflow.python.framework import func_graph, tensor_util

from tf_fused_ops.remapper import optimizers, rows
from tf_fused_ops.remapper.fingerprints import of_function
from tf_fused_ops.remapper.variable_update import FormulaUpdate

_DIVISION = "StatelessIf"
_BRANCHES = ("then_branch", "else_branch")
# Family -> the op that changes the variable, where that changes no other rows.
_SCATTERS = {
    **dict.fromkeys(("rmsprop", "centered_rmsprop", "adagrad"), "ResourceScatterSub"),
    "adadelta": "ResourceScatterAdd",
}


class _OfRows:
    """What the rules share."""

    integers = ("indices", "shape")

    def stock(self, attrs, gradient, indices, shape, **others):
        return super().stock(attrs, gradient=tf.IndexedSlices(gradient, indices, shape), **others)

    @property
    def formula(self):
        return self.family.removeprefix("sparse_")

    def sizes(self, variable):
        return {"shape": tf.raw_ops.VariableShape(input=variable)}

    def dense_shape(self, match):
        return tensor_util.constant_value_as_shape(match.operands["shape"])

    def check(self, match):
        gradient, indices = (match.operands[name] for name in ("gradient", "indices"))
        if indices.shape.rank != 1:
            return f"{indices.name} of shape {indices.shape} is no vector"
        if gradient.shape.rank is None or gradient.shape[1:] != self.dense_shape(match)[1:]:
            return f"{gradient.name} of shape {gradient.shape} may not be rows of the variable"
        divisions = (op for op in match.nodes if op.type == _DIVISION)
        return super().check(match) or next(filter(None, map(_other_division, divisions)), None)


def _of_rows(rule):
    """Returns the rule for the same formula with a gradient of some rows."""
    anchor = _SCATTERS.get(rule.family, rule.anchor)
    members = {
        "__doc__": f"As {rule.family}, with a gradient of some rows of the variable.",
        "family": f"sparse_{rule.family}",
        "label_text": f"{rule.label_text}, of some rows",
        "anchor": anchor,
        "needed": ("UnsortedSegmentSum" if anchor == rule.anchor else _DIVISION,),
    }
    return type(f"Sparse{type(rule).__name__}", (_OfRows, type(rule)), members)()


def _other_division(op):
    """Returns why an op may do something else than to divide rows, or None."""
    _, _, shape, indices, dividend, divisor = op.inputs
    tensors = [(tensor.dtype, _sizes(tensor)) for tensor in (dividend, indices, shape, divisor)]
    sizes = tensor_util.constant_value(shape)
    expected = _division(*tensors, None if sizes is None else tuple(sizes.tolist()))
    if [of_function(op.graph, op.get_attr(name).name) for name in _BRANCHES] == expected:
        return None
    return f"{op.name} is not the division of rows that Keras has"


def _sizes(tensor):
    return None if tensor.shape.rank is None else tuple(tensor.shape)


@functools.cache
def _division(dividend, indices, shape, divisor, sizes):
    """Returns the fingerprints of both branches of Keras's division of rows.

    Args:
        dividend, indices, shape, divisor: The dtype and the static shape of each.
        sizes: The value of `shape`, if it is known.
    """
    graph = func_graph.FuncGraph("division")
    with graph.as_default():
        dividend, indices, shape, divisor = (
            tf.compat.v1.placeholder(*tensor) for tensor in (dividend, indices, shape, divisor)
        )
        shape = shape if sizes is None else tf.constant(sizes, shape.dtype)
        rows.div(tf.IndexedSlices(dividend, indices, shape), divisor)
    (op,) = (op for op in graph.get_operations() if op.type == _DIVISION)
    return [of_function(graph, op.get_attr(name).name) for name in _BRANCHES]


UPDATES = tuple(_of_rows(rule) for rule in optimizers.UPDATES if isinstance(rule, FormulaUpdate))
