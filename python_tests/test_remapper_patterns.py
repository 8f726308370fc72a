"""Patterns that are put together are what the whole stock code is traced to."""

import copy

import numpy as np
import pytest
import tensorflow as tf
from test_remapper_rules import BATCHED, ROWS, attrs, operands, row_id

from tf_fused_ops.remapper import search


def readable(pattern):
    """Returns a pattern in terms that compare as they should."""

    def value(old):
        array = getattr(old, "value", None)
        return (str(array.dtype), array.tolist()) if isinstance(array, np.ndarray) else old

    nodes = [
        (node.type, node.attrs, [value(i) for i in node.inputs], node.commutative, node.open)
        for node in pattern.nodes
    ]
    return nodes, list(pattern.outputs.items()), pattern.spec.dtype, pattern.anchor


@pytest.mark.parametrize("unknown_batch", [False, True])
@pytest.mark.parametrize(
    "rule", [rule for rule in ROWS if rule.added and rule.differentiable], ids=row_id
)
def test_forward_and_backward(rule, unknown_batch):
    named = operands(rule)
    shapes = {name: tensor.shape.as_list() for name, tensor in named.items()}
    for name in shapes.keys() & BATCHED if unknown_batch else ():
        shapes[name][0] = None
    specs = tuple((name, tf.TensorSpec(shape, named[name].dtype)) for name, shape in shapes.items())
    known = {"a_shape": shapes.get("a"), "b_shape": shapes.get("b"), "side_first": True}
    arguments = specs, search._hashable(attrs(rule, **known))
    alone = copy.copy(rule)
    alone.core = alone
    joined, whole = (readable(search._joint_pattern(r, *arguments)) for r in (rule, alone))
    assert joined == whole
