"""Finds a pattern in a graph: depth-first unification that walks edges in both directions.

Starting from one pair (pattern node, op), inputs are unified upwards and the remaining pattern
nodes are looked for among the consumers of values that are already known. Output ports must agree
exactly, commutative inputs are tried in every order, and constants must agree to within `_MAX_ULP`
units in the last place.
"""

import dataclasses
import functools
import itertools

import ml_dtypes
import numpy as np
import tensorflow as tf

from tf_fused_ops.remapper.custom_gradients import ATTRIBUTE as GRADIENT
from tf_fused_ops.remapper.pattern import Literal, Operand, Port

_MAX_ULP = 2
# Beyond this many inputs a commutative op (AddN) is matched in the order given.
_MAX_PERMUTED = 4
# How many inputs a sum of gradients may have.
_MAX_SUMMED = 8


@dataclasses.dataclass
class Binding:
    """What a pattern's nodes and operands stand for.

    Attributes:
        nodes: Pattern node index -> op.
        operands: Operand name -> tensor.
        parameters: Parameter name -> array.
        spare: Pattern node index -> the inputs of its op that the pattern does not account for.
        mismatch: In words, the one constant or attribute that differs, if a near miss was asked
            for.
    """

    nodes: dict = dataclasses.field(default_factory=dict)
    operands: dict = dataclasses.field(default_factory=dict)
    parameters: dict = dataclasses.field(default_factory=dict)
    spare: dict = dataclasses.field(default_factory=dict)
    mismatch: str | None = None

    def copy(self):
        """Returns a copy that may be changed without changing this one."""
        return Binding(
            dict(self.nodes),
            dict(self.operands),
            dict(self.parameters),
            dict(self.spare),
            self.mismatch,
        )


class Matcher:
    """Matches one pattern against one graph."""

    def __init__(self, pattern, view, allow_mismatch=False):
        """Creates a matcher.

        Args:
            pattern: A Pattern.
            view: A GraphView.
            allow_mismatch: Whether to return, when nothing fits, a binding that is wrong in one
                constant or attribute.
        """
        self._pattern = pattern
        self._view = view
        self._allow_mismatch = allow_mismatch
        self._excluded = frozenset()

    def match(self, op, names):
        """Matches the pattern's anchor with an op.

        Args:
            op: The op that the anchor should stand for.
            names: The pattern outputs whose nodes must all be found.

        Returns:
            A Binding or None.
        """
        return self._best(self.matches(op, names))

    def matches(self, op, names):
        """Yields every Binding that `match` may return."""
        todo = self._pattern.ancestors(names)
        return self._solve_any(Binding(), [(self._pattern.anchor, op)], [], todo)

    def resume(self, binding, names):
        """Adds the nodes that the named outputs need to a binding of the pattern's first nodes.

        Args:
            binding: A Binding that another pattern with the same first nodes gave; left as it is.
            names: The pattern outputs whose nodes must all be found.

        Returns:
            A Binding or None.
        """
        todo = self._pattern.ancestors(names) - binding.nodes.keys()
        return self._best(self._solve(binding.copy(), [], todo))

    def assume(self, nodes, operands, names):
        """Returns the binding of what another pattern of the same code matched.

        Args:
            nodes: The ops that it matched, in the order of its nodes.
            operands: Operand name -> tensor.
            names: The outputs that they make.

        Returns:
            A Binding, or None if this pattern does not begin with the same nodes.
        """
        first = self._pattern.nodes[: len(nodes)]
        if self._pattern.ancestors(names) != frozenset(range(len(nodes))):
            return None
        if any(node.type != op.type for node, op in zip(first, nodes, strict=True)):
            return None
        return Binding(dict(enumerate(nodes)), dict(operands))

    def extend(self, binding, names, excluded=frozenset()):
        """Adds the nodes of further outputs to a binding.

        Args:
            binding: A Binding; left as it is.
            names: Pattern outputs.
            excluded: Ops that new nodes must not stand for.

        Returns:
            A Binding or None.
        """
        todo = self._pattern.ancestors(names) - binding.nodes.keys()
        self._excluded = excluded
        found = next(self._solve(binding.copy(), [], todo), None)
        self._excluded = frozenset()
        return found

    def _best(self, bindings):
        near_miss = None
        for binding in bindings:
            if binding.mismatch is None:
                return binding
            near_miss = near_miss or binding
        return near_miss

    def _solve(self, binding, agenda, todo):
        """Yields bindings that satisfy the (value, tensor) pairs and bind the nodes in todo.

        Args:
            binding: A Binding that is changed.
            agenda: A list that is changed.
            todo: A set of pattern nodes.
        """
        nodes, operands = binding.nodes, binding.operands
        while True:
            while agenda:
                value, tensor = agenda.pop()
                kind = type(value)
                if kind is Port:
                    if tensor.value_index != value.port:
                        return
                    op = tensor.op
                    known = nodes.get(value.node)
                    if known is None:
                        choices = ((value.node, op),)
                        break
                    if known is not op:
                        return
                elif kind is Operand:
                    if operands.setdefault(value.name, tensor) is not tensor:
                        return
                elif not self._unify_constant(binding, value, tensor):
                    return
            else:
                missing = todo - nodes.keys()
                if not missing:
                    yield binding
                    return
                choices = self._reachable(binding, missing)
            steps = self._steps(binding, choices)
            if len(steps) != 1:
                yield from self._branch(binding, steps, agenda, todo)
                return
            if not self._take(binding, steps[0], agenda):
                return

    def _solve_any(self, binding, choices, agenda, todo):
        """Yields what `_solve` does, with one of the (node, op) pairs bound first."""
        return self._branch(binding, self._steps(binding, choices), agenda, todo)

    def _branch(self, binding, steps, agenda, todo):
        """Yields the bindings to which any of the steps leads."""
        for step in steps:
            found, rest = binding.copy(), list(agenda)
            if self._take(found, step, rest):
                yield from self._solve(found, rest, todo)

    def _steps(self, binding, choices):
        """Returns the ways in which pattern nodes may stand for ops: (node, op, order)."""
        steps = []
        for node, op in choices:
            wanted = self._pattern.nodes[node]
            if wanted.type != self._view.types[op] or op in self._excluded:
                continue
            inputs = self._view.inputs[op]
            orders = _orders(wanted, len(inputs))
            if len(choices) == len(orders) == 1:
                return [(node, op, orders[0])]
            steps += [
                (node, op, order)
                for order in orders
                if all(
                    self._plausible(binding, value, inputs[i])
                    for value, i in zip(wanted.inputs, order, strict=True)
                )
            ]
        return steps

    def _take(self, binding, step, agenda):
        """Lets a pattern node stand for an op; returns whether its attributes allow it."""
        node, op, order = step
        wanted = self._pattern.nodes[node]
        difference = self._difference(wanted, op)
        if difference and not self._tolerate(binding, difference):
            return False
        binding.nodes[node] = op
        inputs = self._view.inputs[op]
        agenda += zip(wanted.inputs, [inputs[i] for i in order], strict=True)
        if wanted.open:
            rest = (tensor for i, tensor in enumerate(inputs) if i not in order)
            binding.spare[node] = tuple(rest)
        return True

    def _unify_constant(self, binding, value, tensor):
        """Returns whether a Literal or Parameter may stand for a tensor."""
        if isinstance(value, Literal):
            return self._unify_literal(binding, value, tensor)
        return self._unify_parameter(binding, value, tensor)

    def _plausible(self, binding, value, tensor):
        """Looks one op ahead, so that most wrong orders of commutative inputs are never entered."""
        kind = type(value)
        if kind is Port:
            op = binding.nodes.get(value.node)
            if op is None:
                return self._view.types[tensor.op] == self._pattern.nodes[value.node].type
            return op is tensor.op and tensor.value_index == value.port
        if kind is Operand:
            return binding.operands.get(value.name, tensor) is tensor
        return self._view.types[tensor.op] == "Const"

    def _reachable(self, binding, missing):
        """Yields the candidates for the missing node that has the fewest."""
        choices, types = [], self._view.types
        # The later a node, the more of the others are among its inputs.
        for node in sorted(missing, reverse=True):
            wanted = self._pattern.nodes[node]
            for port, value in enumerate(wanted.inputs):
                tensor = self._tensor(binding, value)
                if tensor is None:
                    continue
                choice = [
                    (node, op)
                    for op, other in self._view.consumers(tensor)
                    if types[op] == wanted.type and (other == port or wanted.commutative)
                ]
                if len(choice) < 2:
                    return choice
                choices.append(choice)
        fewest = dict.fromkeys(min(choices, key=len, default=()))
        # A tape that is asked twice leaves dead ops beside the live ones.
        return sorted(fewest, key=lambda choice: not self._view.is_live(choice[1]))

    def _tensor(self, binding, value):
        kind = type(value)
        if kind is Port:
            op = binding.nodes.get(value.node)
            return None if op is None else op.outputs[value.port]
        return binding.operands.get(value.name) if kind is Operand else None

    def _difference(self, wanted, op):
        attrs = self._view.attrs(op)
        if GRADIENT in attrs and GRADIENT not in wanted.attrs:
            return f"the gradient of {op.name} is overridden"
        for name, value in wanted.attrs.items():
            # An op whose gradient is not overridden has the true one, as the fused op does.
            if attrs.get(name) != value and (name in attrs or name != GRADIENT):
                return f"attribute {name} of {op.name} differs from what the rule stands for"
        return None

    def _unify_literal(self, binding, literal, tensor):
        value = self._view.constant(tensor)
        if (
            value is None
            or value.shape != literal.value.shape
            or value.dtype != literal.value.dtype
        ):
            return False
        if not same_constant(value, literal.value):
            words = f"constant {tensor.op.name} is {_text(value)}, not {_text(literal.value)}"
            if not self._tolerate(binding, words):
                return False
        return True

    def _unify_parameter(self, binding, parameter, tensor):
        value = self._view.constant(tensor)
        if value is None or (value.ndim, tensor.dtype) != (parameter.rank, parameter.dtype):
            return False
        known = binding.parameters.setdefault(parameter.name, value)
        return known is value or np.array_equal(known, value)

    def _tolerate(self, binding, words):
        if not self._allow_mismatch or binding.mismatch not in (None, words):
            return False
        binding.mismatch = words
        return True


def _orders(wanted, given):
    """Returns the orders in which so many inputs may be those of a pattern node, as indices."""
    count = len(wanted.inputs)
    if not count <= given <= (_MAX_SUMMED if wanted.open else count):
        return ()
    if wanted.open or (wanted.commutative and count <= _MAX_PERMUTED):
        return _permutations(given, count)
    return (range(given),)


@functools.cache
def _permutations(given, count):
    return tuple(itertools.permutations(range(given), count))


def _text(value):
    return f"{float(value):.6g}" if value.ndim == 0 else str(value.tolist())


def same_constant(a, b):
    """Returns whether two arrays of one dtype and shape differ by rounding only."""
    if a.tobytes() == b.tobytes() or np.array_equal(a, b):
        return True
    if not tf.as_dtype(a.dtype).is_floating:
        return False
    a, b, epsilon = a.astype(np.float64), b.astype(np.float64), float(ml_dtypes.finfo(a.dtype).eps)
    ulp = epsilon * np.exp2(np.frexp(b)[1] - 1)
    return bool(np.all(np.abs(a - b) <= _MAX_ULP * ulp))
