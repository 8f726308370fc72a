"""Finds what optimizers do to variables: several passes over memory become one.

What the rules stand for has no outputs but what it leaves in variables, so nothing but the order of
the program says what reads what. They are looked for only in a graph that is being traced, whose
ops are in that order and get their control dependencies later.
"""

import dataclasses
import functools

import tensorflow as tf

from tf_fused_ops.remapper import optimizers, pattern, row_updates, stock_optimizers
from tf_fused_ops.remapper.candidate import Candidate
from tf_fused_ops.remapper.matcher import Matcher
from tf_fused_ops.remapper.rule import Match

UPDATES = optimizers.UPDATES + row_updates.UPDATES
ANCHORS = frozenset(rule.anchor for rule in UPDATES)
_FREE = {
    ("AssignVariableOp", "validate_shape"),
    *(("UnsortedSegmentSum", name) for name in ("Tindices", "Tnumsegments")),
    *((name, "Tindices") for name in ("GatherV2", "ResourceScatterAdd", "ResourceScatterSub")),
    ("StridedSlice", "T"),
    *(("StatelessIf", name) for name in ("then_branch", "else_branch", "Tin", "Tout")),
    ("StatelessIf", "output_shapes"),
}
_STEP = (pattern.Operand("gradient"), pattern.Operand("rate"))
# What must be in the order of the stock code; arithmetic need not be.
_ORDERED = (
    *("ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
    *("ResourceScatterAdd", "ResourceScatterSub"),
)


@dataclasses.dataclass(frozen=True)
class UpdateCandidate(Candidate):
    """A proposed replacement of an update."""

    @property
    def root(self):
        return self.nodes[-1]

    @property
    def dtype(self):
        return self.match.operands["gradient"].dtype

    def _cycles(self):
        """Looks at the order of the program instead, in which the others become one op."""
        place = self.view.position
        begin = min(place[op] for op in self.nodes if op.type in _ORDERED)
        for name in self.rule.resources:
            handle = self.match.operands[name]
            for op, _ in self.view.consumers(handle):
                if begin < place[op] < place[self.root] and op not in self._inside:
                    return f"{op.name} uses {name} {handle.op.name} meanwhile"
        return None


def candidates(view, anchor, options):
    """Returns the updates that may end at an op, the longest first, and those that begin last.

    Args:
        view: The GraphView of a graph whose ops are in the order of the program.
        anchor: A live op of a type in `ANCHORS`.
        options: RemapOptions.
    """
    dtype, found = anchor.inputs[-1].dtype, []
    # Of those alike the first will do.
    for rule in (*UPDATES, *stock_optimizers.UPDATES):
        if (
            rule.anchor == anchor.type
            and dtype.is_floating
            and view.has(rule.needed)
            and options.allows(rule.name)
        ):
            traced = _pattern(rule, dtype)
            for binding in Matcher(traced, view).all_matches(anchor, traced.outputs):
                nodes = tuple(op for _, op in sorted(binding.nodes.items()))
                places = [view.position[op] for op in nodes if op.type in _ORDERED]
                if places == sorted(places):
                    match = Match(nodes, _operands(binding), {}, binding.parameters)
                    found.append((places, UpdateCandidate(rule, match, (), view)))
    found.sort(key=lambda item: (len(item[1].nodes), item[0]), reverse=True)
    return [candidate for _, candidate in found]


def _operands(binding):
    """Returns the operands of a binding with the factors rate and gradient the right way round."""
    operands = binding.operands
    rate, gradient = operands.get("rate"), operands["gradient"]
    if rate is not None and (rate.shape.rank or 0) > (gradient.shape.rank or 0):
        return operands | {"rate": gradient, "gradient": rate}
    return operands


@functools.cache
def _pattern(rule, dtype):
    """Returns the pattern of a rule's stock code for a dtype."""
    specs = dict.fromkeys(rule.operands, tf.TensorSpec([], dtype))
    specs |= dict.fromkeys(rule.resources, tf.TensorSpec([], tf.resource))
    specs |= dict.fromkeys(rule.integers, tf.TensorSpec([None], tf.int32))
    specs["gradient"] = tf.TensorSpec([None, None] if rule.integers else None, dtype)
    parameters = {name: tf.TensorSpec([], dtype) for name in rule.parameters({})}
    traced = pattern.trace(rule.stock, specs, rule.anchor, _FREE, parameters)
    # Rate and gradient may be told apart later, see `_operands`, so one order of them will do.
    nodes = (
        dataclasses.replace(node, commutative=node.inputs != _STEP and node.commutative)
        for node in traced.nodes
    )
    # An update ends where the search begins.
    return dataclasses.replace(traced, nodes=tuple(nodes), anchor=len(traced.nodes) - 1)
